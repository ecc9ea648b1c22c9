"""The style of the report: one set of colours for light, one for dark."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1b2430;--soft:#5b6776;--line:#dde2e9;
--good:#1d7f4e;--bad:#c42b2b;--warn:#9a6700;--accent:#2b62c9;--tint:#eef2f8;
--t32:#7d8da3;--t16:#2b8a6e;--tb16:#4f6fd8;--t8:#d08a1d;--tf8:#b1509e}
@media (prefers-color-scheme:dark){:root{--page:#11151b;--card:#1a2029;--ink:#e7ebf1;--soft:#9aa6b5;
--line:#2c3542;--good:#4cc38a;--bad:#ff7b72;--warn:#e3b341;--accent:#7fabff;--tint:#222b37;
--t32:#8896a9;--t16:#45b892;--tb16:#8aa2ff;--t8:#e6a94a;--tf8:#d983c9}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 16px 64px}
header,section{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:20px 24px;margin:0 0 18px}
h1{font-size:24px;margin:6px 0 12px}h2{font-size:17px;margin:0 0 12px}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(220px,1fr));gap:8px 24px;margin:0}
dt{color:var(--soft);font-size:12px}dd{margin:0;overflow-wrap:anywhere}
.badge{display:inline-block;margin:0;padding:4px 14px;border-radius:999px;font-weight:650;border:1.5px solid currentColor}
.pass,.ok{color:var(--good)}.fail,.no{color:var(--bad)}.free{color:var(--warn)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th{font-weight:600;color:var(--soft);font-size:12px;text-align:left;border-bottom:1px solid var(--line)}
th,td{padding:5px 14px 5px 0;vertical-align:top}td{border-bottom:1px solid var(--line);overflow-wrap:break-word;min-width:52px}
tr:last-child td{border-bottom:0}.right{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
ul{margin:12px 0 0;padding-left:20px}.failures li{color:var(--bad)}.notes li{color:var(--soft)}
.alarm,.calm{margin:0 0 10px;padding:10px 14px;border-radius:8px;background:var(--tint);overflow-wrap:anywhere;
border-left:4px solid var(--bad);font-weight:550}.calm{border-left-color:var(--good)}
.plot{margin:10px 0 16px}.plot svg{width:100%;height:auto;display:block}.square{max-width:430px}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}
.grid{stroke:var(--line)}.limit{stroke:var(--warn);stroke-dasharray:6 4}svg text.limit-label{fill:var(--warn)}
.first{stroke:var(--bad);stroke-width:1.5}svg text.first-label{fill:var(--bad);font-weight:600}
.path{fill:none;stroke:var(--accent);stroke-opacity:.3}.diagonal{stroke:var(--soft);stroke-dasharray:3 4}
circle.good{fill:var(--accent)}circle.bad{fill:var(--bad)}.thin{fill-opacity:.65}
.pair{display:grid;grid-template-columns:minmax(280px,430px) 1fr;gap:24px;align-items:start}
@media (max-width:800px){.pair{grid-template-columns:1fr}}
figure{margin:0 0 20px}.sides{display:grid;grid-template-columns:1fr 1fr;gap:10px}
.sides img{width:100%;height:auto;border-radius:8px;display:block;background:var(--tint)}
.sides p{margin:4px 0 0;font-size:12px;color:var(--soft)}figcaption{font-size:13px;color:var(--soft)}
.slots{display:flex;flex-wrap:wrap;gap:8px}
.slot{border:1px solid currentColor;border-radius:8px;padding:3px 10px;font-size:13px}.slot small{margin-left:8px;opacity:.7}
.bar{display:flex;height:12px;min-width:180px;margin-top:5px;border-radius:4px;overflow:hidden;background:var(--tint)}
.bar i{display:block;height:100%}.legend{display:flex;flex-wrap:wrap;gap:16px;margin:0 0 10px}
.key i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}
i.fp32,i.fp64{background:var(--t32)}i.fp16{background:var(--t16)}i.bf16{background:var(--tb16)}
i.int8{background:var(--t8)}i.fp8{background:var(--tf8)}
details{margin-top:12px}summary{cursor:pointer;color:var(--accent)}
"""

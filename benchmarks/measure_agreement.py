"""How far 16-bit graphs are from FP32, with each graph's own selection of queries and with FP32's: see docs/results/benchmarks-gpu.md.

    python benchmarks/measure_agreement.py OUT.jsonl fp16 rt_detr co_dino-swin-l ...

The graphs run as they are, uncompiled. A model that selects queries by rank trades rows wherever two scores are closer
than rounding. Forcing the selection of the FP32 graph on the other shows what rounding alone does. `spread` is the
standard deviation of the scores that the first selection ranks, `noise` that of their change: where noise is not far
below spread, ranks mean nothing.
"""

from __future__ import annotations

import json

import torch
from agreement import matched, relative, run_forced
from measure_inductor import RECENT, SIZES
from program import make_parser, run

from detrt.errors import one_line


def measure(name: str, precision: str, size: str | None, device: str) -> dict:
    from detrt.backends.inductor.passes import prepare
    from detrt.backends.inductor.types import lower_types
    from detrt.models.contract import ExportConfig, exported_spec
    from detrt.models.load import load_source
    from detrt.spec import Precision

    source = load_source(f"random:{name}")
    given = source.spec.input
    height, width = (int(s) for s in size.split("x")) if size and size != "-" else given.size_hw
    height, width = height // given.multiple_of * given.multiple_of, width // given.multiple_of * given.multiple_of
    config = ExportConfig(height=height, width=width, mask=False) if given.dynamic else ExportConfig(mask=not given.mask or False)
    captured = prepare(source, exported_spec(source, config), (1, 1), Precision.FP32, device, 6)
    want, first = run_forced(captured.graph, captured.inputs)
    row = {"model": name, "precision": precision, "selections": len(first.indices)}
    lower_types(captured.graph, Precision(precision))
    for label, indices in (("own", None), ("forced", first.indices)):
        got, second = run_forced(captured.graph, captured.inputs, indices)
        row[label] = {"errors": [relative(a, b) for a, b in zip(want, got, strict=True)], "matched": matched(want, got)}
    if first.scores:
        good = first.scores[0].abs() < 1e4
        change = (second.scores[0] - first.scores[0])[good]
        row["spread"], row["noise"] = float(first.scores[0][good].std()), float(change.std())
        count = first.indices[0].shape[-1]
        tops = [r.scores[0].flatten(1).topk(count, 1).indices.tolist() for r in (first, second)]
        row["same_selected"] = sum(len(set(a) & set(b)) for a, b in zip(*tops, strict=True)) / (count * len(tops[0]))
    return row


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("out", metavar="OUT.jsonl", help="rows are appended to it")
    parser.add_argument("precision", choices=("fp16", "bf16"))
    parser.add_argument(
        "models", nargs="+", choices=[*SIZES, *RECENT], metavar="MODEL", help=f"of {', '.join([*SIZES, *RECENT])}"
    )
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in given.models:
        try:
            row = measure(name, given.precision, (SIZES | RECENT)[name], device)
        except Exception as error:
            row = {"model": name, "error": f"{type(error).__name__}: {one_line(error, 400)}"}
        with open(given.out, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    run(main)

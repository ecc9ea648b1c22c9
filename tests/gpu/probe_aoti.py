"""Whether AOTInductor packages load on this machine, and where they crash: python tests/gpu/probe_aoti.py"""

from __future__ import annotations

import subprocess
import sys

CASES = {
    "cpu": "d='cpu'; dt=torch.float32; o={}",
    "cuda fp16": "d='cuda'; dt=torch.float16; o={}",
    "cuda fp32": "d='cuda'; dt=torch.float32; o={}",
    "cuda no triton": "d='cuda'; dt=torch.float16; o={}; only=True",
    "cuda embedded": "d='cuda'; dt=torch.float16; o={'aot_inductor.embed_kernel_binary': True}",
}
CODE = """
import faulthandler, torch; faulthandler.enable(); only=False; {case}
class M(torch.nn.Module):
    def __init__(s):
        super().__init__(); s.l = torch.nn.Linear(64, 64)
    def forward(s, x):
        return torch.mm(x, s.l.weight) if only else torch.relu(s.l(x)) * 2 + 1
m = M().to(d, dt).eval(); x = torch.randn(8, 64, device=d, dtype=dt)
with torch.no_grad():
    ep = torch.export.export(m, (x,))
    p = torch._inductor.aoti_compile_and_package(ep, package_path='/tmp/aoti-{name}.pt2', inductor_configs=o)
    print('packaged', flush=True)
    r = torch._inductor.aoti_load_package(p)
    print('loaded', flush=True)
    print('ran', float((r(x).float() - m(x).float()).abs().max()), flush=True)
"""


def main() -> int:
    for name, case in CASES.items():
        code = CODE.format(case=case, name=name.replace(" ", "-"))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        print("==", name, done.returncode, done.stdout.split("\n")[:4], done.stderr[-700:] if done.returncode else "", flush=True)
    code = "import torch; torch._inductor.aoti_load_package('/tmp/aoti-cuda-fp16.pt2'); print('loaded')"
    command = [
        "cuda-gdb",
        "-batch",
        "-ex",
        "set breakpoint pending on",
        "-ex",
        "run",
        "-ex",
        "bt 25",
        "-ex",
        "info sharedlibrary libcuda",
    ]
    done = subprocess.run([*command, "--args", sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    print("== backtrace", done.stdout[-4000:], done.stderr[-500:], flush=True)
    listing = "d=$(mktemp -d); cd $d; unzip -q /tmp/aoti-cuda-fp16.pt2; find . -name '*.so' | head -3; ldd $(find . -name '*.so' | head -1); readelf -d $(find . -name '*.so' | head -1) | head -20"
    print(subprocess.run(["bash", "-c", listing], capture_output=True, text=True).stdout[-2500:], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

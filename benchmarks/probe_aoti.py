"""Whether AOTInductor packages load on this machine, for each C++ compiler on it: python benchmarks/probe_aoti.py [cpu|cuda]

A package whose C++ library is linked statically crashes when PyTorch loads it. Printed for each compiler: whether detrt would
take it, whether the package needs the shared library, and what became of loading and running it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from detrt.backends.inductor.cpp_compiler import links_shared

MAKE = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
    def forward(self, x):
        return torch.relu(self.layer(x)) * 2 + 1
model, x = Model().to("{device}").eval(), torch.ones(8, 64, device="{device}")
with torch.no_grad():
    torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path="{package}")
"""
LOAD = """
import faulthandler, torch
faulthandler.enable()
run = torch._inductor.aoti_load_package("{package}")
print("sum", float(run(torch.ones(8, 64, device="{device}")).sum()))
"""


def call(code: str, environment: dict[str, str]) -> tuple[int | str, str]:
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment)
    except subprocess.TimeoutExpired:
        return "timeout", ""
    return done.returncode, (done.stdout + done.stderr)[-400:]


def main() -> int:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    found = [os.environ.get("CXX", "").split()[:1], ["g++"], ["clang++"]]
    paths = dict.fromkeys(path for names in found for name in names if (path := shutil.which(name)))
    for number, path in enumerate(paths):
        with tempfile.TemporaryDirectory() as folder:
            fill = {"device": device, "package": f"{folder}/model{number}.pt2"}
            environment = {**os.environ, "CXX": path, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"}
            made = call(MAKE.format(**fill), environment)
            shutil.unpack_archive(fill["package"], f"{folder}/open", "zip") if made[0] == 0 else None
            libraries = list(Path(folder, "open").rglob("*.so"))
            shared = all(b"libstdc++.so.6" in library.read_bytes() for library in libraries)
            print(path, "taken by detrt:", links_shared(path), "| made:", made, "| shared C++ library:", shared, flush=True)
            if made[0] == 0:
                print("  loaded and run:", *call(LOAD.format(**fill), environment), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

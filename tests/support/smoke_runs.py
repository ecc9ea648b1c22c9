"""Short runs of the programs in training/."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_smoke(script: str, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """`python training/SCRIPT --smoke --out OUT MORE`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "training" / script), "--smoke", "--out", str(out), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)

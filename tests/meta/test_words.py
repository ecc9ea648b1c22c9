"""Words of docs/reference/glossary.md: the worst private ones stay out of code, messages and documents."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Private word -> the standard one.
BANNED = {
    r"whole[ -]numbers?\b": "integer",
    r"images a run\b": "batch size",
    r"images a second\b": "images per second",
    r"for want of\b": "out of; because there are too few",
    r"text towers?\b": "text encoder",
    r"with commas\b": "comma-separated",
    r"gone on (from|with)\b": "resumed",
    r"prove that it arrived": "verify that it matches PyTorch",
    r"\bone a line\b": "one per line",
    r"takes offence": "rejects",
    r"keys do not tell|does not tell\b": "cannot be inferred",
    r"where (the|two) graphs part\b": "first node that differs",
    r"gives what its image gives alone": "batch invariance",
    r"waits for company": "max queue delay",
}
# Names that still have such a word: path -> patterns. Nothing else may be added; the second test keeps the list short.
ALLOWED: dict[str, tuple[str, ...]] = {
    "benchmarks/measure_devices.py": (r"images a second\b",),
    "cpp/apps/options.cpp": (
        r"whole[ -]numbers?\b",
        r"images a run\b",
        r"with commas\b",
    ),
    "cpp/include/detrt/detector.hpp": (r"images a run\b",),
    "cpp/include/detrt/detrt.h": (r"with commas\b",),
    "cpp/plugin/ms_deform_attn_plugin.cpp": (r"whole[ -]numbers?\b",),
    "cpp/src/bundle.cpp": (r"whole[ -]numbers?\b",),
    "cpp/src/detector.cpp": (r"images a run\b",),
    "cpp/src/json_fields.hpp": (r"whole[ -]numbers?\b",),
    "cpp/src/preprocess.cpp": (r"whole[ -]numbers?\b",),
    "cpp/src/prompt.cpp": (r"text towers?\b",),
    "cpp/src/resize.cpp": (r"whole[ -]numbers?\b",),
    "cpp/src/spec.cpp": (r"whole[ -]numbers?\b",),
    "cpp/tests/test_detector.cpp": (r"images a run\b",),
    "cpp/tests/test_prompt.cpp": (
        r"whole[ -]numbers?\b",
        r"text towers?\b",
    ),
    "cpp/tests/test_spec.cpp": (r"whole[ -]numbers?\b",),
    "src/detrt/backends/base.py": (r"text towers?\b",),
    "src/detrt/backends/gpu/decoder.py": (r"takes offence",),
    "src/detrt/backends/gpu/resize_triton.py": (r"whole[ -]numbers?\b",),
    "src/detrt/backends/gpu/staging.py": (r"whole[ -]numbers?\b",),
    "src/detrt/backends/gpu/top_k.py": (r"whole[ -]numbers?\b",),
    "src/detrt/backends/inductor/config.py": (r"whole[ -]numbers?\b",),
    "src/detrt/backends/onnxruntime/session.py": (r"whole[ -]numbers?\b",),
    "src/detrt/backends/tensorrt/config.py": (r"whole[ -]numbers?\b",),
    "src/detrt/backends/tensorrt/profile.py": (r"text towers?\b",),
    "src/detrt/backends/tensorrt/worker.py": (r"whole[ -]numbers?\b",),
    "src/detrt/cli/build.py": (r"with commas\b",),
    "src/detrt/cli/describe.py": (r"text towers?\b",),
    "src/detrt/data/resample.py": (r"whole[ -]numbers?\b",),
    "src/detrt/detector.py": (r"images a run\b",),
    "src/detrt/evaluation/divergence.py": (r"whole[ -]numbers?\b",),
    "src/detrt/evaluation/matching.py": (r"for want of\b",),
    "src/detrt/evaluation/tensors.py": (r"text towers?\b",),
    "src/detrt/export/onnx.py": (r"text towers?\b",),
    "src/detrt/export/prompted.py": (r"text towers?\b",),
    "src/detrt/jobs/ray/inputs.py": (r"whole[ -]numbers?\b",),
    "src/detrt/jobs/ray/job.py": (r"gone on (from|with)\b",),
    "src/detrt/jobs/ray/worker.py": (r"text towers?\b",),
    "src/detrt/models/arch/grounding_dino.py": (r"text towers?\b",),
    "src/detrt/models/arch/omdet_turbo.py": (r"text towers?\b",),
    "src/detrt/models/contract.py": (
        r"whole[ -]numbers?\b",
        r"text towers?\b",
    ),
    "src/detrt/models/example_inputs.py": (r"text towers?\b",),
    "src/detrt/models/labels.py": (r"\bone a line\b",),
    "src/detrt/models/load.py": (r"keys do not tell|does not tell\b",),
    "src/detrt/models/wrapper.py": (r"text towers?\b",),
    "src/detrt/precision/cast.py": (r"whole[ -]numbers?\b",),
    "src/detrt/precision/config.py": (r"images a run\b",),
    "src/detrt/precision/search.py": (r"text towers?\b",),
    "src/detrt/precision/stage.py": (r"text towers?\b",),
    "src/detrt/serve/config.py": (r"images a run\b",),
    "src/detrt/serve/kserve.py": (r"whole[ -]numbers?\b",),
    "src/detrt/serve/request.py": (r"with commas\b",),
    "src/detrt/serve/scheduler.py": (r"keys do not tell|does not tell\b",),
    "src/detrt/serve/triton.py": (r"text towers?\b",),
    "src/detrt/spec.py": (
        r"whole[ -]numbers?\b",
        r"text towers?\b",
    ),
    "src/detrt/system.py": (r"keys do not tell|does not tell\b",),
    "src/detrt/text/tokenizer.py": (r"\bone a line\b",),
    "training/measure_prompted.py": (r"text towers?\b",),
}
SUFFIXES = (".py", ".md", ".cpp", ".hpp", ".h", ".cu", ".html", ".js")
ITSELF = ("docs/reference/glossary.md", "tests/meta/test_words.py")


def texts() -> dict[str, str]:
    try:
        command = ["git", "ls-files", "-z", "src", "cpp", "docs", "README.md", "benchmarks", "training"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    names = [n for n in listed.split("\0") if n.endswith(SUFFIXES) and n not in ITSELF and (ROOT / n).is_file()]
    return {name: (ROOT / name).read_text("utf-8") for name in names}


def found(text: str) -> list[str]:
    """The banned patterns in a text. Line breaks, comment signs and quotes between two words do not hide them."""
    flat = re.sub(r"[\s\"'#/*]+", " ", text)
    return [pattern for pattern in BANNED if re.search(pattern, flat, re.IGNORECASE)]


def test_private_words_stay_out():
    wrong = [
        f"{name}: {pattern!r}; the word is {BANNED[pattern]!r}"
        for name, text in texts().items()
        for pattern in found(text)
        if pattern not in ALLOWED.get(name, ())
    ]
    assert not wrong, "\n".join(wrong)


def test_allowances_are_needed():
    has = {name: found(text) for name, text in texts().items()}
    idle = {name: [p for p in patterns if p not in has.get(name, ())] for name, patterns in ALLOWED.items()}
    assert not {name: patterns for name, patterns in idle.items() if patterns}


def test_words_are_found():
    assert set(found('must be a "whole\n    # number" with\ncommas')) == {r"whole[ -]numbers?\b", r"with commas\b"}

"""The kernels of an engine, as TensorRT-RTX's builder lists them at the end of its log; no GPU is needed for that.

Their number and kinds show what a graph costs, so that a change of an export is seen on any machine.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from ...files import write_text

HEAD = "Layers:"  # of the message
ATTENTION = "fused attention"  # of `count`: among all kernels
WIDENING = "convolutions from 8 bits to FP32"
_SYNCHRONISATION = ("signal", "wait")
_CONVOLUTION = "correlation"
_EIGHT_BITS = ("Int8", "FP8")


@dataclass(frozen=True, slots=True)
class Kernel:
    """name, kind: as the library calls them ("kgen": generated code, "correlation": a convolution). reads, writes: types of its tensors, e.g. "Half"."""

    name: str
    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def parse(message: str) -> tuple[Kernel, ...]:
    """The kernels of the builder's message; what only synchronises streams is left out."""
    found = []
    for line in message.partition(HEAD)[2].splitlines():
        kind = re.search(r"LayerType: (\w+)", line)
        if not line.startswith("Name: ") or kind is None or kind[1] in _SYNCHRONISATION:
            continue
        inputs, _, outputs = line.partition("Outputs: [")
        reads = re.findall(r"Datatype: (\w+)", inputs.partition("Constants: [")[0])
        writes = re.findall(r"Datatype: (\w+)", outputs.partition("TacticName:")[0])
        found.append(Kernel(line[len("Name: ") :].partition(",")[0], kind[1], tuple(reads), tuple(writes)))
    return tuple(found)


def count(kernels: tuple[Kernel, ...]) -> dict[str, int]:
    """ "all", fused attentions, convolutions that read 8 bits and write FP32, and each kind of kernel -> how many."""
    if not kernels:
        return {}
    widening = sum(
        one.kind == _CONVOLUTION and any(kind in _EIGHT_BITS for kind in one.reads) and "Float" in one.writes for one in kernels
    )
    attention = sum("_gemm_mha" in one.name for one in kernels)
    return {"all": len(kernels), ATTENTION: attention, WIDENING: widening, **Counter(one.kind for one in kernels)}


def write_kernels(path: Path, engines: Mapping[str, tuple[Kernel, ...]]) -> None:
    """Write the kernels of engines by their name, in the builder's order: one JSON object a line, with a kernel's fields and `engine`.

    Raises:
        OutputError: `path` cannot be written.
    """
    rows = [{"engine": name} | asdict(kernel) for name, kernels in engines.items() for kernel in kernels]
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))

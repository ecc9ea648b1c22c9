"""The types of an engine's layers against what was asked for. Needs no onnx."""

from __future__ import annotations

from ..bundle import EngineFacts
from ..errors import GateError
from .config import PrecisionConfig

# TensorRT's name of each low type among the types of an engine's layers.
_ENGINE_TYPE = {"fp16": "HALF", "bf16": "BF16", "int8": "INT8", "fp8": "FP8"}
_LOW = frozenset(_ENGINE_TYPE.values())


def check_engine(facts: EngineFacts, config: PrecisionConfig) -> None:
    """Compare the types of an engine's layers with what was asked for.

    Raises:
        GateError: the engine lacks the low type (a silent upgrade), or has one that was not asked for.
    """
    types, target = dict(facts.layer_types), config.target
    if not types:
        return
    wanted = {_ENGINE_TYPE[name] for name in (target, config.sixteen) if name in _ENGINE_TYPE}
    missing = [kind for kind in wanted if not types.get(kind)]
    extra = [kind for kind in _LOW - wanted if types.get(kind)]
    if missing or extra:
        text = ", ".join(f"{kind} {count}" for kind, count in types.items())
        fault = f"has no {', '.join(sorted(missing))} layer" if missing else f"also has {', '.join(sorted(extra))} layers"
        raise GateError(
            f"--precision {config.precision} was asked for, but the engine {fault} (layer outputs by type: {text}); "
            "build it again from the checkpoint with the --precision that you want"
        )

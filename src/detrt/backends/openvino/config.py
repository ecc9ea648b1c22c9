"""The caller's choices for one OpenVINO model. No OpenVINO is needed to make or check them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ...errors import EngineError, check_range, check_timeout

TARGET = "openvino"
PERFORMANCE = ("latency", "throughput")  # the first is the default
LARGEST_STREAMS = 256


@dataclass(frozen=True, slots=True)
class OpenVinoRun:
    """How an OpenVINO model is run.

    performance: "latency": all threads work on one batch; "throughput": the threads are divided among several batches, which
        `Detector.stream` and the server run at the same time. None: as the model was built, "latency" unless it says otherwise.
    streams: batches at a time with "throughput"; None: what OpenVINO chooses for the processor.

    Raises:
        EngineError: a value that is not allowed.
    """

    performance: str | None = field(
        default=None,
        metadata={
            "help": "OpenVINO: latency (one batch at a time, default) or throughput (several).",
            "panel": "Engine",
            "needs": {"target": (TARGET,)},
        },
    )
    streams: int | None = field(
        default=None,
        metadata={
            "help": "Batches at a time with `performance=throughput`; default: OpenVINO's choice.",
            "panel": "Engine",
            "needs": {"performance": ("throughput",)},
        },
    )

    def __post_init__(self) -> None:
        if self.performance not in (None, *PERFORMANCE):
            raise EngineError(f"`performance` must be {' or '.join(PERFORMANCE)}; got {self.performance!r}")
        if self.streams is not None:
            check_range("`streams`", self.streams, 1, LARGEST_STREAMS, EngineError, integer=True)
        if self.streams is not None and self.performance != "throughput":
            raise EngineError(
                f"`streams={self.streams}` has no effect without `performance=throughput`; add that, or leave it out"
            )


@dataclass(frozen=True, slots=True)
class OpenVinoConfig(OpenVinoRun):
    """How to write an OpenVINO model, and how it is run unless the caller of the session says otherwise.

    compress_weights: store FP32 weights as FP16, half of the file; they are FP32 again when the model is opened.
    timeout_seconds: the build is stopped after it. None: no limit.

    Raises:
        EngineError: a value that is not allowed.
    """

    compress_weights: bool = field(
        default=False,
        metadata={
            "help": "Store FP32 weights as FP16 in the OpenVINO model.",
            "panel": "Engine",
            "flag": "compress-weights",
            "needs": {"target": (TARGET,)},
        },
    )
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        OpenVinoRun.__post_init__(self)
        check_timeout(self.timeout_seconds, EngineError)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "performance": self.performance or PERFORMANCE[0]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OpenVinoConfig:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in data.items() if k in known})


def model_name(precision: str = "fp32", part: str = "model") -> str:
    """File of a model in a bundle: `model.openvino.xml`, `model.openvino.int8.xml`. part: "model" or "text"."""
    return f"{part}.{TARGET}{'' if precision in ('fp32', 'tf32') else '.' + precision}.xml"

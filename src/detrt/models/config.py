"""ExportConfig: the caller's choices for PyTorch -> ONNX."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ExportError

OPSETS = (17, 18, 19, 20)
LOWERINGS = ("auto", "gather", "gridsample", "plugin", "nvidia-plugin")
DECODES = ("raw", "graph")
NMS = ("checkpoint", "none", "hard", "graph", "graph-hard")


@dataclass(frozen=True, slots=True)
class ExportConfig:
    """Choices for one export.

    opset: ONNX opset, 17 to 20 (16 and below decompose LayerNormalization, which breaks FP16 later).
    msda: how deformable attention is lowered; "auto" is "gather" (see docs/export.md for figures); "plugin" and
        "nvidia-plugin" keep one node that only TensorRT 10 or 11 with that plugin runs (docs/plugin.md).
    height, width: fix the input size; None keeps it symbolic where the family allows it.
    decode: "raw" gives logits and pred_boxes; "graph" gives finished boxes, scores, labels.
    max_detections: boxes an image with decode "graph"; None takes the checkpoint's rule.
    score_threshold: with decode "graph", `num_detections` counts the scores at or above it.
    nms: "checkpoint" keeps the checkpoint's rule, outside the graph; "none" drops it; "hard" makes it hard
        NMS, outside; "graph" puts the checkpoint's own rule into the graph of decode "graph"; "graph-hard"
        puts hard NMS there, whatever the checkpoint's rule.
    normalize: whether rescale and normalisation are part of the graph.
    input_dtype: "uint8" or "float32" raw pixels (only float32 when normalize is False).
    mask: keep the padding mask input of families that have one; False needs a fixed size.
    single_graph: of a prompted model, one graph that takes token ids, instead of a detector and a text tower.
    check: run the result at a batch and a size that were not traced and compare with PyTorch.
    """

    opset: int = 17
    msda: str = "auto"
    height: int | None = None
    width: int | None = None
    decode: str = "raw"
    max_detections: int | None = None
    score_threshold: float = 0.0
    nms: str = "checkpoint"
    normalize: bool = True
    input_dtype: str = "uint8"
    mask: bool = True
    check: bool = True
    single_graph: bool = False

    def __post_init__(self) -> None:
        _one_of("--opset", self.opset, OPSETS)
        _one_of("--msda", self.msda, LOWERINGS)
        _one_of("--decode", self.decode, DECODES)
        _one_of("--nms", self.nms, NMS)
        if self.nms.startswith("graph") and self.decode != "graph":
            raise ExportError(f"--nms {self.nms} needs --decode graph: NMS works on finished boxes")
        _one_of("--input-dtype", self.input_dtype, ("uint8", "float32"))
        if (self.height is None) != (self.width is None):
            raise ExportError("give both --height and --width (or --size for a square), or neither")
        for name, value in (("--height", self.height), ("--width", self.width)):
            if value is not None and not (isinstance(value, int) and 1 <= value <= 16384):
                raise ExportError(f"{name} must be a whole number of pixels from 1 to 16384; got {value!r}")
        if self.max_detections is not None and self.max_detections < 1:
            raise ExportError(f"--max-detections must be at least 1; got {self.max_detections}")
        if not 0.0 <= self.score_threshold <= 1.0:
            raise ExportError(f"--score-threshold must be from 0 to 1; got {self.score_threshold}")
        if self.score_threshold and self.decode != "graph":
            raise ExportError(
                f"--score-threshold {self.score_threshold:g} is for a graph that decodes: add --decode graph, or leave "
                "it out and give --threshold to detrt detect"
            )
        if not self.normalize and self.input_dtype == "uint8":
            object.__setattr__(self, "input_dtype", "float32")
        if not self.mask and self.height is None:
            raise ExportError("a model without its padding mask needs a fixed size; add --height and --width")

    @property
    def lowering(self) -> str:
        return "gather" if self.msda == "auto" else self.msda

    @property
    def plugin(self) -> bool:
        """Whether deformable attention stays one node, for a TensorRT plugin."""
        return self.msda in ("plugin", "nvidia-plugin")


def _one_of(name: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        raise ExportError(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}")

"""Configuration of precision. Needs no onnx."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..backends.targets import TARGETS
from ..errors import GraphError, check_one_of, check_range, is_finite
from ..spec import Precision, comma_separated

PRECISIONS = (*Precision, "auto")
METHODS = ("auto", "entropy", "percentile", "mse", "minmax")
BUDGETS = ("ap", "drift")
PLACEMENTS = tuple(dict.fromkeys(target.placement for target in TARGETS if target.placement))
RANGES, SEARCH_PLOT, SEARCH_STATE = "ranges.json", "search.svg", "search.json"  # files of the stage
EIGHT_BITS = tuple(kind for kind in Precision if kind.quantized)
BELOW_FP32 = (*(kind for kind in Precision if kind.bits < 32), "auto")


def parse_budget(text: str) -> tuple[str, float]:
    """ "ap=0.1" -> ("ap", 0.1), in AP points of 100; "drift=0.01" -> ("drift", 0.01).

    Raises:
        GraphError: another form.
    """
    kind, _, number = text.partition("=")
    try:
        return kind.strip(), float(number)
    except ValueError:
        raise GraphError(f"`budget` must be ap=POINTS (of 100) or drift=NUMBER, such as ap=0.1; got {text!r}") from None


@dataclass(frozen=True, slots=True)
class PrecisionConfig:
    """The types of a graph. All values are checked here, before any work.

    precision: "fp32" and "tf32" leave the graph as it is (TF32 is a flag of the engine); "fp16" and
        "bf16" store weights and activations in 16 bits; "int8" and "fp8" add Q/DQ pairs to the matmuls and
        convolutions that tolerate it, in an FP16 graph; "auto" searches the smallest set of blocks that must
        not be in `low` to stay within `budget`.
    calibration: folder of images, or a COCO annotation file with its images beside it (see
        `calibrate.find_images`). Required for int8, fp8 and auto; for fp16 it turns on the overflow scan.
    calibration_images: largest number of images that ranges and drift are measured on.
    ap_images: largest number of annotated images that AP is measured on, the first ones; None: all.
    prompt: of a model that takes a prompt, on these images.
    method: how an activation's range becomes a scale: "entropy", "percentile", "mse", "minmax"; "auto" is "mse".
    percentile: for that method, in percent.
    keep_fp32: module paths or glob patterns ("model.decoder.layers.5", "*bbox*") that stay in FP32; with int8
        and fp8 they are not quantized and stay in FP32.
    margin: a tensor whose largest value on the calibration images exceeds 65504 / margin stays FP32.
    budget: (kind, allowed) for "auto": ("ap", points of 100) or ("drift", mean change of matched detections).
    low: the type that "auto" prefers.
    quantize_fraction: with int8 and fp8, smallest fraction of the MatMul and Conv MACs to quantize; the most sensitive
        remaining layers stay in 16 bits. 1 quantizes every layer that the rules allow. None: 0.5 where whole stages are taken
        (`fuses`), else 0.7.
    qdq_placement: one of PLACEMENTS, for INT8: see `quantize.plan_quantization`. None: "tensorrt", and in `build` "cpu" where
        OpenVINO is the only target.
    min_fraction: smallest fraction of the MatMul and Conv MACs in the low type; below it is a GateError.
        None: `Precision.min_fraction`.

    Raises:
        GraphError: a value that is not allowed.
    """

    precision: str = field(
        default="fp32",
        metadata={"help": "Precision: fp32, tf32, fp16, bf16, int8, fp8, or auto (needs `budget`).", "panel": "Precision"},
    )
    calibration: Path | None = field(
        default=None,
        metadata={
            "help": "Calibration images: a folder or a COCO file; for fp16 ranges, for int8 and fp8 scales.",
            "panel": "Precision",
            "needs": {"precision": BELOW_FP32},
        },
    )
    calibration_images: int = field(
        default=128,
        metadata={
            "help": "Largest number of calibration images, for ranges, scales and drift. AP has its own: `ap_images`.",
            "panel": "Precision",
            "needs": {"calibration": ()},
        },
    )
    ap_images: int | None = field(
        default=None,
        metadata={
            "help": "Largest number of annotated images of `calibration` that AP is measured on, the first ones; default: all.",
            "panel": "Precision",
            "needs": {"calibration": ()},
        },
    )
    prompt: str | None = field(
        default=None,
        metadata={"help": "Prompt of a prompted model on the calibration images.", "panel": "Prompt"},
    )
    method: str = field(
        default="auto",
        metadata={
            "help": "Calibration method: auto, entropy, percentile, mse or minmax.",
            "panel": "Precision",
            "flag": "calibration-method",
            "needs": {"calibration": ()},
        },
    )
    percentile: float = 99.99
    keep_fp32: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Comma-separated module paths or patterns that stay FP32: model.decoder.layers.5,*bbox*.",
            "panel": "Precision",
            "many": True,
            "parse": comma_separated,
            "needs": {"precision": BELOW_FP32},
        },
    )
    margin: float = 4.0
    budget: tuple[str, float] | None = field(
        default=None,
        metadata={
            "help": "Allowed loss with `precision=auto`: ap=POINTS of 100, or drift=NUMBER.",
            "panel": "Precision",
            "parse": parse_budget,
        },
    )
    low: str = field(
        default="fp16",
        metadata={
            "help": "Preferred low precision, with `precision=auto`: fp16, bf16, int8 or fp8.",
            "panel": "Precision",
            "needs": {"precision": ("auto",)},
        },
    )
    quantize_fraction: float | None = field(
        default=None,
        metadata={
            "help": "Smallest fraction of MatMul and Conv MACs to quantize; the most sensitive remaining layers stay in 16 bits. "
            "Default: 0.5 for INT8 of TensorRT, which takes whole stages, else 0.7.",
            "panel": "Precision",
            "needs": {"precision": EIGHT_BITS, "low": EIGHT_BITS},
        },
    )
    qdq_placement: str | None = field(
        default=None,
        metadata={
            "help": "Layers that INT8 takes: tensorrt (what TensorRT fuses right) or cpu (also projections of attentions, for "
            "OpenVINO and ONNX Runtime); default: cpu if OpenVINO is the only target.",
            "panel": "Precision",
            "needs": {"precision": (Precision.INT8,), "low": (Precision.INT8,)},
        },
    )
    min_fraction: float | None = field(
        default=None,
        metadata={
            "help": "Smallest fraction of MatMul and Conv MACs in the low precision, 0 to 1.",
            "panel": "Precision",
            "needs": {"precision": BELOW_FP32},
        },
    )
    state: Path | None = field(
        default=None,
        metadata={
            "help": "Resume file of `precision=auto`.",
            "writes": "JSON",
            "panel": "Precision",
            "needs": {"precision": ("auto",)},
        },
    )

    def __post_init__(self) -> None:
        check_one_of("`precision`", self.precision, PRECISIONS, GraphError)
        check_one_of("`method`", self.method, METHODS, GraphError)
        check_one_of("`low`", self.low, [kind for kind in Precision if kind.bits < 32], GraphError)
        if self.qdq_placement is not None:
            check_one_of("`qdq_placement`", self.qdq_placement, PLACEMENTS, GraphError)
        if self.low != Precision.FP16 and self.precision != "auto":
            raise GraphError(f"`low={self.low}` has no effect without `precision=auto`; add that, or leave it out")
        for name in ("calibration", "state"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, Path(value))
        object.__setattr__(self, "keep_fp32", tuple(self.keep_fp32))
        for name, low, high in (
            ("calibration_images", 1, 100_000),
            ("ap_images", 1, 10_000_000),
            ("percentile", 50, 100),
            ("margin", 1, 1000),
            ("quantize_fraction", 0, 1),
            ("min_fraction", 0, 1),
        ):
            if (value := getattr(self, name)) is not None:
                check_range(f"`{name}`", value, low, high, GraphError)
        if self.precision == "auto" and self.budget is None:
            raise GraphError("`precision=auto` needs `budget`, e.g. `budget=ap=0.1` or `budget=drift=0.01`")
        if self.precision != "auto" and self.budget is not None:
            raise GraphError(f"`budget` belongs to `precision=auto`; got `precision={self.precision}`")
        if self.budget is not None:
            kind, allowed = self.budget
            check_one_of("the kind of `budget`", kind, BUDGETS, GraphError)
            if not (is_finite(allowed) and allowed >= 0):
                raise GraphError(f"`budget={kind}=...` must be a number of at least 0; got {allowed!r}")
        if self.method == "entropy" and self.target == Precision.FP8:
            raise GraphError(
                "`method=entropy` needs uniform steps, which FP8 does not have; choose `method=mse`, percentile or minmax"
            )
        if self.prompt is not None and self.calibration is None:
            raise GraphError(f"`prompt={self.prompt!r}` needs the images of `calibration`; give those too, or leave it out")

    def check_images(self) -> None:
        """Raise GraphError where images are needed and none are named. Asked when it is known that the target has the precision."""
        if self.calibration is not None:
            return
        if self.precision == "auto":
            raise GraphError("`precision=auto` needs `calibration=DIR` or, for `budget=ap=...`, a COCO file")
        if self.target.quantized:
            raise GraphError(
                f"`precision={self.precision}` needs images like those of the deployment: `calibration=DIR` or a COCO file"
            )

    @property
    def target(self) -> Precision:
        """The precision of the graph; FP32 if the graph is not converted."""
        precision = Precision(self.low if self.precision == "auto" else self.precision)
        return Precision.FP32 if precision == Precision.TF32 else precision

    @property
    def base(self) -> Precision:
        """What is not quantized: FP16 beside INT8 and FP8, but FP32 beside INT8 for CPUs, which compute FP16 slower than FP32."""
        return Precision.FP32 if self.for_cpu else self.target.base

    @property
    def for_cpu(self) -> bool:
        """Whether Q/DQ pairs are placed for OpenVINO and ONNX Runtime on a CPU."""
        return self.target == Precision.INT8 and self.qdq_placement == "cpu"

    @property
    def fuses(self) -> bool:
        """Whether Q/DQ pairs are placed for a runtime that fuses attentions, MLPs and residual additions: INT8 for TensorRT."""
        return self.target == Precision.INT8 and not self.for_cpu

    @property
    def quantize_at_least(self) -> float:
        """Fraction of the MACs, 0..1, below which no more layers are excluded from quantization for their noise."""
        if self.quantize_fraction is not None:
            return self.quantize_fraction
        return 0.5 if self.fuses else 0.7

    @property
    def required_fraction(self) -> float:
        return self.target.min_fraction if self.min_fraction is None else self.min_fraction

    @property
    def searches(self) -> bool:
        """Whether the graph is the result of a search."""
        return self.precision == "auto"

    def plain(self) -> PrecisionConfig:
        """What the result has to be faster than (`Precision.plain`), with the choices that are for it as well."""
        names = ("calibration", "calibration_images", "prompt", "keep_fp32", "margin")
        return PrecisionConfig(self.target.plain, min_fraction=0.0, **{name: getattr(self, name) for name in names})

    def without_search(self) -> PrecisionConfig:
        """Of "auto": the same choices with the low precision of the search in its place."""
        return replace(self, precision=self.low, low=Precision.FP16, budget=None)

    def to_dict(self) -> dict[str, Any]:
        """The values as JSON types."""
        data = asdict(self)
        for name in ("calibration", "state"):
            data[name] = None if data[name] is None else str(data[name])
        data["keep_fp32"] = list(self.keep_fp32)
        data["budget"] = None if self.budget is None else list(self.budget)
        return data

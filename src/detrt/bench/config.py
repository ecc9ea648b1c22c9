"""What `detrt bench` measures: one dataclass for checkpoints and bundles."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from ..backends.targets import GRAPH, TARGETS, check_no_target
from ..data.arguments import INPUT_SIZE
from ..data.datasets import is_dataset
from ..errors import DetrtError, check_range
from ..models.load_options import LoadOptions
from ..spec import LARGEST_SIDE, comma_separated, parse_numbers

SCOPES = ("kernel", "forward", "end_to_end")
BACKENDS = tuple(name for target in reversed(TARGETS) for name in (target.name, *target.others))
CHECKPOINTS, BUNDLES = "checkpoints", "bundles"


def _only(models: str, text: str, **more: Any) -> dict[str, Any]:
    """Metadata of an option that has an effect on one kind of models; any value but the default is refused with the other kind."""
    return {"only": models, "help": f"With {models}{text}", **more}


def _scopes(text: str) -> tuple[str, ...]:
    return tuple(name.replace("-", "_") for name in comma_separated(text))


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What to measure, and how.

    Attributes:
        batches: batch sizes; checkpoints take one.
        size: (height, width) of the input in pixels; None: the model's own.
        threads: of PyTorch, ONNX Runtime and OpenVINO.
        load: how checkpoints are read, also those of `against`; without them, ONNX files of other exporters.
        scopes: of SCOPES. backends: of BACKENDS, each target by its first name.
        providers: execution providers of ONNX Runtime ("cpu", "cuda", "cuda:1"), each measured; empty: the CPU, and the GPU where this
            build of ONNX Runtime has one.
        devices: "cpu", "cuda:0"; empty: what the bundle has.
        ground_truth, images: a data set as `load_dataset` takes it; images of a COCO file.

    Raises:
        DetrtError: a value that is not allowed, or options that do not go together.
    """

    batches: tuple[int, ...] = field(
        default=(1,),
        metadata={
            "help": "Batch size (1); with bundles several, comma-separated: 1,4,16.",
            "panel": "Size",
            "flag": "batch batches",
            "parse": partial(parse_numbers, flag="batch"),
        },
    )
    size: tuple[int, int] | None = field(default=None, metadata=INPUT_SIZE)
    repeats: int = field(default=7, metadata={"help": "Timed runs."})
    warmup: int = field(default=2, metadata={"help": "Runs before the clock starts."})
    threads: int | None = field(default=None, metadata={"help": "Threads of models that run on a CPU; default: all cores."})
    load: LoadOptions = field(default_factory=LoadOptions)

    engine: bool | None = field(
        default=None,
        metadata=_only(CHECKPOINTS, ": build a TensorRT-RTX engine (default).", flag="engine/no-engine"),
    )
    torch: bool | None = field(
        default=None,
        metadata=_only(CHECKPOINTS, ": time the plain transformers model (default).", flag="torch/no-torch"),
    )
    msda: str | None = field(
        default=None,
        metadata=_only(CHECKPOINTS, ": lowering of deformable attention: auto (default), gather, gridsample."),
    )
    fixed: bool | None = field(
        default=None,
        metadata=_only(CHECKPOINTS, ": fix the size in the graph, or keep it symbolic (default).", flag="fixed/symbolic"),
    )

    scopes: tuple[str, ...] = field(
        default=(),
        metadata=_only(BUNDLES, ": of kernel (GPU work alone), forward, end-to-end; default: all.", parse=_scopes),
    )
    backends: tuple[str, ...] = field(
        default=(),
        metadata=_only(
            BUNDLES,
            ": onnxruntime, onnxruntime-rtx, openvino, inductor, tensorrt; default: all but -rtx that run here.",
            parse=comma_separated,
        ),
    )
    providers: tuple[str, ...] = field(
        default=(),
        metadata=_only(
            BUNDLES,
            ": of ONNX Runtime, comma-separated: cpu, cuda; default: all it has.",
            flag="provider",
            parse=comma_separated,
        ),
    )
    devices: tuple[str, ...] = field(
        default=(),
        metadata=_only(
            BUNDLES,
            ": of packages, engines and `against`, comma-separated: cpu, cuda:0; default: all.",
            flag="device",
            parse=comma_separated,
        ),
    )
    prompt: str | None = field(
        default=None, metadata=_only(BUNDLES, " that take one: 'a cat. a remote control.'", panel="Prompt")
    )
    against: tuple[str, ...] = field(
        default=(),
        metadata=_only(BUNDLES, ": their checkpoint, timed in transformers as well; one, or one for each bundle.", many=True),
    )
    compile: bool = field(default=False, metadata=_only(BUNDLES, " and `against`: also under torch.compile."))
    ground_truth: Path | None = field(
        default=None,
        metadata=_only(BUNDLES, ": annotations, as detrt eval takes them, for average precision."),
    )
    images: Path | None = field(default=None, metadata=_only(BUNDLES, " and `ground_truth`: the folder of its images."))
    parts: bool = field(
        default=False,
        metadata=_only(BUNDLES, ": time by stage, module and kind of operator, and the fraction of the roofline."),
    )
    plot: Path | None = field(
        default=None, metadata=_only(BUNDLES, ": plots of all results, FILE.svg or FILE.png.", writes="figure")
    )

    def __post_init__(self) -> None:
        if not self.batches or not all(1 <= batch <= 256 for batch in self.batches):
            raise DetrtError(f"`batches` must be numbers from 1 to 256, such as 1,4,16; got {self.batches}")
        for name, value, low in (("repeats", self.repeats, 1), ("warmup", self.warmup, 0)):
            check_range(f"`{name}`", value, low, 10_000, DetrtError)
        if self.threads is not None and self.threads < 1:
            raise DetrtError(f"`threads` must be at least 1, or left out for all cores; got {self.threads}")
        if self.size is not None and not all(1 <= side <= LARGEST_SIDE for side in self.size):
            height, width = self.size
            raise DetrtError(f"size must be from 1 to {LARGEST_SIDE} pixels per side; got {height}x{width}")
        for backend in self.backends:
            check_no_target(backend, "backends", BACKENDS, DetrtError)
        for name, given, allowed in (("scopes", self.scopes, SCOPES), ("backends", self.backends, BACKENDS)):
            if unknown := sorted(set(given) - set(allowed)):
                names = ", ".join(allowed).replace("_", "-")
                raise DetrtError(f"`{name}` must be of {names}; got {', '.join(unknown)}")
        for name, given, allowed in (
            ("providers", self.providers, GRAPH.devices),
            ("devices", self.devices, ("cpu", "cuda")),
        ):
            for one in given:
                kind, colon, number = one.partition(":")
                if kind not in allowed or (colon and not number.isdecimal()):
                    raise DetrtError(
                        f"`{name}` must be of {', '.join(allowed)}, comma-separated, such as cpu,cuda:0; got {one!r}"
                    )
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Refuse what would have no effect."""
        alone = self.ground_truth is not None and self.images is None and not is_dataset(self.ground_truth)
        if alone or (self.ground_truth is None and self.images is not None):  # a COCO file does not say where its images lie
            raise DetrtError(
                "average precision needs both `ground_truth` (a JSON file in COCO's format) and `images` (its folder)"
            )
        if self.compile and not self.against:
            raise DetrtError("`compile` times the checkpoint under torch.compile; give it with `against`")
        if self.parts and self.scopes and "forward" not in self.scopes:
            raise DetrtError("`parts` compares with the forward time; add forward to `scopes`, or leave `parts` out")
        if self.providers and self.backends and GRAPH.name not in self.backends:
            raise DetrtError(
                f"`providers` chooses for {GRAPH.title}, which is not in `backends`; add {GRAPH.name}, or leave `providers` out"
            )
        if self.devices and self.backends == (GRAPH.name,) and not self.against:
            raise DetrtError(
                f"`devices` chooses for packages, engines and `against`, and `backends` names {GRAPH.name} alone; give `providers`, or "
                "leave `devices` out"
            )

    def check_models(self, models: str) -> None:
        """Refuse options that have no effect on CHECKPOINTS or BUNDLES.

        Raises:
            DetrtError: names the option.
        """
        for entry in fields(self):
            only = entry.metadata.get("only", models)
            if only != models and (value := getattr(self, entry.name)) != entry.default:
                given = f"`{entry.name}=False`" if value is False else f"`{entry.name}`"
                raise DetrtError(f"{given} is for {only} and has no effect on {models}; leave it out")
        if models == CHECKPOINTS and len(self.batches) > 1:
            raise DetrtError("`batch`: checkpoints are measured at one batch size; give one number, or build bundles first")

    def to_dict(self, models: str) -> dict[str, Any]:
        """The settings that have an effect on CHECKPOINTS or BUNDLES, as JSON takes them."""
        values = {e.name: getattr(self, e.name) for e in fields(self) if e.metadata.get("only", models) == models}
        load = values.pop("load")
        values |= load.arguments()
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

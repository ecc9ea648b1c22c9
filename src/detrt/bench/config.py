"""What `detrt bench` measures: one dataclass for checkpoints and bundles."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..backends.targets import GRAPH, TARGETS, check_no_target
from ..data.datasets import is_dataset
from ..errors import DetrtError, check_range
from ..models.load_options import LoadOptions
from ..spec import LARGEST_SIDE

SCOPES = ("kernel", "forward", "end_to_end")
BACKENDS = tuple(name for target in reversed(TARGETS) for name in (target.name, *target.others))
CHECKPOINTS, BUNDLES = "checkpoints", "bundles"


def _only(models: str) -> dict[str, str]:
    """Metadata of a field that has an effect on one kind of models; any value but the default is refused with the other kind."""
    return {"only": models}


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What to measure, and how.

    Attributes:
        batches: batch sizes; checkpoints take one.
        size: (height, width) of the input in pixels; None: the model's own.
        repeats, warmup: timed runs, and runs before them.
        threads: of PyTorch, ONNX Runtime and OpenVINO; None: all cores.
        load: how checkpoints are read, also those of `against`; without them, ONNX files of other exporters.

        engine: with checkpoints: also build a TensorRT-RTX engine; None: yes.
        torch: with checkpoints: also time the plain transformers model; None: yes.
        msda: with checkpoints: lowering of deformable attention, as in `ExportConfig`; None: "auto".
        fixed: with checkpoints: fix the size in the graph; None: no.

        scopes: with bundles: of SCOPES; empty: all that exist.
        backends: with bundles: of BACKENDS; empty: all that run here, each target by its first name.
        providers: with bundles: execution providers of ONNX Runtime ("cpu", "cuda", "cuda:1"), each measured; empty: the CPU,
            and the GPU where this build of ONNX Runtime has one.
        devices: with bundles: of packages, engines and `against` ("cpu", "cuda:0"); empty: what the bundle has.
        prompt: with bundles that take one.
        against: with bundles: checkpoints that are timed in transformers as well, one for all bundles or one for each.
        compile: with `against`: also under torch.compile.
        ground_truth, images: with bundles: a data set as `load_dataset` takes it, for average precision; images of a COCO file.
        parts: with bundles: also the time by stage, module and kind of operator, and the fraction of the roofline.
        plot: with bundles: an SVG or PNG file with plots.

    Raises:
        DetrtError: a value that is not allowed, or options that do not go together.
    """

    batches: tuple[int, ...] = (1,)
    size: tuple[int, int] | None = None
    repeats: int = 7
    warmup: int = 2
    threads: int | None = None
    load: LoadOptions = field(default_factory=LoadOptions)

    engine: bool | None = field(default=None, metadata=_only(CHECKPOINTS))
    torch: bool | None = field(default=None, metadata=_only(CHECKPOINTS))
    msda: str | None = field(default=None, metadata=_only(CHECKPOINTS))
    fixed: bool | None = field(default=None, metadata=_only(CHECKPOINTS))

    scopes: tuple[str, ...] = field(default=(), metadata=_only(BUNDLES))
    backends: tuple[str, ...] = field(default=(), metadata=_only(BUNDLES))
    providers: tuple[str, ...] = field(default=(), metadata=_only(BUNDLES))
    devices: tuple[str, ...] = field(default=(), metadata=_only(BUNDLES))
    prompt: str | None = field(default=None, metadata=_only(BUNDLES))
    against: tuple[str, ...] = field(default=(), metadata=_only(BUNDLES))
    compile: bool = field(default=False, metadata=_only(BUNDLES))
    ground_truth: Path | None = field(default=None, metadata=_only(BUNDLES))
    images: Path | None = field(default=None, metadata=_only(BUNDLES))
    parts: bool = field(default=False, metadata=_only(BUNDLES))
    plot: Path | None = field(default=None, metadata=_only(BUNDLES))

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

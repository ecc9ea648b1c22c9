"""The caller's choices for one engine. No TensorRT is needed to make or check them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ...errors import EngineError, check_one_of, check_range, check_timeout
from ...spec import LARGEST_BATCH, LARGEST_SIDE, Triple
from ...system import compute_capabilities_here

TARGETS = ("tensorrt-rtx", "tensorrt")
RTX_SMS = (75, 80, 86, 89, 120, 121)
# One TensorRT-RTX engine serves all of these for eight more bytes each. 75 (Turing) is left out because
# TensorRT-RTX has no FP32 matrix product for it, so that an FP32 model would not build at all.
DEFAULT_RTX_SMS = (80, 86, 89, 120, 121)
DEFAULT_BATCH = (1, 1, 8)
HARDWARE_COMPATIBILITIES = ("none", "ampere_plus", "same_compute_capability")


def parse_sms(text: str) -> tuple[int, ...]:
    """ "86,89", "sm_86, sm_89" or "8.6,8.9" -> (86, 89); "current": that of the first GPU of this machine.

    Raises:
        EngineError: a part that is no compute capability, or "current" on a machine without a GPU.
    """
    if text.strip().lower() == "current":
        if not (here := compute_capabilities_here()):
            raise EngineError("`sms=current` is the GPU of this machine, and nvidia-smi finds none; name it, such as `sms=89`")
        return here[:1]
    sms = []
    for part in text.split(","):
        digits = part.strip().lower().removeprefix("sm").removeprefix("_").replace(".", "", 1)
        if not digits.isdecimal():
            raise EngineError(f"`sms` must be compute capabilities such as 86,89, or current; got {text!r}")
        sms.append(int(digits))
    return tuple(sms)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to build an engine. Every value is checked here, before any work.

    target: "tensorrt-rtx" (built without a GPU, compiled on the device when it is opened) or
        "tensorrt" (built on the GPU that will run it).
    sms: compute capabilities that a TensorRT-RTX engine must run on, e.g. (86, 89): one engine for
        all of them. Empty: DEFAULT_RTX_SMS. One that is not in RTX_SMS stands alone, e.g. (90,), and is built on such a GPU only;
        NVIDIA does not support it. Must be empty for "tensorrt".
    batch, height, width: (min, opt, max) of a symbolic axis; sides in pixels. None: `DEFAULT_BATCH`, and
        sides from the model's ModelSpec. A graph with fixed axes takes only its own length.
    optimization_level: 0 (fast build) to 5 (long search). workspace_mib: limit of scratch memory, MiB;
        None: the library's own. tf32: let FP32 products use TF32 (19 bits) where the GPU can.
    timing_cache: file of measured tactics, read and updated; "tensorrt" only.
    keep_gathers: leave deformable attention as the graph has it where detrt would run it in a plugin (TensorRT 8.5 and 8.6);
        "tensorrt" only.
    return_selections: the engine also returns the indices of its top-k selections, so that it is compared with its graph on the same
        queries.
    layers: file for the kernels of the engines, a JSON object a line: engine, kind, name, and the types of what it reads and writes, as
        TensorRT-RTX's builder names them; "tensorrt-rtx" only, no GPU is needed. None: no file.
    timeout_seconds: the build is stopped after it. None: no limit.
    version_compatible: the engine also runs on newer TensorRT versions; "tensorrt" only.
    hardware_compatibility: "ampere_plus" or "same_compute_capability" for engines that leave this
        GPU; "tensorrt" only.
    plugins: libraries of TensorRT plugins, loaded before the graph is read and before the engine is opened;
        "tensorrt" only.

    Raises:
        EngineError: a value that is not allowed, or that this target does not have.
    """

    target: str = "tensorrt-rtx"
    sms: tuple[int, ...] = field(
        default=(),
        metadata={
            "help": "Comma-separated compute capabilities of a TensorRT-RTX engine: 86,89. current: of the GPU of this machine.",
            "panel": "Engine",
            "flag": "sm",
            "parse": parse_sms,
            "needs": {"target": ("tensorrt-rtx",)},
            "instead": "TensorRT builds for the GPU that it runs on: build there without it",
        },
    )
    batch: Triple | None = None
    height: Triple | None = None
    width: Triple | None = None
    optimization_level: int = field(
        default=3,
        metadata={"help": "Builder effort: 0 (fast build) to 5 (long search).", "panel": "Engine", "needs": {"target": TARGETS}},
    )
    workspace_mib: int | None = field(
        default=None,
        metadata={"help": "Limit of the builder's scratch memory, MiB.", "panel": "Engine", "needs": {"target": TARGETS}},
    )
    tf32: bool = field(
        default=False,
        metadata={"help": "Let FP32 matmuls and convolutions use TF32.", "panel": "Engine", "needs": {"target": TARGETS}},
    )
    timing_cache: Path | None = field(
        default=None,
        metadata={
            "help": "File of measured tactics, read and updated.",
            "writes": "timing cache",
            "panel": "Engine",
            "needs": {"target": ("tensorrt",)},
            "instead": "TensorRT-RTX measures nothing when it builds; to start faster on the device, open the engine with a runtime_cache file",
        },
    )
    layers: Path | None = field(
        default=None,
        metadata={
            "help": "Write the kernels of the engines with their types to this file, a JSON object a line.",
            "writes": "JSON lines",
            "panel": "Engine",
            "needs": {"target": ("tensorrt-rtx",)},
            "instead": "TensorRT names the layers of an engine where it runs: `detrt bench` with parts",
        },
    )
    timeout_seconds: float | None = None
    keep_gathers: bool = field(
        default=False,
        metadata={
            "help": "Keep deformable attention as gathers where TensorRT 8.5 would run it in a plugin.",
            "panel": "Engine",
            "needs": {"target": ("tensorrt",)},
            "instead": "TensorRT-RTX always has gathers",
        },
    )
    return_selections: bool = field(
        default=False,
        metadata={
            "help": "Also return the indices of top-k selections, so that engine and graph are compared on the same queries.",
            "panel": "Engine",
            "needs": {"target": TARGETS},
        },
    )
    version_compatible: bool = field(
        default=False,
        metadata={
            "needs": {"target": ("tensorrt",)},
            "instead": "TensorRT-RTX wheels have no lean runtime; build one engine for each TensorRT-RTX version",
        },
    )
    hardware_compatibility: str = field(
        default="none",
        metadata={
            "needs": {"target": ("tensorrt",)},
            "instead": "a TensorRT-RTX engine names the GPUs it runs on instead: sms=(86, 89), or `sms=86,89`",
        },
    )
    plugins: tuple[Path, ...] = field(
        default=(),
        metadata={
            "help": "Library of TensorRT plugins; may be repeated.",
            "panel": "Engine",
            "flag": "plugin",
            "many": True,
            "needs": {"target": ("tensorrt",)},
            "instead": "TensorRT-RTX has no plugin layers; export with `msda=gather`, or choose `targets=tensorrt`",
        },
    )

    def __post_init__(self) -> None:
        check_one_of("`target`", self.target, TARGETS, EngineError)
        for one in others_of(self.target):
            if (value := getattr(self, one.name)) and value != one.default:
                raise EngineError(
                    f"{one.name} is not for the target {self.target!r}; got {value!r}. Leave it out: {one.metadata['instead']}"
                )
        object.__setattr__(self, "sms", _checked_sms(self.sms) if self.target == "tensorrt-rtx" else ())
        for name, limit in (("batch", LARGEST_BATCH), ("height", LARGEST_SIDE), ("width", LARGEST_SIDE)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _checked_triple(name, value, limit))
        check_range(
            "`optimization_level`", self.optimization_level, 0, 5, EngineError, integer=True, more=" (3 is the usual one)"
        )
        if self.workspace_mib is not None:
            check_range("`workspace_mib`", self.workspace_mib, 1, 1 << 20, EngineError, integer=True, more=", or left out")
        check_timeout(self.timeout_seconds, EngineError)
        for name in ("timing_cache", "layers"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        check_one_of("hardware_compatibility", self.hardware_compatibility, HARDWARE_COMPATIBILITIES, EngineError)
        plugins = (self.plugins,) if isinstance(self.plugins, (str, Path)) else tuple(self.plugins)
        object.__setattr__(self, "plugins", tuple(Path(plugin).absolute() for plugin in plugins))
        for plugin in self.plugins:
            if not plugin.is_file():
                raise EngineError(
                    f"there is no plugin library '{plugin}'; build one as docs/guide/plugin.md says, or check the path"
                )

    @property
    def label(self) -> str:
        """Short name for file names, e.g. "tensorrt-rtx-sm86-89"."""
        sms = "-".join(str(sm) for sm in self.sms)
        return f"{self.target}-sm{sms}" if sms else self.target

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON holds, for the builder process and the sidecar; without `layers`."""
        data = asdict(self)
        data["timing_cache"] = None if self.timing_cache is None else str(self.timing_cache)
        del data["layers"]  # what else a call writes says nothing of the engine: equal engines share their compiled kernels
        data["plugins"] = [str(plugin) for plugin in self.plugins]
        for name in ("sms", "batch", "height", "width"):
            data[name] = None if data[name] is None else list(data[name])
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineConfig:
        """Read `to_dict`'s form.

        Raises:
            EngineError: unknown fields or values that are not allowed.
        """
        unknown = sorted(set(data) - {f.name for f in fields(cls)})
        if unknown:
            raise EngineError(f"engine choices have unknown fields {unknown}; allowed: {[f.name for f in fields(cls)]}")
        return cls(**data)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def others_of(target: str) -> list[Field[Any]]:
    """The fields that are for another target."""
    return [one for one in fields(EngineConfig) if target not in one.metadata.get("needs", {}).get("target", TARGETS)]


def _checked_sms(sms: object) -> tuple[int, ...]:
    if isinstance(sms, (str, bytes)) or not hasattr(sms, "__iter__"):
        raise EngineError(f"sms must be a sequence of integers such as (86, 89); got {sms!r}")
    values = tuple(sms)
    for sm in values:
        if not _is_whole(sm) or not (sm in RTX_SMS or (sm > min(RTX_SMS) and len(set(values)) == 1)):
            raise EngineError(
                f"TensorRT-RTX cannot build for compute capability {sm!r}; allowed: "
                f"{', '.join(map(str, RTX_SMS))}, such as `sms=86,89`. Another GPU, such as 90 (H100), stands alone and is built on it: "
                "`sms=current`; or use the target tensorrt there"
            )
    return tuple(sorted(set(values))) or DEFAULT_RTX_SMS


def _checked_triple(name: str, value: object, limit: int) -> Triple:
    ok = isinstance(value, (tuple, list)) and len(value) == 3 and all(_is_whole(v) for v in value)
    if not ok or not 1 <= value[0] <= value[1] <= value[2] <= limit:  # type: ignore[index]
        raise EngineError(
            f"{name} must be (min, opt, max), three integers with 1 <= min <= opt <= max <= {limit}; "
            f"got {value!r}; type for example `{name}={'1,4,8' if name == 'batch' else '480,640,800'}`"
        )
    return (value[0], value[1], value[2])  # type: ignore[index]

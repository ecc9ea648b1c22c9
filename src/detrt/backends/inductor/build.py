"""Build of compiled packages and their sidecars, in a child process; the target `inductor` as a stage of `detrt build`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ... import bundle, files
from ...bundle import EngineFacts
from ...data.preprocess import needs_equal_sizes
from ...errors import EngineError, ExportError, MissingPackageError
from ...models import trust
from ...models.contract import ExportConfig
from ...spec import ModelSpec, Precision
from ...system import Progress, StageProgress
from ..child_process import run_child
from ..worker_process import module_command
from .config import PRECISIONS, InductorConfig, package_name
from .cpp_compiler import compiler, compiler_environment

WORKER_COMMAND: tuple[str, ...] = module_command("detrt.backends.inductor.worker")


@dataclass(frozen=True, slots=True)
class BuiltPackage:
    """A written package. size: bytes. error: largest difference to PyTorch, relative to the largest value."""

    path: Path
    facts: EngineFacts
    size: int
    error: float


def check_ready(config: InductorConfig, spec: ModelSpec | None = None) -> None:
    """Check that this machine can compile, before minutes of export.

    Raises:
        MissingPackageError: no torch. EngineError: no C++ compiler, no GPU, or a model that the target does not support.
    """
    if find_spec("torch") is None:
        raise MissingPackageError("torch", "export", "`targets=inductor`")
    if config.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise EngineError(
                f"`targets=inductor` `device=cuda` compiles for a GPU of this machine, and PyTorch {torch.__version__} finds none; "
                "build on the machine that runs the model, or with `device=cpu`"
            )
    compiler()
    if spec is None:
        return
    if spec.text is None:
        if config.tokens is not None:
            raise EngineError(
                f"`tokens={config.tokens}` is for models that take a prompt; this one has fixed classes; leave it out"
            )
        return
    if spec.decode.in_graph or not spec.text.encoder:
        choice = "`decode=graph`" if spec.decode.in_graph else "`single_graph`"
        raise EngineError(f"{choice} is not for `targets=inductor` with a model that takes a prompt; leave it out")
    if config.batch is not None and config.batch[0] != config.batch[2]:
        raise EngineError(
            "a package of a model that takes a prompt is for one batch; got "
            f"`batch={','.join(map(str, config.batch))}`; give one number"
        )


def fixed_spec(spec: ModelSpec, config: InductorConfig) -> ModelSpec:
    """The spec at the size of the package; inputs and outputs stay those of the bundle.

    Raises:
        EngineError: a size that the model does not take.
    """
    input_spec = spec.input
    height, width = (t[0] if t else side for t, side in ((config.height, input_spec.height), (config.width, input_spec.width)))
    if not input_spec.dynamic and (height, width) != input_spec.size_hw:
        raise EngineError(
            f"this model takes {input_spec.height}x{input_spec.width} only; got {height}x{width}; leave the size out"
        )
    multiple = input_spec.multiple_of
    if config.height is None:
        height, width = (-(-side // multiple) * multiple for side in (height, width))
    if height % multiple or width % multiple:
        raise EngineError(f"both sides must be multiples of {multiple} for this model; got {height}x{width} (height x width)")
    if not input_spec.dynamic:
        return spec
    if needs_equal_sizes(input_spec):
        raise EngineError(
            "this model keeps the aspect ratio of images and has no padding mask, so a package of one size needs a graph of one "
            f"size: give `size={height}x{width}`"
        )
    return replace(spec, input=input_spec.fixed((height, width)))


@dataclass(frozen=True, slots=True)
class PackageSource:
    """What all packages of a bundle are compiled from.

    ref: reference of the checkpoint, as `load_source` takes it. loading: its keywords. folder: of the bundle. spec: of the bundle.
    precision: one of PRECISIONS. onnx_sha256: digest of the bundle's graph.
    """

    ref: str
    loading: Mapping[str, Any]
    folder: Path
    spec: ModelSpec
    precision: str
    onnx_sha256: str


def build_package(
    source: PackageSource, config: InductorConfig, progress: Progress | None = None, *, name_with_size: bool = False
) -> BuiltPackage:
    """Compile a checkpoint into the folder of its bundle, with a sidecar; both are written atomically.

    Args:
        source: the checkpoint and its bundle.
        config: the caller's choices.
        progress: called with a fraction and a text.
        name_with_size: the bundle has packages of several sizes, so the size is part of the name.

    Raises:
        EngineError: choices that do not go together, no compiler or GPU, the compiler failed or took too long.
        GateError: the outputs of the package differ from PyTorch. ExportError: the model cannot be captured.
    """
    folder, precision = source.folder, source.precision
    check_ready(config, source.spec)
    if precision not in PRECISIONS:
        raise EngineError(
            f"`targets=inductor` has the precisions {', '.join(PRECISIONS)}; got {precision}; use another target for it"
        )
    package_spec = fixed_spec(source.spec, config)
    with files.temporary_folder(folder, "package") as place:
        package = place / "package.pt2"
        result = _run_compiler(source, package_spec, package, config, progress)
        sms = tuple(result["compute_capabilities"])
        path = folder / package_name(
            config.device, sms[0] if sms else None, precision, package_spec.input.size_hw if name_with_size else None
        )
        files.move(package, path)
    facts = EngineFacts(
        target=config.label,
        runtime_version=result["torch"],
        compute_capabilities=sms,
        precision=precision,
        profile=result["profile"],
        onnx_sha256=source.onnx_sha256,
        layers=result["nodes"],
        build_seconds=result["build_seconds"],
        options={
            "format": result["format"],
            **config.to_dict(),
            **result["machine"],
            "share": result["share"],
            "errors": result["errors"],
        },
        inputs=tuple(result["inputs"]),
        outputs=tuple(result["outputs"]),
        peak_memory_mib=result["peak_memory_mib"],
    )
    bundle.write_sidecar(path, source.spec, facts)
    trust.remember(path)
    if progress:
        progress(1.0, "done")
    return BuiltPackage(path, facts, result["size"], max(result["errors"].values()))


def _run_compiler(
    source: PackageSource, spec: ModelSpec, package: Path, config: InductorConfig, progress: Progress | None
) -> dict[str, Any]:
    """The result of the compiler process. spec: of the package."""
    ref = source.ref
    local = ref if ":" in ref and not Path(ref).exists() else str(Path(ref).resolve())
    if ref.startswith("ckpt:"):
        local = "ckpt:" + str(Path(ref[5:]).resolve())
    request = {
        "ref": local,
        "loading": {k: str(Path(v).resolve()) if isinstance(v, Path) else v for k, v in source.loading.items()},
        "spec": spec.to_dict(),
        "config": config.to_dict(),
        "precision": source.precision,
        "package": str(package.resolve()),
    }

    def environment(scratch: Path) -> dict[str, str]:
        return {"TORCHINDUCTOR_CACHE_DIR": str(scratch / "cache"), **compiler_environment()}

    result: dict[str, Any] = run_child(
        WORKER_COMMAND,
        request,
        what="compiler",
        timeout_seconds=config.timeout_seconds,
        progress=progress,
        environment=environment,
    )
    return result


@dataclass(frozen=True, slots=True)
class PackageResult:
    """A finished package: its name for people, what was built, seconds, and a verdict for people."""

    name: str
    built: BuiltPackage
    seconds: float
    verdict: str


def check_packages(packages: Sequence[InductorConfig], model: str, export: ExportConfig, precision: str) -> None:
    """Raise for what the target cannot build, before minutes of export.

    Raises:
        EngineError, ExportError: choices that do not go together. MissingPackageError: torch is not installed.
    """
    if model.lower().endswith(".onnx"):
        raise EngineError(f"`targets=inductor` compiles a checkpoint, and '{model}' is an ONNX file; give the checkpoint itself")
    if export.nms.startswith("graph"):
        raise ExportError(f"`nms={export.nms}` is not for `targets=inductor`; leave it out: NMS runs in post-processing")
    if precision not in PRECISIONS:
        raise EngineError(
            f"`targets=inductor` has the precisions {', '.join(PRECISIONS)}; got {precision}; build it without, or with another target"
        )
    if len({(config.device, config.height, config.width) for config in packages}) != len(packages):
        raise EngineError("two packages would have one name; give each device and each size once")
    for config in packages:
        check_ready(config)


def build_packages(source: PackageSource, packages: Sequence[InductorConfig], say: StageProgress) -> list[PackageResult]:
    """Compile each package into the folder of its bundle.

    Raises:
        See `build_package`.
    """
    results = []
    several_sizes = len(packages) > len({config.device for config in packages})
    for config in packages:
        start = time.perf_counter()
        name = config.label + (
            f" {config.height[0]}x{config.width[0]}" if several_sizes and config.height and config.width else ""
        )
        progress = partial(say, name)
        built = build_package(source, config, progress, name_with_size=several_sizes)
        profile = next(iter(built.facts.profile.values()))
        low, high = profile["min"][0], profile["max"][0]
        batches = f"batch {low}" if low == high else f"batches {low} to {high}"
        # 16-bit types may select other queries, which a difference of tensors cannot judge.
        exact = Precision(built.facts.precision).bits == 32
        comparison = f"{built.error:.1e} from PyTorch" if exact else "finite; compare with: detrt verify"
        verdict = f"{built.facts.precision}, {batches}, {comparison}"
        results.append(PackageResult(name, built, time.perf_counter() - start, verdict))
    return results

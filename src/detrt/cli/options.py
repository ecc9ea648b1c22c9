"""Text of command line options -> the configs of export and engine; shared by several commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..backends.inductor.config import TARGET as INDUCTOR
from ..backends.inductor.config import InductorConfig
from ..backends.tensorrt import EngineConfig
from ..backends.tensorrt.config import Triple, parse_sms, parse_triple
from ..detector import IMAGE_DECODERS
from ..errors import DetrtError, EngineError
from ..models.contract import ExportConfig
from ..precision import PrecisionConfig, parse_budget

NO_ENGINES = ("onnx", "onnxruntime")  # the ONNX file alone, which ONNX Runtime runs


def image_decoder_choice(text: str) -> str:
    """--image-decoder as `Detector` takes it. Raises DetrtError."""
    if text not in IMAGE_DECODERS:
        raise DetrtError(f"--image-decoder must be {' or '.join(IMAGE_DECODERS)}; got {text!r}")
    return text


def several_sizes(size: str | None, target: str) -> list[tuple[int, int]]:
    """(height, width) of each of several sizes in --size, such as "640,800" or "800x1066,1066x800"; none for one size."""
    parts = [part.strip() for part in (size or "").split(",")]
    if len(parts) < 2:
        return []
    found = []
    for part in parts:
        tall, wide = sizes(part, None, None)
        assert tall is not None and wide is not None
        found.append((tall[0], wide[0]))
    names = {name.strip() for name in target.split(",")}
    if INDUCTOR not in names or names - {INDUCTOR, *NO_ENGINES}:
        raise EngineError(
            f"--size {size} names several sizes, which --target inductor compiles a package for each; got --target {target}; "
            "give one size, or a range with --height and --width"
        )
    return found


def sizes(size: str | None, height: str | None, width: str | None) -> tuple[Triple | None, Triple | None]:
    """(height, width) as (min, opt, max) in pixels, from --size or --height and --width.

    --size takes "640" or "480x640"; --height and --width take "640", or "480,640,800" for a range.
    """
    if size is not None:
        if height is not None or width is not None:
            raise DetrtError("give --size, or --height and --width, not both")
        parts = size.lower().split("x")
        if len(parts) > 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise DetrtError(f"--size must be one number such as 640, or HEIGHTxWIDTH such as 480x640; got {size!r}")
        sides = [int(part) for part in parts] * (2 if len(parts) == 1 else 1)
        return (sides[0],) * 3, (sides[1],) * 3
    if (height is None) != (width is None):
        raise DetrtError("give both --height and --width (or --size), or neither")
    return (None, None) if height is None or width is None else (parse_triple(height), parse_triple(width))


def fixed(triple: Triple | None) -> int | None:
    """The length of an axis that does not vary, else None."""
    return triple[0] if triple is not None and triple[0] == triple[2] else None


def export_config(
    *,
    opset: int,
    msda: str,
    height: Triple | None,
    width: Triple | None,
    decode: str,
    max_detections: int | None,
    score_threshold: float,
    normalize: bool,
    input_dtype: str,
    mask: bool,
    check: bool,
    nms: str = "checkpoint",
    single_graph: bool = False,
) -> ExportConfig:
    """ExportConfig; a side that is one number is fixed in the graph, a range leaves both symbolic."""
    both = fixed(height) is not None and fixed(width) is not None
    return ExportConfig(
        opset=opset,
        msda=msda,
        height=fixed(height) if both else None,
        width=fixed(width) if both else None,
        decode=decode,
        max_detections=max_detections,
        score_threshold=score_threshold,
        normalize=normalize,
        input_dtype=input_dtype,
        mask=mask,
        check=check,
        nms=nms,
        single_graph=single_graph,
    )


def precision_config(
    *,
    precision: str,
    calibration: Path | None,
    calibration_images: int,
    prompt: str | None,
    method: str,
    keep_fp32: list[str] | None,
    budget: str | None,
    low: str,
    min_share: float | None,
    quantize_share: float,
    state: Path | None,
) -> PrecisionConfig:
    """PrecisionConfig; --keep-fp32 may be repeated and takes several patterns with commas."""
    patterns = [part.strip() for entry in keep_fp32 or [] for part in entry.split(",") if part.strip()]
    return PrecisionConfig(
        precision=precision,
        calibration=calibration,
        calibration_images=calibration_images,
        prompt=prompt,
        method=method,
        keep_fp32=tuple(patterns),
        budget=parse_budget(budget) if budget else None,
        low=low,
        min_share=min_share,
        quantize_share=quantize_share,
        state=state,
    )


def engine_configs(
    target: str,
    sm: str | None,
    batch: str | None,
    height: Triple | None,
    width: Triple | None,
    *,
    optimization_level: int,
    workspace_mib: int | None,
    timeout_seconds: float | None,
    timing_cache: Path | None,
    tf32: bool,
    plugins: Sequence[Path] = (),
) -> list[EngineConfig]:
    """One EngineConfig for each target of a comma-separated list; none for "onnx" and "onnxruntime"."""
    targets = [name.strip() for name in target.split(",") if name.strip()]
    if not targets:
        raise EngineError("--target must be tensorrt-rtx, tensorrt, inductor or onnxruntime (no engine); got nothing")
    configs = []
    for name in targets:
        if name in (*NO_ENGINES, INDUCTOR):
            continue
        if name not in ("tensorrt-rtx", "tensorrt"):
            raise EngineError(
                f"--target must be tensorrt-rtx, tensorrt, inductor or onnxruntime (no engine), or several with commas; got {name!r}"
            )
        configs.append(
            EngineConfig(
                target=name,
                sms=parse_sms(sm) if sm and name == "tensorrt-rtx" else (),
                batch=parse_triple(batch) if batch else None,
                height=height,
                width=width,
                optimization_level=optimization_level,
                workspace_mib=workspace_mib,
                timeout_seconds=timeout_seconds,
                timing_cache=timing_cache if name == "tensorrt" else None,
                tf32=tf32,
                plugins=tuple(plugins) if name == "tensorrt" else (),
            )
        )
    if plugins and "tensorrt" not in targets:
        raise EngineError(f"--plugin '{plugins[0]}' has a use with --target tensorrt only; TensorRT-RTX has no plugin layers")
    if sm and "tensorrt-rtx" not in targets:
        raise EngineError("--sm chooses GPUs for --target tensorrt-rtx; tensorrt builds for the GPU that it runs on")
    if timing_cache is not None and "tensorrt" not in targets:
        raise EngineError(f"--timing-cache '{timing_cache}' has a use with --target tensorrt only; leave it out")
    if not configs:
        given = {"--workspace-mib": workspace_mib, "--tf32": tf32 or None}
        if INDUCTOR not in targets:
            given |= {
                "--batch": batch,
                "--height": height if fixed(height) is None else None,
                "--width": width if fixed(width) is None else None,
                "--timeout": timeout_seconds,
            }
        for name, value in given.items():
            if value is not None:
                shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
                raise EngineError(
                    f"{name} ({shown}) is a choice for an engine, and --target {target} builds none; leave it out, or name a "
                    "target with an engine"
                )
    return configs


def package_configs(
    target: str,
    device: str | None,
    batch: str | None,
    height: Triple | None,
    width: Triple | None,
    *,
    tune: str | None,
    form: str | None,
    tokens: int | None = None,
    timeout_seconds: float | None,
    several: Sequence[tuple[int, int]] = (),
) -> list[InductorConfig]:
    """One InductorConfig for each device of a comma-separated list and each of `several` sizes, where the target is asked
    for."""
    if INDUCTOR not in [name.strip() for name in target.split(",")]:
        for name, value in (("--device", device), ("--tune", tune), ("--form", form), ("--tokens", tokens)):
            if value is not None:
                raise EngineError(f"{name} {value} is a choice for --target inductor; leave it out, or add that target")
        return []
    one = [(height, width)] if height is not None and width is not None else [(None, None)]
    triples = [((tall,) * 3, (wide,) * 3) for tall, wide in several] or one
    return [
        InductorConfig(
            device=name.strip(),
            batch=parse_triple(batch) if batch else None,
            height=tall,
            width=wide,
            tune=tune or "default",
            form=form or "auto",
            tokens=tokens,
            timeout_seconds=timeout_seconds,
        )
        for name in (device or "cpu").split(",")
        for tall, wide in triples
    ]


def check_provider(provider: str | None, target: str) -> None:
    """Refuse a provider of ONNX Runtime that is not here, or not asked for, before minutes of export.

    Raises:
        EngineError: no target that runs with it. SessionError, MissingPackageError: it cannot run here.
    """
    if provider is None:
        return
    if not {name.strip() for name in target.split(",")} & set(NO_ENGINES):
        raise EngineError(f"--provider {provider} is a choice for --target onnxruntime; leave it out, or add that target")
    from ..backends.onnxruntime.session import require_provider

    require_provider(provider)

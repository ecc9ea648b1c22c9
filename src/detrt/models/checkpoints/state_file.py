"""Checkpoint files as a state dict, without running anything that is in them."""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SourceError

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".safetensors")
# Where trainers keep the moving average, best first, and then the weights themselves.
_EMA = ("ema_state_dict", "ema", "model_ema", "ema_model")
_PLAIN = ("model", "state_dict", "model_state_dict", "module")
_PREFIXES = ("module.", "_orig_mod.")
_QUANTISED = re.compile(r"(zero_point|_packed_params|weight_fake_quant|qweight|qzeros|weight_scale|SCB)(\.|$)")
# How torch words a global that it will not import, or a call that it will not make.
_REFUSED_GLOBAL = re.compile(
    r"(?:Unsupported global: GLOBAL|Unsupported class|Trying to load unsupported GLOBAL|"
    r"Trying to call reduce for unrecognized function)\s+<?(?:(?:class|built-in function|function)\s+)?'?([\w.]+)"
)
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.|\.index\.json$")


@dataclass(slots=True)
class StateFile:
    """tensors: by their original names. weights: which of the file's sets they are. args: settings in the file.

    labels: class names in the file, by id or in order; empty where it has none.
    """

    tensors: dict[str, Tensor]
    weights: str
    args: dict[str, Any] = field(default_factory=dict)
    labels: Mapping[int, str] | Sequence[str] = ()
    notes: list[str] = field(default_factory=list)


def read_state(path: Path, ref: str) -> StateFile:
    """Read a checkpoint file with `weights_only=True`, and take the moving average where it has one.

    Raises:
        SourceError: no such file, a shard, damaged or not a checkpoint, code in the pickle (which is not
            run), quantised tensors, or no state dict in it.
    """
    if _SHARD.search(path.name):
        raise SourceError(f"'{ref}' is one shard of a checkpoint (or its index); join the shards into one file first")
    if not path.is_file():
        kind = "a folder; give the file in it" if path.is_dir() else "not there"
        raise SourceError(f"'{ref}': the file '{path}' is {kind}, e.g. ckpt:detr-r50-e632da11.pth")
    if path.suffix not in SUFFIXES:
        raise SourceError(f"'{ref}' ends with '{path.suffix}'; checkpoint files end with one of {', '.join(SUFFIXES)}")
    if path.stat().st_size == 0:
        raise SourceError(f"'{ref}' is an empty file; download it again")
    loaded = _read_safetensors(path, ref) if path.suffix == ".safetensors" else _read_pickle(path, ref)
    if not isinstance(loaded, Mapping):
        raise SourceError(f"'{ref}' holds a {type(loaded).__name__}, not a state dict; save model.state_dict() instead")
    tensors, weights = _choose(loaded, ref)
    args = _args(loaded)
    found = StateFile(tensors, weights, args, _labels(loaded, args))
    _check(found, ref)
    return found


def _read_safetensors(path: Path, ref: str) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise SourceError(f"'{ref}' is not a safetensors file, or is damaged: {error}") from None


def _harmless() -> list[Any]:
    """Types that carry settings and numbers, and no code: argparse's Namespace and NumPy scalars."""
    import numpy as np

    try:
        from numpy._core.multiarray import scalar
    except ImportError:  # NumPy 1
        from numpy.core.multiarray import scalar  # type: ignore[no-redef]
    kinds = {type(np.dtype(name)) for name in ("float16", "float32", "float64", "int32", "int64", "bool")}
    return [argparse.Namespace, scalar, (scalar, "numpy.core.multiarray.scalar"), np.dtype, *kinds]


def _read_pickle(path: Path, ref: str) -> Any:
    import torch

    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(_harmless()):
            warnings.simplefilter("ignore", UserWarning)  # of pickle's protocol number
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        text = str(error)
        named = _REFUSED_GLOBAL.search(text)
        if named is None and not re.search(r"nsupported (global|class)|not an allowed global", text, re.IGNORECASE):
            raise SourceError(
                f"'{ref}' is damaged or not a PyTorch checkpoint: {_short(text)}; download or save it again"
            ) from None
        what = named[1] if named else _short(text)
        hint = "save a plain state dict with the authors' code: torch.save({'model': model.state_dict()}, path)"
        if what.split(".")[0] == "ultralytics":
            hint = (
                "checkpoints of ultralytics are not supported. Give the authors' weights (hf:PekingU/rtdetr_r50vd), or export it "
                "with ultralytics, and build from its ONNX file"
            )
        if what.split(".")[0] in ("mmengine", "mmcv", "mmdet"):
            hint = "it is a setting of the trainer, not a weight; save checkpoint['state_dict'] alone, and give that file"
        raise SourceError(
            f"'{ref}' asks to run Python code when it is read ('{what}'). It was refused and not run; {hint}"
        ) from None
    except Exception as error:  # torch interprets the file's bytes, and raises anything: struct.error, AssertionError, ...
        raise SourceError(
            f"'{ref}' is damaged or not a PyTorch checkpoint: {_short(str(error))}; download or save it again"
        ) from None


def _short(text: str) -> str:
    """The cause in an error of torch, without its advice to read the file with `weights_only=False`, which would run code."""
    if "weights_only" in text:
        text = text.partition("WeightsUnpickler error:")[2].partition("\n")[0]
    text = " ".join(text.partition("This is an internal miniz error")[0].split())[:200].rstrip(". ")
    return text if re.search("[A-Za-z]", text) else "it ends too early, or is something else"


def _choose(loaded: Mapping[Any, Any], ref: str) -> tuple[dict[str, Tensor], str]:
    """The state dict of a file, and a word for which of its sets it is."""
    for name in (*_EMA, *_PLAIN):
        value = loaded.get(name)
        if not isinstance(value, Mapping):
            continue
        if isinstance(value.get("module"), Mapping):
            value = value["module"]
        tensors = _tensors(value)
        if len(tensors) > 1:
            return tensors, "EMA weights" if name in _EMA else "weights"
    tensors = _tensors(loaded)
    if not tensors:
        keys = ", ".join(map(str, list(loaded)[:6])) or "nothing"
        raise SourceError(f"'{ref}' holds no state dict: its keys are {keys}; expected one of {', '.join((*_EMA, *_PLAIN))}")
    return tensors, "weights"


def _tensors(mapping: Mapping[Any, Any]) -> dict[str, Tensor]:
    import torch

    found = {key: value for key, value in mapping.items() if isinstance(key, str) and isinstance(value, torch.Tensor)}
    for prefix in _PREFIXES:
        # A moving average counts its steps beside the wrapped model.
        wrapped = {key: value for key, value in found.items() if key.startswith(prefix)}
        if len(wrapped) > len(found) / 2:
            found = {key.removeprefix(prefix): value for key, value in wrapped.items()}
    return found


def _args(loaded: Mapping[Any, Any]) -> dict[str, Any]:
    args = loaded.get("args")
    if isinstance(args, argparse.Namespace):
        return dict(vars(args))
    return dict(args) if isinstance(args, Mapping) else {}


def _labels(loaded: Mapping[Any, Any], args: Mapping[str, Any]) -> Mapping[int, str] | Sequence[str]:
    """Class names where mmdetection 2 and 3 (`meta`) and RF-DETR (`args`) keep them."""
    meta = loaded.get("meta")
    meta = meta if isinstance(meta, Mapping) else {}
    inner = meta.get("dataset_meta")
    inner = inner if isinstance(inner, Mapping) else {}
    for value in (
        *(h.get(key) for h in (inner, meta) for key in ("classes", "CLASSES")),
        args.get("class_names"),
    ):
        if isinstance(value, Mapping) and value and all(type(k) is int and k >= 0 for k in value):
            return {key: str(name) for key, name in value.items()}
        if isinstance(value, (list, tuple)) and value and all(isinstance(name, str) for name in value):
            return tuple(value)
    return ()


def _check(found: StateFile, ref: str) -> None:
    import torch

    quantised = [
        key
        for key, tensor in found.tensors.items()
        if tensor.is_quantized
        or tensor.dtype in (torch.int8, torch.uint8)
        or "float8" in str(tensor.dtype)
        or _QUANTISED.search(key)
    ]
    if quantised:
        raise SourceError(
            f"'{ref}' is quantised ({len(quantised)} tensors, e.g. {', '.join(quantised[:3])}); give the float checkpoint, "
            "detrt quantises itself"
        )
    half = [key for key, tensor in found.tensors.items() if tensor.dtype in (torch.float16, torch.bfloat16)]
    if half:
        found.notes.append(f"{len(half)} half-precision tensors read as float32")

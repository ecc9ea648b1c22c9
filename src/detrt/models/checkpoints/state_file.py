"""Checkpoint files as a state dict, without running anything that is in them."""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SourceError, number_of
from ...files import what_it_is
from ..labels import names_in, stored_names

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".tar", ".safetensors")
# Where trainers keep the moving average, best first, and then the weights themselves.
_EMA = ("ema_state_dict", "ema", "model_ema", "ema_model")
_PLAIN = ("model", "state_dict", "model_state_dict", "module")
# Names that wrappers put between those of a model: torch.compile, and two of distributed training.
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_IS_EMA = re.compile(r"(?<![a-z])(ema|swa)(?![a-z])|E[Mm][Aa]|SWA|[Aa]verag|shadow")
# Dictionaries with the names of a model that do not hold its weights: what an optimizer keeps, and gradients.
_NO_WEIGHTS = re.compile(r"optim|lr_sched|sched|grad|(max_)?exp_avg|momentum")
# Where settings of a training are kept, the last counts most.
_SETTINGS = ("hyper_parameters", "hparams", "train_config", "model_config", "config", "cfg", "opt", "args", "model_init_args")
_FEWEST = 20  # tensors of a model; parts with fewer are not looked at
Told = Callable[[Iterable[str]], Any]
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

    labels: class names in the file, by id or in order; empty where it has none. words: texts at the top of the file, by name.
    plain_args: its `args` are a dictionary, not an object of argparse.
    """

    tensors: dict[str, Tensor]
    weights: str
    args: dict[str, Any] = field(default_factory=dict)
    labels: Mapping[int, str] | Sequence[str] = ()
    notes: list[str] = field(default_factory=list)
    words: dict[str, str] = field(default_factory=dict)
    plain_args: bool = False


def read_state(path: Path, ref: str, told: Told | None = None) -> StateFile:
    """Read a checkpoint file with `weights_only=True`, and take the moving average where it has one.

    Args:
        told: whether names are those of a known model, which is then found at any place and under any common prefix.

    Raises:
        SourceError: no such file, a shard, damaged or not a checkpoint, code in the pickle (which is not
            run), quantised tensors, or no state dict in it.
    """
    if _SHARD.search(path.name):
        raise SourceError(f"'{ref}' is one shard of a checkpoint (or its index); join the shards into one file first")
    if not path.is_file():
        kind = "a folder; give the file in it" if path.is_dir() else "not there"
        raise SourceError(f"'{ref}': the file '{path}' is {kind}, e.g. ckpt:detr-r50-e632da11.pth")
    if path.suffix.lower() not in SUFFIXES:
        raise SourceError(f"'{ref}' ends with '{path.suffix}'; checkpoint files end with one of {', '.join(SUFFIXES)}")
    if path.stat().st_size == 0:
        raise SourceError(f"'{ref}' is an empty file; download it again")
    loaded = _read_safetensors(path, ref) if path.suffix.lower() == ".safetensors" else _read_pickle(path, ref)
    if not isinstance(loaded, Mapping):
        raise SourceError(f"'{ref}' holds a {type(loaded).__name__}, not a state dict; save model.state_dict() instead")
    tensors, weights, notes = _choose(loaded, ref, told)
    args = _args(loaded)
    words = {key: value for key, value in loaded.items() if isinstance(key, str) and isinstance(value, str)}
    plain = isinstance(loaded.get("args"), Mapping)
    found = StateFile(tensors, weights, args, _labels(loaded, args), notes, words, plain)
    _check(found, ref)
    return found


def _read_safetensors(path: Path, ref: str) -> Any:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise SourceError(f"'{ref}' is {what_it_is(path) or f'not a safetensors file, or is damaged: {error}'}") from None


class _Log:
    """In place of what mmengine logged during training, which its checkpoints hold: nothing of it is kept."""

    def __new__(cls, *args: object) -> _Log:
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        pass


class _Array(_Log):
    """An array of NumPy, made of its bytes here: NumPy's own class could be told to take bytes for objects."""

    tensor: Tensor | None = None

    def __setstate__(self, state: Any) -> None:
        import numpy as np
        import torch

        _, shape, dtype, by_columns, content = state
        if isinstance(content, bytes) and dtype.kind in "fiu":
            self.tensor = torch.from_numpy(np.frombuffer(content, dtype).reshape(shape, order="F" if by_columns else "C").copy())


def _harmless() -> list[Any]:
    """Types that carry settings and numbers, and no code: argparse's Namespace, NumPy's arrays and scalars, mmengine's log."""
    import numpy as np

    try:
        from numpy._core.multiarray import scalar
    except ImportError:  # NumPy 1
        from numpy.core.multiarray import scalar  # type: ignore[no-redef]
    kinds = {type(np.dtype(name)) for name in ("float16", "float32", "float64", "int32", "int64", "bool")}
    arrays = [
        (_Array, name) for name in ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray")
    ]
    # The log names its methods by getattr, of which nothing is called.
    log = [(_Log, name) for name in ("mmengine.logging.history_buffer.HistoryBuffer", "builtins.getattr")]
    return [argparse.Namespace, scalar, (scalar, "numpy.core.multiarray.scalar"), np.dtype, *kinds, *arrays, *log]


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
            raise _damaged(path, ref, text) from None
        what = named[1] if named else _cause(text)
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
        raise _damaged(path, ref, str(error)) from None


def _damaged(path: Path, ref: str, text: str) -> SourceError:
    cause = what_it_is(path) or f"damaged or not a PyTorch checkpoint: {_cause(text)}; download or save it again"
    return SourceError(f"'{ref}' is {cause}")


def _cause(text: str) -> str:
    """The cause in an error of torch, without its advice to read the file with `weights_only=False`, which would run code."""
    if "weights_only" in text:
        text = text.partition("WeightsUnpickler error:")[2].partition("\n")[0]
    text = " ".join(text.partition("This is an internal miniz error")[0].split())[:200].rstrip(". ")
    return text if re.search("[A-Za-z]", text) else "it ends too early, or is something else"


def _choose(loaded: Mapping[Any, Any], ref: str, told: Told | None) -> tuple[dict[str, Tensor], str, list[str]]:
    """The state dict of a file, a word for which of its sets it is, and notes."""
    sets = list(_sets(loaded))
    if told is not None:
        found = [(place, *one) for place, tensors in sets for one in _models(tensors, told)]
        if found:
            return _best(found, sets, "current_model_state" in loaded, ref)
    # Of no known model: as its writers use to nest it, for a message or for a family that the caller names.
    by_place = dict(sets)
    for name in (*_EMA, *_PLAIN):
        for place in (f"{name}.module", name):
            if len(tensors := _unwrapped(by_place.get(place, {}))) > 1:
                return tensors, "EMA weights" if name in _EMA else "weights", []
    if not by_place.get(""):
        keys = ", ".join(map(str, list(loaded)[:6])) or "nothing"
        raise SourceError(f"'{ref}' holds no state dict: its keys are {keys}; expected one of {', '.join((*_EMA, *_PLAIN))}")
    return _unwrapped(by_place[""]), "weights", []


def _sets(
    loaded: Mapping[Any, Any], place: str = "", depth: int = 0, searched: set[tuple[int, int]] | None = None
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Place and content of each dictionary of named tensors in a file; names of wrappers in the middle are taken out.

    searched: dictionaries whose inner ones were found, and at which depth. A small file can hold one dictionary under many names.
    """
    import torch

    tensors = {
        _WRAPPERS.sub("", key): value
        for key, one in loaded.items()
        if isinstance(key, str) and isinstance(value := one.tensor if isinstance(one, _Array) else one, torch.Tensor)
    }
    if tensors:
        yield place, tensors
    searched = set() if searched is None else searched
    if (id(loaded), depth) in searched:
        return
    searched.add((id(loaded), depth))
    for key, value in loaded.items():
        at = f"{place}.{key}".lstrip(".")
        if isinstance(value, Mapping) and depth < 4 and not _NO_WEIGHTS.match(str(key)):
            yield from _sets(value, at, depth + 1, searched)
        elif isinstance(value, (list, tuple)) and _IS_EMA.search(at):  # an average without names, which is told
            yield at, {str(number): one for number, one in enumerate(value) if isinstance(one, torch.Tensor)}


def _models(tensors: dict[str, Tensor], told: Told) -> list[tuple[str, dict[str, Tensor], list[str]]]:
    """Each known model in a dictionary: the prefix of its names, its tensors without it, and the names beside all models."""
    if told(tensors):
        return [("", tensors, [])]
    counts: dict[str, int] = {}
    for key in tensors:
        words = key.split(".")
        for number in range(1, min(len(words), 6)):
            prefix = ".".join(words[:number]) + "."
            counts[prefix] = counts.get(prefix, 0) + 1
    found: dict[str, dict[str, Tensor]] = {}
    for prefix in sorted(counts, key=lambda one: one.count(".")):  # the outermost first
        if counts[prefix] < _FEWEST or prefix.startswith(tuple(found)):
            continue
        inner = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        if told(inner):
            found[prefix] = inner
    beside = [key for key, tensor in tensors.items() if not key.startswith(tuple(found)) and tensor.numel() > 1]
    return [(prefix, inner, beside) for prefix, inner in found.items()]


def _best(
    found: list[tuple[str, str, dict[str, Tensor], list[str]]],
    sets: list[tuple[str, dict[str, Tensor]]],
    averaged: bool,
    ref: str,
) -> tuple[dict[str, Tensor], str, list[str]]:
    """The moving average where there is one, else the weights. averaged: Lightning has put the average into `state_dict`.

    Raises:
        SourceError: several models, of which no name tells which to take.
    """
    order = {name: number for number, name in enumerate((*_EMA, *_PLAIN))}

    def rank(one: tuple[str, str, dict[str, Tensor], list[str]]) -> tuple[bool, int]:
        place, prefix = one[:2]
        ema = _IS_EMA.search(f"{place}.{prefix}") is not None or (averaged and place == "state_dict")
        return not ema, order.get(place.split(".")[0], len(order))

    found = sorted(found, key=rank)
    place, prefix, tensors, beside = found[0]
    title = f"{place}.{prefix}".strip(".")
    others = [f"{at}.{before}".strip(".") for at, before, *_ in found[1:] if rank((at, before, {}, [])) == rank(found[0])]
    if others:
        raise SourceError(
            f"'{ref}' holds {number_of(len(others) + 1, 'model')} ('{title}', '{others[0]}'), and no name tells which to run; save one of them alone: "
            "torch.save({'model': state_dict}, path)"
        )
    notes = [] if title in ("", *order, "ema.module", "module.module") else [f"weights of '{title}'"]
    if beside:
        parts = sorted({key.split(".")[0] for key in beside})
        notes.append(f"{number_of(len(beside), 'tensor')} beside the detector were not read ({', '.join(parts[:5])})")
    ema = not rank(found[0])[0]
    unnamed = [at for at, names in sets if not ema and _IS_EMA.search(at) and len(names) > 1]
    if unnamed:
        notes.append(f"the moving average in '{unnamed[0]}' has names of no model that detrt knows, and was not read")
    return tensors, "EMA weights" if ema else "weights", notes


def _unwrapped(found: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = "module."
    # A moving average counts its steps beside the wrapped model.
    wrapped = {key: value for key, value in found.items() if key.startswith(prefix)}
    if len(wrapped) > len(found) / 2:
        found = {key.removeprefix(prefix): value for key, value in wrapped.items()}
    return found


def _args(loaded: Mapping[Any, Any], depth: int = 0) -> dict[str, Any]:
    """Settings of a training, wherever trainers keep them; `args` count most."""
    found: dict[str, Any] = {}
    for name in _SETTINGS:
        value = loaded.get(name)
        value = vars(value) if isinstance(value, argparse.Namespace) else value
        if isinstance(value, Mapping):
            inner = _args(value, depth + 1) if depth < 2 else {}
            found |= {key: one for key, one in value.items() if isinstance(key, str)} | inner
    return found


def _labels(loaded: Mapping[Any, Any], args: Mapping[str, Any]) -> Mapping[int, str] | Sequence[str]:
    """Class names where mmdetection 2 and 3 (`meta`), RF-DETR (`args`), lightly-train (`model_init_args`) and others' trainers keep them."""
    own = loaded.get("model_init_args")
    classes = own.get("classes") if isinstance(own, Mapping) else None
    if isinstance(classes, Mapping) and classes and all(isinstance(name, str) for name in classes.values()):
        return tuple(classes.values())  # a column each, in their order, whatever their ids
    meta = loaded.get("meta")
    meta = meta if isinstance(meta, Mapping) else {}
    places = (meta.get("dataset_meta"), meta, args, loaded, loaded.get("datamodule_hyper_parameters"))
    found = (_names(value) for place in places if isinstance(place, Mapping) for value in stored_names(place))
    return next((names for names in found if names), ())


def _names(value: object) -> Mapping[int, str] | Sequence[str]:
    """Class names of a value by id or in order; empty where it is something else."""
    try:
        names = names_in(value)
    except ValueError:
        return ()
    return names if not isinstance(names, Mapping) or min(names) >= 0 else ()


def _check(found: StateFile, ref: str) -> None:
    import torch

    other = [
        f"{key} is {'complex' if tensor.is_complex() else 'sparse' if tensor.layout != torch.strided else 'without values'}"
        for key, tensor in found.tensors.items()
        if tensor.is_complex() or tensor.layout != torch.strided or tensor.is_meta
    ]
    if other:
        raise SourceError(
            f"'{ref}' holds tensors that no detector has ({', '.join(other[:3])}); save dense tensors of real numbers"
        )
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
            f"'{ref}' is quantised ({number_of(len(quantised), 'tensor')}, e.g. {', '.join(quantised[:3])}); give the float checkpoint, "
            "detrt quantises itself"
        )
    half = [key for key, tensor in found.tensors.items() if tensor.dtype in (torch.float16, torch.bfloat16)]
    if half:
        found.notes.append(f"{len(half)} half-precision tensors read as float32")

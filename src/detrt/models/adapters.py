"""LoRA adapters of PEFT in a checkpoint folder, merged into the weights: beside the base model, or unmerged inside its files.

arXiv:2106.09685: the adapted weight is W + scale * B @ A, with scale alpha / r, or alpha / sqrt(r) for rank-stabilised ones
(arXiv:2312.03732). What is not one of these, and every tensor that has no place, is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..errors import SourceError, is_finite, number_of, one_line

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
# Name of an adapter's part behind that of its layer; PEFT leaves out the adapter's own name in a file of one adapter.
_PART = re.compile(
    r"^(?P<layer>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.(?P<name>\w+?))??(?P<leaf>\.weight|\.bias)?$"
)
_COPY = re.compile(r"^(?P<layer>.+)\.modules_to_save\.(?P<name>\w+)\.(?P<leaf>.+)$")
_UNMERGED = re.compile(r"\.(lora_\w+|base_layer|modules_to_save|original_module|ia3_\w+|oft_\w+|hada_\w+|lokr_\w+)(\.|$)")
# Settings with which the adapted model is another function than the sum, and the values without effect.
_OTHER: dict[str, tuple] = {
    "use_dora": (False, None),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "arrow_config": (None,),
    "megatron_config": (None,),
}
# Of PEFT, these also change the weights of the base; a file of weights beside the adapter does not have that change.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def adapter_in(folder: Path) -> bool:
    """Whether an adapter lies in a folder."""
    return any((folder / name).is_file() for name in (CONFIG, *WEIGHTS))


def beside(folder: Path) -> tuple[str, ...]:
    """A note on adapters in folders inside a folder, where PEFT puts those that have a name, and which are not read."""
    names = sorted(one.name for one in folder.iterdir() if one.is_dir() and adapter_in(one))
    if not names:
        return ()
    return (
        f"adapters in {', '.join(names[:5])} were not read: to merge one, put its {CONFIG} and {WEIGHTS[0]} beside the weights",
    )


def why_alone(folder: Path) -> str:
    """What to do about a folder that holds an adapter and no model; "" for another folder."""
    if not adapter_in(folder):
        return ""
    base = ""
    if (folder / CONFIG).is_file():
        base = str(_config(folder).get("base_model_name_or_path") or "")
    return (
        f"'{folder}' holds an adapter alone, and no model: copy {CONFIG} and {WEIGHTS[0]} into the folder of the model that it was trained on"
        + (f" ('{base}')" if base else "")
        + ", or save the merged model: model.merge_and_unload().save_pretrained(FOLDER)"
    )


def is_unmerged(key: str) -> bool:
    """Whether a tensor's name is one of an adapter, or of a layer that has one."""
    return key.startswith(_PREFIX) or _UNMERGED.search(key) is not None


def merged(
    folder: Path, state: Mapping[str, Tensor], ref: str, stored: Callable[[Iterable[str]], Mapping[str, str]] = lambda names: {}
) -> tuple[dict[str, Tensor], str]:
    """The weights with the adapter in a folder, or the one among them, merged in; and a note.

    stored: names of weights in files -> name in the module -> name in the file, where the two differ: adapters have the module's.

    Raises:
        SourceError: an adapter that is not merged exactly, by the name of its method, setting or tensor.
    """
    inside = any(is_unmerged(key) for key in state)
    if not (folder / CONFIG).is_file():
        key = next((key for key in state if is_unmerged(key)), WEIGHTS[0])
        raise SourceError(
            f"'{ref}' has an adapter ('{key}') without its {CONFIG}, which tells its alpha; put that file beside it, or save the merged "
            "model: model.merge_and_unload().save_pretrained(FOLDER)"
        )
    config = _config(folder)
    _refuse_others(config, ref)
    _check_alphas(config, ref)
    outside = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if outside is None and not inside:
        raise SourceError(
            f"'{folder}' has {CONFIG} and no {WEIGHTS[0]}; copy that file, too, or remove the adapter from the folder"
        )
    if outside is not None and inside:
        raise SourceError(f"'{ref}' has an adapter in its weights and another in {outside.name}; keep one of them")
    base = {_bare(key): tensor for key, tensor in state.items()}
    given = {_bare(key): tensor for key, tensor in _read(outside, ref).items()} if outside is not None else {}
    if inside:
        given = {key: tensor for key, tensor in base.items() if _PART.match(key) or _COPY.match(key)}
        base = {re.sub(r"\.(base_layer|original_module)\.", ".", key): tensor for key, tensor in base.items() if key not in given}
        if left := next((key for key in base if is_unmerged(key)), None):
            raise SourceError(f"'{ref}' has '{left}' among its weights, a part of an adapter that is not merged. {_BY_PEFT}")
    names = stored(base) if any(_target(key) not in base for key in given) else {}
    count = _merge(base, given, names, config, ref)
    name = outside.name if outside is not None else "an adapter inside the weights"
    trained = config.get("base_model_name_or_path")
    trained = f", trained on '{one_line(str(trained), 100)}'" if trained else ""
    return (
        base,
        f"LoRA of {number_of(count, 'layer')} merged ({name}, rank {config.get('r')}, alpha {config.get('lora_alpha')}{trained})",
    )


def _target(key: str) -> str:
    """The weight that a tensor of an adapter changes."""
    if part := _PART.match(key):
        return f"{part['layer']}.weight"
    copy = _COPY.match(key)
    return f"{copy['layer']}.{copy['leaf']}" if copy else key.replace(".base_layer.", ".")


def _as_stored(key: str, names: Mapping[str, str]) -> str:
    """The name of an adapter's tensor with the layer's name in the files."""
    module = _target(key).rpartition(".")[0]
    file = names.get(_target(key), _target(key)).rpartition(".")[0]
    return file + key.removeprefix(module) if key.startswith(module) else key


def _merge(
    base: dict[str, Tensor], given: Mapping[str, Tensor], stored: Mapping[str, str], config: Mapping[str, Any], ref: str
) -> int:
    """Add what an adapter gives to weights, in place; returns the number of layers with a product of two matrices.

    stored: see `_as_stored`. Patterns of the adapter's settings are for the module's names.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    alphas: dict[str, float] = {}
    names = set()
    for name, tensor in given.items():
        key = _as_stored(name, stored)
        if found := _PART.match(key):
            alphas[found["layer"]] = _alpha(_target(name).rpartition(".")[0], config)
            names.add(found["name"] or "default")
            leaf = ".bias" if found["leaf"] == ".bias" else ""
            parts.setdefault(found["layer"], {})[found["part"] + leaf] = tensor
            continue
        copy = _COPY.match(key)
        if copy:
            names.add(copy["name"])
        target = f"{copy['layer']}.{copy['leaf']}" if copy else key.replace(".base_layer.", ".")
        if target not in base:
            raise SourceError(_no_place(ref, key))
        _check_shape(ref, key, tensor.shape, base[target].shape)
        base[target] = tensor
    if len(names) > 1:
        raise SourceError(f"'{ref}' has several adapters ({', '.join(sorted(names))}); keep one, or save the merged model")
    for layer, factors in parts.items():
        _add(base, layer, factors, alphas[layer], config, ref)
    if not parts and not given:
        raise SourceError(f"'{ref}' has an adapter without tensors; save it again")
    return len(parts)


def _add(
    base: dict[str, Tensor], layer: str, parts: Mapping[str, Tensor], alpha: float, config: Mapping[str, Any], ref: str
) -> None:
    import torch

    kind = "lora_embedding_" if "lora_embedding_A" in parts else "lora_"
    first, second = parts.get(f"{kind}A"), parts.get(f"{kind}B")
    unknown = set(parts) - {f"{kind}A", f"{kind}B", "lora_B.bias"}
    target = f"{layer}.weight"
    if first is None or second is None or unknown:
        raise SourceError(f"'{ref}': the adapter of '{layer}' has {', '.join(sorted(parts))}; A and B are needed")
    if target not in base:
        raise SourceError(_no_place(ref, f"{layer}.{kind}A"))
    weight = base[target]
    rank = first.shape[0]
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    a, b = first.double(), second.double()
    if a.ndim == 2:
        if b.ndim != 2 or b.shape[1] != a.shape[0]:
            raise SourceError(
                f"'{ref}': the adapter of '{layer}' has A {list(a.shape)} and B {list(b.shape)}, which do not multiply"
            )
        # PEFT takes fan_in_fan_out back for linear layers, and detectors have no others.
        change = (b @ a).T if kind == "lora_embedding_" else b @ a
    elif a.ndim == 4 and b.ndim == 4 and b.shape[2:] == (1, 1) and b.shape[1] == a.shape[0]:  # B is a 1x1 convolution after A
        change = (b.flatten(1) @ a.flatten(1)).reshape(b.shape[0], *a.shape[1:])
    else:
        raise SourceError(
            f"'{ref}': the adapter of '{layer}' has A {list(a.shape)} and B {list(b.shape)}; linear layers, 2D convolutions without groups and embeddings are merged"
        )
    _check_shape(ref, f"{layer}.{kind}A and B", change.shape, weight.shape)
    wide = weight.dtype if weight.is_floating_point() and weight.itemsize > 2 else torch.float32
    base[target] = (weight.double() + scale * change).to(wide)
    bias = parts.get("lora_B.bias")
    if bias is not None:
        if f"{layer}.bias" not in base:
            raise SourceError(_no_place(ref, f"{layer}.lora_B.bias"))
        base[f"{layer}.bias"] = base[f"{layer}.bias"].float() + scale * bias.float()


def _alpha(layer: str, config: Mapping[str, Any]) -> float:
    """Of a layer by its name in the module; see `_check_alphas`."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    found = (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer))
    return float(next(found, config["lora_alpha"]))


def _check_alphas(config: Mapping[str, Any], ref: str) -> None:
    """Raise SourceError for alphas that are no numbers."""
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, Mapping):
        raise SourceError(f"'{ref}': {CONFIG} has the alpha_pattern {patterns!r}, not an object of name to number")
    for name, alpha in {"lora_alpha": config.get("lora_alpha"), **patterns}.items():
        if not is_finite(alpha):
            raise SourceError(
                f"'{ref}': {CONFIG} has the alpha {alpha!r} of {name!r}, not a number; save the adapter with peft again"
            )
    if not isinstance(config.get("use_rslora", False), (bool, type(None))):
        raise SourceError(
            f"'{ref}': {CONFIG} has use_rslora {config['use_rslora']!r}, not true or false; save the adapter with peft again"
        )
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise SourceError(f"'{ref}': {CONFIG} has the alpha_pattern {pattern!r}, which is no expression: {error}") from None


def _refuse_others(config: Mapping[str, Any], ref: str) -> None:
    method = str(config.get("peft_type") or "LORA")
    if method != "LORA":
        raise SourceError(f"'{ref}' has an adapter of the method {method}; LORA is merged. {_BY_PEFT}")
    for name, neutral in _OTHER.items():
        if name in config and config[name] not in neutral:
            raise SourceError(f"'{ref}' has an adapter with {name} {config[name]!r}, which is not merged. {_BY_PEFT}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise SourceError(
            f"'{ref}' has an adapter that starts from {start!r}, which changes the weights of its base as well. {_BY_PEFT}"
        )


_BY_PEFT = "Save the merged model with PEFT: model.merge_and_unload().save_pretrained(FOLDER)"


def _no_place(ref: str, key: str) -> str:
    return (
        f"'{ref}': '{key}' of its adapter has no place among the weights beside it; the adapter belongs to another model, or was made "
        f"with another version of transformers, which names layers otherwise. {_BY_PEFT}"
    )


def _check_shape(ref: str, key: str, got: Any, wanted: Any) -> None:
    if tuple(got) != tuple(wanted):
        raise SourceError(
            f"'{ref}': '{key}' of its adapter gives the shape {list(got)} for a weight of {list(wanted)}. {_BY_PEFT}"
        )


def _config(folder: Path) -> dict[str, Any]:
    config = files.read_json(folder / CONFIG, "adapter's configuration", SourceError)
    if not isinstance(config, dict):
        raise SourceError(f"'{folder / CONFIG}' must hold a JSON object; got {type(config).__name__}")
    return config


def _bare(key: str) -> str:
    return key.removeprefix(_PREFIX)


def _read(path: Path, ref: str) -> dict[str, Tensor]:
    from .checkpoints.state_file import read_state

    return read_state(path, f"{ref}/{path.name}").tensors

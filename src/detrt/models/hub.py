"""transformers checkpoints, from a folder or from the Hugging Face hub, as a Source."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..bundle import MANIFEST
from ..errors import MissingPackageError, SourceError, number_of, one_line
from ..spec import AUTHORS, OWN, TRANSFORMERS
from . import adapters, trust
from .checkpoints import timm
from .checks import check_channels, check_finite
from .families import BY_NAME, MASK_CLASS, TESTED, Family, by_model_type, first_example, processors, upstreams
from .labels import read_labels
from .load_options import LoadOptions
from .preprocessor import read_input_spec, read_processor
from .source import (
    auto_class,
    checkpoint_inside,
    from_config,
    make_spec,
    provenance_of,
    transformers_version,
    why_unsupported,
)
from .text import text_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor, nn

    from ..spec import InputSpec
    from .source import Source

# In the order in which transformers searches for them.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")

# Exceptions of transformers and of the checkpoint's code for damaged configs and weights.
_LOADING_ERRORS = (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, SyntaxError, NameError)


def download(name: str, revision: str | None, *, trust_remote_code: bool) -> Path:
    """Snapshot of a hub model's config, preprocessor and weights in the local hub cache.

    Raises:
        SourceError: no such model or revision, no access, or no network.
    """
    require_transformers()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = ["*.json", "*.safetensors", "vocab.txt", "merges.txt", *(["*.py"] if trust_remote_code else [])]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
        if weights_in(folder) is None:
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*patterns, "pytorch_model*.bin"]))
        return folder
    except RepositoryNotFoundError:
        raise SourceError(f"the hub has no model '{name}', or it is private (log in with: hf auth login)") from None
    except LocalEntryNotFoundError:
        raise SourceError(
            f"'{name}' is not in the local cache and the hub cannot be reached; check the network and HF_HUB_OFFLINE, "
            "or give a local checkpoint folder"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise SourceError(f"'{name}' cannot be downloaded: {error}") from None


def weights_in(folder: Path) -> Path | None:
    """The file of the weights in a folder, or their index, as transformers searches for it; None where there is none."""
    return next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)


def load_folder(folder: Path, ref: str, options: LoadOptions) -> Source:
    """Load a folder in transformers format. Raises what `load_source` does."""
    from .source import Source
    from .text import read_tokenizer

    config = read_config(folder)
    trust_remote_code, family = options.trust_remote_code or trust.is_allowed(), options.family
    rows = by_model_type()
    row = rows.get(config["model_type"])
    upstream = row.upstream if row is not None else None
    published = upstream is not None and family == upstream.name
    if family is not None and not published:
        others = "".join(f", and `family={one.name}` for a {one.title} folder" for one in upstreams())
        raise SourceError(
            f"'{ref}' is a transformers checkpoint of model_type {config['model_type']!r}, and `family={family}` is not for "
            f"it: `family` is for ckpt:FILE{others}"
        )
    if "auto_map" in config and not trust_remote_code and not published:
        code = _remote_code(config["auto_map"])
        raise SourceError(
            f"'{ref}' runs its own code ({', '.join(code)}), and the stock class would compute another function. "
            f"Read that code, and if you trust it add `trust_remote_code` or set {trust.VARIABLE}=1"
            + (f"; or `family={upstream.name}` for detrt's own published {upstream.title}" if upstream is not None else "")
        )
    model_type = config["model_type"]
    for relative in BY_NAME.values():
        if model_type in relative.not_read:
            raise SourceError(
                f"'{ref}' has model_type {model_type!r}, which detrt does not export: {relative.not_read[model_type]}"
            )
    if row is None:
        known = ", ".join(one.model_type for one in BY_NAME.values() if not one.own)
        raise SourceError(
            f"'{ref}' has model_type {model_type!r}, which detrt does not know; it knows: {known} (see: `info(families=True)`)"
        )
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise SourceError(
            f"'{ref}' is quantized (quantization_config in config.json, method {one_line(repr(method), 40)}); give the float "
            "checkpoint, detrt quantizes itself"
        )
    architectures = config.get("architectures") or [""]
    if not isinstance(architectures, list) or not isinstance(name := architectures[0], str):
        raise SourceError(f"'{folder / 'config.json'}' says architectures {architectures!r}, not a list of names")
    row = next((one for one in BY_NAME.values() if name in one.classes), row)
    if name.endswith("Segmentation") and not name.endswith(MASK_CLASS) and name not in row.classes:
        raise SourceError(
            f"'{ref}' is a {name}, for panoptic or semantic segmentation; detrt reads detectors, also those with instance masks (see: "
            f"`info(families=True)`); give one of those, e.g. hf:{first_example()}"
        )
    if why := why_unsupported(row):
        raise SourceError(f"'{ref}' {why}")
    refuse_text_choices(row, options)
    if options.labels_start is not None and options.labels is None:
        raise SourceError(
            f"`labels_start={options.labels_start}` needs `labels=FILE`: the config.json of '{ref}' says the id of each class"
        )
    words = read_tokenizer(options.tokenizer, folder, ref) if row.text else None  # before seconds of loading
    with _without_adapter(folder, ref, row) as (plain, notes):
        module, ignored = _load_module(
            plain, ref, row, config, trust_remote_code=trust_remote_code and not published, published=published
        )
    if published:
        from .layers.hybrid import take_authors_positions

        take_authors_positions(module)
    check_channels(module, ref)
    check_finite(module, ref)
    notes += (*_note_on_ignored(ignored), *_anchors_of_every_size(module.config))
    if model_type in row.inside:
        notes += (f"it has model_type {model_type!r}: its detector is read, its tracker of videos is not",)
    entry = read_input_spec(folder, row, module.config, resize=options.resize, preprocess=options.preprocess, ref=ref)
    notes += row.loaded(module, entry, ref) if row.loaded is not None else _notes_on_pixels(entry)
    if words is not None:
        spec = text_spec(row, module, entry, words, ref)
    else:
        names = read_labels(options.labels, int(module.config.num_labels), options.labels_start) if options.labels else None
        spec = make_spec(row, module, entry, names)
    origin = AUTHORS if published else OWN if "auto_map" in config else TRANSFORMERS
    spec = replace(spec, name=ref.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1], origin=origin)
    provenance = provenance_of(module, ref, weights_digest(folder))
    found = read_processor(folder) if options.resize is None and options.preprocess is None else None
    return Source(module, spec, row, provenance, notes=notes, tokenizer=words, processor=found[0] if found else None)


def _notes_on_pixels(entry: InputSpec) -> tuple[str, ...]:
    """Where transformers' own processing does what its users may not expect, or what not all of its versions do."""
    if entry.pad:
        return (
            f"images are padded to {entry.height}x{entry.width} and boxes scaled by the original size, as transformers does; a model "
            "trained on boxes relative to the padded image (docs/guide/fine-tuned.md) gives boxes that are too small where it pads",
        )
    version = transformers_version()
    found = [one.name for one in processors().values() if version in one.antialiased_in]
    if not entry.antialias and found:
        return (
            f"images are resized without antialiasing, as {found[0]}ImageProcessor of transformers {TESTED[-1]} does; that of the "
            f"installed {version} antialiases: for a model that was trained with it, `preprocess=family-default` comes closest",
        )
    return ()


def _anchors_of_every_size(config: Any) -> tuple[str, ...]:
    """Let an RT-DETR, D-FINE or DEIMv2 with anchors for one image size compute them for each, in place; returns a note.

    The class has the code for both; the values at that one size are the same.
    """
    size = getattr(config, "anchor_image_size", None)
    if not size:
        return ()
    config.anchor_image_size = None
    return (
        f"config.json has anchor_image_size {list(size)}, for which alone its anchors are stored; they are computed for any size",
    )


def refuse_text_choices(family: Family, options: LoadOptions) -> None:
    """Raise SourceError for labels of a prompted family, and for a tokenizer of one with fixed classes."""
    if family.text and options.labels_start is not None:
        raise SourceError(
            f"`labels_start={options.labels_start}` cannot be given for {family.title}: it finds what a prompt asks for"
        )
    if family.text and options.labels is not None:
        raise SourceError(f"`labels='{options.labels}'` cannot be given for {family.title}: it finds what a prompt asks for")
    if not family.text and options.tokenizer is not None:
        raise SourceError(f"`tokenizer='{options.tokenizer}'` cannot be given for {family.title}, which takes no prompt")


def _remote_code(auto_map: Any) -> list[str]:
    """File names of the code of a checkpoint: "modeling_x.Class", "org/repo--modeling_x.Class" or a list of them."""
    values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    flat = [v for value in values for v in (value if isinstance(value, list) else [value]) if v]
    return sorted({str(v).rsplit("--", 1)[-1].split(".")[0] + ".py" for v in flat})


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder.

    Raises:
        SourceError: missing, not JSON, or without a model_type.
    """
    path = folder / "config.json"
    if not path.is_file():
        if (folder / MANIFEST).is_file():
            raise SourceError(f"'{folder}' is a bundle, not a checkpoint: its graph is exported; give what it was made from")
        raise SourceError(
            adapters.why_alone(folder)
            or f"'{folder}' has neither config.json (a checkpoint) nor {MANIFEST} (a bundle); give a folder with one of them{checkpoint_inside(folder)}"
        )
    config = files.read_json(path, "configuration", SourceError)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise SourceError(f"'{path}' has no model_type; it is not a transformers checkpoint")
    _check_counts(path, config)
    return config


# Ends of names of fields, and the largest count that a detector may have: transformers would make that many modules or names.
_MOST = {"layers": 1000, "num_labels": 1_000_000, "num_queries": 1_000_000}


def _check_counts(path: Path, config: dict[str, Any]) -> None:
    for name, value in config.items():
        if isinstance(value, dict):
            _check_counts(path, value)
        most = next((most for end, most in _MOST.items() if name.endswith(end)), None)
        if most is not None and isinstance(value, int) and value > most:
            raise SourceError(f"'{path}' has the {name} {one_line(value, 40)}; at most {most} can be; correct it")


def require_transformers() -> Any:
    try:
        import torch  # noqa: F401
        import transformers
    except ImportError as error:
        raise MissingPackageError(error.name or "transformers", "export", "loading a checkpoint") from None
    return transformers


@contextlib.contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Silence the loading report of transformers; detrt has its own."""
    level = transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def _load_module(
    folder: Path, ref: str, row: Family, raw: dict[str, Any], *, trust_remote_code: bool, published: bool = False
) -> tuple[nn.Module, list[str]]:
    """The module with the weights of a folder, and the names of those that it does not take."""
    transformers = require_transformers()
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    if weights_in(folder) is None:
        raise SourceError(adapters.why_alone(folder) or f"'{folder}' has no weights; expected one of {', '.join(WEIGHTS)}")
    wanted = _read_files(folder)
    if missing := [path for path in wanted if not path.is_file()]:
        names = ", ".join(path.name for path in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise SourceError(
            f"'{folder}' lacks {len(missing)} of the {number_of(len(wanted), 'file')} with its weights: {names}; copy or "
            "download them into that folder as well, or save the checkpoint again"
        )
    for path in _weight_files(folder):
        if words := files.what_it_is(path):
            raise SourceError(f"'{path}' is {words}")
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        with quiet(transformers):
            converted = row.converted(raw, ref) if row.converted is not None else None
            config = converted[0] if converted else transformers.AutoConfig.from_pretrained(folder, **options)
            location: Path | None = folder
            if raw["model_type"] in row.inside:
                config = config.detector_config
            loader = auto_class(row, raw.get("architectures"))
            if published:
                assert row.upstream is not None
                loader = row.upstream.model()
            state = None
            dilated = False
            backbone = getattr(config, "backbone_config", None)
            if converted:
                state, location = converted[2](_read_state(folder)), None
                loader = converted[1]
            elif getattr(backbone, "model_type", "") == "timm_backbone":
                native = timm.resnet_config(backbone.to_dict())
                config.backbone_config = transformers.ResNetConfig(**{k: v for k, v in native.items() if k != "model_type"})
                state, location = timm.rename_resnet(_read_state(folder)), None
                # The Auto class searches for files even where it is given the weights.
                loader = transformers.MODEL_FOR_OBJECT_DETECTION_MAPPING[type(config)]
                dilated = timm.is_dilated(config.to_dict(), backbone.to_dict())
            module, report = loader.from_pretrained(
                location,
                config=config,
                state_dict=state,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # in the report, and raised below by name
                **options,
            )
    except SourceError:
        raise
    except (SafetensorError, pickle.UnpicklingError, EOFError, StrictDataclassError, *_LOADING_ERRORS) as error:
        if damaged := [path for path in wanted if _is_damaged(path)]:
            raise SourceError(
                f"the weights of '{ref}' are damaged or truncated, in {', '.join(path.name for path in damaged)}: {_first_lines(error)}; "
                "copy, download or save the checkpoint again"
            ) from None
        raise SourceError(f"'{ref}' cannot be loaded: {_first_lines(error)}") from None
    except ImportError as error:
        raise SourceError(f"'{ref}' needs a package that is not installed: {_first_lines(error)}") from None
    mismatched = [(key,) if isinstance(key, str) else key for key in report.get("mismatched_keys", ())]
    wrong = sorted({*report["missing_keys"], *(one[0] for one in mismatched)})
    if wrong:
        why = "The checkpoint is incomplete or of another family"
        columns = (config.num_labels, config.num_labels + 1)
        if len(mismatched) == len(wrong) and all(
            one[1:] and one[1][1:] == one[2][1:] and one[2][0] in columns for one in mismatched
        ):
            # Some heads and tables have one row more, for no object.
            _, stored, expected = min(mismatched)
            count = stored[0] - (expected[0] - config.num_labels)
            why = f"config.json names {number_of(config.num_labels, 'class')} (id2label), and the weights are of {count}; correct it"
        elif prefix := _common_prefix(report.get("unexpected_keys", ()), wrong):
            why = f"All names in it begin with '{prefix}', of a wrapper around the model (torch.compile, DDP); save the model inside it"
        raise SourceError(
            f"'{ref}' lacks {len(wrong)} of the model's weights or has them in another shape, e.g. "
            f"{', '.join(wrong[:3])}; they would be random. {why}"
        )
    if has_shared_weights(module):
        state = state if state is not None else _read_state(folder)
        restore_shared_weights(module, state)
        restore_decoder_heads(module, state)
    if dilated:
        timm.dilate_last_stage(module)
    row.made(module)
    return module.eval().requires_grad_(False), sorted(report.get("unexpected_keys", ()))


def _common_prefix(unexpected: Iterable[str], missing: Iterable[str]) -> str:
    """What all unexpected names begin with that would be names of the model without it, such as "_orig_mod."; "" for nothing."""
    names, known = list(unexpected), set(missing)
    steps = names[0].split(".")[:-1] if names else []
    prefixes = (".".join(steps[:count]) + "." for count in range(1, len(steps) + 1))
    for prefix in prefixes:
        if all(name.startswith(prefix) for name in names) and any(name.removeprefix(prefix) in known for name in names):
            return prefix
    return ""


@contextlib.contextmanager
def _without_adapter(folder: Path, ref: str, row: Family) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """The folder; where it has an adapter, one with the other files and the merged weights, for as long as the block runs. And notes.

    transformers would apply an adapter where PEFT is installed, and ignore it elsewhere.
    """
    from safetensors.torch import save_file

    if weights_in(folder) is None or not (adapters.adapter_in(folder) or any(map(adapters.is_unmerged, _stored_names(folder)))):
        yield folder, adapters.beside(folder)
        return
    state, note = adapters.merged(folder, _read_state(folder), ref, lambda names: _stored_by_module(folder, row, names))
    with files.scratch() as made:
        for path in folder.iterdir():
            if path.name not in (*WEIGHTS, adapters.CONFIG, *adapters.WEIGHTS) and path.suffix not in (".safetensors", ".bin"):
                (made / path.name).symlink_to(path.absolute())
        # Copies: safetensors refuses tensors that share memory.
        save_file({key: tensor.clone().contiguous() for key, tensor in state.items()}, made / WEIGHTS[0], {"format": "pt"})
        yield made, (note, *adapters.beside(folder))


def _stored_by_module(folder: Path, row: Family, names: Iterable[str]) -> dict[str, str]:
    """Name of a tensor in the module -> in the files, of those that transformers renames one by one while it loads them."""
    import torch
    from transformers import AutoConfig

    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # a version that renames no tensors
        return {}
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = from_config(row, config)
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    found = {}
    for name in names:
        renamed, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, model.state_dict())
        if converter is None:
            found[renamed] = name
    return found


def _stored_names(folder: Path) -> list[str]:
    """The names of the tensors in a folder, without reading them where the format allows it."""
    import torch
    from safetensors import SafetensorError, safe_open

    first = weights_in(folder)
    assert first is not None
    if first.suffix == ".json":
        return list(_shards(first))
    try:
        if first.suffix == ".bin":
            return list(torch.load(first, map_location="meta", weights_only=True, mmap=True))
        with safe_open(first, "pt") as file:
            return list(file.keys())
    except (SafetensorError, pickle.UnpicklingError, *_LOADING_ERRORS):
        return []  # the loader says what is wrong


def _note_on_ignored(names: Sequence[str]) -> tuple[str, ...]:
    """Names the tensors that no module takes."""
    if not names:
        return ()
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return (f"{number_of(len(names), 'tensor')} of the weights are not used, because the model has no place for them: {shown}",)


def _read_state(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, sharded or not."""
    import torch
    from safetensors.torch import load_file

    state: dict[str, torch.Tensor] = {}
    for path in _read_files(folder):
        if path.suffix == ".safetensors":
            state.update(load_file(path))
        else:
            state.update(torch.load(path, map_location="cpu", weights_only=True))
    return state


def _read_files(folder: Path) -> list[Path]:
    """The files that the weights are read from; those of an index may be missing. Raises SourceError: a damaged index."""
    first = weights_in(folder)
    assert first is not None
    return [folder / name for name in sorted(set(_shards(first).values()))] if first.suffix == ".json" else [first]


def _is_damaged(path: Path) -> bool:
    """Whether a file of weights cannot be read."""
    import torch
    from safetensors import safe_open

    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                return False
        torch.load(path, map_location="meta", weights_only=True)
    except Exception:  # whatever a damaged file makes of its reader
        return True
    return False


def _shards(index: Path) -> dict[str, str]:
    """Name of a tensor -> name of the file beside the index that has it.

    Raises:
        SourceError: another form, or a file elsewhere.
    """
    found = files.read_json(index, "index of weights", SourceError)
    shards = found.get("weight_map") if isinstance(found, dict) and isinstance(found.get("metadata"), dict) else None
    if not isinstance(shards, dict) or not shards:
        raise SourceError(f"'{index}' has no 'metadata', or no 'weight_map' of tensors to files; save the checkpoint again")
    for name in shards.values():
        if not isinstance(name, str) or Path(name).name != name or not files.is_file_name(name):
            raise SourceError(f"'{index}' names the file {one_line(repr(name), 80)}, which is none beside it; refused")
    return shards


def _weight_files(folder: Path) -> list[Path]:
    """All that weights are read from, and what is named as they are. Raises SourceError: a damaged index."""
    named = {folder / name for index in folder.glob("*.index.json") if index.name in WEIGHTS for name in _shards(index).values()}
    return sorted({*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin"), *named})


def weights_digest(folder: Path) -> str:
    """One SHA-256 over the digests of the weight files, in name order."""
    digest = hashlib.sha256()
    adapted = [path for name in (adapters.CONFIG, *adapters.WEIGHTS) if (path := folder / name).is_file()]
    for path in sorted([*filter(Path.is_file, _weight_files(folder)), *adapted]):
        digest.update(files.sha256_of(path).encode())
    return digest.hexdigest()


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:600] or type(error).__name__


def has_shared_weights(module: nn.Module) -> bool:
    """Whether any parameter of a module has more than one name."""
    return len(list(module.parameters())) < len(list(module.named_parameters(remove_duplicate=False)))


def restore_shared_weights(module: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Load parameters with several names under whichever name the checkpoint has, in place; returns the names used.

    transformers stores one of the names and ties the others after loading. If the stored name is not the one that it ties to
    (DEIMv2 with `share_bbox_head`: it stores `bbox_embed.1` and ties to `bbox_embed.0`), the weights stay random and its loading
    report lists nothing as missing. A parameter that equals one of its names in `state` is not changed, nor is one without a name
    of the right shape in `state` (transformers has read it under another name).
    """
    import torch

    names: dict[int, list[str]] = {}
    parameters: dict[int, Tensor] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    restored = []
    for key, aliases in names.items():
        target = parameters[key]
        stored = [n for n in aliases if n in state and state[n].shape == target.shape]
        if len(aliases) < 2 or any(torch.equal(state[n].to(target), target) for n in stored):
            continue
        for name in stored[:1]:
            target.data.copy_(state[name])
            restored.append(name)
    return restored


def restore_decoder_heads(module: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Load heads that a Grounding DINO's decoder and detector share under whichever of the two names the checkpoint has, in place.

    MM-Grounding-DINO has a head of its own in each layer. transformers ties all layers to the first where a layer's head is stored
    under one name only, and reports nothing missing. Returns the names that were filled in.
    """
    import torch

    parameters = dict(module.named_parameters(remove_duplicate=False))
    restored = []
    for name in [name for name in parameters if name.startswith("model.decoder.")]:
        other = name.removeprefix("model.decoder.")
        if other not in parameters or (name in state) == (other in state):
            continue
        stored, absent = (name, other) if name in state else (other, name)
        value = state[stored].to(parameters[absent])
        if torch.equal(parameters[absent], value):
            continue
        owner, _, leaf = absent.rpartition(".")
        setattr(module.get_submodule(owner), leaf, torch.nn.Parameter(value.clone(), requires_grad=False))
        restored.append(absent)
    return restored

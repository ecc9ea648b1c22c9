"""Random-weight models of every family: `random:<family>` at full size, `random:<family>/tiny` for tests.

The full-size configurations are the published ones (ResNet-50 for the DETRs of 2020 to 2022, the
"L" or "base" model where a family has several). Weights are seeded; parameters that training starts at
zero are perturbed, because zero offsets and zero box heads would hide errors; and weights keep the
variance of activations, because with the library's initialisation (a standard deviation of 0.01 or 0.02)
the signal vanishes in a narrow network: the output is then the same for every image, and a comparison of
outputs proves nothing.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from ..bundle import Provenance
from ..errors import SourceError
from .families import Family, RandomModel, random_models
from .families.sizes import TINY_VOCABULARY
from .hub import refuse_text_choices
from .labels import labels_for, read_labels
from .load_options import LoadOptions
from .preprocessor import authors_input
from .source import Source, config_of, from_config, make_spec, parameters_of, versions, why_unsupported
from .text import bert_tokenizer, library, read_tokenizer, text_spec


def load_random(ref: str, options: LoadOptions = LoadOptions()) -> Source:  # noqa: B008 - frozen
    """A Source for `random:<name>` or `random:<name>/tiny`.

    Raises:
        SourceError: a name that no family has.
    """
    name, _, size = ref.removeprefix("random:").partition("/")
    models = dict(random_models())
    if name not in models or size not in ("", "tiny"):
        raise SourceError(
            f"there is no random model {ref!r}; write random:<name> or random:<name>/tiny with one of: {', '.join(models)}"
        )
    family, model = models[name]
    if why := why_unsupported(family):
        raise SourceError(f"'{ref}' {why}")
    family = replace(family, **model.row) if model.row else family
    refuse_text_choices(family, options)
    if options.labels_start is not None and options.labels is None:
        raise SourceError(f"`labels_start={options.labels_start}` needs `labels=FILE`: '{ref}' has a name for each class")
    module, words = build_model(family, model, tiny=size == "tiny"), None
    if family.text:
        given = options.tokenizer
        words = small_tokenizer(module.config.text_config) if given is None else read_tokenizer(given, None, ref)
        spec = text_spec(family, module, authors_input(family, module), words, ref)
    else:
        classes = int(module.config.num_labels)
        names = read_labels(options.labels, classes, options.labels_start) if options.labels else None
        if names is None and not hasattr(module.config, "id2label"):
            names = labels_for(classes) or {i: str(i) for i in range(classes)}
        spec = make_spec(family, module, authors_input(family, module), names)
    provenance = Provenance(ref, "", parameters_of(module), versions=versions())
    title = ref.removeprefix("random:").replace("/", "-")
    return Source(module, replace(spec, name=title), family, provenance, tokenizer=words)


def build_model(family: Family, model: RandomModel, *, tiny: bool) -> Any:
    """The module of a row: float32, seeded weights, eval mode."""
    settings: dict[str, Any] = deepcopy({**model.full, **(model.tiny if tiny else {})})
    if not family.text:
        # As published: DETR by COCO's ids, RT-DETR and its successors by its names.
        settings.setdefault("num_labels", 91 if family.select == "query" or family.mask else 80)
        settings |= {"num_labels": 7} if tiny else {}
    if family.build_random is not None:
        return family.build_random(settings)
    return build(family, settings, settle=not tiny)


def build(family: Family, settings: dict[str, Any], *, settle: bool = False) -> torch.nn.Module:
    """The family's transformers class with seeded weights, float32, eval mode.

    settle: keep six decoder layers well conditioned; not needed for the two of a tiny model.
    """
    config = config_of(family, settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = from_config(family, config, dtype=torch.float32, attn_implementation="eager")
        generator = torch.Generator().manual_seed(SEED)
        keep_variance(module, generator)
        for name, parameter in module.named_parameters():
            dull = parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all())
            moves = "bbox" in name or "box_head" in name or "sampling_offsets" in name
            if moves and settle and parameter.ndim == 2:
                # Trained models move boxes and samples by little in each layer. With steps of full size six
                # layers of random weights are chaotic, and rounding alone changes the result.
                parameter.data *= 0.2
            elif family.text and name.endswith(("_param", "text_projection")):
                # Fusion is initialised to 1e-4, and the projection may be uninitialised memory.
                parameter.data.normal_(0, 0.5 if parameter.ndim == 1 else parameter.shape[0] ** -0.5, generator=generator)
            elif family.text and name.endswith(("reference_points.weight", "position_embeddings")):
                parameter.data.normal_(generator=generator)  # else all boxes of SAM 3 begin at one point
            elif dull or (moves and (family.text or not settle)):
                parameter.data += torch.empty_like(parameter).normal_(0, 0.05, generator=generator)
        spread_variances(module, generator)
        if family.after_random is not None:
            family.after_random(module, generator, settle)
        projection = getattr(getattr(module, "model", None), "input_projection", None)
        if settle and isinstance(projection, torch.nn.Conv2d):
            _settle_projection(projection, module, generator)
    family.made(module)
    return module.eval().requires_grad_(False)


def draw_scales(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw the scales of every BatchNorm, in place, which are initialised to 0.01 for training from a backbone's weights."""
    for child in module.modules():
        if isinstance(child, torch.nn.BatchNorm2d):
            child.weight.data.normal_(1, 0.05, generator=generator)


def settle_batch_norms(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Set the statistics of every BatchNorm from two images of noise, in place, and shift it off zero.

    These decoders read the output of the encoder without a projection or norm; without statistics it is in the thousands, and
    adding it to the queries loses four digits. Around zero, each untrained layer of normalisation and activation amplifies every
    difference by a constant factor (Yang et al., arXiv:1902.08129), including rounding; trained layers do not. A small scale and a
    positive shift keep the activation almost linear.
    """
    norms = [child for child in module.modules() if isinstance(child, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.weight.data.normal_(0.5, 0.05, generator=generator)
        norm.bias.data.normal_(0.8, 0.2, generator=generator)
        norm.momentum = 1.0
        norm.train()
    with torch.no_grad():
        module(pixel_values=_noise(2, generator))
    for norm in norms:
        norm.momentum = 0.1
        norm.eval()


def centre(module: torch.nn.Module, layer: Any, generator: torch.Generator) -> None:
    """Give the last output of a convolution or linear layer the mean 0 on images of noise, in place.

    Of the maps that masks are sums of: otherwise a mask is the whole image or nothing.
    """
    seen: list[torch.Tensor] = []
    handle = layer.register_forward_hook(lambda layer, inputs, output: seen.append(output))
    with torch.no_grad():
        module.eval()(pixel_values=_noise(2, generator))
    handle.remove()
    channels = 1 if isinstance(layer, torch.nn.Conv2d) else -1
    layer.bias.data -= seen[-1].transpose(0, channels).flatten(1).mean(1)


def _settle_projection(projection: torch.nn.Conv2d, module: torch.nn.Module, generator: torch.Generator) -> None:
    """Scale the input projection of a DETR encoder so that its output has standard deviation 1, in place.

    It projects the output of the backbone without a norm. With untrained layers that is in the thousands, attention logits are in
    the millions, and their softmax is a maximum that rounding moves to another pixel.
    """
    found: list[torch.Tensor] = []
    hook = projection.register_forward_hook(lambda _, __, output: found.append(output))
    with torch.no_grad():
        module.eval()(pixel_values=_noise(1, generator))
        for parameter in projection.parameters():
            parameter /= found[0].std()
    hook.remove()


def _noise(count: int, generator: torch.Generator) -> torch.Tensor:
    """(count, 3, 256, 256) of standard deviation 1: noise of all scales, as in photographs. White noise averages out in
    every convolution."""
    image = torch.zeros(count, 3, 256, 256)
    for side in (2, 4, 8, 16, 32, 64, 128, 256):
        noise = torch.randn(count, 3, side, side, generator=generator)
        image += torch.nn.functional.interpolate(noise, size=(256, 256), mode="bilinear")
    return image / image.std()


# Ids of the framing tokens and of printable ASCII in BERT's uncased vocabulary.
_FRAME = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
_PLACES = (
    (999, "!\"#$%&'()*+,-./"),
    (1014, "0123456789:;<=>?@"),
    (1031, "[\\]^_`"),
    (1037, "abcdefghijklmnopqrstuvwxyz{|}~"),
)
_WORDS = (
    "a an the of and with in on red green blue yellow orange purple black white grey circle square triangle "
    "star striped dotted person cat dog car bus bicycle remote control chair table bottle cup book phone tree detect left right"
)


def small_tokenizer(text_config: Any) -> bytes:
    """A tokenizer of some words, and letters and digits for all others, as a file.

    WordPiece with BERT's ids of framing tokens and separators, which transformers' code uses; for CLIP the same words between
    its own two tokens.
    """
    vocabulary = dict(_FRAME)
    vocabulary |= {letter: start + i for start, letters in _PLACES for i, letter in enumerate(letters)}
    free = iter(i for i in range(1, TINY_VOCABULARY) if i not in vocabulary.values())
    vocabulary |= {f"##{letter}": next(free) for letter in "abcdefghijklmnopqrstuvwxyz0123456789"}
    vocabulary |= {word: next(free) for word in _WORDS.split() if word not in vocabulary}
    made = words = bert_tokenizer(vocabulary)
    if text_config.bos_token_id is not None:  # CLIP
        processors = library().processors
        ends = [
            ("<|startoftext|>", text_config.bos_token_id),
            ("<|endoftext|>", text_config.eos_token_id),
        ]
        model = library().models.WordPiece(vocabulary | dict(ends), unk_token="[UNK]")
        made = library().Tokenizer(model)
        made.normalizer, made.pre_tokenizer = words.normalizer, words.pre_tokenizer
        made.post_processor = processors.TemplateProcessing(single="<|startoftext|> $A <|endoftext|>", special_tokens=ends)
        made.add_special_tokens([name for name, _ in ends])
    return made.to_str().encode()


SEED = 20260101


def keep_variance(module: torch.nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw the weights of convolutions and linear layers, in place: sqrt(2 / fan in), He et al., arXiv:1502.01852.

    Linear layers without ReLU have sqrt(1 / fan in).
    """
    for child in module.modules():
        if isinstance(child, (torch.nn.Conv2d, torch.nn.Linear)):
            gain = 2.0 if isinstance(child, torch.nn.Conv2d) else 1.0
            child.weight.data.normal_(0, (gain / child.weight[0].numel()) ** 0.5, generator=generator)


def spread_variances(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Change the variances of normalisations from 1, in place."""
    for name, buffer in module.named_buffers():
        if name.endswith("running_var"):
            buffer.data *= torch.empty_like(buffer).uniform_(0.6, 1.6, generator=generator)

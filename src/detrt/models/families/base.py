"""What a family of detectors is: a row of facts and of functions that import torch only when they are called.

Adding a family is one file in this folder with such a row, and its name in the list of `detrt.models.families`. Facts that differ
between checkpoints of one family (sizes, mean, labels, queries) are read from the checkpoint; a row holds what its code fixes, and the
defaults for a folder without a preprocessor file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ...spec import InputSpec, TextSpec
    from ..checkpoints.assumed import Assumed
    from ..checkpoints.key_map import LoadReport, Table
    from ..checkpoints.shapes import Shapes
    from ..checkpoints.state_file import StateFile
    from ..stock import Stock

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
MASK_CLASS = "ForInstanceSegmentation"  # end of the name of a class with boxes and masks
# Ends of lines of `relatives`: the way that works.
AS_FOLDER = "under its authors' names; detrt reads it in transformers' format, e.g. hf:"
BY_ONNX = "export it to ONNX with the authors' code, and build from that file"

# Versions of transformers that the export tests ran with, the oldest first. Written by write_fingerprints.py.
TESTED = ("5.3.0", "5.12.1", "5.15.1", "5.20.2", "5.23.0")

# What was measured or reported of engines of some families, by `Family.engines`; see `detrt.backends.tensorrt.versions`.
SAMPLING_ENCODER = "sampling encoder"  # every place of its feature maps is a query of deformable attention
DINOV3 = "DINOv3"  # layers and rotary positions of DINOv3
PLUGIN_IS_FASTER = "plugin is faster"
LAYER_NORM_PLUGIN_IS_FASTER = "LayerNorm plugin is faster"
SIGMOID_IN_FP16 = "Sigmoid in FP16"
INT8_CROSS_ATTENTION = "INT8 cross-attention"
SYMBOLIC_PLUGIN = "symbolic plugin"
ONE_PHRASE = "one phrase"


@dataclass(frozen=True, slots=True)
class Processor:
    """An image processor of transformers.

    name: of its class, without "ImageProcessor".
    settings: what it does where a file does not say. The others are equal for all: bilinear, 1 / 255, the mean and standard deviation
    of ImageNet.
    not_antialiased: of one that does not antialias, PIL's number of the one filter that detrt does so, and whether it rounds the
    resized pixels. authors_antialias: the authors of its family do. antialiased_in: versions of transformers that do; detrt reads
    their files as later ones do.
    square: images are padded to a square of their long side before they are resized.
    one_size: images are fitted into the one size that the model takes.
    rounds_down: sides between two edges are rounded down to multiples of it; 0: they are not.
    rescale_key: do_rescale may be called `rescale`, as in its first files.
    idle: further keys of its files that say nothing about pixels.
    needs: packages that it needs. like: another processor with the same steps, which needs fewer packages.
    """

    name: str
    settings: Mapping[str, Any]
    not_antialiased: tuple[int, bool] | None = None
    authors_antialias: bool = False
    antialiased_in: tuple[str, ...] = ()
    square: bool = False
    one_size: bool = False
    rounds_down: int = 0
    rescale_key: bool = False
    idle: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    like: str = ""


ATTENDS_BY_MASK = "attends by a padding mask in transformers, which its graph does not take"
EDGES: Mapping[str, Any] = {"size": {"shortest_edge": 800, "longest_edge": 1333}, "do_normalize": True, "do_pad": True}
DETR_PROCESSOR = Processor("Detr", EDGES)


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A model with random weights, `random:<name>` at full size and `random:<name>/tiny` for tests.

    full: fields of its configuration, as published. tiny: fields on top of them.
    size: another published size of a model, which tests of every model leave out.
    row: fields of the family's row that are others in this model.
    """

    name: str
    full: Mapping[str, Any] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)
    size: bool = False
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Format:
    """Checkpoint files as the authors of a family publish them.

    name: of the variant, as `--family` has it. titles: whose checkpoints they are.
    recognise: names the variant that the keys belong to, or None. Formats with the same function share their keys.
    settings: gives what `build` takes, from tensor shapes, what they do not tell, the variant and a report; "family" may hold fields of the
        family's row that differ in this file.
    table: its key map, see `key_map`. skipped: key pattern -> why the module does not need it. Either may depend on the shapes.
    relatives: key pattern -> the related model that it tells, which is refused.
    also: which other models have the same keys, and how to say which it is; "" where there are none.
    model: gives the class of the module, where it is not that of transformers. build: gives the module from settings and variant.
    facts: the sizes that people know a model by, from the settings.
    values: gives tensors in the module's form instead of the file's.
    prepare: changes the module, in place, before the weights are copied; finish and check come after it.
    names_start: gives the column of the head that the first of a file's class names is for. class_names: number of classes -> those of the
        published models.
    """

    name: str
    titles: tuple[str, ...]
    recognise: Callable[[set[str]], str | None]
    settings: Callable[[Shapes, Assumed, str, LoadReport], dict[str, Any]]
    table: Table | Callable[[Shapes], Table]
    skipped: Mapping[str, str] | Callable[[Shapes], Mapping[str, str]] = field(default_factory=dict)
    relatives: Table = ()
    also: str = ""
    model: Callable[[], Any] | None = None
    build: Callable[[dict[str, Any], str], nn.Module] | None = None
    facts: Callable[[dict[str, Any]], dict[str, object]] | None = None
    values: Callable[[Shapes], dict[str, Tensor]] | None = None
    prepare: Callable[[nn.Module, Shapes], None] | None = None
    finish: Callable[[nn.Module], None] | None = None
    check: Callable[[nn.Module, Shapes], None] | None = None
    names_start: Callable[[StateFile], int] | None = None
    class_names: Mapping[int, Sequence[str]] = field(default_factory=dict)


# Names that one run of a model with a list of classes takes; its head has no limit of its own.
MOST_CLASSES = 1000


@dataclass(frozen=True, slots=True)
class TextFacts:
    """What a config says of prompts.

    max_tokens, features: see `TextSpec`. queries: of an image. most: columns of logits, or phrases of one run.
    marks: tokens that end a phrase or frame a prompt, in the model's order. mask_stride: see `DecodeSpec`.
    """

    max_tokens: int
    features: int
    queries: int
    most: int = MOST_CLASSES
    marks: tuple[str, ...] = ()
    mask_stride: float = 0.0


@dataclass(frozen=True, slots=True)
class Upstream:
    """The authors' model under transformers' names, for a folder in transformers format that runs code of its own.

    name: as `--family` has it. title: how messages call it.
    model: gives its class.
    """

    name: str
    title: str
    model: Callable[[], type]


def _as_it_is(module: Any) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Family:
    """Facts about one family.

    name: detrt's name. model_type: the `model_type` of its transformers config; "" for a detector that transformers does not have, or
    that of the modules that it is composed of.
    own: transformers does not have it; there are original checkpoint files only.
    activation, select: see `DecodeSpec`. max_detections: what the authors' post-processing keeps,
    None for the number of queries.
    mask: the model takes a padding mask, so images of different sizes share a batch. no_mask: what it is that takes none.
    dynamic: height and width can be symbolic; otherwise `fixed_reason` says why not.
    multiple_of: a fixed number, or the name of the rule in `preprocessor.multiple_of` that reads it from the config.
    shortest_edge: default resize keeps the aspect ratio, by the shortest and longest edges of `edges`, else stretches to `size` (height, width); None is the
        size of the position table, or the `image_size` of the config.
    normalize: pixels are normalised by ImageNet. normalize_differs: not in all of its models.
    queries: config attributes that may hold the number of queries, first present and positive wins; of a pair, the second attribute
        says whether the first counts.
    patterns: config attribute with how many boxes each of these queries gives, where it is not 0.
    rewrites: names of the rewrites that tracing needs, of `detrt.models.rewrites` or the family's own -> places in the modeling module
        that they rely on -> fingerprints of the code there in the tested versions.
    by_selections: name of a function in its module of transformers -> what gives one that computes it by selections, with which the plain
        model runs where these are recorded or forced.
    own_rewrites: name of a rewrite that this family alone needs -> what gives it, see `detrt.models.rewrites.Rewrite`.
    reducible: its authors evaluate it with fewer queries and decoder layers than it was trained with, see `detrt.models.reduce`.
    licence: of the published code and weights, as their authors state it; sizes that differ are named.
    processor: image processor of transformers for its checkpoints.
    text: "" for fixed classes, else the kind of prompt, see `detrt.text.kinds`. nms, nms_iou: the authors' suppression of
    overlapping boxes, see `DecodeSpec`. reading_order, quads: see `DecodeSpec`. masks_at: stride of the masks that every checkpoint
    of the family has; 0 where the class of the checkpoint tells.
    since: oldest tested version of transformers that it is read with.
    classes: names of classes in the `architectures` of a config -> what gives detrt's class for them.
    auto: Auto class of transformers, where the task does not say it.
    inside: model types of larger models whose detector it is. not_read: model types of relatives -> why they are not exported.
    upstream: see `Upstream`.
    raw_outputs: gives the outputs of its tasks beside masks, by the names of their tensors, from what transformers' model returned and
        the number of queries.
    converted: of a family with folders that have other names than the library's, gives config, class and a function that renames the
        weights, or None; it takes config.json and the reference.
    made: sets a module of transformers right, in place, wherever its weights are from.
    loaded: makes a module from a folder ready, in place, and returns notes. It takes the module, its InputSpec and the reference.
    detector, text_encoder, query_encoder: of a prompted family, give the modules of its graphs. text_facts: gives what its config says
        of prompts. text_processor: transformers' processor of images and text; stock: gives the class of how transformers runs it.
    layouts: layouts of `detrt.graph.layouts` that are of this family alone.
    formats: original checkpoint files. relatives: key pattern -> a model whose keys are like those of the family and that is not read.
    random: models with random weights. build_random: gives one from its settings, of a family without a configuration of transformers.
    after_random: changes the weights of one, in place. It takes the module, a generator and whether the model has its full size.
    authors_input: preprocessing of the authors' files and of random models, where it is another than that of the row. It takes the
        config, the row and `attend_padding`.
    engines: what was measured or reported of its engines.
    """

    name: str
    model_type: str
    title: str
    activation: str
    select: str
    max_detections: int | None
    example: str
    own: bool = False
    mask: bool = False
    no_mask: str = ""
    dynamic: bool = True
    fixed_reason: str = ""
    multiple_of: int | str = 1
    shortest_edge: bool = False
    edges: tuple[int, int] = (800, 1333)
    size: tuple[int, int] | None = (640, 640)
    normalize: bool = True
    normalize_differs: bool = False
    queries: tuple[str | tuple[str, str], ...] = ("num_queries",)
    patterns: str = ""
    deformable: bool = False
    rewrites: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    own_rewrites: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    by_selections: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    text: str = ""
    nms: str = "none"
    nms_iou: float = 0.8
    processor: Processor = DETR_PROCESSOR
    reducible: bool = False
    licence: str = ""
    reading_order: str = "none"
    quads: bool = False
    masks_at: int = 0
    since: str = TESTED[0]
    classes: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    auto: str = ""
    inside: tuple[str, ...] = ()
    not_read: Mapping[str, str] = field(default_factory=dict)
    upstream: Upstream | None = None
    raw_outputs: Callable[[Any, int], dict[str, Tensor]] | None = None
    converted: Callable[[Mapping[str, Any], str], tuple[Any, Any, Callable[[Any], dict[str, Tensor]]] | None] | None = None
    made: Callable[[Any], None] = _as_it_is
    loaded: Callable[[Any, InputSpec, str], tuple[str, ...]] | None = None
    detector: Callable[[nn.Module], nn.Module] | None = None
    text_encoder: Callable[[nn.Module, TextSpec], nn.Module] | None = None
    query_encoder: Callable[[nn.Module], nn.Module] | None = None
    text_facts: Callable[[Any], TextFacts] | None = None
    text_processor: str = ""
    stock: Callable[[], type[Stock]] | None = None
    layouts: tuple[str, ...] = ()
    formats: tuple[Format, ...] = ()
    relatives: Table = ()
    random: tuple[RandomModel, ...] = ()
    build_random: Callable[[Mapping[str, Any]], nn.Module] | None = None
    after_random: Callable[[Any, torch.Generator, bool], None] | None = None
    authors_input: Callable[..., InputSpec] | None = None
    engines: frozenset[str] = frozenset()


def modeling_name(family: Family) -> str:
    """Name of the module of transformers that has the code of a family."""
    package = family.model_type.replace("-", "_")
    return f"transformers.models.{package}.modeling_{package}"


def hybrid_row(name: str, model_type: str, title: str, example: str, **facts: Any) -> Family:
    """A row of RT-DETR or one of its successors, with their common facts."""
    base: dict[str, Any] = {
        "licence": "Apache-2.0",
        "activation": "sigmoid",
        "select": "topk",
        "max_detections": None,
        "multiple_of": 32,
        "normalize": False,
        "processor": RT_DETR_PROCESSOR,
        "deformable": True,
        "reducible": True,
    }
    return Family(name=name, model_type=model_type, title=title, example=example, **{**base, **facts})


RT_DETR_PROCESSOR = Processor("RTDetr", {"size": {"height": 640, "width": 640}, "do_normalize": False, "do_pad": False})

# Facts of DETR and its direct successors with a ResNet.
RESNET_DETR: Mapping[str, Any] = {
    "mask": True,
    "shortest_edge": True,
    "activation": "sigmoid",
    "select": "topk",
    "max_detections": 100,
    "licence": "Apache-2.0",
}
SOFTMAX: Mapping[str, Any] = {"activation": "softmax", "select": "query", "max_detections": None}

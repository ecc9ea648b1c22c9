"""ONNX files of other exporters: what is known about them, from the file, its neighbours, a sidecar and options, and what is not."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .. import files, graph
from ..bundle import PROVENANCE_KEY, Provenance
from ..data.preprocess import preprocessing_words
from ..errors import SourceError, SpecError, check_one_of, number_of, one_line
from ..spec import OWN, DecodeSpec, InputSpec, ModelSpec, parse_size
from .families import BY_NAME, IMAGENET_MEAN, IMAGENET_STD, Family, by_model_type
from .labels import choose
from .load_options import LoadOptions
from .preprocessor import FAMILY_DEFAULT, read_input_spec
from .source import now, versions

if TYPE_CHECKING:
    import onnx

    from ..graph.layouts import ForeignGraph

SIDECAR = ".json"  # behind the name of the ONNX file
_Fact = TypeVar("_Fact")
Run = Callable[[Path, Mapping[str, Any]], Mapping[str, Any]]
_NEUTRAL = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class OnnxSidecar:
    """`FILE.onnx.json` beside an ONNX file of another exporter: what the file does not say. Options replace its fields.

    layout: one of `detrt.graph.layouts.LAYOUTS`. tensors: name in the layout -> name in the file, where they differ.
    family: a name of `detrt info --families`; with the layout "transformers" it says how logits become scores.
    labels: class names in order, or class id (as text) -> name. resize, preprocess: as `--resize` and `--preprocess`.
    mean, std: of each channel, R, G, B: (pixel * rescale - mean) / std; rescale is 1 / 255 where nothing says it.
    resample: filter of Pillow; bilinear where nothing says it.
    """

    layout: str | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)
    family: str | None = None
    labels: Mapping[str, str] | tuple[str, ...] = ()
    resize: str | None = None
    preprocess: str | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    rescale: float | None = None
    resample: str | None = None

    @classmethod
    def read(cls, path: Path) -> OnnxSidecar:
        """Read a sidecar.

        Raises:
            SpecError: not JSON, unknown fields, or values of a wrong type; the message names the file.
        """
        data: Any = files.read_json(path, "sidecar")
        known = [one.name for one in fields(cls)]
        if not isinstance(data, dict) or set(data) - set(known):
            got = sorted(set(data) - set(known)) if isinstance(data, dict) else type(data).__name__
            raise SpecError(f"the sidecar '{path}' must be a JSON object with some of {', '.join(known)}; got {got}")
        for name, value in data.items():
            kinds = {"tensors": dict, "labels": (dict, list), "mean": list, "std": list, "rescale": (int, float)}.get(name, str)
            if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
                raise SpecError(f"the sidecar '{path}': {name} has the value {value!r} of a wrong type")
        return cls(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in data.items() if value is not None}
        )


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """A graph of another exporter in detrt's contract.

    graph: as it was. notes: what was decided, and by what. stated: the choices of the caller, by option.
    """

    path: Path
    graph: ForeignGraph
    spec: ModelSpec
    notes: tuple[str, ...]
    stated: Mapping[str, Any]

    def contract(self, *, batch: int | None = None) -> onnx.ModelProto:
        """The graph with detrt's inputs and outputs, spec and provenance. batch: the only size at which it runs."""
        from ..graph.layouts import in_contract

        model = in_contract(self.graph, self.spec, batch=batch)
        graph.with_metadata(model, {PROVENANCE_KEY: replace(self.provenance(), created="").to_json()})
        return graph.with_spec(model, self.spec)

    def provenance(self) -> Provenance:
        """The file that it was read from, and the choices of the caller."""
        elements = graph.summarise(self.graph.model).weight_elements
        options = {**self.stated, "layout": self.graph.layout.name, "loading": list(self.notes)}
        sha256 = files.sha256_of(self.path)
        return Provenance(str(self.path.absolute()), sha256, elements, options, versions(), now())


def read_foreign(path: Path | str, load: LoadOptions | None, run: Run) -> ForeignModel:
    """Read an ONNX file that has no spec of detrt.

    Facts come from, in this order: options, the sidecar, what lies beside the file (config.json and the image processor that
    optimum writes), the file. Each that the file does not settle is in the notes.

    Args:
        load: layout, family, labels, resize, preprocess, mean and std; other fields are refused.
        run: (file, input name -> array) -> output name -> array; used where the file does not say how many queries it has.

    Raises:
        GraphError: no ONNX file, or one of no layout that detrt knows.
        SpecError, SourceError: facts that nothing says, with the options that would; or that do not fit the file.
    """
    from ..graph.layouts import recognise

    path, usual = Path(path), LoadOptions()
    load = load or usual
    for name in ("tokenizer", "trust_remote_code", "queries", "decoder_layers", "no_masks"):
        if getattr(load, name) != getattr(usual, name):
            raise SpecError(f"`{name}` says how a checkpoint is read, and '{path}' is an ONNX file; leave it out")
    model = graph.load(path)
    beside = path.with_name(path.name + SIDECAR)
    sidecar = OnnxSidecar.read(beside) if beside.is_file() else OnnxSidecar()
    names = ("layout", "family", "resize", "preprocess", "mean", "std")
    stated = {name: value for name in names if (value := getattr(load, name)) is not None}
    sidecar = replace(sidecar, **stated)
    if load.labels is not None:
        stated["labels"] = str(load.labels.absolute())
    foreign = recognise(model, str(path), sidecar.layout, sidecar.tensors)
    if not foreign.queries or (not foreign.classes and foreign.layout.name != "rt-detr"):
        usual = parse_size(sidecar.resize, "resize") if sidecar.resize and ":" not in sidecar.resize else (640, 640)
        foreign = foreign.with_shapes(run(path, foreign.feeds(usual)), str(path))
    if load.labels_start is not None:
        stated["labels_start"] = load.labels_start
    return _ForeignReader(path, foreign, sidecar, load.labels, stated).read()


class _ForeignReader:
    """The facts of one file, and the notes on their origin."""

    def __init__(
        self, path: Path, foreign: ForeignGraph, sidecar: OnnxSidecar, labels: Path | None, stated: Mapping[str, Any]
    ) -> None:
        self._path, self._foreign, self._sidecar, self._labels, self._stated = path, foreign, sidecar, labels, stated
        layout = foreign.layout
        self._unknown: list[SpecError | SourceError] = []
        self._notes = [f"layout {layout}, as {layout.exporters} export it: {layout.about}"]
        # As `verify` has it for the folder on the other side; their graph is that model.
        same = [row.name for row in BY_NAME.values() if row.upstream is not None and row.upstream.name == sidecar.family]
        if same:
            self._sidecar = replace(sidecar, family=same[0])
        elif sidecar.family is not None:
            check_one_of("`family`", sidecar.family, BY_NAME, SpecError)

    def read(self) -> ForeignModel:
        layout = self._foreign.layout.name
        config = self._config()
        family = self._fact(lambda: self._family(config), _unnamed(layout))
        names = self._fact(lambda: self._class_names(config), {})
        given = self._fact(lambda: self._input(family, config), None)
        if given is None or self._unknown:
            raise self._refusal()
        classes = max((self._foreign.classes, *(i + 1 for i in names))) if not self._foreign.classes else self._foreign.classes
        if layout == "transformers":
            classes -= family.activation == "softmax"
        queries = self._foreign.queries
        select = {"transformers": family.select, "ultralytics": "query"}.get(layout, "topk")
        activation = family.activation if layout == "transformers" else "sigmoid"
        most = queries if layout != "transformers" or family.max_detections is None else family.max_detections
        in_graph = layout == "rt-detr"
        decode = DecodeSpec(activation, select, queries, classes, min(most, queries * classes), in_graph=in_graph)
        if layout == "transformers":
            self._notes.append(f"scores: {activation} of the logits, best by {select}, as of {family.title}")
        if self._foreign.batch is not None:
            self._notes.append(f"the graph takes a batch of {self._foreign.batch} and no other")
        spec = ModelSpec(family.name, given, decode, names, name=self._path.stem, origin=OWN)
        return ForeignModel(self._path, self._foreign, spec, tuple(self._notes), self._stated)

    def _fact(self, find: Callable[[], _Fact], otherwise: _Fact) -> _Fact:
        """A fact; where it cannot be told the reason is kept, so that one refusal has all of them."""
        try:
            return find()
        except (SpecError, SourceError) as error:
            self._unknown.append(error)
            return otherwise

    def _refusal(self) -> SpecError | SourceError:
        if len(self._unknown) == 1:
            return self._unknown[0]
        start = f"'{self._path}'"
        reasons = [
            str(error).removeprefix(start).removeprefix(f" (layout {self._foreign.layout.name})").strip()
            for error in self._unknown
        ]
        return SpecError(f"{start}: " + "; ".join(f"({number}) {reason}" for number, reason in enumerate(reasons, 1)))

    def _config(self) -> Any:
        """The configuration that optimum writes beside a file of the layout "transformers"; None where there is none."""
        folder = self._path.parent
        if self._foreign.layout.name != "transformers" or not (folder / "config.json").is_file():
            return None
        from .hub import read_config, require_transformers

        raw = read_config(folder)
        if self._sidecar.family is None and raw["model_type"] not in by_model_type():
            raise SpecError(
                f"'{folder / 'config.json'}' has model_type {raw['model_type']!r}, which detrt does not know; give `family` with a "
                "family whose post-processing it has (see: `info(families=True)`)"
            )
        try:
            return require_transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise SourceError(f"'{folder / 'config.json'}' cannot be read: {one_line(error, 300)}") from None

    def _family(self, config: Any) -> Family:
        """The row of the family; of a layout that does not need it a row of its own."""
        name, layout = self._sidecar.family, self._foreign.layout.name
        origin = "as stated"
        if name is None and config is not None:
            name, origin = by_model_type()[config.model_type].name, "by the config.json beside the file"
        if name is None:
            name = next((row.name for row in BY_NAME.values() if layout in row.layouts), None)
            origin = "by its layout"
        if name is None and layout == "transformers":
            rows = sorted(row.name for row in BY_NAME.values() if not row.text)
            raise SpecError(
                f"'{self._path}' (layout transformers) does not say how its logits become scores; put the config.json of its "
                f"checkpoint beside it, or give `family` with one of {', '.join(rows)}"
            )
        if name is None:
            return _unnamed(layout)
        if BY_NAME[name].text:
            raise SpecError(
                f"`family={name}` takes a prompt, for which detrt reads no ONNX file of other exporters; export its checkpoint"
            )
        self._notes.append(f"family {name}, {origin}")
        return BY_NAME[name]

    def _by_column(self, stored: Any, classes: int | None, origin: str) -> dict[int, str]:
        """Names by column of the head: of a list, by the option where the head has more columns."""
        start = self._stated.get("labels_start")
        if isinstance(stored, Mapping):
            return dict(stored)
        if start is None and classes and len(stored) == classes - 1:
            raise SpecError(
                f"{origin} has {number_of(len(stored), 'name')} in a list, and '{self._path}' has {number_of(classes, 'column')}; say which column the first name is for "
                "with `labels_start=0` or `labels_start=1`, or name their ids"
            )
        return dict(enumerate(stored, start or 0))

    def _class_names(self, config: Any) -> dict[int, str]:
        """Class names by id."""
        classes = self._foreign.classes
        stored: Any = self._sidecar.labels
        origin = f"the sidecar '{self._path.name}{SIDECAR}'"
        if isinstance(stored, Mapping):
            try:
                stored = {int(key): value for key, value in stored.items()}
            except ValueError:
                raise SpecError(f"{origin}: labels must have class ids as keys; got {sorted(stored)[:3]}") from None
        if not stored and config is not None and config.id2label:
            stored, origin = {int(key): str(value) for key, value in config.id2label.items()}, "config.json"
        if not stored and "names" in self._foreign.metadata:
            stored, origin = _names_of(self._foreign.metadata["names"]), "the metadata of the file"
        if self._labels is not None:
            from .labels import count_labels, read_labels

            start = self._stated.get("labels_start")
            names = read_labels(self._labels, classes or count_labels(self._labels, start), start)
            self._notes.append(f"{number_of(len(names), 'class name')} of '{self._labels}'")
            return names
        if stored:
            found = self._by_column(stored, classes, origin)
            if classes and max(found) >= classes:
                raise SpecError(
                    f"{origin} names {number_of(len(found), 'class')} (ids up to {max(found)}), but '{self._path}' has {classes}; give those of "
                    "this model with `labels=FILE`"
                )
            self._notes.append(f"{number_of(len(found), 'class name')} of {origin}")
            return found
        if not classes:
            raise SpecError(
                f"'{self._path}' does not say how many classes it has nor their names; give them with `labels=FILE`, one per line, "
                f"or in the sidecar '{self._path.name}{SIDECAR}'"
            )
        names, note = choose(classes, ref=str(self._path))
        self._notes.append(note)
        return names

    def _input(self, family: Family, config: Any) -> InputSpec:
        foreign, sidecar = self._foreign, self._sidecar
        if (sidecar.mean is None) != (sidecar.std is None):
            raise SpecError("give both `mean` and `std`, or neither")
        given = self._resized(family, config)
        names = ("mean", "std", "rescale", "resample")
        given = replace(given, **{name: value for name in names if (value := getattr(sidecar, name)) is not None})
        if foreign.size_hw is not None and given.size_hw != foreign.size_hw:
            height, width = foreign.size_hw
            raise SpecError(
                f"'{self._path}' takes images of {height}x{width}, and preprocessing makes {given.height}x{given.width}; give "
                f"`resize={height}x{width}`, or the graph that belongs to it"
            )
        self._notes.append(f"images: {preprocessing_words(given)}")
        return given

    def _resized(self, family: Family, config: Any) -> InputSpec:
        """Size and normalisation; without those of an image processor beside the file, which only optimum writes."""
        foreign, sidecar = self._foreign, self._sidecar
        dynamic = foreign.size_hw is None
        if foreign.layout.name == "transformers":
            return self._like_a_checkpoint(family, config)
        if sidecar.preprocess not in (None, FAMILY_DEFAULT):
            raise SpecError(f"`preprocess` must be {FAMILY_DEFAULT}; got {sidecar.preprocess!r}")
        mean, std = self._fact(lambda: self._normalisation(family), _NEUTRAL)
        if sidecar.resize is None and dynamic:
            raise SpecError(
                f"'{self._path}' takes images of any size; give the one that the model was trained at with `resize=HEIGHTxWIDTH`"
            )
        size = foreign.size_hw
        if sidecar.resize is not None:
            if ":" in sidecar.resize:
                raise SpecError(
                    f"`resize={sidecar.resize}` keeps the aspect ratio, and images of the layout {foreign.layout.name} are "
                    "stretched; give `resize=HEIGHTxWIDTH`"
                )
            size = parse_size(sidecar.resize, "resize")
        assert size is not None
        return InputSpec("stretch", *size, mean=mean, std=std, mask=foreign.mask, dynamic=dynamic)

    def _normalisation(self, family: Family) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation that the exporter of the layout documents; refused where it has several."""
        if self._sidecar.mean is not None:
            return _NEUTRAL
        layout = self._foreign.layout.name
        if layout == "rf-detr":
            return IMAGENET_MEAN, IMAGENET_STD
        if layout == "ultralytics":
            return _NEUTRAL
        stated = BY_NAME.get(self._sidecar.family or "")
        if self._sidecar.preprocess is None and (stated is None or stated.normalize_differs):
            mean, std = (",".join(map(str, three)) for three in (IMAGENET_MEAN, IMAGENET_STD))
            raise SpecError(
                f"'{self._path}' (layout {layout}) does not say how its images are normalised; give `preprocess=family-default` (RGB / "
                "255 and no more: RT-DETR, D-FINE, DEIM, and DEIMv2 with HGNetV2), or mean and standard deviation (DEIMv2 with DINOv3: "
                f"`mean={mean}`, `std={std}`)"
            )
        return (IMAGENET_MEAN, IMAGENET_STD) if family.normalize else _NEUTRAL

    def _like_a_checkpoint(self, family: Family, config: Any) -> InputSpec:
        """By the image processor beside the file, as of a checkpoint folder."""
        foreign, sidecar = self._foreign, self._sidecar
        folder = self._path.parent
        row = replace(family, mask=foreign.mask, dynamic=foreign.size_hw is None)
        if config is None and not isinstance(row.multiple_of, int):
            row = replace(row, multiple_of=1)
        names = ("resize", "preprocess")
        choices = {name: value for name in names if (value := getattr(sidecar, name)) is not None}
        return read_input_spec(folder, row, config, ref=str(self._path), **choices)


def _unnamed(layout: str) -> Family:
    """A row of its own for a layout that needs no family."""
    return Family(layout, "", layout, "sigmoid", "topk", None, "", normalize=False)


def _names_of(text: str) -> dict[int, str]:
    """Class names as ultralytics writes them: a Python dictionary of id to name as text."""
    try:
        found = ast.literal_eval(text)
        return {int(key): str(value) for key, value in (found.items() if isinstance(found, dict) else enumerate(found))}
    except (ValueError, SyntaxError, TypeError):
        return {}

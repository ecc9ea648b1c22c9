"""Command line options, generated from config dataclasses.

A field becomes an option through its metadata, a dictionary that the dataclass carries without knowing the command line:

    help: text of `--help`; fields without it are no options.
    panel: panel of `--help`; without it the first, unnamed one.
    flag: names of the option without dashes, e.g. "check/no-check" or "port p"; default: the name of the field.
    parse: text -> value; the option then takes text.
    many: whether the option may be repeated; the field is a tuple, and `parse` gives a tuple for each.
    min: smallest number.
    writes: what is written to the path, a key of `FORMATS`. All other paths are read.
    needs: {field: values}; the option is refused unless one of these fields has one of the values, or is given where there
        are no values. A comma-separated field has several. Fields that a command has no option for are not needed there.

A command takes a config class, `Given[config class]` where it makes the config itself, or `GivenBackends` or `GivenTuning` for the
configs of all backends, and `command` replaces them.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import typer

from ..backends.targets import BACKEND, TARGETS
from ..errors import DetrtError, PromptError
from ..spec import Triple, comma_separated, parse_size, parse_triple
from .spellings import spelled

if TYPE_CHECKING:
    from ..backends.target import Target
    from ..text.prompts import ImageQueries

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class Writes:
    """In the annotation of a parameter: that its path is written.

    format: a key of `FORMATS`. path: the parameter is a Path, in which "-" is not standard output.
    """

    format: str
    path: bool = False

    @property
    def text(self) -> bool:
        """Whether that is a text, and not an image, a graph or a folder."""
        return self.format in TEXTS

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Ends of the names of such files; the first is the usual one."""
        return FORMATS[self.format]


# What options write -> ends of its names: texts, and all. A graph may have the name of a folder. Data may be in a .txt, which any program reads
# as it is; a page, a figure, a graph and a folder are not what that name says.
TEXTS: dict[str, tuple[str, ...]] = {
    "JSON": (".json", ".txt"),
    "JSON lines": (".jsonl", ".json", ".ndjson", ".txt"),
    "CSV": (".csv", ".txt"),
    "HTML": (".html", ".htm"),
    "HTML or Markdown": (".html", ".htm", ".md", ".markdown"),
}
FORMATS = {
    **TEXTS,
    "figure": (".svg", ".png"),
    "graph": (".onnx",),
    "folder": (),
    "timing cache": (".cache",),
}
JSON, HTML, FIGURE, GRAPH, FOLDER = (Writes(name) for name in ("JSON", "HTML", "figure", "graph", "folder"))
Json = Annotated[str | None, typer.Option("--json", help="Results as JSON to this file; - is stdout."), JSON]
# Ends of names of other files that detrt reads or writes, beside images, videos and what backends run.
_OTHERS = {".tsv", ".parquet", ".yaml", ".yml", ".pdf", ".pt", ".pth", ".ckpt", ".safetensors"}


def check_name(flag: str, path: str, written: Writes, others: Mapping[str, Writes]) -> None:
    """Refuse a path whose name says another format than what is written there. others: of the other options, by flag.

    Raises:
        DetrtError: the name ends as those of another format that detrt knows.
    """
    from ..data.images import IMAGE_SUFFIXES, VIDEO_SUFFIXES

    suffix = Path(path).suffix.lower()
    known = (_OTHERS | IMAGE_SUFFIXES | VIDEO_SUFFIXES).union(*FORMATS.values(), *(row.suffixes for row in TARGETS))
    if suffix in written.suffixes or suffix not in known or (written.format == "folder" and os.path.isdir(path)):
        return
    fitting = [other for other, mark in others.items() if suffix in mark.suffixes]
    wanted = f"a name that ends in {' or '.join(written.suffixes)}" if written.suffixes else "the name of a folder"
    what = written.format if written.text else f"a {written.format}"
    raise DetrtError(
        f"{flag} writes {what}, and '{path}' has the name of another format, {suffix}; give {wanted}"
        + (f", or {' or '.join(fitting)} for {suffix}" if fitting else "")
    )


# Panels of `--help`, in their order.
PANELS = (None, "Cameras", "Size", "Precision", "Engine", "Checkpoint", "Prompt", "Cluster", "Advanced")


class Given(Generic[Config]):
    """The options of a config class, as they were given on the command line."""

    def __init__(self, config: type[Config], values: Mapping[str, Any], named: frozenset[str] = frozenset()) -> None:
        self._config = config
        self._values = dict(values)
        self._named = named

    def __getattr__(self, name: str) -> Any:
        """The value of an option, by the name of its field."""
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __contains__(self, name: str) -> bool:
        """Whether the command line names the option of this field."""
        return name in self._named

    def flags(self) -> list[tuple[str, str]]:
        """(option, field) of each option that the command line names."""
        return [(flag_of(one), one.name) for one in fields(self._config) if one.name in self._named]  # type: ignore[arg-type]

    def make(self, **changes: Any) -> Config:
        """The config; `changes` are values of further fields."""
        return self._config(**{**self._values, **changes})


class GivenBackends(dict[str, Given[Any]]):
    """Name of a backend -> the options of what is built for it, as they were given on the command line."""


class GivenTuning(dict[str, Given[Any]]):
    """Name of a backend -> the options of running with it, as they were given on the command line."""

    def arguments(self) -> dict[str, Any]:
        """`SessionOptions.tuning`. Raises EngineError: a value that is not allowed."""
        made = [given.make() for given in self.values()]
        return {one.name: value for config in made for one in fields(config) if (value := getattr(config, one.name)) is not None}


# What stands for the configs of all backends -> (whether a backend has one, its class).
_OF_BACKENDS: dict[Any, tuple[Callable[[Target], bool], Callable[[Target], type]]] = {
    GivenBackends: (lambda row: bool(row.config), lambda row: row.config_class()),
    GivenTuning: (lambda row: bool(row.tuned_by), lambda row: row.tuning_class()),
}


def _configs(hint: Any) -> dict[str, type]:
    """The config classes that a parameter stands for, each under a name."""
    if hint in _OF_BACKENDS:
        has, config_of = _OF_BACKENDS[hint]
        return {target.name: config_of(target) for target in TARGETS if has(target)}
    config = get_args(hint)[0] if get_origin(hint) is Given else hint
    return {"": config} if hasattr(config, "__dataclass_fields__") else {}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A function that takes config classes, as typer takes it: with one option for each of their fields."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, dict[str, type]] = {}
    parameters: list[inspect.Parameter] = []
    options: dict[str, Field[Any]] = {}
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if not (configs := _configs(hint)):
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = configs
        for config in configs.values():
            types = get_type_hints(config)
            for one in fields(config):
                if "help" in one.metadata:
                    assert one.name not in options, f"two options {one.name}"
                    options[one.name] = one
                    parameters.append(_parameter(one, types[one.name]))
    parameters.sort(key=lambda one: PANELS.index(options[one.name].metadata.get("panel") if one.name in options else None))

    @functools.wraps(function)
    def run(context: typer.Context, **values: Any) -> None:
        named = frozenset(name for name in values if _is_named(context, name))
        parsed = {name: values[name] for name in options}
        for name, option in options.items():
            value, parse = values[name], option.metadata.get("parse")
            if value is None:
                parsed[name] = option.default if option.default is not MISSING else option.default_factory()  # type: ignore[misc]
            elif isinstance(value, list):
                parsed[name] = tuple(value) if parse is None else tuple(part for text in value for part in parse(text))
            elif parse is not None and isinstance(value, str):
                parsed[name] = parse(value)
        for name in values:
            if name in named and name in options and (needs := options[name].metadata.get("needs")):
                _refuse_idle(options, name, values[name], {other: values[other] for other in needs if other in values})
        arguments = {name: value for name, value in values.items() if name not in options}
        for name, configs in groups.items():
            given = {}
            for key, config in configs.items():
                own = {o.name: parsed[o.name] for o in fields(config) if o.name in options}
                given[key] = Given(config, own, named.intersection(own))
            wanted = get_origin(hints[name]) is Given
            many = hints[name] if hints[name] in _OF_BACKENDS else None
            arguments[name] = many(given) if many else given[""] if wanted else given[""].make()
        function(**arguments)

    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    run.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (context, *parameters)}
    return run


def outputs_of(function: Callable[..., Any]) -> dict[str, Writes]:
    """Parameter -> what a command writes to its path."""
    hints = get_type_hints(function, include_extras=True)
    marks = ((name, mark) for name, hint in hints.items() for mark in getattr(hint, "__metadata__", ()))
    return {name: replace(mark, path=_takes_path(hints[name])) for name, mark in marks if isinstance(mark, Writes)}


def _takes_path(hint: Any) -> bool:
    kind = get_args(hint)[0]  # of Annotated
    return Path in (kind, *get_args(kind))


def paths_in(values: Any) -> Iterator[str]:
    """Files and folders on this machine that the value of a parameter names: itself, those of a pattern, and what stands behind
    `ckpt:` and `NAME=`."""
    for value in values if isinstance(values, (list, tuple)) else (values,):
        if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
            continue
        text = str(value)
        for path in dict.fromkeys((text, text.partition(":")[2], text.partition("=")[2])):
            if path and os.path.exists(path):
                yield path
        if glob.has_magic(text):
            yield from glob.iglob(text, recursive=True)


def option_of(config: type, name: str) -> Any:
    """The annotation of a command's parameter that is one field of a config class."""
    (one,) = (one for one in fields(config) if one.name == name)
    return _parameter(one, get_type_hints(config)[name]).annotation


def flag_of(option: Field[Any]) -> str:
    """The name by which messages call an option."""
    return _names(option)[0].partition("/")[0]


def _names(option: Field[Any]) -> list[str]:
    """As typer takes them, e.g. ["--check/--no-check"] or ["--port", "-p"]."""
    words = option.metadata.get("flag", option.name.replace("_", "-")).split()
    return ["/".join(f"{'-' if len(name) == 1 else '--'}{name}" for name in word.split("/")) for word in words]


def _flag(options: Mapping[str, Field[Any]], name: str) -> str:
    return flag_of(options[name]) if name in options else "--" + name.replace("_", "-")


def _parameter(option: Field[Any], hint: Any) -> inspect.Parameter:
    """The parameter that typer reads."""
    data = option.metadata
    names = _names(option) if "flag" in data else []
    default = option.default_factory() if option.default_factory is not MISSING else option.default
    if data.get("many"):
        hint, default = (list[str] if "parse" in data else list[get_args(hint)[0]]) | None, None  # type: ignore[misc]
    elif "parse" in data:
        hint, default = (str, default) if isinstance(default, str) else (str | None, None)  # type: ignore[assignment]
    elif hint is bool and not names:
        names = ["--" + option.name.replace("_", "-")]
    info = typer.Option(*names, help=spelled(data["help"], by_rule=True), rich_help_panel=data.get("panel"), min=data.get("min"))
    annotation = Annotated[(hint, info, *((Writes(data["writes"]),) if "writes" in data else ()))]  # type: ignore[valid-type]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _is_named(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_idle(options: Mapping[str, Field[Any]], name: str, value: Any, others: Mapping[str, Any]) -> None:
    """Raise DetrtError where an option that is given would have no effect with the values of `others`, which it needs."""
    needs = options[name].metadata["needs"]
    if not others or any(_fits(value, needs[other]) for other, value in others.items()):
        return
    shown = "" if isinstance(value, (bool, list)) else f" {value}"
    wanted = [f"{_flag(options, other)} {' or '.join(needs[other])}".strip() for other in others]
    flag = flag_of(options[name])
    if value is False:
        flag = _names(options[name])[0].partition("/")[2]
    raise DetrtError(f"{flag}{shown} has no effect without {' or '.join(wanted)}; add that, or leave it out")


def _fits(value: Any, allowed: tuple[str, ...]) -> bool:
    if not allowed:
        return value not in (None, False, "")
    return isinstance(value, str) and bool({part.strip() for part in value.split(",")} & set(allowed))


# Metadata of the fields `tile` and `overlap` of every command that detects in tiles.
TILE = {
    "help": "Detect in tiles of this size, 640 or HEIGHTxWIDTH, and in the whole image.",
    "panel": "Size",
    "parse": functools.partial(parse_size, flag="tile"),
}
OVERLAP = {"help": "Part of a tile that neighbours share (0.2).", "panel": "Size", "needs": {"tile": ()}}


def parse_sizes(text: str) -> tuple[tuple[int, int], ...]:
    """Comma-separated sizes; see `parse_size`."""
    return tuple(parse_size(part) for part in text.split(","))


@dataclass(frozen=True, slots=True)
class SizeOptions:
    """Input size of a graph and of what is built from it.

    size: (height, width) of each size, in pixels. height, width: (min, opt, max) in pixels. Empty and None: the model's own.

    Raises:
        DetrtError: both forms, or one side alone.
    """

    size: tuple[tuple[int, int], ...] | None = field(
        default=None,
        metadata={
            "help": "Fixed input size: 640 or HEIGHTxWIDTH; for compiled packages several, comma-separated.",
            "panel": "Size",
            "parse": parse_sizes,
        },
    )
    height: Triple | None = field(
        default=None,
        metadata={
            "help": "Input height: 640, or MIN,OPT,MAX for a range.",
            "panel": "Size",
            "parse": functools.partial(parse_triple, flag="height"),
        },
    )
    width: Triple | None = field(
        default=None,
        metadata={
            "help": "Input width: 640, or MIN,OPT,MAX for a range.",
            "panel": "Size",
            "parse": functools.partial(parse_triple, flag="width"),
        },
    )

    def __post_init__(self) -> None:
        if self.size and (self.height is not None or self.width is not None):
            raise DetrtError("give --size, or --height and --width, not both")
        if (self.height is None) != (self.width is None):
            raise DetrtError("give both --height and --width (or --size), or neither")

    @property
    def ranges(self) -> tuple[Triple | None, Triple | None]:
        """(height, width) as (min, opt, max); None where several sizes or none are given."""
        if self.size and len(self.size) == 1:
            height, width = self.size[0]
            return (height,) * 3, (width,) * 3
        return self.height, self.width

    @property
    def several(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of each size, where there are several."""
        return self.size if self.size is not None and len(self.size) > 1 else ()

    @property
    def fixed(self) -> tuple[int, int] | None:
        """(height, width) of a graph of one size; None: symbolic."""
        height, width = self.ranges
        if height is None or width is None or height[0] != height[2] or width[0] != width[2]:
            return None
        return height[0], width[0]


def parse_device(text: str) -> tuple[str, ...]:
    """Comma-separated devices; see `detrt.system.parse_devices`."""
    from ..system import parse_devices

    return parse_devices(text)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What runs a model, and on which devices: none is the backend's own, several are a worker process each."""

    backend: str = field(default="auto", metadata=BACKEND)
    device: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "cpu, cuda:0, or comma-separated devices with a worker process each: 0,1 or cuda:all or cpu,cpu.",
            "parse": parse_device,
        },
    )

    def one_device(self) -> str | None:
        """The device, or None. Raises DetrtError for several."""
        if len(self.device) > 1:
            raise DetrtError(f"--device takes one device here; got {','.join(self.device)}")
        return self.device[0] if self.device else None


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What to find, of a model that takes a prompt."""

    prompt: str | None = field(
        default=None, metadata={"help": "What to find, for prompted models: 'a cat. a remote control.'", "panel": "Prompt"}
    )
    prompt_file: Path | None = field(default=None, metadata={"help": "Text file with the prompt.", "panel": "Prompt"})
    classes_from: Path | None = field(
        default=None, metadata={"help": "Text file of class names, one per line, as the prompt.", "panel": "Prompt"}
    )
    task: str = field(
        default="",
        metadata={"help": "Task sentence, for models that take one; default: 'Detect NAMES.'", "panel": "Prompt"},
    )

    query_image: tuple[Path, ...] = field(
        default=(),
        metadata={
            "help": "Image of what to find, instead of words (OWL-ViT, OWLv2); may be repeated.",
            "panel": "Prompt",
            "many": True,
        },
    )

    def notes(self) -> list[str]:
        """What may be meant otherwise: the name of a file, and phrases between commas."""
        text = self.prompt
        if text is None or not text.strip():
            return []
        with contextlib.suppress(OSError, ValueError):  # a text that can be no name
            if Path(text).is_file():
                return [f"--prompt finds what its words say, and {text!r} is also a file; to read it: --prompt-file {text}"]
        parts = comma_separated(text)
        if len(parts) > 1 and "." not in text:
            return [f"{text!r} is one phrase, because full stops end phrases; for several: --prompt '{'. '.join(parts)}.'"]
        return []

    def read(self) -> str | list[str] | ImageQueries | None:
        """The prompt; None where none is given.

        Raises:
            PromptError: more than one is given, or a file that cannot be used.
        """
        from ..text.prompts import ImageQueries, read_class_file, read_prompt_file

        given = {"--prompt": self.prompt, "--prompt-file": self.prompt_file, "--classes-from": self.classes_from}
        given["--query-image"] = self.query_image or None
        named = [option for option, value in given.items() if value is not None]
        if len(named) > 1:
            raise PromptError(f"{' and '.join(named)} say what to find more than once; give one of them")
        if self.query_image:
            return ImageQueries(self.query_image)
        if self.prompt_file is not None:
            return read_prompt_file(self.prompt_file)
        return self.prompt if self.classes_from is None else read_class_file(self.classes_from)

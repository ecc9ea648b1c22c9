"""Reading and writing of ONNX files, with the ModelSpec in their metadata."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import GraphError, MissingPackageError
from ..files import what_it_is, writing
from ..spec import ModelSpec, read_spec_file, spec_beside
from .external import data_locations

if TYPE_CHECKING:
    import onnx

SPEC_KEY = "detrt.spec"  # of the spec in the metadata_props of a file

# Weights of this many bytes are written around protobuf, which builds a message in buffers that double: five times its size in all.
_LARGE_BYTES = 1 << 16

# Protobuf refuses messages of 2 GiB; weights go to a file beside the graph before that.
MAX_INLINE_BYTES = 2_000_000_000


def _onnx() -> object:
    try:
        import onnx
    except ImportError:
        raise MissingPackageError("onnx", "export", "reading or writing ONNX graphs") from None
    return onnx


def load(path: Path | str, *, weights: bool = True) -> onnx.ModelProto:
    """Read an ONNX file; every node gets a name of its own (`name_nodes`).

    Raises:
        GraphError: missing, empty, truncated or not ONNX, or its external weights are missing.
    """
    onnx = _onnx()
    path = Path(path)
    if not path.is_file():
        raise GraphError(f"there is no ONNX file '{path}'; check the path, or create one with: `export(MODEL, output=OUT)`")
    if path.stat().st_size == 0:
        raise GraphError(f"'{path}' is empty (0 bytes); export it again")
    try:
        model = onnx.load(str(path), load_external_data=weights)  # type: ignore[attr-defined]
    except FileNotFoundError as error:
        raise GraphError(f"'{path}' keeps its weights in another file that is missing: {error}") from None
    except Exception as error:
        # onnx raises protobuf's own DecodeError, ValidationError or TypeError, by file and version.
        what = what_it_is(path) or f"not a complete ONNX file ({type(error).__name__}: {error}); export it again"
        raise GraphError(f"'{path}' is {what}") from None
    if not model.graph.node:
        raise GraphError(f"'{path}' contains no graph: truncated or not ONNX; export it again")
    name_nodes(model)
    return model


def name_nodes(model: onnx.ModelProto) -> None:
    """Give nodes without a name, or with that of an earlier node, one of their own, in place.

    What is written in place of a node, and what is known of it, such as its precision, is found by its name.
    """
    taken: set[str] = {""}
    counts: Counter[str] = Counter()
    for index, node in enumerate(model.graph.node):
        name = wanted = node.name or f"/{node.op_type}_{index}"
        while name in taken:
            counts[wanted] += 1
            name = f"{wanted}.{counts[wanted]}"
        taken.add(name)
        if name != node.name:
            node.name = name


def save(model: onnx.ModelProto, path: Path | str) -> None:
    """Write atomically; weights of 2 GB and more go to `<name>.data` beside the graph.

    Raises:
        OutputError: the file cannot be written.
    """
    onnx = _onnx()
    path = Path(path)
    content = to_bytes(model) if weight_bytes(model) < MAX_INLINE_BYTES else b""
    if 0 < len(content) < MAX_INLINE_BYTES:
        with writing(path) as temporary:
            temporary.write_bytes(content)
        return
    data_name = path.name + ".data"
    copy = type(model)()
    copy.CopyFrom(model)  # onnx removes the weights from the model that it writes
    with writing(path.with_name(data_name)) as data, writing(path) as graph:
        onnx.save_model(  # type: ignore[attr-defined]
            copy, str(graph), save_as_external_data=True, location=data.name, convert_attribute=False
        )
        # The data file is renamed after this block, so the graph must have its final name.
        raw = onnx.load(str(graph), load_external_data=False)  # type: ignore[attr-defined]
        for tensor in raw.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = data_name
        graph.write_bytes(raw.SerializeToString())


def weight_bytes(model: onnx.ModelProto) -> int:
    """Size of the weights inside a model: of all but a few megabytes. `ByteSize` serializes it, and fails where it is too large."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer)


def to_bytes(model: onnx.ModelProto, rest: onnx.GraphProto | None = None) -> bytes:
    """`SerializeToString` in the memory of one copy. rest: in place of all but the weights of the graph, see `without_weights`."""
    buffer = io.BytesIO()
    for piece in _pieces(model, without_weights(model) if rest is None else rest):
        buffer.write(piece)
    return buffer.getvalue()


def without_weights(model: onnx.ModelProto) -> onnx.GraphProto:
    """A copy of the graph without its weights, which are not copied."""
    return _without(model.graph, "initializer")


def _pieces(model: onnx.ModelProto, rest: onnx.GraphProto) -> Iterator[bytes]:
    """A model in protobuf's encoding: all but the graph, the graph but for its weights, and each weight."""
    graph = rest.SerializeToString()
    weights = []  # what comes before the values of each weight, and whether they follow
    length = len(graph)
    for tensor in model.graph.initializer:
        size = len(tensor.raw_data)
        large = size > _LARGE_BYTES
        start = (_without(tensor, "raw_data") if large else tensor).SerializeToString()
        start += _key(tensor, "raw_data", size) if large else b""
        start = _key(model.graph, "initializer", len(start) + size * large) + start
        length += len(start) + size * large
        weights.append((start, large))
    yield _without(model, "graph").SerializeToString() + _key(model, "graph", length) + graph
    for tensor, (start, large) in zip(model.graph.initializer, weights, strict=True):
        yield start
        if large:
            yield tensor.raw_data


def _without(message: Any, name: str) -> Any:
    """A copy without one field, which is not copied."""
    copy = type(message)()
    for field, value in message.ListFields():
        if field.name == name:
            continue
        if hasattr(value, "extend"):
            getattr(copy, field.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(copy, field.name).CopyFrom(value)
        else:
            setattr(copy, field.name, value)
    return copy


def _key(message: Any, name: str, length: int) -> bytes:
    """What precedes the bytes of a field: its number, and their length as a varint."""
    key = [message.DESCRIPTOR.fields_by_name[name].number << 3 | 2]  # 2: length-delimited; numbers below 16 are one byte
    while length > 127:
        key.append(length & 127 | 128)
        length >>= 7
    return bytes([*key, length])


def data_files(path: Path | str) -> list[str]:
    """Names of the files beside an ONNX file that hold its external weights.

    Raises:
        GraphError: a file that is missing, or outside of the folder of the model.
    """
    path = Path(path)
    load(path, weights=False)
    names = data_locations(path)
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise GraphError(f"'{path}' keeps weights outside its own folder ('{name}'); refused")
        if not (path.parent / name).is_file():
            raise GraphError(f"'{path}' keeps its weights in '{name}', which is missing beside it")
    return names


def with_spec(model: onnx.ModelProto, spec: ModelSpec) -> onnx.ModelProto:
    """Write the spec into the metadata of a model, in place."""
    return with_metadata(model, {SPEC_KEY: spec.to_json()})


def with_metadata(model: onnx.ModelProto, entries: Mapping[str, str]) -> onnx.ModelProto:
    """Write entries into the metadata of a model, in place; they replace those of the same keys."""
    others = [(p.key, p.value) for p in model.metadata_props if p.key not in entries]
    del model.metadata_props[:]
    for name, text in [*others, *entries.items()]:
        model.metadata_props.add(key=name, value=text)
    return model


def read_metadata(model: onnx.ModelProto, key: str) -> str:
    """An entry of the model's metadata; "" where it has none."""
    return next((entry.value for entry in model.metadata_props if entry.key == key), "")


def find_spec(path: Path | str) -> ModelSpec | None:
    """The spec embedded in an ONNX file, or the whole spec beside it; None where there is neither.

    Raises:
        GraphError: not an ONNX file. SpecError: a damaged spec.
    """
    text = read_metadata(load(path, weights=False), SPEC_KEY)
    if text:
        return ModelSpec.from_json(text)
    sidecar = spec_beside(Path(path))
    return None if sidecar is None else read_spec_file(sidecar)


def read_spec(path: Path | str) -> ModelSpec:
    """As `find_spec`.

    Raises:
        GraphError: not an ONNX file, or one without a spec.
    """
    spec = find_spec(path)
    if spec is None:
        raise GraphError(
            f"'{path}' carries no detrt spec, so its preprocessing and labels are unknown; make a file with one from it with: "
            f"`export({path}, output=OUT.onnx)` (docs/guide/onnx-files.md)"
        )
    return spec


@dataclass(frozen=True, slots=True)
class GraphSummary:
    """nodes, operator -> count, weight elements and bytes, and name -> (dtype, shape) of inputs and outputs."""

    nodes: int
    operators: Mapping[str, int]
    weight_elements: int
    weight_bytes: int
    opset: int
    inputs: Mapping[str, tuple[str, tuple[int | str, ...]]]
    outputs: Mapping[str, tuple[str, tuple[int | str, ...]]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def described(self, side: str) -> tuple[Mapping[str, Any], ...]:
        """The "inputs" or "outputs" as the facts of an engine hold them: name, dtype and shape of each."""
        tensors: Mapping[str, tuple[str, tuple[int | str, ...]]] = getattr(self, side)
        return tuple({"name": name, "dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in tensors.items())


def summarise(model: onnx.ModelProto) -> GraphSummary:
    """Count nodes, operators and weights of a graph."""
    from onnx import helper

    from .nodes import DEFAULT_DOMAINS, default_opset

    elements = size = 0
    for tensor in model.graph.initializer:
        count = 1
        for side in tensor.dims:
            count *= side
        elements += count
        size += count * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    operators = Counter(
        f"{node.domain}.{node.op_type}" if node.domain not in DEFAULT_DOMAINS else node.op_type for node in model.graph.node
    )
    return GraphSummary(
        len(model.graph.node),
        dict(operators.most_common()),
        elements,
        size,
        default_opset(model),
        {value.name: tensor_type(value) for value in model.graph.input},
        {value.name: tensor_type(value) for value in model.graph.output},
    )


def tensor_type(value: onnx.ValueInfoProto) -> tuple[str, tuple[int | str, ...]]:
    """NumPy dtype name and shape; a symbolic axis is its name."""
    from onnx import helper

    tensor = value.type.tensor_type
    shape = tuple(d.dim_param or (d.dim_value if d.HasField("dim_value") else "?") for d in tensor.shape.dim)
    return helper.tensor_dtype_to_np_dtype(tensor.elem_type).name, shape

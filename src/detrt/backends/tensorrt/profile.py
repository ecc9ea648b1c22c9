"""The optimisation profile: min, opt and max shape of every symbolic network input.

An engine takes only shapes inside its profile, is tuned for `opt`, and needs device memory for `max`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import EngineError, SessionError
from ...spec import PIXEL_MASK, PIXEL_VALUES, TARGET_SIZES, InputSpec, ModelSpec, Triple, triple_text
from ...text.tensors import ATTENTION_MASK, AXES, FEATURES_AXIS, INPUT_IDS, LENGTH_AXES
from .config import DEFAULT_BATCH, EngineConfig

Profile = dict[str, dict[str, list[int]]]

# Which axis of an input means what. Axis 0 is the batch everywhere.
_AXES = {
    PIXEL_VALUES: {0: "batch", 2: "height", 3: "width"},
    PIXEL_MASK: {0: "batch", 1: "height", 2: "width"},
    TARGET_SIZES: {0: "batch"},
    **{name: {place: axis for place, axis in enumerate(axes) if axis != FEATURES_AXIS} for name, axes in AXES.items()},
}
_SIZES = ("batch", "height", "width")
# Class names that a text encoder encodes in one run.
NAMES_BATCH = (1, 16, 64)
_OTHER_AXES = {0: "batch"}


@dataclass(frozen=True, slots=True)
class NetworkTensor:
    """An input or output after parsing. shape: -1 is symbolic; dimensions: its names, "" where it has none."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    dimensions: tuple[str, ...] = ()


def axis_names(tensor: str, rank: int) -> list[str]:
    """Names for a tensor's axes: "batch", "height", "width", else "<tensor>_<axis>"."""
    known = _AXES.get(tensor, _OTHER_AXES)
    return [known.get(axis, f"{tensor}_{axis}") for axis in range(rank)]


def plan_profile(inputs: Sequence[NetworkTensor], config: EngineConfig, spec: ModelSpec, *, one_phrase: bool = False) -> Profile:
    """Choose the profile of every input, static ones included.

    one_phrase: phrases with queries of their own run one at a time.

    Raises:
        EngineError: an axis that detrt does not know is symbolic, or a choice does not fit the graph
            or the model.
    """
    axes = (*_SIZES, *(LENGTH_AXES if spec.text is not None else ()))
    unknown = []
    for tensor in inputs:
        known = _AXES.get(tensor.name, _OTHER_AXES)
        unknown += [
            f"'{tensor.name}' axis {axis}"
            for axis, length in enumerate(tensor.shape)
            if length < 0 and known.get(axis) not in axes
        ]
    if unknown:
        raise EngineError(
            f"the graph has symbolic axes that detrt has no sizes for: {', '.join(unknown)}. It knows axis "
            f"0 of every input as the batch, height and width of {PIXEL_VALUES} and {PIXEL_MASK}, and tokens, "
            "phrases and classes of the text inputs. "
            "Export the model with fixed lengths for the others"
        )
    lengths = {name: _lengths_of(name, inputs, config, spec.input) for name in _SIZES}
    if spec.text is not None:
        kind = spec.text.prompt_kind
        lengths |= {axis: _text_lengths(axis, inputs, usual) for axis, usual in kind.lengths(spec, one_phrase=one_phrase).items()}
        if not kind.reads_ids and {tensor.name for tensor in inputs} == {INPUT_IDS, ATTENTION_MASK}:
            lengths["batch"] = NAMES_BATCH
    profile: Profile = {}
    for tensor in inputs:
        known = _AXES.get(tensor.name, _OTHER_AXES)
        shapes: dict[str, list[int]] = {}
        for index, point in enumerate(("min", "opt", "max")):
            # A static axis keeps its own length even on an input that detrt does not know.
            shapes[point] = [lengths[known[axis]][index] if length < 0 else length for axis, length in enumerate(tensor.shape)]
        profile[tensor.name] = shapes
    return profile


def check_shapes(shapes: Mapping[str, Sequence[int]], profile: Mapping[str, tuple[tuple[int, ...], ...]]) -> None:
    """Compare the shapes of a run with the (min, opt, max) shapes that an engine was built for.

    Raises:
        SessionError: an axis is too short or too long; says which, and what would be allowed.
    """
    for tensor, shape in shapes.items():
        low, _, high = profile[tensor]
        for axis, (name, length) in enumerate(zip(axis_names(tensor, len(low)), shape, strict=True)):
            if low[axis] <= length <= high[axis]:
                continue
            allowed = f"{low[axis]}" if low[axis] == high[axis] else f"{low[axis]} to {high[axis]}"
            if name in ("batch", "height", "width"):
                todo = f"give another size, or build the engine again with a wider `{name}=MIN,OPT,MAX`"
            elif name in LENGTH_AXES:
                todo = f"give a prompt with {'more' if length < low[axis] else 'fewer'} {name}"
            else:
                name, todo = f"axis {axis}", "the model has no other size"
            raise SessionError(f"input '{tensor}' has {name} {length}; this engine takes {allowed} ({todo})")


def _lengths_of(axis: str, inputs: Sequence[NetworkTensor], config: EngineConfig, facts: InputSpec) -> Triple:
    """(min, opt, max) of one kind of axis over all inputs."""
    static: dict[int, str] = {}
    symbolic = False
    for tensor in inputs:
        for position, name in _AXES.get(tensor.name, _OTHER_AXES).items():
            # Axis 0 of an input that detrt does not know is a batch only where it is symbolic.
            if name != axis or position >= len(tensor.shape):
                continue
            if tensor.shape[position] < 0:
                symbolic = True
            elif tensor.name in _AXES:
                static.setdefault(tensor.shape[position], tensor.name)
    chosen: Triple | None = getattr(config, axis)
    if static:
        length, owner = next(iter(static.items()))
        if len(static) > 1:
            found = ", ".join(f"'{name}' {value}" for value, name in static.items())
            raise EngineError(f"the inputs disagree about the {axis}: {found}; the graph is damaged, export it again")
        if chosen is not None and chosen != (length, length, length):
            raise EngineError(
                f"the graph has a fixed {axis} of {length} (input '{owner}'); got {axis} {triple_text(chosen)}. "
                f"Leave that out, or export the model with a symbolic {axis}"
            )
        return (length, length, length)
    if axis == "batch":
        return chosen or DEFAULT_BATCH
    triple = chosen or _default_side(axis, facts)
    if symbolic:
        wrong = [value for value in triple if value % facts.multiple_of]
        if wrong:
            near = tuple(max(1, round(value / facts.multiple_of)) * facts.multiple_of for value in triple)
            raise EngineError(
                f"{axis} must be a multiple of {facts.multiple_of} for this model; got {triple_text(triple)}; "
                f"the nearest is {triple_text(near)}"
            )
    return triple


def _text_lengths(axis: str, inputs: Sequence[NetworkTensor], usual: Triple) -> Triple:
    """(min, opt, max) of an axis of the prompt; a fixed one keeps its length."""
    fixed = {
        tensor.shape[place]
        for tensor in inputs
        for place, name in _AXES.get(tensor.name, {}).items()
        if name == axis and tensor.shape[place] >= 0
    }
    length = fixed.pop() if fixed else None
    return usual if length is None else (length, length, length)


def _default_side(axis: str, facts: InputSpec) -> Triple:
    """Sizes in pixels that the model's own preprocessing can make.

    "stretch", "fit" and padding to one size make one size. "shortest_edge" and "max_size" make portraits and landscapes, so
    both sides go up to the longest edge. The short side drops below `shortest_edge` when the longest edge limits a wide
    image; a quarter of it allows images up to about 6.7 : 1 at 800 / 1333.
    """
    usual = facts.height if axis == "height" else facts.width
    if facts.one_size:
        return (usual, usual, usual)
    step = facts.multiple_of
    shortest, longest = facts.shortest_edge, facts.longest_edge
    if facts.resize == "max_size":
        shortest = longest = facts.max_height if axis == "height" else facts.max_width
    assert shortest is not None  # InputSpec holds this
    longest = longest or 2 * shortest
    largest = -(-longest // step) * step
    smallest = max(32, shortest // 4)
    smallest = max(step, smallest // step * step)
    largest = max(largest, usual)
    return (min(smallest, usual), usual, largest)

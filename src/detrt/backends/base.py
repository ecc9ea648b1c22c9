"""The interface of the backends: a `Session` runs a model on NumPy arrays, and its `SessionInfo` describes it.

PyTorch, ONNX Runtime, OpenVINO, TensorRT and TorchInductor sessions have the same interface, so that detect, verify, bench and
serve do not depend on what runs the model. `FakeSession` ships for tests of anything built on a Session.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..bundle import EngineFacts
from ..data.postprocess import Candidates, DetectionFilter, decode
from ..data.preprocess import BatchPlan, SizeHW
from ..data.raw_image import LoadedImage
from ..detections import Detections
from ..errors import ClosedSessionError, PromptError, SessionError, SpecError
from ..spec import PIXEL_MASK, PIXEL_VALUES, SELECTION, TARGET_SIZES, ModelSpec, TensorInfo, TextSpec, text_inputs
from ..tasks import output_names
from ..tasks.reading_order import cuts_coordinates
from ..text.kinds import EncodedPrompt
from ..text.tensors import CLASS_FEATURES, TEXT_ENCODER_INPUTS

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..graph.view import GraphView
    from .gpu.decoder import GpuDecoder

# The run of a shape that is captured as a CUDA graph: a capture takes as long as several runs, so shapes that come once have none.
CAPTURE_AT = 3
Feeds = Mapping[str, NDArray]
Outputs = dict[str, NDArray]
Shape = tuple[int, ...]


class Choices(NamedTuple):
    """What a run chose: the indices of its top-k selections, and of a model that cuts coordinates to integers (PP-DocLayoutV2) those, in
    graph order; `cuts` is None for other models."""

    selections: Sequence[NDArray]
    cuts: Sequence[NDArray] | None = None


def no_prompt(
    name: str = "this model", instead: str = "choose among them with `classes`, or use a model that takes one"
) -> PromptError:
    """What a prompt for a model of fixed classes is answered with. instead: what to do."""
    return PromptError(f"{name} has fixed classes and takes no prompt; {instead}")


@dataclass(frozen=True)
class SessionInfo:
    """Facts about an open model.

    Attributes:
        backend: name of the row in `targets.TARGETS` that runs it, or "function": a Python function, see `FakeSession`.
        name: for people, reports and state files: "torch-cpu", "onnxruntime-cuda", "tensorrt-rtx", ...
        device: "cpu" or "cuda:N"; of OpenVINO also "xpu:N" (an Intel GPU) and "npu".
        inputs, outputs: its tensors with their dtypes; an axis is a length, or the name of a symbolic axis.
        path: the file of the model, or None.
        min_batch, max_batch: batch sizes that it takes; max_batch None: any.
        sizes: (height, width) of each size that it was compiled for, if there are several.
        profile: of an engine: input name -> its smallest, optimal and largest shape.
        facts: of the sidecar of an engine or package; `facts_by_size`: of each of `sizes`.
        gpu_name, compute_capability: of the GPU of an engine; compute_capability e.g. 89.
        parallel: number of concurrent batches, enqueued with `start`; 1: `run` only.
        text: of a model that takes a prompt and has none bound; None: fixed classes.
        takes_query_images: whether `ImageQueries` are prompts of it.
        runs_graph: it runs the ONNX graph of `path` as it is, whose tensors can be read by their names.
        compiled: by its backend from the checkpoint, with a spec of its own.
        few_lengths: each new combination of input shapes costs time, so that prompts are padded to few lengths.
        notes: for people: why this session was chosen, and its limitations.
    """

    backend: str
    name: str
    device: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    path: Path | None = None
    min_batch: int = 1
    max_batch: int | None = None
    sizes: tuple[SizeHW, ...] = ()
    profile: Mapping[str, tuple[Shape, ...]] = field(default_factory=dict)
    facts: EngineFacts | None = None
    facts_by_size: Mapping[SizeHW, EngineFacts] = field(default_factory=dict)
    gpu_name: str = ""
    compute_capability: int | None = None
    parallel: int = 1
    text: TextSpec | None = None
    takes_query_images: bool = False
    runs_graph: bool = False
    compiled: bool = False
    few_lengths: bool = False
    notes: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """All notes as one text."""
        return "; ".join(self.notes)

    @property
    def precision(self) -> str:
        """What an engine or a package was built with, e.g. "fp16"; "" if unknown."""
        return "" if self.facts is None else str(self.facts.precision)

    @property
    def pixel_shape(self) -> tuple[int | str, ...]:
        """Shape of `pixel_values`, (batch, 3, height, width); () if the model takes none."""
        return next((info.shape for info in self.inputs if info.name == PIXEL_VALUES), ())

    @property
    def fixed_batch(self) -> int | None:
        """The only batch size that the graph takes; None if the axis is symbolic."""
        first = next((info.shape for info in self.inputs), ()) if not self.pixel_shape else self.pixel_shape
        return first[0] if first and isinstance(first[0], int) and first[0] > 0 else None


class PendingOutputs(Protocol):
    """Outputs of a batch that a device works on."""

    def outputs(self) -> Outputs | Candidates:
        """Wait for them."""


class ImageRunner(Protocol):
    """Takes images instead of tensors: resizes them, runs the model and selects candidates on its device."""

    def submit(self, images: Sequence[LoadedImage], plan: BatchPlan) -> PendingOutputs:
        """Enqueue a batch of images, (H, W, 3) uint8 RGB or raw; `plan`: their sizes.

        Raises:
            ImageError: an array that is not an image.
        """

    def stage_times(self, images: Sequence[LoadedImage], plan: BatchPlan, repeats: int) -> dict[str, list[float]]:
        """Milliseconds of the steps of a batch, see `GpuRunner.stage_times`."""

    def decoder(self) -> GpuDecoder:
        """A decoder of JPEG files and videos on the same device."""


@runtime_checkable
class Session(Protocol):
    """Runs one model. The arrays that `run` returns belong to the caller.

    Attributes:
        prompts: those that are bound: one for all images, or one for each image of a batch; () for none.
    """

    spec: ModelSpec
    prompts: tuple[EncodedPrompt, ...]

    @property
    def info(self) -> SessionInfo: ...

    @property
    def inputs(self) -> tuple[TensorInfo, ...]: ...

    @property
    def outputs(self) -> tuple[TensorInfo, ...]: ...

    @property
    def image_runner(self) -> ImageRunner | None:
        """Runs images on the device of the model; None: images are preprocessed on the CPU."""

    @property
    def tells_selections(self) -> bool:
        """Whether `selections` can say what a run chose."""

    @property
    def takes_selections(self) -> bool:
        """Whether `run` can be given what to choose."""

    def run(self, feeds: Feeds, force: Choices | None = None) -> Outputs:
        """Outputs of a batch. Raises SessionError.

        force: what the model chooses, instead of what its own scores say. Outputs that end in GIVEN_SCORES and BEST_SCORES are the scores
        of what it was given and of what it would choose, where the backend tells them.
        """

    def selections(self, feeds: Feeds) -> tuple[Outputs, Choices]:
        """Outputs of a batch, and what the model chose for them. Raises SessionError."""

    def layer_times(self, repeats: int) -> dict[str, float]:
        """Median milliseconds of each layer in `repeats` runs at the shapes of the last one; {} where the backend has none."""

    def probed(self, view: GraphView, feeds: Feeds) -> Callable[[Sequence[str]], Mapping[str, NDArray]] | None:
        """A reader of tensors inside of what was built from a graph, by their names there; None: they cannot be read."""

    def start(self, feeds: Feeds) -> Outputs | PendingOutputs:
        """Enqueue a batch if `info.parallel` is above 1; else as `run`."""

    def bind(self, *prompts: Any, **options: Any) -> Session:
        """The model with a fixed prompt; see `PromptedSession.bind`. Raises PromptError: it has fixed classes."""

    def postprocess(self, outputs: Outputs | Candidates, sizes_hw: Sequence[SizeHW], keep: DetectionFilter) -> list[Detections]:
        """Outputs of `run` -> detections; see `detrt.data.postprocess.decode`."""

    def close(self) -> None: ...


_sessions: weakref.WeakSet[BaseSession] = weakref.WeakSet()  # of this process


def _keep_for_ever() -> None:
    """Let no session end what it holds in a forked process: that would wait for the threads of the other one, also when Python exits."""
    for session in _sessions:
        for value in vars(session).values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_keep_for_ever)


class BaseSession(ABC):
    """Common part of the sessions of all backends; each sets `_info`."""

    spec: ModelSpec
    prompts: tuple[EncodedPrompt, ...] = ()
    checkpoint_sha256: str = ""  # of the weights of a checkpoint
    _info: SessionInfo
    _process: int

    def __new__(cls, *args: Any, **choices: Any) -> Self:
        session = super().__new__(cls)
        session._process = os.getpid()
        _sessions.add(session)
        return session

    @property
    def _forked(self) -> bool:
        """Whether this process was forked with the session in it. Threads and GPU memory are not copied, so that a run would wait for ever."""
        return self._process != os.getpid()

    def _unusable(self) -> ClosedSessionError:
        """What a run of a session raises that is closed or `_forked`."""
        name = f"'{self.info.path.name}'" if self.info.path else self.info.name
        if not self._forked:
            return ClosedSessionError(f"the session of {name} is closed")
        return ClosedSessionError(
            f"{name} was opened before this process was forked, and its threads and GPU memory were not copied; open the model in this "
            "process, or start processes with multiprocessing.get_context('spawn')"
        )

    @property
    def info(self) -> SessionInfo:
        return self._info

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        return self._info.inputs

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        return self._info.outputs

    @property
    def image_runner(self) -> ImageRunner | None:
        return None

    def add_note(self, text: str) -> None:
        """Add to `info.notes`."""
        self._info = replace(self._info, notes=(*self._info.notes, text))

    @property
    def tells_selections(self) -> bool:
        return self._returned() is not None

    @property
    def takes_selections(self) -> bool:
        return False

    @abstractmethod
    def run(self, feeds: Feeds, force: Choices | None = None) -> Outputs: ...

    def selections(self, feeds: Feeds) -> tuple[Outputs, Choices]:
        returned = self._returned()
        if returned is None:
            raise SessionError(f"{self.info.name} cannot say what it selects")
        outputs = self.run(feeds)
        return outputs, Choices([outputs.pop(name) for name in returned])

    def _returned(self) -> list[str] | None:
        """The selections among the outputs, in graph order. None: the model was not built to return them, or cuts that it made beside
        them."""
        facts = self.info.facts
        if facts is None or not facts.options.get("return_selections") or cuts_coordinates(self.spec):
            return None
        numbers = [int(info.name.removeprefix(SELECTION)) for info in self.outputs if info.name.startswith(SELECTION)]
        return [f"{SELECTION}{number}" for number in sorted(numbers)]

    def _refuse(self, force: Choices | None) -> None:
        """Raise SessionError where a run is given selections that this backend cannot take."""
        if force is not None:
            raise SessionError(f"{self.info.name} cannot be given what to select")

    def layer_times(self, repeats: int) -> dict[str, float]:
        """Median milliseconds of each layer in `repeats` runs at the shapes of the last one; {} where the backend has none."""
        return {}

    def probed(self, view: GraphView, feeds: Feeds) -> Callable[[Sequence[str]], Mapping[str, NDArray]] | None:
        """A reader of tensors inside of what was built from a graph, by their names there; None: they cannot be read."""
        return None

    def start(self, feeds: Feeds) -> Outputs | PendingOutputs:
        return self.run(feeds)

    def bind(self, *prompts: Any, **options: Any) -> Session:
        raise no_prompt()

    def postprocess(self, outputs: Outputs | Candidates, sizes_hw: Sequence[SizeHW], keep: DetectionFilter) -> list[Detections]:
        return decode(
            outputs,
            self.spec,
            sizes_hw,
            threshold=keep.threshold,
            class_ids=keep.class_ids,
            max_detections=keep.max_detections,
            class_thresholds=keep.class_thresholds,
        )

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_feeds(inputs: tuple[TensorInfo, ...], feeds: Feeds) -> None:
    """Compare feeds with a session's inputs.

    Raises:
        SessionError: a missing or unknown name, another dtype, rank or fixed axis length; symbolic
            axes of one name with different lengths.
    """
    names = [info.name for info in inputs]
    missing, unknown = sorted(set(names) - set(feeds)), sorted(set(feeds) - set(names))
    if missing or unknown:
        raise SessionError(f"the model takes the inputs {names}; missing: {missing}, unknown: {unknown}")
    lengths: dict[str, int] = {}
    for info in inputs:
        array = feeds[info.name]
        if array.dtype != np.dtype(info.dtype):
            raise SessionError(f"input '{info.name}' must be {info.dtype}; got {array.dtype}")
        if array.ndim != len(info.shape):
            raise SessionError(f"input '{info.name}' must have shape {info.shape}; got {array.shape}")
        for axis, (expected, actual) in enumerate(zip(info.shape, array.shape, strict=True)):
            if isinstance(expected, str):
                expected = lengths.setdefault(expected, actual)
            if expected != actual:
                raise SessionError(
                    f"input '{info.name}' must have shape {info.shape}; got {array.shape} (axis {axis} must be {expected})"
                )


def is_query_encoder(inputs: tuple[TensorInfo, ...], outputs: tuple[TensorInfo, ...]) -> bool:
    """Whether a model with these inputs and outputs is an encoder of query images."""
    return {info.name for info in inputs} == {PIXEL_VALUES} and {info.name for info in outputs} == {CLASS_FEATURES}


def is_text_encoder(inputs: tuple[TensorInfo, ...]) -> bool:
    """Whether a model with these inputs is a text encoder."""
    return {info.name for info in inputs} == set(TEXT_ENCODER_INPUTS)


def check_spec(name: str, spec: ModelSpec, inputs: tuple[TensorInfo, ...], outputs: tuple[TensorInfo, ...]) -> None:
    """Compare the tensors of a model with what its spec promises; more outputs than that are fine, and inputs for selections.

    A model with a text part may be its detector or its text encoder.

    Raises:
        SpecError: other names, another dtype of the pixels, or a fixed size that the spec does not allow.
    """
    decoded = spec.decode.in_graph
    wants_in = [PIXEL_VALUES] + [PIXEL_MASK] * spec.input.mask + [TARGET_SIZES] * decoded + text_inputs(spec)
    wants_out = output_names(spec)
    has_in, has_out = [i.name for i in inputs if not i.name.startswith(SELECTION)], [o.name for o in outputs]
    if spec.text is not None and is_text_encoder(inputs):
        wants_in, wants_out = list(TEXT_ENCODER_INPUTS), list(spec.text.prompt_kind.encoder_outputs)
    if spec.text is not None and spec.text.query_encoder and is_query_encoder(inputs, outputs):
        wants_in, wants_out = has_in, has_out
    if set(has_in) != set(wants_in) or not set(wants_out) <= set(has_out):
        raise SpecError(
            f"{name} has the inputs {has_in} and outputs {has_out}; its spec promises {wants_in} and "
            f"{wants_out}. Give the spec that belongs to this file, or export it with: detrt export"
        )
    if PIXEL_VALUES not in has_in:
        return
    pixels = next(info for info in inputs if info.name == PIXEL_VALUES)
    if pixels.dtype != spec.input.dtype:
        raise SpecError(f"{name} takes '{PIXEL_VALUES}' as {pixels.dtype}, its spec says {spec.input.dtype}; give the right spec")
    fixed = pixels.shape[2:]
    for axis, side in zip(("height", "width"), fixed, strict=False):
        if isinstance(side, int) and not spec.input.dynamic and side != getattr(spec.input, axis):
            raise SpecError(
                f"{name} takes images of {axis} {side}, its spec says {getattr(spec.input, axis)}; give the right spec"
            )


class FakeSession(BaseSession):
    """A Session over a function, for tests: `FakeSession(spec, inputs, outputs, lambda feeds: {...})`.

    facts: other fields of its `SessionInfo`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        inputs: tuple[TensorInfo, ...],
        outputs: tuple[TensorInfo, ...],
        function: Callable[[Feeds], Outputs],
        max_batch: int | None = None,
        **facts: Any,
    ) -> None:
        self.spec = spec
        given = {"backend": "function", "name": "fake", "device": "cpu", **facts}
        self._info = SessionInfo(inputs=tuple(inputs), outputs=tuple(outputs), max_batch=max_batch, **given)
        self._function = function
        self.closed = False

    def run(self, feeds: Feeds, force: Choices | None = None) -> Outputs:
        self._refuse(force)
        if self.closed:
            raise self._unusable()
        check_feeds(self.inputs, feeds)
        return self._function(feeds)

    def close(self) -> None:
        self.closed = True

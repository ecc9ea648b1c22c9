"""Messages between the server process and its workers, over the protocol of `backends.worker_process`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.worker_process import Bulk
from ..data.tiles import Tiling
from ..detections import Detections
from ..errors import SessionError
from ..spec import ModelSpec, TensorInfo
from .config import ServeConfig, ServedModel
from .errors import Refused

# Of a request, whatever its form: characters of a prompt and of a name, names of a list, and detections of an image.
MAX_TILES = 128  # of an image, the whole image among them
MAX_PROMPT, MAX_NAME, MAX_NAMES, MAX_DETECTIONS = 20_000, 1000, 5000, 100_000


class ContentChanged(SessionError):
    """A worker cannot open what `Setup.pinned` says, because other content is stored now."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message to a worker: the models to open, and the device.

    pinned: name of a model -> the content that it must have, `ModelFacts.content`.
    """

    models: tuple[ServedModel, ...]
    device: str
    threads: int
    backend: str
    tuning: Mapping[str, Any]
    size_hw: tuple[int, int] | None
    max_batch: int
    max_pixels: int
    image_decoder: str
    image_formats: tuple[str, ...]
    max_prompt_runs: int
    pinned: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: ServeConfig, device: str) -> Setup:
        """That of a worker on one of the devices of a server."""
        return cls(
            models=config.models,
            device=device,
            threads=config.threads_on(device),
            backend=config.backend,
            tuning=config.tuning,
            size_hw=config.size,
            max_batch=config.max_batch,
            max_pixels=config.max_pixels,
            image_decoder=config.image_decoder,
            image_formats=config.image_formats,
            max_prompt_runs=config.max_prompt_runs,
        )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as a worker opened it.

    max_batch: the smaller of the server's and the model's. Of inputs, (height, width): size_hw, the usual one; only_hw, that of all
    images, where there is one besides the model's rule; sizes, those that it was built for, where there are several. run_s: seconds
    of a run with a full batch. content: digest of what was opened, see `serve.content`.
    """

    name: str
    spec: ModelSpec
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    backend: str
    max_batch: int
    size_hw: tuple[int, int]
    takes_prompt: bool
    takes_task: bool
    takes_query_images: bool
    note: str
    only_hw: tuple[int, int] | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    run_s: float = 0.0
    content: str = ""

    @property
    def takes(self) -> dict[str, bool]:
        """What a request may say beside images."""
        return {"prompt": self.takes_prompt, "task": self.takes_task, "query_images": self.takes_query_images}


@dataclass(frozen=True, slots=True)
class ImageTask:
    """An image to detect in.

    data: the content of an image file, or its pixels, (height, width, 3) RGB. prompt: a text, or class names. query_images: (name, content of the file) of what to find, instead. classes: names or ids to keep.
    as_detections: the answer has `Detections`, not JSON. tiling: of large images.
    """

    data: Bulk | NDArray[np.uint8]
    threshold: float
    classes: tuple[str | int, ...] | None = None
    max_detections: int | None = None
    prompt: str | tuple[str, ...] | None = None
    task: str = ""
    query_images: tuple[tuple[str | None, Bulk], ...] = ()
    as_detections: bool = False
    tiling: Tiling | None = None


@dataclass(frozen=True, slots=True)
class TensorTask:
    """Tensors for the inputs of a model, with a batch size of `rows`.

    outputs, id: of the answer, as in `kserve.InferRequest`.
    """

    feeds: Mapping[str, NDArray]
    rows: int
    outputs: tuple[tuple[str, bool], ...] = ()
    id: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    number: int
    model: str
    tasks: tuple[ImageTask | TensorTask, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """Nobody waits any more for these tasks of a batch, by their slots."""

    number: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a task.

    value: JSON of an image's detections, or the body of an inference response. head_length: of its JSON, where binary tensors follow.
    detections: instead of JSON, where the task asks for them.
    """

    value: Bulk
    head_length: int | None = None
    decode_ms: float = 0.0
    model_ms: float = 0.0
    found: int = 0
    detections: Detections | None = None


@dataclass(frozen=True, slots=True)
class Alive:
    """A worker that opens its models is not stuck; a reader can read."""


@dataclass(frozen=True, slots=True)
class Ready:
    models: tuple[ModelFacts, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """Results of a batch, in the order of its tasks. runs: images in each run of the model."""

    number: int
    results: tuple[Answer | Refused, ...]
    runs: tuple[int, ...] = ()

"""Images in, detections out, through any session."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .backends.base import Session
from .backends.prompted import BoundSession, PromptedSession
from .data.images import ImageSource, load_image
from .data.postprocess import check_threshold, decode
from .data.preprocess import SizeHW, check_size, group_by_size, nearest_size, preprocess, size_words
from .data.raw_image import Picture, as_array
from .detections import Detections
from .errors import ImageError, PromptError, SessionError, SpecError
from .spec import PIXEL_VALUES, ModelSpec
from .system import usable_cores
from .text.postprocess import TEXT_THRESHOLD
from .text.prompts import Prompt
from .text.tokenizer import Asked

if TYPE_CHECKING:
    from .backends.gpu.decoder import GpuDecoder

# What to look for: text with a dot behind each phrase, or a list of class names.
Prompts = str | Sequence[str] | Prompt
IMAGE_DECODERS = ("cpu", "gpu")
MOST_DECODERS, MOST_READERS = 8, 4  # threads that decode files for a GPU, and that read what a GPU decodes
AHEAD = 2  # batches that wait on a GPU while the results of one are read; the runner has memory for one more
# Waits for a batch that was begun.
Found = Callable[[], list[Detections]]


class Detector:
    """Finds objects: `Detector.open("bundle/")(["street.jpg"])`.

    session: what runs the model; the detector closes it.
    threshold: keep scores above it. classes: names or ids to keep, default all.
    batch_size: images a run, default: what the session was made for (its fixed or largest batch), else 1.
    size_hw: another (height, width) of the input, for models with a dynamic size.
    max_detections: keep at most so many for each image.
    resize_threads: threads that resize the images of a batch; more than one pays where the model runs on a GPU.
    on_device: resize and choose candidates on the GPU where the session can; the detections are the same.
    image_decoder: "cpu", or "gpu": JPEG files, whose pixels then differ a little, and videos are decoded by the GPU that
        runs the model. What it cannot decode is decoded on the CPU; `decoder.counts` tells how many.

    For models that take a prompt (see docs/guide/prompts.md):

    prompt: what to look for in all images; None: every call brings its own. A text gives its phrases as
        classes; a list of names is asked for in as many runs as it needs. task: for models that take one.
    phrases: "best" names a box by its best phrase, "tokens" by the tokens above `text_threshold` as
        published, "tokens-of-best" by those of its best sub-sentence.

    Raises:
        SpecError: unknown class names, or a size that the model cannot take.
        PromptError: a prompt for a model of fixed classes, classes for one that takes a prompt, or a bad prompt.
        SessionError: image_decoder is "gpu", and the session does not resize pictures on a GPU.
        ValueError: threshold, text_threshold, batch_size, max_detections, resize_threads or image_decoder out of range.
    """

    def __init__(
        self,
        session: Session,
        *,
        threshold: float = 0.5,
        batch_size: int | None = None,
        size_hw: SizeHW | None = None,
        classes: Sequence[str | int] | None = None,
        max_detections: int | None = None,
        resize_threads: int = 1,
        on_device: bool = True,
        image_decoder: str = "cpu",
        prompt: Prompts | None = None,
        task: str = "",
        phrases: str = "best",
        text_threshold: float = TEXT_THRESHOLD,
    ) -> None:
        check_threshold(threshold)
        check_threshold(text_threshold, "text_threshold")
        for name, value in (("batch_size", batch_size), ("max_detections", max_detections), ("resize_threads", resize_threads)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        check_image_decoder(image_decoder)
        self._model = session if isinstance(session, PromptedSession) else None
        if isinstance(session, BoundSession):
            self._model = session.model
        if not isinstance(session, PromptedSession):
            if prompt is not None or task or phrases != "best":
                raise PromptError(_NO_PROMPT)
        elif classes is not None:
            raise PromptError(
                "this model has no classes of its own to choose from with --classes (Python: classes=...); say what to find "
                "with --prompt or --classes-from (Python: prompt=...)"
            )
        elif prompt is not None:
            session = session.bind(prompt, task=task, phrases=phrases)
        self._task, self._phrases, self._text_threshold = task, phrases, text_threshold
        self.session = session
        self.spec = session.spec
        self.threshold = threshold
        self._pool = ThreadPoolExecutor(resize_threads, "detrt-resize") if resize_threads > 1 else None
        self.max_detections = max_detections
        self.class_ids: Collection[int] | None = None
        if classes is not None:
            self.class_ids = frozenset(self.spec.class_ids([str(name) for name in classes]))
        shape = next((info.shape for info in session.inputs if info.name == PIXEL_VALUES), ())
        self._fixed_batch = shape[0] if shape and isinstance(shape[0], int) and shape[0] > 0 else None
        # A session of several sizes lets every picture have its own.
        sizes: tuple[SizeHW, ...] = getattr(session, "sizes", ())
        self._sizes = sizes if size_hw is None else ()
        if sizes and size_hw is not None and tuple(size_hw) not in sizes:
            asked = size_words([size_hw])
            raise SpecError(f"--size {asked}: this bundle was compiled for {size_words(sizes)}; give one of them, or none")
        if size_hw is None and self.spec.input.dynamic and all(isinstance(side, int) for side in shape[2:]):
            size_hw = shape[2:] or None  # an engine of one size from a model of many
        if size_hw is not None:
            size_hw = (int(size_hw[0]), int(size_hw[1]))
        check_size(self.spec.input, size_hw)
        self.size_hw = size_hw
        self._loaders: ThreadPoolExecutor | None = None
        self._runner = getattr(session, "pictures", None) if on_device else None
        self.decoder: GpuDecoder | None = None
        if image_decoder == "gpu":
            if self._runner is None:
                raise SessionError(_NO_GPU_DECODING.format(session.backend))
            self.decoder = self._runner.decoder()
        limit = self._fixed_batch or session.max_batch
        self.batch_size = min(batch_size or limit or 1, limit or batch_size or 1)

    @classmethod
    def open(
        cls,
        ref: str | os.PathLike,
        *,
        device: str | None = None,
        backend: str | None = None,
        provider: str = "cpu",
        threads: int | None = None,
        spec: ModelSpec | None = None,
        trust_remote_code: bool = False,
        family: str | None = None,
        labels: str | os.PathLike | None = None,
        tokenizer: str | os.PathLike | None = None,
        **options: Any,
    ) -> Detector:
        """Open a bundle, ONNX file, engine or checkpoint; see `sessions.open_session` and `Detector`."""
        from .backends.open import open_session

        session = open_session(
            ref,
            backend=backend or "auto",
            provider=provider,
            device=device,
            threads=threads,
            spec=spec,
            trust_remote_code=trust_remote_code,
            family=family,
            labels=labels,
            tokenizer=tokenizer,
        )
        try:
            return cls(session, **options)
        except BaseException:
            session.close()
            raise

    def __call__(self, images: Sequence[ImageSource], prompts: Sequence[Prompts] | None = None) -> list[Detections]:
        """Detect in every image; the result has the same length and order.

        images: arrays (H, W, 3) uint8 RGB, or anything that `load_image` takes. prompts: one for each image,
        instead of the detector's; images with different prompts share a batch.

        Raises:
            ImageError: an image that cannot be read. SessionError: the model failed.
            PromptError: no prompt for a model that takes one, or a bad one.
        """
        if isinstance(images, (str, bytes, os.PathLike, np.ndarray)) or not isinstance(images, Iterable):
            raise TypeError(f"give a list of images, also for one: detector([image]); got {type(images).__name__}")
        return list(self.stream(images, prompts))

    def stream(self, images: Iterable[ImageSource], prompts: Iterable[Prompts] | None = None) -> Iterator[Detections]:
        """Detect in images as they come, in order; holds one batch of images in memory, and another on its way where
        the device resizes. prompts: see `__call__`."""
        source, asked = iter(images), self._asked(prompts)
        waiting: deque[Found] = deque()
        while chunk := self._loaded(list(itertools.islice(source, self.batch_size))):
            wanted = None if asked is None else list(itertools.islice(asked, len(chunk)))
            if wanted is not None and len(wanted) != len(chunk):
                raise PromptError("there are fewer prompts than images; give one for each image")
            waiting.append(self._chunk(chunk, wanted))
            if len(waiting) > self.ahead:
                yield from waiting.popleft()()
        for found in waiting:
            yield from found()
        if asked is not None and next(asked, None) is not None:
            raise PromptError("there are more prompts than images; give one for each image")

    def _loaded(self, images: list[ImageSource]) -> list[Any]:
        """Files of a batch are decoded side by side where a GPU would wait for them."""
        files = sum(not isinstance(image, (np.ndarray, Picture)) for image in images)
        load = _load if self.decoder is None else self.decoder.open
        if self._runner is None or files < 2:
            loaded = [load(image) for image in images]
        else:
            if self._loaders is None:
                self._loaders = ThreadPoolExecutor(min(MOST_DECODERS, usable_cores()), "detrt-decode")
            loaded = list(self._loaders.map(load, images))
        if self.decoder is None:
            return loaded
        pictures = self.decoder.pictures(loaded)
        for picture in pictures:
            if isinstance(picture, ImageError):
                raise picture
        return pictures

    @property
    def ahead(self) -> int:
        """How many batches `submit` may begin before their results are asked for."""
        return 0 if self._runner is None else AHEAD

    @property
    def planar(self) -> bool:
        """Whether frames of videos are best given in 4:2:0, as `pictures.YuvPicture`: their RGB is then made on the GPU."""
        return self._runner is not None

    def submit(self, images: Sequence[NDArray[np.uint8] | Picture]) -> Found:
        """Begin a batch of at most `batch_size` images (H, W, 3) uint8 RGB, or pictures that become that; the call of what
        comes back waits for it.

        Where the device resizes, the work goes on meanwhile; otherwise it is done here.

        Raises:
            As `__call__`.
        """
        self.check_prompt()
        return self._chunk(list(images), None)

    def check_prompt(self) -> None:
        """Raise PromptError where the model takes a prompt and the detector has none."""
        if self._model is not None and self.session is self._model:
            raise PromptError(
                "this model finds what a prompt names, and there is none; give --prompt 'a cat. a dog.', --prompt-file or "
                "--classes-from (Python: prompt=... or detector(images, prompts=[...]))"
            )

    def _asked(self, prompts: Iterable[Prompts] | None) -> Iterator[Asked] | None:
        if prompts is None:
            self.check_prompt()
            return None
        model = self._model
        if model is None:
            raise PromptError(_NO_PROMPT)
        if isinstance(prompts, (str, Prompt)):
            raise PromptError(f"give a list of prompts, one for each image; got one, {prompts!r}")
        return (model.ask(prompt, self._task) for prompt in prompts)

    def _chunk(self, images: list[NDArray[np.uint8] | Picture], asked: list[Asked] | None) -> Found:
        begun: list[tuple[list[int], Found]] = []
        sizes = [(image.shape[0], image.shape[1]) for image in images]
        for group, size_hw in self._groups(sizes):
            for part in [group] if asked is None else _sharing(group, asked):
                wanted = None if asked is None else [asked[i] for i in part]
                begun.append((part, self._batch([images[i] for i in part], wanted, size_hw)))

        def finished() -> list[Detections]:
            results = {i: found for part, finish in begun for i, found in zip(part, finish(), strict=True)}
            return [results[i] for i in range(len(images))]

        return finished

    def _groups(self, sizes: list[SizeHW]) -> list[tuple[list[int], SizeHW | None]]:
        """Indices of images that may share a batch, and the size of their input."""
        if not self._sizes:
            return [(group, self.size_hw) for group in group_by_size(sizes, self.spec, size_hw=self.size_hw)]
        groups: dict[SizeHW, list[int]] = {}
        for index, size in enumerate(sizes):
            groups.setdefault(nearest_size(size, self._sizes), []).append(index)
        return [(group, size) for size, group in groups.items()]

    def _batch(self, images: list[NDArray[np.uint8] | Picture], asked: list[Asked] | None, size_hw: SizeHW | None) -> Found:
        if self._runner is None or asked is not None:
            found = self._batch_here([as_array(image) for image in images], asked, size_hw)
            return lambda: found
        pending = self._runner.submit(images, size_hw, self._fixed_batch)
        sizes = [(image.shape[0], image.shape[1]) for image in images]

        def finished() -> list[Detections]:
            found = decode(
                pending.outputs(),
                self.spec,
                sizes,
                threshold=self.threshold,
                class_ids=self.class_ids,
                max_detections=self.max_detections,
            )
            bound = self.session
            return [bound.named(i, one) for i, one in enumerate(found)] if isinstance(bound, BoundSession) else found

        return finished

    def _batch_here(self, images: list[NDArray[np.uint8]], asked: list[Asked] | None, size_hw: SizeHW | None) -> list[Detections]:
        count = len(images)
        if self._fixed_batch:  # the model cannot run fewer: repeat the last image and forget its results
            images = images + [images[-1]] * (self._fixed_batch - count)
        session = self.session
        if asked is not None:
            assert self._model is not None
            same = all(one.prompt == asked[0].prompt for one in asked)
            filled = asked[:1] if same else asked + asked[-1:] * (len(images) - count)
            session = BoundSession(self._model, filled, phrases=self._phrases)
        batch = preprocess(images, session.spec, size_hw=size_hw, pool=self._pool)
        bound = session if isinstance(session, BoundSession) else None
        if bound is not None and bound.phrases != "best":
            found = bound.found(
                batch.feeds,
                batch.original_sizes_hw,
                threshold=self.threshold,
                text_threshold=self._text_threshold,
                max_detections=self.max_detections,
            )
        else:
            found = decode(
                session.run(batch.feeds),
                session.spec,
                batch.original_sizes_hw,
                threshold=self.threshold,
                class_ids=self.class_ids,
                max_detections=self.max_detections,
            )
        found = found[:count]
        return found if bound is None else [bound.named(i, one) for i, one in enumerate(found)]

    def close(self) -> None:
        """Release the model."""
        for pool in (self._pool, self._loaders):
            if pool is not None:
                pool.shutdown()
        self.session.close()

    def __enter__(self) -> Detector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _load(image: ImageSource | Picture) -> NDArray[np.uint8] | Picture:
    return image if isinstance(image, Picture) else load_image(image)


def check_image_decoder(name: str) -> None:
    """Raise ValueError where `name` is not in IMAGE_DECODERS."""
    if name not in IMAGE_DECODERS:
        raise ValueError(f"image_decoder must be one of {', '.join(IMAGE_DECODERS)}; got {name!r}")


_NO_GPU_DECODING = (
    "--image-decoder gpu (Python: image_decoder='gpu') is for models whose pictures a GPU resizes: a package of an NVIDIA GPU (--backend "
    "inductor), or ONNX Runtime with --provider cuda and PyTorch's CUDA build; this one runs with {}. Leave it out, or "
    "choose such a back end"
)
_NO_PROMPT = (
    "this model has fixed classes and takes no prompt; choose among them with --classes (Python: classes=[...]), or use a "
    "model that takes one"
)


def _sharing(group: list[int], asked: list[Asked]) -> list[list[int]]:
    """Split a group into those that can share a run: all, unless a list of names needs several runs."""
    if all(len(asked[i].parts) == 1 for i in group):
        return [group]
    split: list[list[int]] = []
    for i in group:
        same = next((part for part in split if asked[part[0]].prompt == asked[i].prompt), None)
        if same is None:
            split.append([i])
        else:
            same.append(i)
    return split

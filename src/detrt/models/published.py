"""transformers' own image processor and post-processing, which ours are compared with.

They read the checkpoint's folder themselves: a setting that our reader misses shows here and nowhere else. The Pillow variant
of a processor is taken where there is one, since Pillow's pixels are ours; RF-DETR's processor needs torchvision.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import files
from ..data.postprocess import decode
from ..data.preprocess import preprocess
from ..data.scenes.scene import draw_scene
from ..detections import Detections
from ..errors import GateError, MissingPackageError, number_of, one_line
from ..spec import PIXEL_MASK, PIXEL_VALUES, ModelSpec, TextSpec
from ..tasks import TASKS
from ..tasks.base import PublishedTask
from ..tasks.masks import Masks, mask_iou
from ..text.prompts import Prompt, with_last_dot
from .families import processors
from .hub import quiet, require_transformers
from .stock import TokenStock
from .wrapper import named_outputs

if TYPE_CHECKING:
    from .source import Source

# Float32 rounding of two implementations of the same steps, relative to the largest value.
PIXEL_TOLERANCE = 1e-5
# Fraction of pixels that may differ by a step of 8 bits where torchvision antialiases (SAM 3): Pillow rounds after each axis, torchvision
# once where the processor has no AVX2.
ROUNDED_ONCE = 0.25
# The same of scores, and of boxes in pixels, on equal outputs of the model.
SCORE_TOLERANCE, BOX_TOLERANCE_PX = 1e-5, 1e-2
_SORTED = 40  # detections whose order by successors is compared
MASK_IOU = 0.99  # lowest allowed of masks, of which rounding moves pixels at logit 0
CHECKED_SIZES = ((480, 640), (612, 405))
_TASKS = [task for task in TASKS if isinstance(task, PublishedTask)]


@dataclass(frozen=True, slots=True)
class ProcessingCheck:
    """Our preprocessing and post-processing compared with transformers'.

    oracle: its class that ours was compared with, "" where none was. pixels: largest difference of pixels, relative to the
    largest value. detections: how many were compared. note: why nothing, or not everything, was
    compared, or "".
    """

    oracle: str = ""
    pixels: float | None = None
    detections: int | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """The result as text."""
        if not self.oracle:
            return self.note
        compared = " and post-processing" if self.detections is not None else ""
        note = f"; {self.note}" if self.note else ""
        return f"pixels{compared} equal to transformers' {self.oracle}: {self.pixels:.1e} relative{note}"


def open_processor(file: Path | None) -> tuple[Any, str]:
    """(transformers' image processor, "") or (None, why there is none). file: of the processor of a checkpoint; None: none."""
    if file is None:
        return None, ""
    transformers = require_transformers()
    folder = file.parent
    try:
        with quiet(transformers):
            found = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    except (ImportError, OSError, ValueError, TypeError, LookupError) as error:
        if isinstance(error, ImportError) or "torchvision" in str(error):
            return None, "not compared with transformers' processor, which needs torchvision: install it to compare"
        return None, f"not compared with transformers' processor, which does not open it: {one_line(error, 200)}"
    row = processors().get(type(found).__name__.partition("ImageProcessor")[0])
    for package in row.needs if row is not None else ():
        if importlib.util.find_spec(package) is None:
            return None, f"not compared with transformers' processor, which needs {package}: install it to compare"
    return found, ""


def checked_images() -> list[NDArray[np.uint8]]:
    """Images of both orientations, and of a size that is a multiple of nothing."""
    return [draw_scene(index, size_hw=size).image for index, size in enumerate(CHECKED_SIZES)]


def pixel_error(processor: Any, spec: ModelSpec, images: Sequence[NDArray[np.uint8]]) -> float:
    """Largest relative difference between our pixels and those of transformers' processor, each image alone.

    Raises:
        GateError: another shape, another mask, or values that differ by more than rounding.
    """
    own = spec.with_input(normalize_in_graph=False, dtype="float32")
    name, worst = type(processor).__name__, 0.0
    for image in images:
        theirs = processor(images=image, return_tensors="np")
        ours = preprocess([image], own).feeds
        want, got = np.asarray(theirs[PIXEL_VALUES]), ours[PIXEL_VALUES]
        size = "x".join(map(str, image.shape[:2]))
        if want.shape != got.shape:
            raise GateError(
                f"preprocessing differs from transformers' {name}: an image of {size} (height x width) becomes "
                f"{got.shape[2]}x{got.shape[3]} here and {want.shape[2]}x{want.shape[3]} there"
            )
        if spec.input.mask and PIXEL_MASK in theirs and not np.array_equal(theirs[PIXEL_MASK], ours[PIXEL_MASK]):
            raise GateError(f"preprocessing differs from transformers' {name}: another padding mask for an image of {size}")
        if PIXEL_MASK in ours and PIXEL_MASK not in theirs:  # the graph fills the padding of EoMT
            got = np.where(ours[PIXEL_MASK][:, None] == 1, got, want)
        apart = np.abs(got - want)
        if spec.input.antialias and not name.endswith("Pil"):
            steps = (apart > PIXEL_TOLERANCE) & (apart <= 1.01 * spec.input.rescale / min(spec.input.std))
            apart = np.where(steps, 0, apart) if steps.mean() <= ROUNDED_ONCE else apart
        error = float(apart.max() / max(1.0, float(np.abs(want).max())))
        if not error <= PIXEL_TOLERANCE:
            raise GateError(
                f"preprocessing differs from transformers' {name}: pixels of an image of {size} by {error:.2g} (relative, allowed "
                f"{PIXEL_TOLERANCE}); ours are from {got.min():.3g} to {got.max():.3g}, theirs from {want.min():.3g} to "
                f"{want.max():.3g}"
            )
        worst = max(worst, error)
    return worst


def post_processing_count(source: Source, processor: Any, images: Sequence[NDArray[np.uint8]]) -> int:
    """Run the model on transformers' pixels, and compare its post-processing of the outputs with ours.

    Returns how many detections there were, from score 0 on.

    Raises:
        GateError: they differ.
    """
    import torch

    count = 0
    for image in images:
        size = image.shape[:2]
        with torch.inference_mode():
            # Pixels that are neither scaled nor normalised stay bytes, which no model of transformers takes.
            feeds = {
                k: v.float() if v.dtype == torch.uint8 else v for k, v in processor(images=image, return_tensors="pt").items()
            }
            outputs = source.module(**feeds)
        arrays = {name: tensor.float().numpy() for name, tensor in named_outputs(outputs, source.spec).items()}
        threshold = 0.0
        if source.spec.decode.reading_order == "successors":
            # transformers takes minutes to sort all queries of a model that is not sure.
            best = np.sort(decode(arrays, source.spec, [size], threshold=0.0)[0].scores)[-_SORTED - 1 :]
            threshold = float(best[:2].mean())
        theirs = processor.post_process_object_detection(outputs, threshold=threshold, target_sizes=torch.tensor([size]))[0]
        ours = decode(arrays, source.spec, [size], threshold=threshold)[0]
        found = _as_detections(theirs, size)
        difference = _difference(ours, found)
        if not difference and ours.masks is not None and _has_masks(processor):
            difference = mask_difference(ours, processor, outputs)
        if difference:
            raise GateError(f"post-processing differs from transformers' {type(processor).__name__}: {difference}")
        count += len(found)
    return count


def check_processing(source: Source, say: Callable[[str], None] = lambda text: None) -> ProcessingCheck:
    """Compare a checkpoint's preprocessing, and without a prompt its post-processing, with transformers' own.

    Raises:
        GateError: they differ.
    """
    processor, why_not = open_processor(source.processor)
    if processor is None:
        return ProcessingCheck(note=why_not)
    say("comparing with transformers' processor")
    images = checked_images()
    pixels = pixel_error(processor, source.spec, images)
    # That of EoMT returns masks without boxes, at scores of the image's size.
    boxes = source.spec.text is None and hasattr(processor, "post_process_object_detection")
    count = post_processing_count(source, processor, images[:1]) if boxes else None
    note = "its post-processing has no masks to compare ours with" if source.spec.has_masks and not _has_masks(processor) else ""
    return ProcessingCheck(type(processor).__name__, pixels, count, note)


def _has_masks(processor: Any) -> bool:
    """Whether transformers' processor makes instance masks of outputs; those of detectors do not."""
    return hasattr(processor, "post_process_instance_segmentation")


def _as_detections(found: Mapping[str, Any], size_hw: tuple[int, int]) -> Detections:
    """What transformers' post-processing returned, best score first, clipped to the image as ours are."""
    import torch

    scores = found["scores"].float().numpy()
    order = np.argsort(-scores, kind="stable")
    height, width = size_hw
    boxes = np.clip(found["boxes"].float().numpy()[order], 0, np.array([width, height, width, height], np.float32))
    ids = found["labels"].numpy().astype(np.int64)[order]
    document = {
        name: found[key].numpy()[order]
        for name, key in ((task.field, task.published) for task in _TASKS)
        if isinstance(found.get(key), torch.Tensor)  # polygons of masks are a list
    }
    return Detections(boxes, scores[order], ids, tuple(map(str, ids)), (int(height), int(width)), **document)


def _difference(ours: Detections, theirs: Detections) -> str:
    """What differs, as text; "" for nothing. Equal scores may come in any order, and ours may go on below theirs."""
    ours = ours[np.argsort(-ours.scores, kind="stable")]
    count = len(theirs)
    if len(ours) < count:
        return f"{number_of(len(ours), 'detection')} here, {count} there"
    worst = np.abs(ours.scores[:count] - theirs.scores).max(initial=0.0)
    if not worst <= SCORE_TOLERANCE:
        return f"scores by {worst:.2g} (allowed {SCORE_TOLERANCE})"
    if len(ours) > count and count and ours.scores[count] > theirs.scores[-1] + SCORE_TOLERANCE:
        return f"{number_of(len(ours), 'detection')} here, {count} there"
    near = np.abs(ours.scores[:, None] - theirs.scores[None]) <= SCORE_TOLERANCE
    near &= ours.class_ids[:, None] == theirs.class_ids[None]
    apart = np.abs(ours.boxes_xyxy[:, None] - theirs.boxes_xyxy[None]).max(-1)
    closest = np.where(near, apart, np.inf).min(0, initial=np.inf)
    # Which of several equal scores at the cut are kept is not defined.
    bad = np.flatnonzero(~(closest <= BOX_TOLERANCE_PX) & (theirs.scores > theirs.scores[-1:] + SCORE_TOLERANCE))
    if len(bad):
        i = int(bad[0])
        return (
            f"{len(bad)} of {number_of(count, 'detection')}, first class {theirs.class_ids[i]} with score {theirs.scores[i]:.4f}, whose box is "
            f"{', '.join(f'{side:.1f}' for side in theirs.boxes_xyxy[i])} there"
        )
    partner = np.where(near, apart, np.inf).argmin(0)
    known = closest <= BOX_TOLERANCE_PX
    for task in _TASKS:
        mine, others = getattr(ours, task.field), getattr(theirs, task.field)
        if others is not None and (why := task.difference(mine[partner][known], others[known], BOX_TOLERANCE_PX)):
            return why
    return ""


def mask_difference(ours: Detections, processor: Any, outputs: Any) -> str:
    """What differs between our masks and those of transformers' processor for the same outputs, as text; "" for nothing."""
    assert ours.masks is not None
    theirs = processor.post_process_instance_segmentation(
        outputs, threshold=0.0, target_sizes=[ours.image_size_hw], return_binary_maps=True
    )[0]
    masks = Masks.from_array(theirs["segmentation"].numpy())
    for i, found in enumerate(theirs["segments_info"]):  # it leaves out empty masks
        near = (np.abs(ours.scores - found["score"]) <= SCORE_TOLERANCE) & (ours.class_ids == found["label_id"])
        best = mask_iou(masks.take([i]), ours.masks.take(np.flatnonzero(near))).max(initial=0.0)
        if best < MASK_IOU:
            return f"a mask of class {found['label_id']} with score {found['score']:.4f}: IoU {best:.4f} (at least {MASK_IOU})"
    if (filled := int((ours.masks.areas > 0).sum())) != len(masks):
        return f"{number_of(filled, 'mask')} here, {len(masks)} there"
    return ""


@dataclass(frozen=True, slots=True)
class PublishedPrompt:
    """A prompt as transformers' processors take it. text: of all phrases, with a dot at its end; names: class id -> phrase.

    spans: (start, end) of each phrase in the text. task: the sentence of OmDet-Turbo; "" is its own.
    """

    text: str
    names: Mapping[int, str]
    spans: Sequence[tuple[int, int]]
    task: str = ""

    @classmethod
    def of(cls, prompt: Prompt) -> PublishedPrompt:
        spans = [(phrase.start, phrase.end) for phrase in prompt.phrases]
        return cls(with_last_dot(prompt.text), prompt.names, spans, prompt.task)


class PublishedDetector:
    """A checkpoint with transformers' own processor before and after it: what its users have without detrt.

    prompt: of a model that takes one; one that runs in several chunks is none that transformers can run.

    Raises:
        MissingPackageError: the processor of OmDet-Turbo or SAM 3 without torchvision.
    """

    def __init__(self, source: Source, image_processor: Any, prompt: PublishedPrompt | None = None) -> None:
        self._source, self._images, self._prompt = source, image_processor, prompt
        self._both = None if source.spec.text is None else processor_with_text(source, image_processor)
        self._stock: Any = None if source.family.stock is None else source.family.stock()()

    def run(self, image: NDArray[np.uint8]) -> PublishedOutputs:
        """Outputs of the model for (height, width, 3) uint8 RGB pixels, as transformers' processor prepares them."""
        import torch

        with torch.inference_mode():
            if self._both is None:
                feeds = [self._images(images=image, return_tensors="pt")]
            else:
                feeds = self._stock.runs(self._both, image, self._prompt)
            return PublishedOutputs([self._source.module(**one) for one in feeds], feeds, image.shape[:2])

    def detections(self, outputs: PublishedOutputs) -> Detections:
        """All detections, best score first, by transformers' post-processing; see `Stock.found`."""
        import torch

        if self._both is None:
            target = torch.tensor([outputs.size_hw])
            found = self._images.post_process_object_detection(outputs.tensors[0], threshold=0.0, target_sizes=target)[0]
        else:
            found = self._stock.found(self._both, outputs, self._prompt, self._source.spec.decode.max_detections)
        names = self._source.spec.labels if self._prompt is None else self._prompt.names
        made = _as_detections(found, outputs.size_hw)
        return replace(made, labels=tuple(names.get(int(i), str(i)) for i in made.class_ids))

    def by_tokens(self, outputs: PublishedOutputs, text_threshold: float) -> Detections:
        """Detections as the processor of Grounding DINO returns them: the score is the best of all tokens, the label is the text of
        those above `text_threshold`, and the class id is 0."""
        import torch

        assert isinstance(self._stock, TokenStock)
        found = self._stock.by_tokens(self._both, outputs, text_threshold)
        order = torch.argsort(found["scores"].float(), descending=True, stable=True).tolist()
        made = _as_detections({**found, "labels": torch.zeros(len(order), dtype=torch.int64)}, outputs.size_hw)
        return replace(made, labels=tuple(found["text_labels"][i] for i in order))


@dataclass(frozen=True, slots=True)
class PublishedOutputs:
    """What transformers' model returned for one image, and its feeds, a run after the other; size_hw: of the image."""

    tensors: Sequence[Any]
    feeds: Sequence[Mapping[str, Any]]
    size_hw: tuple[int, int]


def processor_with_text(source: Source, image_processor: Any) -> Any:
    transformers = require_transformers()
    text = source.spec.text
    assert text is not None and source.tokenizer is not None
    tokenizer = _tokenizer(source.tokenizer, text)
    try:
        return getattr(transformers, source.family.text_processor)(image_processor, tokenizer)
    except ImportError:
        raise MissingPackageError("torchvision", "", f"transformers' processor of {source.family.title}") from None


def _tokenizer(content: bytes, text: TextSpec) -> Any:
    """transformers' wrapper of a checkpoint's tokenizer."""
    transformers = require_transformers()
    with files.scratch() as folder:
        path = folder / "tokenizer.json"
        path.write_bytes(content)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(text.pad_id)
    tokenizer.model_max_length = text.max_tokens  # to which some processors pad
    return tokenizer

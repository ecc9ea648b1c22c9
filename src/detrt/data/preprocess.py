"""Reference of InputSpec: RGB images -> the arrays that a model is fed. NumPy and Pillow only.

Every other runtime is tested against this module; `tests/data/preprocess_cases.json` holds its
answers for a few images.

How an image gets its size:

    stretch        exactly (height, width); the aspect ratio changes
    shortest_edge  the short side becomes `shortest_edge`, the long side at most `longest_edge`.
                   With a mask, the batch is padded right and bottom to its largest sides, rounded up
                   to `multiple_of`. Without one a model cannot tell padding from image, so the
                   sides are rounded down to `multiple_of` instead and only images of equal size
                   share a batch (`group_by_size`). A `Detector` keeps images with masks apart as
                   well, where their padded sizes differ (`plan_batches`): what a model finds in an
                   image changes with the padding that a larger neighbour brings.
    fit            the largest size of the same aspect ratio inside (height, width), then padded
    max_size       the largest size of the same aspect ratio inside (max_height, max_width), sides rounded
                   down; padding as shortest_edge
    square         exactly (height, width), with a black square around the image; see `detrt.data.square`

With `pad`, shortest_edge and max_size pad every batch to (height, width), with a mask or without one.

Padding is zero in the numbers that reach the backbone. Where the graph normalises, the tensor is
padded with raw zeros and the graph multiplies the normalised pixels by the mask; where the caller
normalises, padding comes after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import ImageError, SpecError
from ..spec import PIXEL_MASK, PIXEL_VALUES, RESAMPLES, TARGET_SIZES, InputSpec, ModelSpec
from .interpolate import interpolate
from .raw_image import LoadedImage, RawImage
from .square import resize_in_square

SizeHW = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Which images share a batch, and their sizes, (height, width) each.

    Attributes:
        indices: of the images; the last one repeated where the model takes a fixed number.
        count: how many of them are not repeated.
        originals_hw: sizes before resizing. resized_hw: inside the tensor; the rest is padding. tensor_hw: of the tensor.
    """

    indices: tuple[int, ...]
    count: int
    originals_hw: tuple[SizeHW, ...]
    resized_hw: tuple[SizeHW, ...]
    tensor_hw: SizeHW


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """Feeds of a session, and the sizes that post-processing needs.

    feeds: pixel_values (n, 3, H, W) uint8 or float32; pixel_mask (n, H, W) int64 where the model has
        a mask; target_sizes (n, 2) int64 where decoding is in the graph.
    original_sizes_hw: size of every image before resizing.
    resized_sizes_hw: size of the image inside the tensor; the rest is padding.
    """

    feeds: dict[str, NDArray]
    original_sizes_hw: tuple[SizeHW, ...]
    resized_sizes_hw: tuple[SizeHW, ...]


def preprocess(
    images: Sequence[LoadedImage],
    spec: ModelSpec,
    *,
    size_hw: SizeHW | None = None,
    pool: Executor | None = None,
    plan: BatchPlan | None = None,
) -> PreparedBatch:
    """Resize, normalise and pad a batch of images, (H, W, 3) uint8 RGB or raw.

    Args:
        size_hw: another input size than the spec's, for models with symbolic height and width. A model that resizes by its
            shortest edge then fits images inside it and pads to exactly that size.
        pool: threads that share the images of the batch; Pillow and NumPy let them run at the same time.
        plan: their sizes, where `plan_batches` has computed them already.

    Raises:
        ImageError: no image, or one that is not (H, W, 3) uint8 with pixels in it.
        SpecError: size_hw does not suit the model, or images of different resized sizes share a
            batch of a model without a mask (see `group_by_size`).
    """
    given = spec.input
    count = len(images) if plan is None else plan.count
    arrays: list[NDArray[np.uint8]] = []
    for index, given_image in enumerate(images[:count]):
        image: object = given_image.rgb() if isinstance(given_image, RawImage) else given_image
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            got = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
            raise ImageError(
                f"image {index} of the batch must be an array (height, width, 3) of uint8 RGB; got {got}; "
                "detrt.data.images.load_image makes one from files, bytes, PIL images and other arrays"
            )
        if 0 in image.shape:
            raise ImageError(f"image {index} of the batch has no pixels: shape {image.shape}")
        arrays.append(image)
    if plan is None:
        plan = plan_batch([(array.shape[0], array.shape[1]) for array in arrays], given, size_hw)
    arrays += arrays[-1:] * (len(images) - count)
    (height, width), resized = plan.tensor_hw, plan.resized_hw

    batch = np.zeros((len(images), 3, height, width), given.dtype)

    def fill(slot: NDArray, image: NDArray[np.uint8], size: SizeHW) -> None:
        if given.resize == "square":
            resized = resize_in_square(image, size)
        else:
            resized = resize(image, size, given.resample) if given.antialias else interpolate(image, size, given)
        pixels = resized.transpose(2, 0, 1)
        slot[:, : size[0], : size[1]] = pixels if given.normalize_in_graph else normalize(pixels, given)

    list((map if pool is None else pool.map)(fill, batch, arrays, resized))

    feeds: dict[str, NDArray] = {PIXEL_VALUES: batch}
    if given.mask:
        mask = np.zeros((len(images), height, width), np.int64)
        for row, (h, w) in zip(mask, resized, strict=True):
            row[:h, :w] = 1
        feeds[PIXEL_MASK] = mask
    if spec.decode.in_graph:
        feeds[TARGET_SIZES] = np.array(plan.originals_hw, np.int64)
    return PreparedBatch(feeds, plan.originals_hw, resized)


def plan_batch(sizes_hw: Sequence[SizeHW], given: InputSpec, size_hw: SizeHW | None = None) -> BatchPlan:
    """The sizes of images that share a batch.

    Raises:
        ImageError: no image. SpecError: as `preprocess`.
    """
    if not len(sizes_hw):
        raise ImageError("preprocess needs at least one image; got an empty list")
    check_size(given, size_hw)
    resized = tuple(resized_size(size, given, size_hw) for size in sizes_hw)
    indices = tuple(range(len(sizes_hw)))
    return BatchPlan(indices, len(indices), tuple(sizes_hw), resized, _canvas(resized, given, size_hw))


def plan_batches(
    sizes_hw: Sequence[SizeHW],
    given: InputSpec,
    *,
    size_hw: SizeHW | None = None,
    sizes: Sequence[SizeHW] = (),
    split: Callable[[list[int]], list[list[int]]] | None = None,
    fill: int | None = None,
) -> list[BatchPlan]:
    """Split images into batches: by the size of their tensor, so that none depends on its neighbours, then by `split`.

    Args:
        sizes_hw: of the images.
        size_hw: as `preprocess` takes it.
        sizes: input sizes that the model was built for, instead of `size_hw`; an image gets the `nearest_size`.
        split: divides the indices of images of one size further, e.g. by prompt.
        fill: repeat the last image of a batch up to so many.

    Raises:
        SpecError: as `preprocess`.
    """
    inputs = [nearest_size(size, sizes) if sizes else size_hw for size in sizes_hw]
    for size in set(inputs):
        check_size(given, size)
    resized = [resized_size(size, given, wanted) for size, wanted in zip(sizes_hw, inputs, strict=True)]
    groups: dict[SizeHW, list[int]] = {}
    for index, (size, wanted) in enumerate(zip(resized, inputs, strict=True)):
        groups.setdefault(_padded([size], given, wanted), []).append(index)
    plans = []
    for group in groups.values():
        for some in [group] if split is None else split(group):
            indices = (*some, *[some[-1]] * ((fill or 0) - len(some)))
            inside = tuple(resized[i] for i in indices)
            tensor_hw = _canvas(inside, given, inputs[some[0]])
            plans.append(BatchPlan(indices, len(some), tuple(sizes_hw[i] for i in indices), inside, tensor_hw))
    return plans


def group_by_size(sizes_hw: Sequence[SizeHW], spec: ModelSpec, *, size_hw: SizeHW | None = None) -> list[list[int]]:
    """Split images into groups that the model can run as one batch: lists of indices, by first appearance.

    One group for all, except for models that keep the aspect ratio and have no mask. Where there is a mask, the results of an
    image change with the padding that a larger neighbour brings; `plan_batches` keeps them apart.
    """
    if not needs_equal_sizes(spec.input):
        return [list(range(len(sizes_hw)))] if len(sizes_hw) else []
    groups: dict[SizeHW, list[int]] = {}
    for index, original in enumerate(sizes_hw):
        groups.setdefault(resized_size(original, spec.input, size_hw), []).append(index)
    return list(groups.values())


def tensor_size(original_hw: SizeHW, given: InputSpec, size_hw: SizeHW | None = None, *, sizes: Sequence[SizeHW] = ()) -> SizeHW:
    """Size of the tensor of an image by itself, with padding. Images of one size do not change each other's results in a batch.

    Arguments as of `plan_batches`.
    """
    wanted = nearest_size(original_hw, sizes) if sizes else size_hw
    return _padded([resized_size(original_hw, given, wanted)], given, wanted)


def needs_equal_sizes(given: InputSpec) -> bool:
    return not given.one_size and not given.mask


def check_size(given: InputSpec, size_hw: SizeHW | None) -> None:
    """Raise SpecError where the model cannot take images of `size_hw`."""
    if size_hw is None or size_hw == given.size_hw:
        return
    if not given.dynamic:
        raise SpecError(
            f"size {size_hw[0]}x{size_hw[1]} (height x width) is not possible: this model takes "
            f"{given.height}x{given.width} only; leave `size` out, or export the checkpoint again with `size={size_hw[0]}x{size_hw[1]}`"
        )
    multiple = given.multiple_of
    if any(side < 1 or side % multiple for side in size_hw):
        near = " and ".join(str(max(1, round(side / multiple)) * multiple) for side in size_hw)
        raise SpecError(
            f"size {size_hw[0]}x{size_hw[1]} (height x width): both sides must be positive multiples of "
            f"{multiple}; the nearest are {near}"
        )


def resized_size(original_hw: SizeHW, given: InputSpec, size_hw: SizeHW | None = None) -> SizeHW:
    """Size of the image inside the tensor, without padding."""
    target = size_hw or given.size_hw
    if given.resize in ("stretch", "square"):
        return target
    if given.resize == "fit":
        return fit_size(original_hw, target)
    if size_hw is not None:
        height, width = fit_size(original_hw, target)
    elif given.resize == "max_size":
        assert given.max_height is not None and given.max_width is not None  # InputSpec holds this
        height, width = max_size(original_hw, (given.max_height, given.max_width))
    else:
        assert given.shortest_edge is not None  # InputSpec holds this
        tall_first = needs_equal_sizes(given)
        height, width = shortest_edge_size(original_hw, given.shortest_edge, given.longest_edge, tall_first=tall_first)
    if needs_equal_sizes(given):
        multiple = given.multiple_of
        height, width = (max(multiple, side - side % multiple) for side in (height, width))
    return height, width


def nearest_size(original_hw: SizeHW, sizes: Sequence[SizeHW]) -> SizeHW:
    """The size whose aspect ratio is nearest to the image's; the first of equal ones."""
    return min(sizes, key=lambda size: round(abs(math.log(size[0] / size[1] * original_hw[1] / original_hw[0])), 6))


def size_words(sizes: Sequence[SizeHW]) -> str:
    """ "480x640, 640x480", (height, width) each."""
    return ", ".join(f"{height}x{width}" for height, width in sizes)


def preprocessing_words(given: InputSpec) -> str:
    """How an image becomes pixel values, in one line."""
    size = f"{given.height}x{given.width}"
    words = {
        "stretch": f"stretch to {size}",
        "shortest_edge": f"shortest edge {given.shortest_edge}, at most {given.longest_edge}",
        "fit": f"fit into {size}",
        "square": f"pad to a black square, stretch to {size}",
        "max_size": f"fit into {given.max_height}x{given.max_width}, rounded down",
    }[given.resize]
    if given.resize == "fit" or given.pad:
        words += f", pad to {size}"
    elif given.mask and not given.one_size:
        words += ", pad to the batch"
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (given.mean, given.std))
    scale = f"times 1/{1 / given.rescale:g}" if given.rescale < 1 else f"times {given.rescale:g}" * (given.rescale != 1)
    normal = f"mean {mean}, std {std}" if any(given.mean) or set(given.std) != {1.0} else "no normalisation"
    resample = given.resample + (
        "" if given.antialias else " after a blur" if given.resize == "square" else " without antialiasing"
    )
    return ", ".join(part for part in (words, resample, scale, normal) if part)


def shortest_edge_size(original_hw: SizeHW, shortest: int, longest: int | None, *, tall_first: bool = False) -> SizeHW:
    """The rule of transformers' `get_size_with_aspect_ratio`, with equal results.

    Double precision, `round` to even, multiplications from left to right and truncation are part of the
    rule: another order changes some sizes by a pixel. The one difference is that a side is never 0.
    tall_first: YOLOS asks whether the image is tall before it asks whether its size is right already,
    which differs where rounding the short side hides that the long side is not.
    """
    height, width = original_hw
    short, long = min(original_hw), max(original_hw)
    scale: float = shortest
    if longest is not None and long / short * shortest > longest:
        scale = longest * short / long
        shortest = round(scale)
    if short == shortest and not (tall_first and width < height):
        result = height, width
    elif width < height:
        result = int(scale * height / width), shortest
    else:
        result = shortest, int(scale * width / height)
    return max(1, result[0]), max(1, result[1])


def max_size(original_hw: SizeHW, limit_hw: SizeHW) -> SizeHW:
    """The rule of transformers' `get_image_size_for_max_height_width`, with equal results, except that a side is never 0."""
    scale = min(limit / side for limit, side in zip(limit_hw, original_hw, strict=True))
    return max(1, int(original_hw[0] * scale)), max(1, int(original_hw[1] * scale))


def fit_size(original_hw: SizeHW, target_hw: SizeHW) -> SizeHW:
    """Largest size of the same aspect ratio inside `target_hw`; integers only, halves round up."""
    height, width = original_hw
    target_height, target_width = target_hw
    if target_width * height <= target_height * width:
        scaled = (2 * height * target_width + width) // (2 * width)
        return min(target_height, max(1, scaled)), target_width
    scaled = (2 * width * target_height + height) // (2 * height)
    return target_height, min(target_width, max(1, scaled))


def resize(image: NDArray[np.uint8], size_hw: SizeHW, resample: str) -> NDArray[np.uint8]:
    """(H, W, 3) uint8 -> (h, w, 3) uint8 with Pillow, which filters when it makes an image smaller."""
    height, width = size_hw
    if image.shape[:2] == (height, width):
        return image
    pillow = Image.fromarray(np.ascontiguousarray(image))
    return np.asarray(pillow.resize((width, height), Image.Resampling(RESAMPLES.index(resample))))


def normalize(pixels: NDArray, given: InputSpec) -> NDArray[np.float32]:
    """(3, h, w) of 0..255 -> (pixels * rescale - mean) / std, float32."""
    mean = np.array(given.mean, np.float32)[:, None, None]
    std = np.array(given.std, np.float32)[:, None, None]
    return (pixels.astype(np.float32) * np.float32(given.rescale) - mean) / std


def _canvas(resized: Sequence[SizeHW], given: InputSpec, size_hw: SizeHW | None) -> SizeHW:
    """Height and width of the batch tensor."""
    if needs_equal_sizes(given) and len(set(resized)) > 1:
        raise SpecError(
            f"this model has no padding mask, so all images of a batch must have one size; got "
            f"{sorted(set(resized))} after resizing. Use Detector, or split the batch with group_by_size"
        )
    canvas = _padded(resized, given, size_hw)
    for height, width in resized:
        if height > canvas[0] or width > canvas[1]:
            raise ImageError(
                f"an image of {height}x{width} (height x width) after resizing does not fit the {canvas[0]}x{canvas[1]} that "
                "this model pads to; transformers refuses it as well. Build the model again with `resize`"
            )
    return canvas


def _padded(resized: Sequence[SizeHW], given: InputSpec, size_hw: SizeHW | None) -> SizeHW:
    """Height and width of a tensor for images of these sizes."""
    if needs_equal_sizes(given):
        return resized[0]  # a multiple already
    if given.one_size or size_hw is not None:
        return size_hw or given.size_hw
    multiple = given.multiple_of
    height, width = (-(-max(size[axis] for size in resized) // multiple) * multiple for axis in (0, 1))
    return height, width

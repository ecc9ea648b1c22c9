"""A checkpoint as transformers runs it, eager and under torch.compile: what detrt's backends are compared with."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DetrtError, MissingPackageError, SessionError
from ..system import usable_cores
from .measure import Calls

if TYPE_CHECKING:
    from ..models.load_options import LoadOptions
    from ..models.source import Source


def load_reference(checkpoint: str, prompt: str | None, load: LoadOptions | None = None) -> Source:
    """The checkpoint of --against.

    Raises:
        SessionError: a model that transformers does not have; a prompt that is missing, or too much.
    """
    from ..models.load import load_source

    source = load_source(checkpoint, load)
    if _of_library(source.module) is None:
        lacking = (
            f"{source.family.title} with masks; add `no_masks`"
            if source.spec.has_masks
            else f"{source.family.title}; leave it out"
        )
        raise SessionError(f"`against='{checkpoint}'`: transformers has no {lacking}")
    if source.spec.text is not None and not prompt:
        raise SessionError(f"`against='{checkpoint}'` takes a prompt; give `prompt='a cat. a remote control.'`")
    if source.spec.text is None and prompt:
        raise SessionError(
            f"`against='{checkpoint}'` has fixed classes and takes no prompt; it is another model than the bundle's"
        )
    return source


def _of_library(module: Any) -> Any:
    """The model as transformers has it; None if it has none."""
    found = module.of_library() if hasattr(module, "of_library") else module
    return found if type(found).__module__.startswith("transformers.") else None


def library_calls(
    source: Source,
    *,
    threads: int | None,
    compiled: bool = False,
    device: str = "cpu",
    precision: str = "fp32",
    prompt: str | None = None,
) -> Callable[[tuple[int, int], Sequence[bytes | NDArray[np.uint8]]], dict[str, Calls]]:
    """A function (size, images) -> backend -> scope -> call that has finished when it returns.

    Backends are "transformers-..." or, for what detrt alone has, "pytorch-...".
    Images are JPEG files, which Pillow decodes as detrt does, or (height, width, 3) arrays. The scope end_to_end has
    transformers' own processor of images and prompts.

    Args:
        source: the loaded checkpoint; its module is moved to the device and the type.
        threads: of PyTorch; None: all cores.
        compiled: also under torch.compile.
        device: "cpu" or "cuda:N".
        precision: "fp32", "fp16" or "bf16"; 16 bits on a GPU only.
        prompt: for a model that takes one.

    Raises:
        DetrtError: no such device. MissingPackageError: what transformers' processor needs does not exist.
    """
    import torch

    target = torch.device(device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise DetrtError(f"`device={device}`: PyTorch sees no CUDA device; use `device=cpu`")
    low = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision) if target.type == "cuda" else None
    torch.set_num_threads(threads or usable_cores())
    found = _of_library(source.module)
    library, module = ("pytorch", source.module) if found is None else ("transformers", found)
    for part in module.modules():
        # What from_pretrained chooses by itself; detrt loads models with plain attention, for tracing.
        own = getattr(part, "config", None)
        if getattr(type(part), "_supports_sdpa", False) and getattr(own, "_attn_implementation", None) == "eager":
            own._attn_implementation = "sdpa"
    module = module.eval().to(target, low or torch.float32)
    modules = {f"{library}-{target.type}": module}
    if compiled:
        torch._logging.set_logs(dynamo=logging.ERROR, inductor=logging.ERROR)  # every graph break with its stack otherwise
        mode = "reduce-overhead" if target.type == "cuda" else "default"
        modules[f"{library}-compile-{target.type}"] = torch.compile(module, mode=mode)

    def calls(size: tuple[int, int], images: Sequence[bytes | NDArray[np.uint8]]) -> dict[str, Calls]:
        prepare, finish = _processor(source, size, prompt)

        def prepared() -> Any:
            feeds = prepare([_decoded(image) for image in images])
            return {k: v.to(target, low if v.is_floating_point() else None) for k, v in feeds.items()}

        ready = prepared()

        def forward(run: Any, feeds: Any = None) -> Any:
            with torch.inference_mode():
                outputs = run(**(ready if feeds is None else feeds))
            if target.type == "cuda":
                torch.cuda.synchronize()
            return outputs

        def end_to_end(run: Any) -> Any:
            feeds = prepared()
            outputs = forward(run, feeds)
            try:
                return finish(outputs, feeds, [size] * len(images))
            except ImportError as error:  # OpenCV for the polygons of PP-DocLayoutV3
                raise DetrtError(f"transformers' post-processing of {source.family.title}: {_first_line(error)}") from None

        return {
            name: {
                "kernel": lambda run=run: forward(run),
                "forward": lambda run=run: forward(run),
                "end_to_end": lambda run=run: end_to_end(run),
            }
            for name, run in modules.items()
        }

    return calls


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _decoded(image: bytes | NDArray[np.uint8]) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(image)).convert("RGB") if isinstance(image, bytes) else image


def _processor(source: Source, size: tuple[int, int], prompt: str | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(images -> inputs, (outputs, inputs, sizes of the images) -> detections), both transformers' own."""
    from ..models.published import PublishedPrompt, processor_with_text
    from ..text.tokenizer import PromptTokenizer

    processor = _image_processor(source, size)
    text = source.spec.text
    if text is None:
        boxes = hasattr(processor, "post_process_object_detection")
        finish = processor.post_process_object_detection if boxes else processor.post_process_instance_segmentation
        return (
            lambda images: {
                k: v for k, v in processor(images=images, return_tensors="pt").items() if k in ("pixel_values", "pixel_mask")
            },
            lambda outputs, feeds, sizes: finish(outputs, threshold=0.5, target_sizes=sizes),
        )
    assert source.tokenizer is not None and prompt
    assert source.family.stock is not None
    stock = source.family.stock()()
    if size != source.spec.input.size_hw and stock.one_size:
        height, width = source.spec.input.size_hw
        raise SessionError(f"transformers' {source.family.title} takes {height}x{width} only; leave `size` out")
    both = processor_with_text(source, processor)
    published = PublishedPrompt.of(PromptTokenizer(source.tokenizer, text).parse(prompt))
    return (
        lambda images: stock.feeds(both, images, published),
        lambda outputs, feeds, sizes: stock.usual(both, outputs, feeds, published, sizes, source.spec.has_masks),
    )


def _image_processor(source: Source, size: tuple[int, int]) -> Any:
    """transformers' image processor (its Pillow version, if it has one) with the checkpoint's settings, at the measured size.

    Raises:
        MissingPackageError: one that needs torchvision.
    """
    import transformers

    facts, kind = source.spec.input, source.family.processor
    name = f"{kind.like or kind.name}ImageProcessor"
    try:
        return (getattr(transformers, f"{name}Pil", None) or getattr(transformers, name))(
            size=dict(zip(("shortest_edge", "longest_edge") if kind.one_size else ("height", "width"), size, strict=True)),
            do_normalize=any(facts.mean) or facts.std != (1.0, 1.0, 1.0),
            image_mean=list(facts.mean),
            image_std=list(facts.std),
            do_pad=facts.mask or facts.resize == "square",
        )
    except ImportError:
        raise MissingPackageError("torchvision", "", f"transformers' image processor of {source.family.title}") from None

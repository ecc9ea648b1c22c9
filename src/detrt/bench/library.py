"""The same checkpoint as its library runs it, next to what detrt built: transformers eager, and under torch.compile."""

from __future__ import annotations

import io
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DetrtError, MissingPackageError, SessionError
from ..system import usable_cores

if TYPE_CHECKING:
    from ..models.source import Source

Calls = dict[str, dict[str, Callable[[], object]]]  # back end -> scope -> call that has finished when it returns


def library_calls(
    checkpoint: str, *, compiled: bool, device: str, precision: str, threads: int | None, prompt: str | None = None
) -> Callable[[tuple[int, int], list[bytes]], Calls]:
    """A function (size, JPEG files) -> back end -> scope -> call that has finished when it returns.

    precision: "fp32", "fp16" or "bf16"; 16 bits on a GPU only. prompt: for a model that takes one. end_to_end: with
    transformers' own processor of pictures and prompts; the files are decoded by Pillow, as detrt does it.

    Raises:
        SessionError: a model that transformers does not have; a prompt that is missing, or too much.
        DetrtError: no such device. MissingPackageError: what transformers' processor needs is not there.
    """
    import torch

    from ..models.load import load_source

    source = load_source(checkpoint)
    module = source.module
    if not type(module).__module__.startswith("transformers."):
        raise SessionError(f"--against '{checkpoint}': transformers has no {source.family.title}; leave it out")
    if source.spec.text is not None and not prompt:
        raise SessionError(f"--against '{checkpoint}' takes a prompt; give --prompt 'a cat. a remote control.'")
    if source.spec.text is None and prompt:
        raise SessionError(
            f"--against '{checkpoint}' has fixed classes and takes no prompt; it is another model than the bundle's"
        )
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise DetrtError(f"--device {device}: PyTorch sees no CUDA device; use --device cpu")
    low = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision) if place.type == "cuda" else None
    torch.set_num_threads(threads or usable_cores())
    for part in module.modules():
        # What from_pretrained chooses by itself; detrt loads models with plain attention, for tracing.
        own = getattr(part, "config", None)
        if getattr(type(part), "_supports_sdpa", False) and getattr(own, "_attn_implementation", None) == "eager":
            own._attn_implementation = "sdpa"
    module = module.eval().to(place, low or torch.float32)
    runs = {f"transformers-{place.type}": module}
    if compiled:
        torch._logging.set_logs(dynamo=logging.ERROR, inductor=logging.ERROR)  # every graph break with its stack otherwise
        mode = "reduce-overhead" if place.type == "cuda" else "default"
        runs[f"transformers-compile-{place.type}"] = torch.compile(module, mode=mode)

    def calls(size: tuple[int, int], files: list[bytes]) -> Calls:
        prepare, finish = _processor(source, size, prompt)

        def prepared() -> Any:
            from PIL import Image

            pictures = [Image.open(io.BytesIO(data)).convert("RGB") for data in files]
            feeds = prepare(pictures)
            return {k: v.to(place, low if v.is_floating_point() else None) for k, v in feeds.items()}

        feeds = prepared()

        def forward(run: Any, given: Any = None) -> Any:
            with torch.inference_mode():
                found = run(**(feeds if given is None else given))
            if place.type == "cuda":
                torch.cuda.synchronize()
            return found

        def end_to_end(run: Any) -> Any:
            given = prepared()
            return finish(forward(run, given), given, [size] * len(files))

        return {
            name: {
                "kernel": lambda run=run: forward(run),
                "forward": lambda run=run: forward(run),
                "end_to_end": lambda run=run: end_to_end(run),
            }
            for name, run in runs.items()
        }

    return calls


def first_call_seconds(step: Callable[[], object]) -> float:
    """What compiling takes: the first call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _processor(source: Source, size: tuple[int, int], prompt: str | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(pictures -> inputs, (outputs, inputs, sizes of the pictures) -> detections), both transformers' own."""
    from .checkpoints import processor_of

    images = processor_of(source.family.name, source.spec, size)
    text = source.spec.text
    if text is None:
        return (
            lambda pictures: images(images=pictures, return_tensors="pt"),
            lambda found, feeds, sizes: images.post_process_object_detection(found, threshold=0.5, target_sizes=sizes),
        )
    import transformers

    from ..text.tokenizer import PromptTokenizer

    assert source.tokenizer is not None and prompt
    tokenizer = _tokenizer(source.tokenizer, text.pad_id)
    if text.kind == "tokens":
        both = transformers.GroundingDinoProcessor(images, tokenizer)
        return (
            lambda pictures: both(images=pictures, text=[prompt.lower()] * len(pictures), return_tensors="pt", padding=True),
            lambda found, feeds, sizes: both.post_process_grounded_object_detection(
                found, feeds["input_ids"], threshold=0.25, text_threshold=0.25, target_sizes=sizes
            ),
        )
    names = list(PromptTokenizer(source.tokenizer, text).parse(prompt).names.values())
    try:
        both = transformers.OmDetTurboProcessor(images, tokenizer)
    except ImportError:
        raise MissingPackageError("torchvision", "", "transformers' processor of OmDet-Turbo") from None
    return (
        lambda pictures: both(images=pictures, text=[names] * len(pictures), return_tensors="pt"),
        lambda found, feeds, sizes: both.post_process_grounded_object_detection(
            found, text_labels=[names] * len(sizes), threshold=0.3, target_sizes=sizes
        ),
    )


def _tokenizer(content: bytes, pad_id: int) -> Any:
    """transformers' wrapper of a checkpoint's tokenizer."""
    import transformers

    with tempfile.TemporaryDirectory(prefix="detrt-") as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_bytes(content)
        made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    made.pad_token = made.convert_ids_to_tokens(pad_id)
    return made

"""The same checkpoint as its library runs it, next to what detrt built: transformers eager, and under torch.compile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .cores import usable_cores
from .errors import DetrtError, SessionError


def library_calls(
    checkpoint: str, *, compiled: bool, device: str | None, precision: str, threads: int | None
) -> Callable[[tuple[int, int], list[Any]], dict[str, dict[str, Callable[[], object]]]]:
    """A function (size, pictures) -> back end -> scope -> call that has finished when it returns.

    precision: "fp32", "fp16" or "bf16"; 16 bits on a GPU only. end_to_end: with transformers' own image processor.

    Raises:
        SessionError: a model that transformers does not have, or one that takes a prompt.
        DetrtError: no such device.
    """
    import torch

    from .bench import processor_of
    from .sources import load_source

    source = load_source(checkpoint)
    module = source.module
    if source.spec.text is not None:
        raise SessionError(f"--against '{checkpoint}': models that take a prompt are not timed in their library; leave it out")
    if not type(module).__module__.startswith("transformers."):
        raise SessionError(f"--against '{checkpoint}': transformers has no {source.family.title}; leave it out")
    place = torch.device(device or "cpu")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise DetrtError(f"--device {device}: PyTorch sees no CUDA device; use --device cpu")
    low = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision) if place.type == "cuda" else None
    torch.set_num_threads(threads or usable_cores())
    if getattr(type(module), "_supports_sdpa", False):
        # What from_pretrained chooses by itself; detrt loads models with plain attention, for tracing.
        module.config._attn_implementation = "sdpa"
    module = module.eval().to(place, low or torch.float32)
    runs = {"transformers": module}
    if compiled:
        mode = "reduce-overhead" if place.type == "cuda" else "default"
        runs["transformers-compile"] = torch.compile(module, mode=mode)

    def calls(size: tuple[int, int], pictures: list[Any]) -> dict[str, dict[str, Callable[[], object]]]:
        processor = processor_of(source.family.name, source.spec, size)
        sizes = [picture.shape[:2] for picture in pictures]

        def prepared() -> Any:
            feeds = processor(images=pictures, return_tensors="pt")
            return {k: v.to(place, low if v.is_floating_point() else None) for k, v in feeds.items()}

        feeds = prepared()

        def forward(run: Any, given: Any = None) -> Any:
            with torch.inference_mode():
                found = run(**(feeds if given is None else given))
            if place.type == "cuda":
                torch.cuda.synchronize()
            return found

        def end_to_end(run: Any) -> Any:
            return processor.post_process_object_detection(forward(run, prepared()), threshold=0.5, target_sizes=sizes)

        return {
            name: {"forward": lambda run=run: forward(run), "end_to_end": lambda run=run: end_to_end(run)}
            for name, run in runs.items()
        }

    return calls


def first_call_seconds(step: Callable[[], object]) -> float:
    """What compiling takes: the first call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start

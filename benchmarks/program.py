"""What the programs of this folder share: the parser of their arguments, one line for what is wrong, and the time of GPU work.

Nothing of detrt is imported here by itself: a process of measure_inductor.py imports that of another checkout.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn


def make_parser(text: str) -> argparse.ArgumentParser:
    """text: the first lines of the program, which are its help."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def at_least(least: float) -> Callable[[str], Any]:
    """The type of an argument: a number from `least` on, an integer where `least` is one."""
    kind = type(least)

    def number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be a number of at least {least}; got {text!r}")
        return value

    return number


def folder(text: str) -> Path:
    """The type of an argument: a folder that is there."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}")
    return Path(text)


def file(text: str) -> Path:
    """The type of an argument: a file that is there."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return Path(text)


def stop(text: str) -> NoReturn:
    """End the program with one line on standard error, and the exit code of wrong input."""
    from detrt.errors import one_line

    print(f"{Path(sys.argv[0]).name}: {one_line(text, 600)}", file=sys.stderr)
    sys.exit(2)


def require_gpu() -> None:
    """End the program where PyTorch sees no NVIDIA GPU, before anything is built for one."""
    import torch

    if not torch.cuda.is_available():
        stop(f"needs an NVIDIA GPU, and PyTorch {torch.__version__} sees none")


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a program, and end it with its exit code; what is wrong with its input is one line, and exit code 2."""
    from detrt.errors import DetrtError

    try:
        sys.exit(main())
    except (DetrtError, OSError, ModuleNotFoundError) as error:
        stop(str(error))


def drawn_scenes() -> tuple[Path, Path]:
    """Annotations and images of 500 drawn scenes as a COCO data set; the same every time."""
    from detrt.data.scenes.scene import write_dataset

    place = Path(tempfile.gettempdir()) / "detrt-scenes-500"
    if not (place / "annotations.json").is_file():
        write_dataset(place, 500, seed=10_000)
    return place / "annotations.json", place / "images"


def graph_microseconds(
    call: Callable[..., Any],
    inputs: Sequence[Sequence[Any]],
    calls: int,
    replays: int,
    prepare: Callable[[], Any] = lambda: None,
) -> float:
    """Median microseconds of one call as GPU work alone: a CUDA graph of `calls` calls that take the inputs in turn, replayed.

    prepare: GPU work before each replay that is not counted.
    """
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for given in inputs:
            call(*given)
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for index in range(calls):
            kept.append(call(*inputs[index % len(inputs)]))
    for _ in range(5):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        prepare()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)

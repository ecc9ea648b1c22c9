"""`detrt encode-prompt`: a prompt for the C++ runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import PromptError, number_of
from .options import JSON, PromptOptions, command


@command
def encode_prompt(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder of a model that takes a prompt.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, e.g. prompt.json."), JSON],
    prompt: PromptOptions,
) -> None:
    """Tokenise a prompt and run the text encoder, for `detrt-run --prompt FILE`.

    Exit code 0: written; 2: something was wrong.
    """
    from rich.console import Console

    from ..backends.prompt_file import encode_prompt as work
    from . import show

    text = prompt.read()
    show.notes(prompt.notes())
    if text is None:
        raise PromptError("there is no prompt; give --prompt 'a cat. a dog.', --prompt-file or --classes-from")
    made = work(bundle, text, output, task=prompt.task)
    console = Console(stderr=True)
    for name in made.unknown:
        console.print(f"note: the tokenizer of this model knows no part of {name!r}", markup=False, soft_wrap=True)
    runs = f", in {made.chunks} chunks" if made.chunks > 1 else ""
    console.print(
        f"{made.path}: {number_of(len(made.prompt.phrases), 'phrase')}{runs}, {made.size / 1e3:.1f} kB",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )

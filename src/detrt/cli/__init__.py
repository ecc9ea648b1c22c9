"""The command `detrt`: one function a command; the work is done by the package."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .. import files
from ..errors import DetrtError, missing_package, printable
from .spellings import COMMAND, command_hint, hint, line_of, options_of, spelled
from .stopping import INTERRUPTED, TERMINATED, Terminated, stopping
from .streams import drop_unwritten, give_stdout_a_sink, open_streams

_LINES = "\n\t"  # of messages
# Each command: module and function, and the first line of its help. `detrt --help` shows the line without the module.
_COMMANDS = {
    "build": ("build:build", "Build a bundle: checkpoint -> ONNX, checked against PyTorch -> what the target runs."),
    "export": ("build:export", "Export a checkpoint to one ONNX graph with its spec inside, checked against PyTorch."),
    "detect": ("detect:detect", "Find objects in images, videos and cameras."),
    "serve": ("serve:serve", "Serve detectors over HTTP: images in, boxes out, with a page to try them."),
    "verify": (
        "verify:verify",
        "Compare two models on real images: tensors, batch invariance, detections, AP. Exit code 3 if they differ.",
    ),
    "bench": (
        "bench:bench",
        "Measure checkpoints (sizes, times, memory, latency against transformers) or bundles (each backend that runs here).",
    ),
    "report": (
        "report:report",
        "Build, check, time and evaluate checkpoints on this machine: a table by precision and batch size.",
    ),
    "info": ("info:info", "Say what a model is, or list the families."),
    "doctor": ("info:doctor", "Say what is installed, which targets work here, and what to install for the rest."),
    "demo": ("demo:demo", "Take the embedded detector from checkpoint to a bundle, check it, and detect in an image."),
    "eval": ("eval:evaluate", "COCO average precision: all twelve metrics and one for each class."),
    "demo-data": ("demo:demo_data", "Draw scenes with exact boxes and masks as a dataset in COCO format."),
    "encode-prompt": ("encode:encode_prompt", "Tokenise a prompt and run the text encoder, for `detrt-run --prompt FILE`."),
    "triton-repo": ("triton:triton_repo", "Write a model repository for Triton Inference Server."),
    "deepstream": (
        "deepstream:deepstream",
        "Write graph, labels and nvinfer's configuration for NVIDIA DeepStream.",
    ),
}

_LIKE_AN_OPTION = re.compile(r"--|-[^\W\d]")  # a mistyped one too, such as --no-chek; -1 and - are values


class _Command(TyperCommand):
    """A command that refuses what would be taken without a word: of an option given twice the last value, and the next option as a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, named = self.make_parser(ctx).parse_args(args=list(args))
        for parameter in named:
            option, values = max(parameter.opts, key=len), given.get(parameter.name)
            for value in values if isinstance(values, list) else [values]:
                # An unset variable of a shell; a path would be the current folder.
                if value == "" and parameter.default != "":
                    raise DetrtError(f"{option} is '' (empty); give a value, or leave the option out")
                if isinstance(value, str) and option.startswith("-") and _LIKE_AN_OPTION.match(value):
                    raise DetrtError(
                        f"{option} has no value: {value} behind it is spelled like an option; give one between them: "
                        f"{option} VALUE {value} (a file of that name is ./{value})"
                    )
        for parameter, times in Counter(named).items():
            decides = not getattr(parameter, "is_flag", False) or parameter.secondary_opts
            if times > 1 and decides and not getattr(parameter, "multiple", True) and parameter.nargs == 1:
                raise DetrtError(f"{' or '.join(parameter.opts)} is given {times} times, and takes one value; give it once")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, after each path that it writes was compared with each one that it reads."""
        from ..data.frames import show_frames_once
        from .options import check_name, outputs_of, paths_in

        show_frames_once()
        written = outputs_of(self.callback)
        flags = {one.name: max(one.opts, key=len) for one in self.params}
        marks = {flags[name]: mark for name, mark in written.items()}
        for name, mark in written.items():
            if str(ctx.params[name]) == "-" and mark.path:
                raise DetrtError(f"{flags[name]} is '-', which stands for standard output, and writes files only; give a path")
        inputs = [path for name, value in ctx.params.items() if name not in written for path in paths_in(value)]
        outputs = [
            files.Output(Path(value), flags[name], written[name].text)
            for name, value in ctx.params.items()
            if name in written and value is not None and str(value) not in ("", "-")
        ]
        files.refuse_replacing(outputs, inputs)
        for one in outputs:
            check_name(one.name, str(one.path), marks[one.name], marks)
        with files.keeping(inputs), _consenting(bool(ctx.params.get("trust_remote_code"))):
            return super().invoke(ctx)


@contextlib.contextmanager
def _consenting(consent: bool) -> Iterator[None]:
    """Let the worker processes of a command run the code that models bring, where the command line says so."""
    variable, before = "DETRT_TRUST_REMOTE_CODE", os.environ.get("DETRT_TRUST_REMOTE_CODE")
    if consent:
        os.environ[variable] = "1"
    try:
        yield
    finally:
        if consent:
            os.environ.pop(variable)
            if before is not None:
                os.environ[variable] = before


def load_command(name: str) -> Any:
    """The command `name`, with its options, as click has it. Imports its module."""
    module, _, function = _COMMANDS[name][0].partition(":")
    alone = typer.Typer(add_completion=False)
    alone.command(name, cls=_Command)(getattr(importlib.import_module(f".{module}", __name__), function))
    return typer.main.get_command(alone)


class _Commands(TyperGroup):
    """Commands that are imported when they are called: those that are not called cost no time and no memory."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        COMMAND.set(str(name))
        return name, load_command(str(name)), rest


app = typer.Typer(
    name="detrt",
    cls=_Commands,
    help="Take every DETR from PyTorch to TensorRT, and verify that it matches PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, (_, _line) in _COMMANDS.items():
    app.command(_name, help=_line)(lambda: None)


def _show_version(wanted: bool) -> None:
    if wanted:
        from ..system import package_version

        print(f"detrt {package_version()}")
        raise typer.Exit(0)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


_MOST = 8000  # characters of a message


def _bounded(message: str) -> str:
    """A message without the middle of what is too long to be read, such as a value of a file that it shows; advice is at its end."""
    return message if len(message) <= _MOST else f"{message[: _MOST // 2]} ... {message[-_MOST // 2 :]}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 2 bad input, 3 a gate failed; 130 and 143: stopped.

    Anything that is not a DetrtError is a bug and leaves with its traceback (exit code 1).
    """
    try:
        open_streams()  # before anything takes the number of a closed one
        with stopping(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="max_detections ", category=UserWarning)  # a note says it
            result = app(arguments if arguments is not None else sys.argv[1:], prog_name="detrt", standalone_mode=False)
            sys.stdout.flush()  # here, where a full disk or a closed pipe can still be told
    except DetrtError as error:
        text = printable(spelled(_bounded(str(error))), keep=_LINES)
        # Indented, so that a line break in the name of a file begins no line of its own.
        print("detrt: " + re.sub(r"\n(?! )", "\n  ", text), file=sys.stderr)
        drop_unwritten()
        return error.exit_code
    except KeyboardInterrupt:
        return _stopped()
    except Terminated:
        print("detrt: terminated; nothing half-written was left", file=sys.stderr)
        return TERMINATED
    except MemoryError as error:
        print(
            f"detrt: not enough memory ({error or 'no details'}); use a smaller size or batch, or a machine with more",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:
        # The reader of a pipe has gone (head, less): not an error of ours.
        give_stdout_a_sink()
        return 0
    except SystemExit as error:
        # What rich makes of a BrokenPipeError while it prints a table.
        if isinstance(error.__context__, BrokenPipeError):
            return 0
        raise
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):  # of any path that is looked at
            name = printable(error.filename or "")
            print(f"detrt: {name[:80] + ' ...' if len(name) > 80 else name!r}: {error.strerror}; check the path", file=sys.stderr)
            return 2
        if isinstance(error, FileNotFoundError) and error.filename is None:  # of os.getcwd
            print("detrt: the working folder does not exist any more; change to one that does", file=sys.stderr)
            return 2
        # What is written to files names its file by itself; the rest is standard output.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF, errno.EIO):
            raise
        give_stdout_a_sink()
        print(f"detrt: {files.output_error(error.filename or 'standard output', error)}", file=sys.stderr)
        return 2
    except (typer.Abort, typer.Exit) as error:
        # What typer makes of Ctrl-C: Abort in older versions, Exit(130) in newer ones.
        code = getattr(error, "exit_code", INTERRUPTED)
        return _stopped() if code == INTERRUPTED else code
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        print(
            "detrt: no thread can be started; raise the limit of processes (ulimit -u, pids of a container) or of memory",
            file=sys.stderr,
        )
        return 2
    except ModuleNotFoundError as error:
        missing = missing_package(error, " ".join(["detrt", *(arguments or sys.argv[1:])[:1]]))
        if missing is None:
            raise
        print(f"detrt: {missing}", file=sys.stderr)
        return missing.exit_code
    except Exception as error:
        # Usage errors: click's own class in older typer versions, a vendored one in newer ones.
        if not callable(getattr(error, "format_message", None)):
            raise
        print(f"detrt: {printable(_usage_error(error, arguments or sys.argv[1:]), keep=_LINES)}", file=sys.stderr)
        return 2
    return _stopped() if result == INTERRUPTED else result if isinstance(result, int) else 0


_NO_COMMAND = re.compile(r"No such command '([^']*)'")


def _usage_error(error: Any, arguments: list[str]) -> str:
    """A usage error of click in one line: what is wrong, and where the options are listed."""
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", None)
    command = arguments[0] if context is None and arguments[0] in _COMMANDS else ""  # an option without its value has no context
    path = context.command_path if context is not None else f"detrt {command}".rstrip()
    command = path.partition(" ")[2]
    if option is not None and option not in options_of(command) and (found := hint(option, command)) is not None:
        return found
    message = " ".join(error.format_message().split()).rstrip(".")
    if (unknown := _NO_COMMAND.match(message)) is not None:
        behind = next((arguments[at:] for at, word in enumerate(arguments, 1) if word == unknown[1]), [])
        if (found := command_hint(unknown[1], behind)) is not None:
            return found
    if (line := line_of(arguments)) is not None:
        return f"detrt has no key=value arguments; use {line}"
    if callable(refused := getattr(error.__cause__, "errors", None)):  # of pydantic, in newer typer versions
        message += f"; got {refused()[0]['input']!r}"
    return f"{message[:1].lower()}{message[1:]}; see: {path} -h".replace("?; see", "? See")


def _stopped() -> int:
    print("detrt: stopped; nothing half-written was left", file=sys.stderr)
    return INTERRUPTED

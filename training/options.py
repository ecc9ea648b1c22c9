"""What the programs of this folder share: the options of those that train demo detectors, and one line for what is wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from detrt.errors import DetrtError, one_line


def run_program(main: Callable[[], object]) -> NoReturn:
    """Run a program, as those of benchmarks/ are run: what is wrong with its input is one line, and exit code 2."""
    try:
        code = main()
    except (DetrtError, OSError, ModuleNotFoundError) as error:
        print(f"{Path(sys.argv[0]).name}: {one_line(error, 600)}", file=sys.stderr)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)


def training_options(description: str, record: str, smoke: str) -> argparse.ArgumentParser:
    """A parser to which a script adds its own options and defaults; `record` names the record, `smoke` explains --smoke."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--minutes", type=float, help="training time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished model")
    parser.add_argument("--record", type=Path, help=f"JSON record (default: OUT/{record})")
    parser.add_argument("--checkpoint", type=Path, help="default: OUT/checkpoint.pt")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--pool", type=int, help="scenes kept on the GPU")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--validations", type=int)
    parser.add_argument("--validation-scenes", type=int)
    parser.add_argument("--save-every", type=float, default=2.0, help="minutes between checkpoints")
    parser.add_argument("--log-every", type=int, default=100, help="steps between log lines")
    parser.add_argument("--steps", type=int, default=sys.maxsize, help="stop after so many steps")
    parser.add_argument("--smoke", action="store_true", help=smoke)
    return parser


def parse_options(parser: argparse.ArgumentParser, argv: list[str], record: str, smoke_pool: int) -> argparse.Namespace:
    """Read and check the options and make the folder --out; --smoke keeps `smoke_pool` scenes."""
    args = parser.parse_args(argv)
    if args.minutes <= 0 or args.batch < 1:
        parser.error(f"--minutes and --batch must be above 0, got {args.minutes} and {args.batch}")
    if args.smoke:
        args.batch, args.pool, args.workers = 4, smoke_pool, 0
        args.steps = 2 if args.steps == sys.maxsize else args.steps
        args.validation_scenes, args.log_every = 4, 1
    args.out.mkdir(parents=True, exist_ok=True)
    args.record = args.record or args.out / record
    args.checkpoint = args.checkpoint or args.out / "checkpoint.pt"
    return args

"""How the command line spells what messages name, and what detrt calls the options of other tools.

The core knows fields, not options: its messages write a field and its value as Python does, between backticks, and the command line
replaces them: `size=640` is --size 640, `check=False` --no-check, `targets` --target, `build(MODEL, output=OUT)` detrt build MODEL -o OUT.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Collection, Iterable
from contextvars import ContextVar
from typing import Any

COMMAND = ContextVar("COMMAND", default="")  # that runs: its own options come first
_MARK = re.compile(r"`([a-z]\w*)(?:\(([^`]*)\)|=([^`]*))?`")

# What detrt calls it -> the spellings of ultralytics, trtexec, optimum and mmdeploy, without case. The first word is the option.
_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "--size": (
        "--imgsz",
        "--img-size",
        "--img",
        "--image-size",
        "--input-size",
        "--resolution",
        "--input-shape",
        "--no-dynamic-axes",
    ),
    "--precision fp16": ("--half", "--fp16", "--float16"),
    "--precision bf16": ("--bf16", "--bfloat16"),
    "--precision int8 with --calibration DIR": ("--int8", "--quantize"),
    "--precision fp8": ("--fp8",),
    "--precision auto with --budget ap=POINTS": ("--best",),
    "--precision": ("--dtype",),
    "--keep-fp32 PATTERNS": ("--layerprecisions",),
    "--compress-weights": ("--weight-format",),
    "--calibration DIR": ("--calib", "--calib-dir", "--calib-dataset-cfg", "--calibration-images"),
    "--threshold": ("--conf", "--conf-thres", "--confidence", "--confidence-threshold", "--score-thr", "--score-threshold"),
    "--target": ("--format", "--include", "--export-format"),
    "--output BUNDLE, a folder": ("--saveengine", "--save-engine", "--work-dir"),
    "--batch MIN,OPT,MAX, with --height and --width": ("--minshapes", "--optshapes", "--maxshapes", "--shapes"),
    "--batch": ("--batch-size", "--bs", "--max-batch-size"),
    "--save-dir DIR": ("--save", "--output-dir", "--out-dir", "--project", "--show", "--view-img", "--visualize"),
    "--tile": ("--slice-height", "--slice-width", "--slice-size"),
    "--overlap": ("--overlap-height-ratio", "--overlap-width-ratio"),
    "--save-crops DIR": ("--save-crop", "--crop"),
    "--json FILE": ("--save-json", "--out"),
    "--max-detections": ("--max-det", "--topk", "--num-select"),
    "--every": ("--vid-stride", "--frame-stride"),
    "--iou-type": ("--iou-types", "--eval-type"),
    "--ground-truth": ("--data", "--annotations", "--ann-file"),
    "--workspace-mib": ("--workspace", "--mempoolsize"),
    "--timing-cache": ("--timingcachefile",),
    "--optimization-level": ("--builderoptimizationlevel",),
    "--plugin": ("--plugins", "--staticplugins", "--dynamicplugins"),
    "--repeats": ("--iterations", "--runs", "--avgruns"),
    "--warmup": ("--warmup",),
    "--parts": ("--dumpprofile", "--exportprofile"),
    "--classes": ("--class", "--filter-classes"),
    "--tensor": ("--atol", "--rtol"),
    "--trust-remote-code": ("--trust",),
    "--device": ("--gpu", "--gpus", "--cuda", "--devices", "--provider"),
}
# What detrt has no option for -> why, or where it goes.
_NO_OPTION: dict[str, tuple[str, ...]] = {
    "detectors of the DETR family need no NMS, so there is nothing to set": (
        "--iou",
        "--iou-thres",
        "--nms",
        "--nms-threshold",
        "--agnostic-nms",
    ),
    "the model is the first argument, without an option: detrt COMMAND MODEL ...": (
        "--onnx",
        "--model",
        "-m",
        "--weights",
        "--checkpoint",
        "--loadengine",
    ),
    "images and videos come after the model, without an option: detrt detect MODEL photos/ video.mp4": (
        "--source",
        "--input",
        "-i",
    ),
    "batch, and size where the family allows it, are symbolic anyway; --size or --height and --width fix the size": (
        "--dynamic",
        "--dynamic-axes",
        "--dynamic-batch",
    ),
    "the types of the graph are those of the engine": ("--stronglytyped",),
    "TF32 is off; --tf32 allows it": ("--notf32",),
    "it is a choice in Python: detrt.EngineConfig(version_compatible=..., hardware_compatibility=...)": (
        "--versioncompatible",
        "--hardwarecompatibilitylevel",
    ),
    "CUDA graphs are recorded where the engine can be": ("--usecudagraph",),
    "layer types and counts are in the sidecar of every engine": ("--exportlayerinfo",),
    "every bundle holds them in detrt.json": ("--dump-info",),
    "the folder of downloads is the environment variable HF_HOME": ("--cache-dir",),
    "detrt eval gives all metrics of COCO": ("--metrics",),
    "masks come with the boxes of every model that has them; detrt build CHECKPOINT --no-masks makes a bundle without": (
        "--masks",
        "--mask",
        "--with-masks",
        "--retina-masks",
    ),
    "every graph is simplified": ("--simplify", "--optimize", "--slim"),
    "the family is read from the checkpoint; --family is for ckpt:FILE": ("--framework", "--library", "--library-name"),
}
# `-o` where a command writes no single folder.
_OUTPUT = {
    "detect": "--save-dir DIR for annotated copies, or --json, --csv or --coco FILE for the detections",
    "verify": "--report FILE.html, or --json FILE",
    "eval": "--save FILE for the detections, or --json FILE for the metrics",
    "bench": "--json FILE, or --plot FILE.svg",
    "info": "--json FILE",
    "doctor": "--json FILE",
    "demo-data": "no option: the folder is the first argument",
}


# What to type -> commands of other tools.
_COMMANDS_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "detrt detect MODEL IMAGES": ("predict", "infer", "inference", "run", "test-image", "stream"),
    "detrt detect MODEL VIDEO --track": ("track",),
    "detrt eval MODEL --images DIR --ground-truth FILE": ("val", "validate", "evaluate", "test", "map"),
    "detrt bench MODEL": ("benchmark", "profile", "time", "perf"),
    "detrt build CHECKPOINT -o BUNDLE": ("convert", "compile", "optimize", "optimise", "make"),
    "detrt build CHECKPOINT -o BUNDLE --precision int8 --calibration DIR": ("quantize", "quantise", "calibrate"),
    "detrt verify REFERENCE CANDIDATE": ("compare", "check", "diff"),
    "detrt doctor": ("checks", "env", "version", "settings", "devices"),
    "detrt info MODEL": ("show", "inspect", "summary", "describe", "list"),
    "detrt COMMAND -h": ("help",),
    "training code of transformers or of the authors, since detrt trains nothing, and then: detrt build CHECKPOINT -o BUNDLE": (
        "train",
        "fit",
        "finetune",
        "fine-tune",
    ),
}


# key=value of ultralytics -> the words of detrt; {} stands for the value.
_KEYS = {
    "conf": "--threshold {}", "imgsz": "--size {}", "device": "--device {}", "batch": "--batch {}", "vid_stride": "--every {}",
    "max_det": "--max-detections {}", "project": "--save-dir {}", "classes": "--classes {}",
}  # fmt: skip
_SAVED = {"save_txt": ("--save-txt", "labels"), "save_crop": ("--save-crops", "crops")}
_FORMATS = {"engine": "tensorrt", "torchscript": "inductor", "pt2": "inductor"}  # others have one name in both


def spelled(text: str, *, by_rule: bool = False, only: Collection[str] | None = None) -> str:
    """A message with the command line's spelling of what it names.

    by_rule: each name is an option, spelled like its field. only: these fields alone are replaced.
    """
    rule = "" if by_rule else None
    return _MARK.sub(lambda mark: _spelled(mark, rule) if only is None or mark[1] in only else mark[0], text)


def _spelled(mark: re.Match[str], rule: str | None) -> str:
    name, arguments, value = mark.groups()
    if arguments is None:
        return _option(name, value, COMMAND.get(), rule) or mark[0]
    words = [f"detrt {name.replace('_', '-')}"]
    for argument in filter(None, re.split(r", (?=\w+=)", arguments)):
        field, sign, given = argument.partition("=")
        words.append((_option(field, given, name.replace("_", "-"), rule) if sign else None) or argument)
    return " ".join(words)


def _option(name: str, value: str | None, command: str, rule: str | None) -> str | None:
    off = value == "False"
    flag = f"--{'no-' if off else ''}{name.replace('_', '-')}" if rule is not None else _flag(name, off, command)
    if flag is None or off or value in (None, "True"):
        return flag
    return f"{'-o' if flag == '--output' else flag} {value}"


def _flag(name: str, off: bool, command: str) -> str | None:
    """The option of a field, of this command or else of any other; None: no command has one. off: the one that switches it off."""
    from . import _COMMANDS

    dashed = "--" + name.replace("_", "-")
    for one in (command, *_COMMANDS) if command else _COMMANDS:
        options = _flags_of(one)
        found = options.get(name) or options.get(name.removesuffix("s"))
        found = found or next((both for both in options.values() if dashed in both[0]), None)
        if found is not None:
            on, other = found
            return other[0] if off and other else None if off else dashed if dashed in on else max(on, key=len)
    return None


@functools.cache
def _flags_of(command: str) -> dict[str, tuple[list[str], list[str]]]:
    """Parameter of a command -> the names of its option, and those that switch it off; none of what is no command."""
    from . import _COMMANDS, load_command

    parameters: list[Any] = load_command(command).params if command in _COMMANDS else []
    return {one.name: (one.opts, one.secondary_opts) for one in parameters if one.opts[0].startswith("-")}


def options_of(command: str) -> list[str]:
    """The names of a command's options, without those that switch one off."""
    return [name for names, _ in _flags_of(command).values() for name in names]


def command_hint(command: str, words: Iterable[str] = ()) -> str | None:
    """What to type for an unknown command, where another tool has it; with what was typed behind it where that is known."""
    for ours, names in _COMMANDS_ELSEWHERE.items():
        if command.lower().replace("_", "-") in names:
            given = list(words)
            return f"no such command {command!r}; use {line_of([command, *given]) or _filled(ours, given)}"
    return None


def _filled(line: str, given: list[str]) -> str:
    """A line with what was given in the place of its capital words, where each has one."""
    places = [word for word in line.split() if word.isupper()]
    if not line.startswith("detrt ") or len(places) != len(given) or any(word.startswith("-") for word in given):
        return line
    rest = iter(given)
    return " ".join(shlex.quote(next(rest)) if word.isupper() else word for word in line.split())


def line_of(words: list[str]) -> str | None:
    """The line to type for one of ultralytics, such as `export model=FILE format=engine half=True`, or None where it is none."""
    keys = {key.lower(): value for key, sign, value in (word.partition("=") for word in words) if sign and key.isidentifier()}
    mode = next(
        (word.lower() for word in words if word.lower() in ("predict", "track", "val", "train", "export", "benchmark")), None
    )
    if mode is None or not keys or words[0].startswith("-"):
        return None
    files = [word for word in words if "=" not in word and not word.startswith("-") and word.lower() != mode]
    model = shlex.quote(keys.get("model", files[0] if mode == "export" and files else "MODEL"))
    true = {key for key, value in keys.items() if value.lower() in ("true", "1", "yes")}
    if mode == "export":
        from ..backends.targets import TARGETS

        name = keys.get("format", "onnx").lower()
        target = _FORMATS.get(name, name if name in [build.name for row in TARGETS for build in row.builds] else "auto")
        line = f"detrt build {model} -o BUNDLE --target {target}"
        line += " --precision fp16" if "half" in true else " --precision int8 --calibration DIR" if "int8" in true else ""
        return line + "".join(f" {_key(key, keys[key])}" for key in ("imgsz", "batch") if key in keys)
    if mode == "train":
        return next(ours for ours, names in _COMMANDS_ELSEWHERE.items() if mode in names)
    if mode == "benchmark":
        return f"detrt bench {model}"
    if mode == "val":
        data = shlex.quote(keys["data"]) if "data" in keys else "DATA.yaml"
        return f"detrt eval {model} --ground-truth {data}" + (f" --batch {keys['batch']}" if "batch" in keys else "")
    line = f"detrt detect {model} {shlex.quote(keys.get('source', 'IMAGES'))}" + (" --track" if mode == "track" else "")
    line += "".join(f" {_key(key, value)}" for key, value in keys.items() if key in _KEYS and key != "batch")
    line += "".join(f" {flag} {folder}" for key, (flag, folder) in _SAVED.items() if key in true)
    return line if "project" in keys or "save" not in true else f"{line} --save-dir runs"


def _key(key: str, value: str) -> str:
    """The option of a key with its value: 640,480 is a height and a width, and 0,2 or [0, 2] are ids of classes."""
    parts = [part.strip() for part in value.strip("[]() ").split(",")]
    if key == "imgsz":
        value = "x".join(parts)
    elif key == "classes":
        value = ",".join(f"id:{part}" if part.isdecimal() else part for part in parts)
    return _KEYS[key].format(shlex.quote(value))


def hint(option: str, command: str) -> str | None:
    """What to type for an unknown option, where another tool's name for it is known.

    Args:
        option: as it was typed, such as "--imgsz".
        command: of detrt, such as "build".
    """
    from . import _COMMANDS

    name = option.lower().replace("_", "-")
    if name in ("-o", "--output") and command in _OUTPUT:
        return f"unknown option {option}; for detrt {command} it is {_OUTPUT[command]}"
    for why, names in _NO_OPTION.items():
        if name in names:
            return f"unknown option {option}; {why}"
    for ours, names in _ELSEWHERE.items():
        if name in names:
            flag = ours.split()[0]
            if flag in options_of(command):
                return f"unknown option {option}; detrt calls it {ours}"
            where = [f"detrt {other}" for other in _COMMANDS if flag in options_of(other)]
            return (
                f"unknown option {option}; detrt calls it {ours}, an option of {', '.join(where[:3])} and not of detrt {command}"
            )
    return None

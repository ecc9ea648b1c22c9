"""Things that people type wrongly: each gives one clear line and exit code 2, and writes nothing."""

from __future__ import annotations

import itertools
import json
import os

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from cli_support import cli, snapshot, write_images, write_onnx  # noqa: F401 - fixture

from detrt.cli import _COMMANDS, load_command, main
from detrt.cli.spellings import _COMMANDS_ELSEWHERE, _ELSEWHERE, _NO_OPTION, hint

# What is typed, and a part of the answer.
MISTAKES = {
    # Other tools' options.
    "build model.onnx -o new --imgsz 640": "detrt calls it --size",
    "build model.onnx -o new --half": "detrt calls it --precision fp16",
    "build model.onnx -o new --fp16": "detrt calls it --precision fp16",
    "build model.onnx -o new --bf16": "detrt calls it --precision bf16",
    "build model.onnx -o new --int8": "--precision int8 with --calibration DIR",
    "build model.onnx -o new --format engine": "detrt calls it --target",
    "build model.onnx --saveEngine=new.engine": "detrt calls it --output BUNDLE",
    "build --onnx=model.onnx -o new": "the model is the first argument",
    "build model.onnx -o new --minShapes=x:1x3x64x64": "--batch MIN,OPT,MAX, with --height and --width",
    "build model.onnx -o new --workspace 4096": "detrt calls it --workspace-mib",
    "build model.onnx -o new --dynamic": "symbolic anyway",
    "build model.onnx -o new --simplify": "every graph is simplified",
    "build -m model.onnx -o new": "the model is the first argument",
    "export model.onnx -o new --framework pt": "--family is for ckpt:FILE",
    "detect bundle in --conf 0.3": "detrt calls it --threshold",
    "detect bundle in --iou 0.5": "need no NMS",
    "detect bundle in --imgsz 640": "detrt calls it --size",
    "detect bundle in --masks": "masks come with the boxes of every model that has them",
    "detect bundle --source in": "come after the model",
    "detect bundle in --save": "detrt calls it --save-dir",
    "detect bundle in --save-crop": "detrt calls it --save-crops DIR",
    "detect bundle in --view-img": "detrt calls it --save-dir",
    "detect bundle 0": "/dev/video0",
    "eval bundle --ground-truth none.json": "a YOLO data.yaml or a Pascal VOC folder",
    "detect bundle in --half": "an option of detrt build",
    "detect bundle in -o new": "--save-dir DIR for annotated copies",
    "detect bundle in --max-det 10": "detrt calls it --max-detections",
    "detect bundle in --vid-stride 2": "detrt calls it --every",
    "eval bundle --data truth.json": "detrt calls it --ground-truth",
    "bench bundle --iterations 10": "detrt calls it --repeats",
    "verify bundle --images in --atol 1e-3": "detrt calls it --tensor",
    "verify bundle --images in -o new": "--report FILE.html",
    # Other tools' commands.
    "predict bundle in": "use detrt detect bundle in",
    "track bundle in": "use detrt detect bundle in --track",
    "train bundle": "detrt trains nothing",
    "val bundle": "use detrt eval",
    "quantize bundle": "--precision int8 --calibration DIR",
    "benchmark bundle": "use detrt bench bundle",
    "convert model.onnx": "use detrt build",
    # Typing errors.
    "bild model.onnx -o new": "Did you mean 'build'",
    "detect bundle in --treshold 0.3": "--threshold",
    "--versoin": "--version",
    "build model.onnx -o": "requires an argument",
    "build": "missing argument",
    "build model.onnx -o new --target onnnx": "got 'onnnx'",
    "build model.onnx -o new --target trt": "tensorrt-rtx, tensorrt",
    "detect bundle": "missing argument",
    "verify bundle": "--images",
    "info": "detrt info --families",
    "info bundle more": "more",
    "demo-data": "missing argument",
    # Wrong values.
    "detect bundle in --threshold 50": "from 0 to 1; got 50",
    "detect bundle in --threshold high": "got 'high'|'high' is not",
    "detect bundle in --batch 1,4": "got '1,4'|'1,4' is not",
    "detect bundle in --batch 0": "at least 1; got 0",
    "detect bundle in --size big": "such as 640",
    "detect bundle in --size 100": "multiple of|8x12|100",
    "detect bundle in --size": "see: detrt detect -h",
    "build model.onnx -o new --decode": "option '--decode' requires an argument; see: detrt build -h",
    "build model.onnx -o new --target tensorrt-rtx --sm new": "--sm must be",
    "build random:detr/tiny -o new --size 20000": "--size must be",
    "detect bundle in --classes unicorn": "unicorn",
    "detect bundle in --device gpu:x": "--device",
    "detect bundle in --backend trt": "onnxruntime",
    "detect bundle in --backend tensorrt-rtx": "what is built for it runs with --backend tensorrt",
    "serve bundle --backend onnx": "what is built for it runs with --backend onnxruntime",
    "detect bundle in --every 0": "--every",
    "detect bundle in --image-decoder nvjpeg": "cpu or gpu",
    "detect bundle in --prompt cat": "fixed classes|takes no prompt|no prompt",
    "detect bundle in --csv - --json -": "two outputs have the name '-'",
    "detect bundle in --font arial.ttf": "--save-dir",
    "build model.onnx -o new --target tensorrt-rtx --batch 4,2,1": "--batch 1,4,8",
    "build model.onnx -o new --sm 8.x --target tensorrt-rtx": "86",
    "build model.onnx -o new --target onnx --precision fp4": "fp16",
    "build model.onnx -o new --precision int8 --calibration in --qdq-placement gpu": "tensorrt, cpu; got 'gpu'",
    "build model.onnx -o new --target tensorrt-rtx --precision int8 --calibration in --qdq-placement cpu": "--qdq-placement tensorrt",
    "build model.onnx -o new --precision fp16 --qdq-placement tensorrt": "no effect without --precision int8",
    "build model.onnx -o new --target onnx --opset latest": "--opset",
    "verify bundle --images in --precision half": "fp16",
    "verify bundle --against model.onnx --images in --box-px -1": "at least 0",
    "verify bundle --images in --batches one": "1,4,8",
    "serve bundle --port 99999999": "port",
    "serve bundle --port 80a": "got '80a'|'80a' is not",
    "bench bundle --repeats 0": "--repeats must be a number from 1 to 10000; got 0",
    "bench bundle bundel": "there is no model 'bundel'",
    "bench bundle --scopes all": "kernel|forward",
    "serve bundle --labels names.txt": "'bundle' is a bundle and has its own",
    "serve bundle --allow-untested-transformers": "--allow-untested-transformers says how a checkpoint is loaded, and 'bundle' is a bundle",
    "bench bundle --resize 64x64": "'bundle' is a bundle and has its own",
    "detect bundle in --allow-untested-transformers": "--allow-untested-transformers says how a checkpoint is loaded",
    "triton-repo bundle -o new --device gpus": "--device",
    "demo-data new --count -1": "--count",
    # Wrong files.
    "detect bundel in": "'bundel'",
    "detect PekingU/rtdetr_v2_r18vd in": "written hf:PekingU/rtdetr_v2_r18vd",
    "detect bundle photos": "photos",
    "build run -o new --target onnx": "the latest checkpoint of the training run in it is 'run/checkpoint-1000'",
    "detect run in": "the latest checkpoint of the training run in it is 'run/checkpoint-1000'",
    "detect in bundle": "'bundle' has no images",
    "detect best.pt in": "best.pt",
    "detect bundle/detrt.json in": "detrt.json",
    "build best.pt -o new": "best.pt",
    "build ckpt:best.pt -o new --target onnx": "best.pt",
    "build in/blue.png -o new --target onnx": "in/blue.png",
    "build embedded:shape -o new": "embedded:shapes",
    "build in -o new": "'in' has neither config.json (a checkpoint) nor detrt.json (a bundle)",
    "build hf:rtdetr -o new": "hf:<organisation>/<model>",
    "eval bundle --images in --ground-truth gone.json": "gone.json",
    "eval bundle --images in": "--ground-truth",
    "eval --results gone.json --ground-truth truth.json": "gone.json",
    "verify bundle --images gone": "gone",
    "info gone.onnx": "gone.onnx",
    "serve gone": "'gone'",
    "export bundle -o new.onnx": "'bundle' is a bundle, not a checkpoint",
    "eval bundle --images in --ground-truth truth.json --json in": "cannot write 'in': a folder has that name",
    "eval bundle --images in --ground-truth truth.json --save in": "cannot write 'in': a folder has that name",
    "verify bundle --against model.onnx --images in --report in": "cannot write 'in': a folder has that name",
    "verify bundle --against model.onnx --images in --ground-truth in/blue.png": "is not UTF-8 text",
    "report model.onnx --target onnx -o in": "cannot write 'in': a folder has that name",
    "deepstream gone -o new": "gone",
    "deepstream bundle": "'--output'",
    "triton-repo gone -o new": "gone",
    "encode-prompt bundle -o new.json --prompt cat": "prompt",
}

TRUTH = {
    "images": [{"id": 1, "file_name": "blue.png", "width": 24, "height": 16}],
    "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 24, 16], "area": 384, "iscrowd": 0}],
    "categories": [{"id": 1, "name": "blue"}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One working folder for all: nothing may change in it."""
    path = tmp_path_factory.mktemp("mistakes")
    before = os.getcwd()
    os.chdir(path)
    try:
        write_onnx(path / "model.onnx")
        write_images(path / "in")
        (path / "truth.json").write_text(json.dumps(TRUTH))
        for name in ("checkpoint-500", "checkpoint-1000"):
            (path / "run" / name).mkdir(parents=True)
            (path / "run" / name / "config.json").write_text("{}")
        assert main(["build", "model.onnx", "-o", "bundle", "--target", "onnx"]) == 0
        yield path
    finally:
        os.chdir(before)


def test_there_are_sixty():
    assert len(MISTAKES) >= 60


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes(cli, folder, monkeypatch, line):
    monkeypatch.chdir(folder)
    before = snapshot(folder)
    result = cli(*line.split(), code=2)
    assert result.out == "" and "Traceback" not in result.err
    (message,) = [text for text in result.err.splitlines() if text.startswith("detrt: ")]
    assert result.err.rstrip("\n") == message, f"more than one line: {result.err}"
    assert any(part in message for part in MISTAKES[line].split("|")), message
    assert snapshot(folder) == before


def test_hints_name_options_that_exist():
    """The first word of each answer is an option of some command, and no spelling is an option of detrt."""
    options = {name: {o for p in load_command(name).params for o in p.opts} for name in _COMMANDS}
    every = set().union(*options.values())
    for ours, theirs in _ELSEWHERE.items():
        assert ours.split()[0] in every, ours
        for name in theirs:
            where = [command for command in _COMMANDS if name not in options[command]]
            assert all(hint(name, command) for command in where)
    spellings = [name for names in (*_ELSEWHERE.values(), *_NO_OPTION.values()) for name in names]
    assert len(spellings) == len(set(spellings))


def test_hints_name_commands_that_exist():
    names = [name for theirs in _COMMANDS_ELSEWHERE.values() for name in theirs]
    assert len(names) == len(set(names)) and not set(names) & set(_COMMANDS)
    for ours in _COMMANDS_ELSEWHERE:
        (command,) = [
            word for before, word in itertools.pairwise(ours.split()) if before == "detrt" and word in (*_COMMANDS, "COMMAND")
        ]
        assert command


def test_unknown_options_of_nobody_have_no_hint():
    assert hint("--frobnicate", "build") is None

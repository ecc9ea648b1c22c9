"""Options are generated from config dataclasses, and one that would have no effect is refused."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from dataclasses import dataclass, field, fields

import pytest
import typer
from cli_support import cli, place, snapshot  # noqa: F401 - fixtures

from detrt.backends.inductor.config import InductorConfig
from detrt.backends.tensorrt import EngineConfig
from detrt.cli import app, load_command
from detrt.cli.options import PANELS, Given, PromptOptions, command, flag_of
from detrt.cli.spellings import spelled
from detrt.errors import GraphError, PromptError
from detrt.models.contract import ExportConfig
from detrt.models.load_options import LoadOptions
from detrt.precision import PrecisionConfig
from detrt.serve.config import ServeConfig

NAMES = [one.name for one in app.registered_commands]


def options_of(name):
    return {flag: one for one in load_command(name).params for flag in one.opts if flag.startswith("--")}


@pytest.mark.parametrize(
    ("name", "configs"),
    [
        ("build", (ExportConfig, PrecisionConfig, EngineConfig, InductorConfig, LoadOptions)),
        ("export", (ExportConfig, PrecisionConfig, LoadOptions)),
        ("serve", (ServeConfig,)),
        ("detect", (LoadOptions,)),
        ("verify", (LoadOptions,)),
        ("eval", (LoadOptions,)),
        ("info", (LoadOptions,)),
    ],
)
def test_defaults_are_those_of_the_config(name, configs):
    """The command line and Python cannot disagree: each field is the one declaration of its option."""
    options = options_of(name)
    declared = [one for config in configs for one in fields(config) if "help" in one.metadata]
    assert declared
    for one in declared:
        option = options[flag_of(one)]
        assert option.help.startswith(spelled(one.metadata["help"], by_rule=True))
        if "parse" not in one.metadata and not one.metadata.get("many"):
            assert option.default == one.default, one.name


@pytest.mark.parametrize("name", NAMES)
def test_the_list_of_commands_says_what_each_says(name):
    """`detrt --help` imports no command, so its lines stand beside the names."""
    (listed,) = (one.help for one in app.registered_commands if one.name == name)
    first = load_command(name).help.partition("\n\n")[0]
    assert listed == " ".join(first.split())


def test_help_imports_no_command():
    """What a command does not need costs no time: `detrt --help` takes under 0.3 s."""
    code = "import sys; from detrt.cli import main; main(['--help']); print([n for n in sys.modules if n.startswith('detrt.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = ast.literal_eval(done.stdout.splitlines()[-1])
    assert {"detrt.cli", "detrt.errors"} <= set(loaded)
    inner = {name for name in loaded if name.startswith("detrt.cli.") or name.count(".") > 1}
    assert inner == {"detrt.cli.spellings", "detrt.cli.stopping", "detrt.cli.streams"}  # which every command needs


def test_every_option_has_a_panel_of_the_list():
    for name in NAMES:
        for option in load_command(name).params:
            assert getattr(option, "rich_help_panel", None) in PANELS, (name, option.name)


@dataclass(frozen=True)
class Config:
    kind: str = field(default="a", metadata={"help": "Kind."})
    depth: int = field(default=1, metadata={"help": "Depth.", "needs": {"kind": ("b", "c")}})
    ids: tuple[int, ...] = field(
        default=(), metadata={"help": "Ids.", "many": True, "parse": lambda text: tuple(map(int, text.split(",")))}
    )
    hidden: float = 2.0


@pytest.fixture
def run(capsys):
    """The config that a command line makes, and the fields that it names."""
    found = []

    @command
    def show(config: Given[Config]) -> None:
        found.append((config.make(hidden=3.0), {one.name for one in fields(Config) if one.name in config}))

    application = typer.Typer()
    application.command()(show)

    def call(*arguments):
        found.clear()
        application(list(arguments), standalone_mode=False)
        return found[0]

    return call


def test_options_become_a_config(run):
    assert run() == (Config(hidden=3.0), set())
    assert run("--kind", "b", "--depth", "4", "--ids", "1,2", "--ids", "3") == (
        Config("b", 4, (1, 2, 3), 3.0),
        {"kind", "depth", "ids"},
    )


def test_an_option_without_effect_is_refused_even_at_its_default(run):
    with pytest.raises(Exception, match="--depth 1 has no effect without --kind b or c; add that, or leave it out"):
        run("--depth", "1")


@pytest.mark.parametrize(
    ("arguments", "names", "advice"),
    [
        (["build", "model.onnx", "-o", "out", "--target", "onnx", "--tune", "max"], "--tune max", "--target inductor"),
        (["build", "model.onnx", "-o", "out", "--form", "aoti"], "--form aoti", "--target inductor"),
        (["build", "model.onnx", "-o", "out", "--tokens", "8"], "--tokens 8", "--target inductor"),
        (
            ["build", "model.onnx", "-o", "out", "--target", "openvino", "--device", "cpu"],
            "--device cpu",
            "--target inductor or onnx",
        ),
        (["build", "model.onnx", "-o", "out", "--low", "fp16"], "--low fp16", "--precision auto"),
        (["build", "model.onnx", "-o", "out", "--state", "s"], "--state s", "--precision auto"),
        (["build", "model.onnx", "-o", "out", "--keep-fp32", "*"], "--keep-fp32", "--precision fp16"),
        (["build", "model.onnx", "-o", "out", "--min-fraction", "0.5"], "--min-fraction 0.5", "--precision fp16"),
        (["build", "model.onnx", "-o", "out", "--quantize-fraction", "0.5"], "--quantize-fraction", "--precision int8 or fp8"),
        (["build", "model.onnx", "-o", "out", "--calibration-images", "8"], "--calibration-images", "without --calibration"),
        (["build", "model.onnx", "-o", "out", "--calibration-method", "mse"], "--calibration-method", "without --calibration"),
        (
            ["build", "model.onnx", "-o", "out", "--target", "onnx", "--optimization-level", "3"],
            "-level 3",
            "--target tensorrt-rtx",
        ),
        (["build", "model.onnx", "-o", "out", "--target", "onnx", "--tf32"], "--tf32", "--target tensorrt-rtx"),
        (["build", "model.onnx", "-o", "out", "--precision", "tf32"], "--precision tf32", "--target tensorrt-rtx"),
        (
            ["build", "random:detr/tiny", "-o", "out", "--target", "inductor", "--precision", "tf32"],
            "--precision tf32",
            "--device cuda",
        ),
        (["export", "random:detr/tiny", "-o", "o.onnx", "--precision", "tf32"], "--precision tf32", "Leave it out"),
        (["build", "model.onnx", "-o", "out", "--plugin", "p.so"], "--plugin", "--target tensorrt"),
        (["build", "model.onnx", "-o", "out", "--target", "onnx", "--trust-remote-code"], "--trust-remote-code", "leave it out"),
        (["export", "random:detr/tiny", "-o", "o.onnx", "--low", "bf16"], "--low bf16", "--precision auto"),
        (["detect", "bundle", "in", "--text-threshold", "0.3"], "--text-threshold 0.3", "--phrases tokens"),
        (["detect", "bundle", "in", "--no-draw"], "--no-draw", "without --save-dir"),
        (["detect", "bundle", "in", "--font", "f.ttf"], "--font", "without --save-dir"),
        (["detect", "bundle", "in", "--shard", "8"], "--shard 8", "--cluster ray"),
        (["detect", "bundle", "in", "--no-merge"], "--no-merge", "--cluster ray"),
        (["verify", "bundle", "--images", "in", "--ap", "0.1"], "--ap 0.1", "without --ground-truth"),
        (["verify", "bundle", "--images", "in", "--report-images", "3"], "--report-images 3", "--report"),
        (["eval", "--ground-truth", "t.json", "--results", "r.json", "--device", "cpu"], "--device", "leave out"),
        (["info", "--families", "--family", "detr"], "--family", "leave it out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_idle_options_are_refused(cli, place, arguments, names, advice):
    before = snapshot(place)
    cli.refused(*arguments, names=names, advice=advice)
    assert snapshot(place) == before


def test_python_refuses_the_same():
    with pytest.raises(GraphError, match="`low=int8` has no effect without `precision=auto`"):
        PrecisionConfig("fp16", low="int8")


LINES_OF_ULTRALYTICS = {
    "predict model=best.pt source=a.jpg conf=0.3 imgsz=640 save=True": "detrt detect best.pt a.jpg --threshold 0.3 --size 640 --save-dir runs",
    "predict model=m source=a.jpg save_txt=True save_crop=True": "detrt detect m a.jpg --save-txt labels --save-crops crops",
    "predict model=m source='my photos' device=0": "detrt detect m 'my photos' --device 0",
    "predict photos": "detrt detect MODEL IMAGES",
    "predict best.pt 'my photos'": "detrt detect best.pt 'my photos'",
    "track best.pt drive.mp4": "detrt detect best.pt drive.mp4 --track",
    "val best.pt coco.yaml": "detrt eval MODEL --images DIR --ground-truth FILE",
    "predict model=m source=a.jpg classes=[0,2] imgsz=640,480": "detrt detect m a.jpg --classes id:0,id:2 --size 640x480",
    "export model=m format=engine imgsz=[640,480]": "detrt build m -o BUNDLE --target tensorrt --size 640x480",
    "track model=m source=a.mp4": "detrt detect m a.mp4 --track",
    "val model=m data=coco.yaml batch=4": "detrt eval m --ground-truth coco.yaml --batch 4",
    "train data=coco.yaml epochs=3": "detrt build CHECKPOINT -o BUNDLE",
    "benchmark model=m": "detrt bench m",
    "export model=m format=engine half=True": "detrt build m -o BUNDLE --target tensorrt --precision fp16",
    "export m format=engine int8=True imgsz=640": "detrt build m -o BUNDLE --target tensorrt --precision int8 --calibration DIR --size 640",
    "export model=m format=openvino": "detrt build m -o BUNDLE --target openvino",
    "export model=m": "detrt build m -o BUNDLE --target onnx",
}


@pytest.mark.parametrize(("typed", "line"), LINES_OF_ULTRALYTICS.items())
def test_lines_of_ultralytics_get_the_line_to_type(cli, typed, line):
    assert cli(*shlex.split(typed), code=2).err.rstrip().endswith(line)
    name, *words = shlex.split(line)[1:]
    assert {word for word in words if word.startswith("--")} <= set(options_of(name))


@pytest.mark.parametrize("arguments", [["build"], ["build", "-o", "out"], ["info"]], ids=" ".join)
def test_a_name_of_the_hub_gets_its_prefix(cli, arguments):
    command, *rest = arguments
    assert "hf:PekingU/rtdetr_v2_r18vd" in cli(command, "PekingU/rtdetr_v2_r18vd", *rest, code=2).err


def test_prompts_and_files_of_class_names_exclude_each_other(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("person\n\ncar\n\n")
    assert PromptOptions(classes_from=path).read() == ["person", "", "car"]
    assert PromptOptions("x.").read() == "x." and PromptOptions().read() is None
    with pytest.raises(PromptError, match=r"--prompt and --classes-from"):
        PromptOptions("x.", classes_from=path).read()


ONCE = [
    (name, flag)
    for name in NAMES
    for flag, one in options_of(name).items()
    if not one.multiple and not one.is_flag and one.nargs == 1
]


def test_there_are_many_options_of_one_value():
    assert len(ONCE) > 150 and {name for name, _ in ONCE} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_option_of_one_value_that_is_given_twice_is_refused(cli, name):
    """The last would count, and what the first asked for would be lost without a word."""
    for flag in [flag for of, flag in ONCE if of == name]:
        done = cli(name, flag, "1", flag, "2", code=2)
        assert flag in done.err and "is given 2 times" in done.err, (flag, done.err)


@pytest.mark.parametrize("name", NAMES)
def test_an_option_is_no_value_of_another(cli, name, tmp_path, monkeypatch):
    """Where a value was left out, the next option would be lost without a word, and name a file that is written; a mistyped one too."""
    monkeypatch.chdir(tmp_path)
    valued = [one for one in load_command(name).params if one.opts[0].startswith("-") and not one.is_flag and one.nargs == 1]
    assert valued
    for one in valued:
        for other in ("--help", "-h", f"{valued[-1].opts[0]}=1", "-obundle", "--no-chek", "-force", "--"):
            for flag in one.opts:
                done = cli(name, flag, other, code=2)
                assert f"has no value: {other} behind it is spelled like an option" in done.err, (flag, done.err)
                assert f"{max(one.opts, key=len)} VALUE {other} " in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_path_may_begin_with_dashes(cli, place):
    cli("build", "model.onnx", "-o", "./--no-check", "--json", "./-j.json")
    assert (place / "--no-check" / "detrt.json").is_file() and (place / "-j.json").is_file()


def test_a_negative_number_and_standard_output_are_values(cli, place):
    assert "got '-1'" in cli("detect", "model.onnx", "in", "--every", "-1", code=2).err
    assert len(cli("detect", "model.onnx", "in", "--json", "-").lines) == 2


def test_lists_of_classes_add_up(cli, place):
    """Here a name that is asked for first is not lost behind the second one."""
    run = ("detect", "model.onnx", "in", "--threshold", "0", "--json", "-")
    both = cli(*run, "--classes", "red", "--classes", "blue")
    joined = cli(*run, "--classes", "blue,red")
    one = cli(*run, "--classes", "red")
    assert both.code == joined.code == one.code == 0
    assert both.out == joined.out != one.out
    cli.refused(*run, "--classes", "", names="''", advice="give a value, or leave the option out")
    cli.refused(
        *run, "--class-thresholds", "red=0.1", "--class-thresholds", "red=0.9", names="--class-thresholds", advice="twice"
    )

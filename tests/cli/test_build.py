"""detrt build, export, info and verify: from a checkpoint and from an ONNX file to a bundle that passes."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from cli_support import cli, place, snapshot, write_images, write_onnx  # noqa: F401 - fixtures
from engine_graphs import rtx
from precision_graphs import SPEC as PIXELS
from precision_graphs import pixel_model

from detrt import Bundle, graph
from detrt.backends.building import Work
from detrt.backends.engine_check import EngineCheck, EngineRow
from detrt.backends.onnxruntime.session import run_graph
from detrt.backends.shared import builds
from detrt.backends.tensorrt import BuiltEngine, EngineConfig, building
from detrt.backends.tensorrt import compare as engine_compare
from detrt.backends.tensorrt.building import check_capability
from detrt.backends.tensorrt.versions import row_of
from detrt.bundle import EngineFacts, read_sidecar, write_sidecar
from detrt.data.matching import gate_for
from detrt.errors import DetrtError, EngineError
from detrt.graph.lower_msda import sampled_sums
from detrt.graph.msda_plugin import emit
from detrt.graph.view import GraphView
from detrt.precision import PrecisionConfig
from detrt.precision.apply import apply_precision
from detrt.precision.config import PRECISIONS
from detrt.spec import PIXEL_VALUES, Precision

RTX_NAME = "model.tensorrt-rtx-sm89.engine"


def left_over(folder):
    return [p.name for p in folder.rglob("*") if p.name.endswith((".tmp", ".old", ".partial"))]


@rtx
def test_checkpoint_to_bundle(cli, tmp_path):
    """The main job: a checkpoint, its graph checked against PyTorch, one engine for two GPUs, a ranged profile."""
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    out = tmp_path / "new" / "bundle"
    sizes = ["--height", "64,96,128", "--width", "64,64,96", "--batch", "1,2,4"]
    report = cli(
        "build", "random:detr/tiny", "-o", f"{out}/", "--target", "tensorrt-rtx", "--sm", "89,86", *sizes, "--json", "-"
    ).json
    assert [row["stage"] for row in report["stages"]] == ["load", "export", "check", "engine tensorrt-rtx-sm86-89"]
    assert "equal to PyTorch" in report["stages"][2]["verdict"]
    bundle = Bundle.open(out)
    assert {entry.kind for entry in bundle.files} == {"onnx", "engine"}
    for entry in bundle.files:
        bundle.checked_path(entry)
    facts = bundle.of_kind("engine")[0].engine
    assert facts.compute_capabilities == (86, 89)
    assert facts.profile["pixel_values"] == {"min": [1, 3, 64, 64], "opt": [2, 3, 96, 64], "max": [4, 3, 128, 96]}
    assert bundle.spec.input.dynamic and bundle.provenance.source == "random:detr/tiny"
    assert bundle.provenance.options["export"]["opset"] == 17
    assert read_sidecar(bundle.path_of(bundle.of_kind("engine")[0]))[0] == bundle.spec
    assert os.listdir(out.parent) == ["bundle"]


@rtx
def test_onnx_to_bundle(cli, place):
    text = cli("build", "model.onnx", "-o", "out/", "--target", "tensorrt-rtx", "--sm", 89).out
    assert "spec of test" in text and "engine tensorrt-rtx-sm89" in text and "detrt detect out IMAGE" in text
    assert sorted(os.listdir("out")) == ["detrt.json", "model.onnx", RTX_NAME, f"{RTX_NAME}.json"]
    assert (place / "out/model.onnx").read_bytes() == (place / "model.onnx").read_bytes()
    assert Bundle.open("out").of_kind("engine")[0].engine.profile["pixel_values"]["max"] == [8, 3, 8, 12]


@rtx
def test_layers_names_every_kernel(cli, place):
    cli("build", "model.onnx", "-o", "out", "--target", "tensorrt-rtx", "--sm", 89, "--layers", "layers.jsonl")
    rows = [json.loads(line) for line in (place / "layers.jsonl").read_text().splitlines()]
    facts = Bundle.open("out").of_kind("engine")[0].engine
    assert rows and len(rows) == facts.kernels["all"] and {row["engine"] for row in rows} == {RTX_NAME}
    for kind in {row["kind"] for row in rows}:
        assert sum(row["kind"] == kind for row in rows) == facts.kernels[kind]
    assert "layers.jsonl" not in (place / "out/detrt.json").read_text()  # no part of the engine
    read = {name for row in rows for name in row["reads"]}
    assert "UInt8" in read or "Float" in read
    cli.refused(
        "build",
        "model.onnx",
        "-o",
        "other",
        "--target",
        "tensorrt-rtx",
        "--layers",
        "model.onnx",
        names="model.onnx",
        advice="another|other",
    )
    cli.refused(
        "build", "model.onnx", "-o", "other", "--target", "onnx", "--layers", "l", names="--layers", advice="leave it out"
    )
    assert not os.path.exists("other") and not os.path.exists("l")


@pytest.mark.parametrize(
    ("option", "others"),
    [
        ("--layers", ("--target", "tensorrt-rtx")),
        ("--timing-cache", ("--target", "tensorrt")),
        ("--state", ("--target", "onnx", "--precision", "auto", "--budget", "drift=0.1", "--calibration", "photos")),
    ],
)
def test_files_in_the_folder_of_a_new_bundle_are_refused_before_the_work(cli, place, option, others):
    (place / "photos").mkdir()
    cli.refused("build", "model.onnx", "-o", "new", *others, option, "new/file", names="new/file", advice="outside of 'new'")
    assert not os.path.exists("new")


@rtx
def test_replaces_an_old_bundle(cli, place):
    """Files of the old bundle go, and are named where that cost a build; files of the user stay."""
    cli("build", "bundle", "--target", "tensorrt-rtx", "--sm", 89)
    (place / "bundle/notes").mkdir()
    for name in ("note.txt", "notes/more.txt"):
        (place / "bundle" / name).write_text("of the user")
    write_onnx(place / "other.onnx", height=16)
    result = cli("build", "other.onnx", "-o", "bundle", "--target", "onnx")
    assert sorted(os.listdir("bundle")) == ["detrt.json", "model.onnx", "note.txt", "notes"]
    assert (place / "bundle/notes/more.txt").read_text() == "of the user"
    assert f"{RTX_NAME} was removed: it was built from the earlier graph" in result.err
    assert Bundle.open("bundle").spec.input.height == 16 and not left_over(place)


@rtx
def test_a_bundle_grows(cli, place):
    """An engine joins the rest, also one of the same name; what fails changes nothing."""
    (place / "bundle/note.txt").write_text("of the user")
    before = snapshot(place / "bundle")
    result = cli("build", "bundle", "--target", "tensorrt-rtx", "--sm", 89, "--json", "-")
    assert [row["stage"] for row in result.json["stages"]] == ["engine tensorrt-rtx-sm89"] and result.json["bundle"] == "bundle"
    cli("build", "bundle", "-o", "bundle", "--target", "tensorrt-rtx", "--sm", 86)
    after = snapshot(place / "bundle")
    assert {name: after[name] for name in before if name != "detrt.json"} == {
        k: v for k, v in before.items() if k != "detrt.json"
    }
    bundle = Bundle.open("bundle")
    assert [entry.engine.compute_capabilities for entry in bundle.of_kind("engine")] == [(89,), (86,)]
    assert sorted(bundle.checked_path(entry).suffix for entry in bundle.files) == [".engine", ".engine", ".onnx"]
    cli("build", "bundle", "--target", "tensorrt-rtx", "--sm", 89, "--batch", 2)
    bundle = Bundle.open("bundle")
    profiles = {entry.engine.compute_capabilities[0]: entry.engine.profile for entry in bundle.of_kind("engine")}
    assert {sm: row["pixel_values"]["max"][0] for sm, row in profiles.items()} == {86: 8, 89: 2}
    assert [bundle.checked_path(entry) for entry in bundle.files] and not left_over(place)
    before = snapshot(place)
    cli.refused(
        "build",
        "bundle",
        "--target",
        "tensorrt-rtx",
        "--sm",
        89,
        "--size",
        64,
        names="got height 64. Leave that out",
        advice="symbolic height",
    )
    manifest = json.loads((place / "bundle/detrt.json").read_text("utf-8"))
    manifest["provenance"]["options"]["precision"] = {"precision": "int8", "qdq_placement": "cpu"}
    (place / "for-cpu").mkdir()
    for path in (place / "bundle").iterdir():
        (place / "for-cpu" / path.name).write_bytes(path.read_bytes())
    (place / "for-cpu/detrt.json").write_text(json.dumps(manifest))
    for model in (("for-cpu",), ("for-cpu/model.onnx", "-o", "other")):
        cli.refused(
            "build",
            *model,
            "--target",
            "tensorrt-rtx",
            "--sm",
            80,
            names="--qdq-placement cpu",
            advice="--qdq-placement tensorrt",
        )
    before = snapshot(place)
    (place / "bundle/model.onnx").write_bytes(b"other")
    cli.refused("build", "bundle", "--target", "tensorrt-rtx", "--sm", 80, names="bundle/model.onnx", advice="build it again")
    write_onnx(place / "bundle/model.onnx")
    assert snapshot(place) == before
    before = snapshot(place)
    for _ in range(2):
        cli("build", "bundle/model.onnx", "-o", "bundle", "--target", "onnx")
        assert len(Bundle.open("bundle").files) == 3, "engines of the same graph stay"
        assert snapshot(place).keys() == before.keys(), "folders of a replacement are left"
    half = ("build", "bundle/model.onnx", "-o", "bundle", "--precision", "fp16")
    cli.refused(*half, names="'bundle'", advice="another bundle with -o FOLDER")


def test_a_bundle_of_another_version_is_built_again_as_the_refusal_says(cli, place):
    path = place / "bundle" / "detrt.json"
    manifest = json.loads(path.read_text("utf-8"))
    row = {"kind": "engine", "path": "model.engine", "sha256": "", "size": 0}
    manifest["files"].append({**row, "engine": {"target": "onnx", "tensorrt_version": "1"}})
    path.write_text(json.dumps(manifest))
    for name in ("model.engine", "model.engine.json", "mine.txt"):
        (place / "bundle" / name).write_text("")
    said = cli.refused("detect", "bundle", "in", names="tensorrt_version", advice="detrt build bundle/model.onnx")
    command = said[said.index("detrt build") :].split()
    assert command == ["detrt", "build", "bundle/model.onnx", "-o", "bundle", "--target", "onnx"]
    cli(*command[1:])
    assert len(cli("detect", "bundle", "in", "--json", "-", "-q").lines) == 2
    assert {path.name for path in (place / "bundle").iterdir()} == {"detrt.json", "model.onnx", "mine.txt"}
    kept = Bundle.open("bundle").provenance.options
    assert {name: kept[name] for name in ("export", "loading") if name in kept} == {
        name: value for name, value in manifest["provenance"]["options"].items() if name in ("export", "loading")
    }


@pytest.mark.parametrize(
    ("arguments", "names", "advice"),
    [
        (["bundle", "--target", "onnx"], "'bundle'", "--target tensorrt-rtx"),
        (["bundle", "--precision", "fp16"], "--precision fp16", "another bundle with -o"),
        (["bundle", "--target", "tensorrt-rtx", "--opset", "20"], "--opset 20", "leave it out"),
        (["bundle", "--target", "inductor"], "ONNX file", "give the checkpoint itself"),
        (["model.onnx"], "where the bundle goes", "-o FOLDER|-o bundle"),
        (["model.onnx", "-o", "out", "--target", "onnx", "--size", "8x12"], "--size 8x12", "leave it out"),
        (["model.onnx", "-o", "out", "--calibration", "in"], "--calibration in", "--precision"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_adds_nothing_is_refused(cli, place, arguments, names, advice):
    before = snapshot(place)
    cli.refused("build", *arguments, names=names, advice=advice)
    assert snapshot(place) == before


def test_a_file_of_the_user_is_not_replaced(cli, place):
    """Of a bundle whose manifest does not list it, also where the user's file has the name of a new one."""
    import onnx
    from onnx.external_data_helper import set_external_data

    model = onnx.load("model.onnx")
    set_external_data(next(tensor for tensor in model.graph.initializer if tensor.name == "boxes"), "split.data")
    onnx.save(model, "split.onnx")
    (place / "bundle/split.data").write_text("of the user")
    before = snapshot(place)
    cli.refused("build", "split.onnx", "-o", "bundle", "--target", "onnx", names="bundle/split.data", advice="move it")
    assert snapshot(place) == before


def test_where_a_graph_comes_from_goes_with_it(cli, exported, tmp_path):
    """Through an export and a bundle of a bundle: reference, parameters and choices."""
    path = exported("yolos").path
    cli("build", path, "-o", tmp_path / "a", "--target", "onnx")
    cli("build", tmp_path / "a", "-o", tmp_path / "b", "--target", "onnx")
    for name in "ab":
        origin = Bundle.open(tmp_path / name).provenance
        assert origin.source == "random:yolos/tiny" and origin.parameters > 1000
        assert origin.options["export"]["opset"] == 17 and origin.versions["torch"] and origin.created[:2] == "20"


def test_the_graph_is_tried_on_a_device(cli, place):
    """Also a graph that is smaller than the smallest scene."""
    report = cli("build", "model.onnx", "-o", "out", "--target", "onnx", "--device", "cpu", "--json", "-").json
    assert [(row["stage"], row["verdict"]) for row in report["stages"]][1:] == [("onnxruntime-cpu", "runs")]
    before = snapshot(place)
    tried = ("build", "model.onnx", "-o", "out", "--target", "onnx", "--device", "cuda")
    cli.refused(*tried, names="'cuda'", advice="onnxruntime-gpu|no NVIDIA GPU.*--device cpu")
    assert snapshot(place) == before


def test_from_a_bundle_into_itself(cli, place):
    before = (place / "bundle/model.onnx").read_bytes()
    cli("build", "bundle/model.onnx", "-o", "bundle", "--target", "onnx")
    assert (place / "bundle/model.onnx").read_bytes() == before and not left_over(place)


def test_into_an_empty_folder_and_through_a_link(cli, place):
    (place / "empty").mkdir()
    (place / "real").mkdir()
    (place / "link").symlink_to(place / "real")
    for folder in ("empty", "link", "link"):
        cli("build", "model.onnx", "-o", folder, "--target", "onnx")
        assert Bundle.open(folder).spec.family == "test"
    assert (place / "link").is_symlink() and (place / "real/detrt.json").is_file() and not left_over(place)


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("in", "give a new or empty folder"),
        ("model.onnx", "give another output path"),
        ("model.onnx/sub", "a part of the path is a file"),
        (".", "give a new or empty folder"),
        ("..", "give a new or empty folder"),
        ("/proc/bundle", "give another output path"),
    ],
)
def test_foreign_places_are_refused(cli, place, output, advice):
    before = snapshot(place)
    cli.refused("build", "model.onnx", "-o", output, "--target", "onnx", names=f"'{output}'", advice=advice)
    assert snapshot(place) == before


def test_external_weights_travel(cli, place):
    import onnx
    from onnx.external_data_helper import set_external_data

    model = onnx.load("model.onnx")
    # Only the boxes: ONNX Runtime needs the small shape tensors in the file itself.
    boxes = next(tensor for tensor in model.graph.initializer if tensor.name == "boxes")
    set_external_data(boxes, "split.data")
    onnx.save(model, "split.onnx")
    assert graph.data_files("split.onnx") == ["split.data"]
    cli("build", "split.onnx", "-o", "out", "--target", "onnx")
    assert {e.path: e.kind for e in Bundle.open("out").files} == {"model.onnx": "onnx", "split.data": "weights"}
    assert len(cli("detect", "out", "in", "--json", "-", "-q").lines) == 2


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--opset", "20"], "--opset 20"),
        (["--msda", "gridsample"], "--msda gridsample"),
        (["--decode", "graph"], "--decode graph"),
        (["--max-detections", "5"], "--max-detections 5"),
        (["--score-threshold", "0.5", "--decode", "graph"], "--decode graph"),
        (["--no-normalize"], "--no-normalize"),
        (["--input-dtype", "float32"], "--input-dtype float32"),
        (["--no-mask", "--target", "tensorrt-rtx", "--size", "64"], "--no-mask"),
        (["--no-check"], "--no-check"),
        (["--labels", "labels.txt"], "labels.txt"),
    ],
    ids=" ".join,
)
def test_export_choices_are_not_ignored(cli, place, options, names):
    (place / "labels.txt").write_text("a\nb\nc\n")
    before = snapshot(place)
    cli.refused("build", "model.onnx", "-o", "out", *options, names=names, advice="detrt export")
    assert snapshot(place) == before


def test_export(cli, tmp_path):
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    (tmp_path / "names.txt").write_text("\n".join("abcdefg"))
    out = tmp_path / "new" / "g.onnx"
    options = ["--size", "64x96", "--decode", "graph", "--max-detections", 5, "--opset", 18]
    result = cli("export", "random:yolos/tiny", "-o", out, *options, "--labels", tmp_path / "names.txt")
    assert "equal to PyTorch" in result.out and "YOLOS" in result.out and "boxes: float32 batch x 5 x 4" in result.out
    spec = graph.read_spec(out)
    assert spec.input.size_hw == (64, 96) and spec.decode.in_graph and spec.labels[6] == "g"
    assert graph.summarise(graph.load(out)).opset == 18
    assert os.listdir(out.parent) == ["g.onnx"]


@pytest.mark.parametrize(
    ("options", "exact"), [((), 1e-5), (("--precision", "fp16", "--min-fraction", 0), 1e-2)], ids=["fp32", "fp16"]
)
def test_export_writes_the_form_that_tensorrt_fuses(cli, tmp_path, options, exact):
    """Samples are summed by ReduceSum, as in the graphs that `build` gives to TensorRT, which writes each operand of a MatMul to memory."""
    pytest.importorskip("transformers", reason="needs the 'export' extra")

    outputs = {}
    for name, form in (("plain", ()), ("fused", ("--for-tensorrt",))):
        path = tmp_path / name / "g.onnx"
        cli("export", "random:rt_detr_v2/tiny", "-o", path, "--no-check", "--size", 64, *options, *form)
        spec = graph.read_spec(path)
        assert os.listdir(path.parent) == ["g.onnx"] and bool(sampled_sums(GraphView(graph.load(path)))[0]) == (name == "plain")
        pixels = np.random.default_rng(1).integers(0, 256, (2, 3, *spec.input.size_hw), np.uint8)
        outputs[name] = run_graph(path, {PIXEL_VALUES: pixels})
    for output, want in outputs["plain"].items():
        np.testing.assert_allclose(outputs["fused"][output], want, rtol=exact, atol=exact)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "equal to PyTorch: "),
        (("--for-tensorrt",), "equal to PyTorch: "),
        (("--precision", "bf16", "--for-tensorrt"), "equal to PyTorch (before conversion): "),
        (("--msda", "plugin"), "equal to PyTorch: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_export_says_which_graph_was_compared(cli, tmp_path, options, words):
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    assert words in cli("export", "random:rt_detr_v2/tiny", "-o", tmp_path / "g.onnx", "--size", 64, *options).out


@pytest.mark.parametrize("precision", [(), ("--precision", "bf16")], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["yolos", "owlvit"])
def test_export_compares_the_form_that_it_writes(cli, tmp_path, monkeypatch, family, precision):
    """A last rewrite that changes what the model computes ends with exit code 3, and not with "equal to PyTorch"."""
    pytest.importorskip("transformers", reason="needs the 'export' extra")

    def wrong(model):
        if any(value.name == PIXEL_VALUES for value in model.graph.input):
            last = next(node for node in model.graph.node if "logits" in node.output)
            last.output[0] = "before"
            model.graph.node.append(onnx.helper.make_node("Neg", ["before"], ["logits"]))

    monkeypatch.setattr("detrt.graph.dialect.for_typed_parser", wrong)
    result = cli("export", f"random:{family}/tiny", "-o", tmp_path / "g.onnx", *precision, "--for-tensorrt", code=3)
    assert "differs from" in result.err and "logits" in result.err and not os.listdir(tmp_path)


def test_export_compares_the_plugin_nodes_that_it_writes(cli, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="needs the 'export' extra")

    def wrong(model, how):
        emit(model, how)
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "points_per_level":
                    attribute.ints[:] = attribute.ints[::-1]

    monkeypatch.setattr("detrt.export.trace.emit", wrong)
    options = ["--msda", "plugin", "--size", 64]
    result = cli("export", "random:d_fine/tiny", "-o", tmp_path / "g.onnx", *options, code=3)
    assert "differs from PyTorch" in result.err and not os.listdir(tmp_path)


def test_what_export_says_of_the_graph_is_of_the_file(cli, tmp_path):
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    options = ["--precision", "bf16", "--for-tensorrt", "--json", "-"]
    found = cli("export", "random:owlvit/tiny", "-o", tmp_path / "g.onnx", *options).json["graph"]
    written = graph.summarise(graph.load(tmp_path / "g.onnx"))
    assert (found["nodes"], found["opset"]) == (written.nodes, 20) and written.opset == 20


def test_export_into_a_folder_as_json(cli, tmp_path):
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    data = cli("export", "random:yolos/tiny", "-o", tmp_path / "d", "--no-check", "--json", "-").json
    assert data["path"] == str(tmp_path / "d" / "model.onnx") and data["checks"] == [] and data["parameters"] > 0
    assert os.listdir(tmp_path / "d") == ["model.onnx"]


@pytest.mark.parametrize(
    ("arguments", "names", "advice"),
    [
        (["random:detr/tiny", "-o", "o.onnx", "--height", "64,96,128", "--width", "96"], "one size", "give one number"),
        (["model.onnx", "-o", "o.onnx"], "'model.onnx'", "detrt build model.onnx"),
        (["random:detr/tiny", "-o", "model.onnx/o.onnx"], "'model.onnx/o.onnx'", "a part of the path is a file"),
        (["random:detr/tiny", "-o", "in/o.onnx", "--json", "/proc/r.json"], "/proc/r.json", "another output path"),
        (["random:detr/tiny", "-o", "o.onnx", "--opset", "12"], "got 12", "17, 18, 19, 20"),
        (["random:detr/tiny", "-o", "o.onnx", "--no-mask"], "mask", "add --height and --width"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_export_refuses_early(cli, place, arguments, names, advice):
    before = snapshot(place)
    cli.refused("export", *arguments, names=names, advice=advice)
    assert snapshot(place) == before


@rtx
def test_info(cli, place):
    cli("build", "model.onnx", "-o", "out", "--target", "tensorrt-rtx", "--sm", 89)
    bundle = cli("info", "out", "--json", "-").json
    assert bundle["kind"] == "bundle" and bundle["family"] == "test" and bundle["source"] == str(place / "model.onnx")
    assert [(f["path"], f["present"]) for f in bundle["files"]] == [("model.onnx", True), (RTX_NAME, True)]
    model = cli("info", "model.onnx", "--json", "-").json
    assert model["kind"] == "onnx" and model["operators"]["Cast"] == 1 and model["opset"] == 18
    engine = cli("info", f"out/{RTX_NAME}", "--json", "-").json
    assert engine["kind"] == "engine" and engine["compute_capabilities"] == [89] and engine["precision"] == "fp32"
    assert "pixel_values" in engine["profile"]
    counted = read_sidecar(place / "out" / RTX_NAME)[1].kernels
    for ref in ("out", f"out/{RTX_NAME}"):
        rows = cli("info", ref, "--layers", "--json", "-").json
        assert {row["kind"]: row["kernels"] for row in rows} == {kind: number for kind, number in counted.items() if number}
        assert {row["engine"] for row in rows} == {RTX_NAME} and rows[0]["kind"] == "all"
    table = cli("info", "out", "--layers").out.splitlines()
    assert any(line.split() == [RTX_NAME, "all", str(counted["all"])] for line in table) and "--layers FILE" in table[-1]
    text = " ".join(cli("info", f"out/{RTX_NAME}").out.split())
    assert "red, green, blue" in text and "max 8, 3, 8, 12" in text
    (place / "out" / RTX_NAME).write_bytes(b"cut")
    assert "engine, DAMAGED: it has 3 bytes" in " ".join(cli("info", "out").out.split())
    found = {row["path"]: row.get("bytes_found") for row in cli("info", "out", "--json", "-").json["files"]}
    assert found == {"model.onnx": None, RTX_NAME: 3}
    (place / "out" / RTX_NAME).unlink()
    assert "engine, MISSING" in " ".join(cli("info", "out").out.split())


def test_info_of_a_checkpoint(cli):
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    data = cli("info", "random:yolos/tiny", "--json", "-").json
    assert data["kind"] == "checkpoint" and data["family"] == "yolos" and data["parameters"] > 1000


@pytest.mark.parametrize(
    ("arguments", "names", "advice"),
    [
        (["info"], "MODEL", "detrt info --families"),
        (["info", "bundle", "--families"], "MODEL", "detrt info --families"),
        (["info", "bundle", "--layers"], "'bundle'", "build one with: detrt build bundle --target tensorrt-rtx"),
        (["info", "model.onnx", "--layers"], "'model.onnx'", "build one with: detrt build MODEL -o OUT --target tensorrt-rtx"),
        (["info", "--layers", "--families"], "--layers", "leave it out"),
        (["info", "bundle", "--layers", "--family", "detr"], "--family has no effect with --layers", "leave it out"),
        (["info", "in"], "'in'", r"detrt.json \(a bundle\) nor config.json"),
        (["info", "gone"], "'gone'", "give a bundle folder"),
        (["info", "in/blue.png"], "in/blue.png", "expected .onnx, .* or a folder"),
        (["verify", "bundle", "--against", "gone", "--images", "in"], "'gone'", "give a bundle folder"),
        (["verify", "bundle", "--against", "model.onnx", "--images", "none"], "'none'", "check the path"),
        (["verify", "bundle", "--against", "model.onnx", "--images", "in", "--box-px", "-1"], "-1", "at least 0"),
        (["verify", "bundle", "--against", "model.onnx", "--images", "in", "--json", "in"], "'in'", "another output"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_info_and_verify_refuse(cli, place, arguments, names, advice):
    before = snapshot(place)
    cli.refused(*arguments, names=names, advice=advice)
    assert snapshot(place) == before


def test_verify_passes(cli, place):
    result = cli("verify", "bundle", "--against", "model.onnx", "--images", "in", "--json", "r.json")
    assert "verdict: the same detections" in result.out
    report = json.loads((place / "r.json").read_text())
    assert report["passed"] and report["compared"] > 0 and len(report["images"]) == 2


def test_verify_fails_with_3(cli, place):
    """A graph with another constant gives other scores."""
    import onnx

    model = onnx.load("model.onnx")
    shift = next(t for t in model.graph.initializer if t.name == "shift")
    shift.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(shift) + 0.5, "shift"))
    onnx.save(model, "other.onnx")
    result = cli("verify", "bundle", "--against", "other.onnx", "--images", "in", code=3)
    assert "verdict: DIFFERENT" in result.out
    assert result.err.startswith("detrt: ") and "score" in result.err and "Traceback" not in result.err


def test_verify_reads_every_image(cli, place):
    (place / "in" / "cut.png").write_bytes((place / "in/blue.png").read_bytes()[:60])
    cli.refused("verify", "bundle", "--against", "model.onnx", "--images", "in", names="in/cut.png", advice="damaged|copy")
    shutil.rmtree(place / "in")
    (place / "in").mkdir()
    cli.refused("verify", "bundle", "--against", "model.onnx", "--images", "in", names="'in'", advice="known suffixes")


def test_a_bf16_graph_alone_is_warned_about(cli, place):
    """ONNX Runtime refuses it on a CPU (test_session.py)."""
    graph.save(pixel_model(), place / "pixels.onnx")
    result = cli("build", "pixels.onnx", "-o", "low", "--target", "onnx", "--precision", "bf16")
    assert "warning: ONNX Runtime has no convolutions in BF16 on CPUs" in result.err and "--precision fp16" in result.err


def test_an_int8_graph_alone_is_warned_about_where_nobody_placed_it(cli, place):
    """It is placed for TensorRT, and on a CPU slower than FP32."""
    graph.save(pixel_model(), place / "pixels.onnx")
    build = ("build", "pixels.onnx", "--target", "onnx", "--precision", "int8", "--calibration", "in", "--min-fraction", "0")
    result = cli(*build, "-o", "default")
    assert "warning: this INT8 graph is placed for TensorRT" in result.err and "--qdq-placement cpu" in result.err
    for placement in ("cpu", "tensorrt"):
        assert "placed for" not in cli(*build, "-o", placement, "--qdq-placement", placement).err


def test_tf32_is_asked_for_of_graphs_in_fp32_alone(cli, place, monkeypatch):
    monkeypatch.setattr(building.EngineBuilder, "missing", lambda *_: [])
    graph.save(pixel_model(), place / "pixels.onnx")
    cli("build", "pixels.onnx", "-o", "half", "--precision", "fp16", "--min-fraction", "0")
    build = ["build", "half", "--target", "tensorrt", "--precision", "tf32"]
    cli.refused(*build, names="--precision tf32 is for a graph in FP32, and this one is in fp16", advice="leave it out: --tf32")


def test_a_detector_has_its_engine_without_one_of_its_text_encoder(tmp_path, monkeypatch):
    """TensorRT 8.5.3 crashes on the text encoder of OWL-ViT and builds the detector."""

    def crash(*_, **__):
        raise EngineError("the builder process crashed (SIGABRT)")

    monkeypatch.setattr(building, "build_engine", crash)
    work = Work(tmp_path, PrecisionConfig(), lambda *_: None, ())
    work.spec = PIXELS
    config = EngineConfig(target="tensorrt")
    assert building.BUILDER._text_engine(work, "text.onnx", "text.tensorrt.engine", config) is None
    (warning,) = work.warnings
    assert "stays with ONNX Runtime" in warning and warning.endswith("crashed (SIGABRT)")
    assert not work.entries and not list(tmp_path.iterdir())


def test_an_engine_that_detects_something_else_is_not_handed_over(cli, place, monkeypatch):
    """Of trained weights: exit code 3 and nothing written, with the shape that is wrong. Random weights are judged by NaN alone."""
    rows = (EngineRow(4, 16, 16, compared=40), EngineRow(1, 8, 8, compared=10, missing=10, error=1.0))

    def write_engine(path, output, config, spec, *, progress):
        output.write_bytes(b"engine")
        facts = EngineFacts("tensorrt", "8.5.3.1", (90,), "fp32", {}, onnx_sha256="")
        return BuiltEngine(output, write_sidecar(output, spec, facts), facts, 6)

    monkeypatch.setattr(building, "build_engine", write_engine)
    monkeypatch.setattr(building.EngineBuilder, "missing", lambda *_: [])
    monkeypatch.setattr(engine_compare, "compare_engine", lambda *_, **__: EngineCheck(rows, gate_for("fp32")))
    before = snapshot(place)
    build = ["build", "model.onnx", "-o", "wrong", "--target", "tensorrt"]
    cli.refused(*build, names="40 of 50 detections matched, at batch 1, 8x8 0 of 10", advice="--no-check", code=3)
    assert snapshot(place) == before
    assert "40 of 50" not in cli(*build, "--no-check").out  # what the message says works for a graph that is exported already
    cli.refused("build", "model.onnx", "-o", "other", "--target", "onnx", "--no-check", names="--no-check", advice="leave it out")
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    result = cli("build", "random:yolos/tiny", "-o", "random", "--target", "tensorrt")
    assert "at batch 1, 8x8 0 of 10" in result.err and "Not judged: random weights" in result.err
    assert Bundle.open("random").provenance.options["engine_checks"]["model.tensorrt.engine"]["passed"] is False
    assert "--return-selections" in result.err  # on the same queries random weights are judged as well
    rows = tuple(replace(row, selection=0.0) for row in rows)
    cli.refused("build", "random", "--target", "tensorrt", names="1.0e+00 of the largest output", advice="--precision", code=3)
    rows = (replace(rows[0], text="the model returned NaN"), rows[1])
    cli.refused("build", "random", "--target", "tensorrt", names="the model returned NaN", advice="--precision", code=3)


def test_tensorrt_8_is_refused_int8_before_any_work(cli, place, monkeypatch):
    """Asked of a checkpoint, and held by a graph; a later TensorRT is not."""
    model, _ = apply_precision(
        pixel_model(), PIXELS, PrecisionConfig("int8", calibration="x", min_fraction=0.0), [np.zeros((16, 16, 3), np.uint8)]
    )
    graph.save(model, place / "int8.onnx")
    installed = SimpleNamespace(row=row_of("tensorrt", "8.6.1"), version="8.6.1")
    monkeypatch.setattr(building, "is_installed", lambda target: True)
    monkeypatch.setattr(building, "load_trt", lambda target: installed)
    monkeypatch.setattr(building.EngineBuilder, "missing", lambda *_: [])
    monkeypatch.setattr(Work, "graph_precision", Precision.INT8)
    before = snapshot(place)
    refused = partial(cli.refused, names="no int8 engines with TensorRT 8.6.1", advice="--precision fp16")
    refused("build", "int8.onnx", "-o", "new", "--target", "tensorrt")
    refused("build", "random:detr/tiny", "-o", "new", "--target", "tensorrt", "--precision", "int8", "--calibration", "x")
    assert snapshot(place) == before
    installed.row = row_of("tensorrt", "10.3.0")
    check_capability(Precision.INT8, [EngineConfig(target="tensorrt")])


MACHINES = {  # installed packages that build or run a target, GPUs, checkpoint -> what auto builds
    "nothing": ((), (), True, None),
    "a CPU with OpenVINO": (("openvino",), (), True, "openvino"),
    "TensorRT-RTX without a GPU": (("tensorrt-rtx-cu13-bindings", "cuda-python"), (), True, None),
    "TensorRT-RTX on its GPU": (("tensorrt-rtx-cu13-bindings", "cuda-python", "openvino"), ("8.9",), True, "tensorrt-rtx"),
    "TensorRT-RTX on a GPU that it does not know": (("tensorrt-rtx-cu13-bindings", "cuda-python"), ("9.0",), True, None),
    "TensorRT": (("tensorrt", "cuda-python", "torch", "transformers"), ("9.0",), True, "tensorrt"),
    "TensorRT without cuda-python": (("tensorrt", "openvino"), ("9.0",), True, "openvino"),
    "PyTorch on a GPU": (("torch", "transformers", "openvino"), ("9.0",), True, "inductor"),
    "PyTorch on a GPU, and an ONNX file": (("torch", "transformers", "openvino"), ("9.0",), False, "openvino"),
    "PyTorch for CPUs on a GPU": (("torch+cpu", "transformers"), ("9.0",), True, None),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_what_auto_builds(monkeypatch, machine):
    from detrt import system
    from detrt.backends.targets import fastest_build

    installed, gpus, checkpoint, expected = MACHINES[machine]
    versions = {name.removesuffix("+cpu"): "2.0+cpu" if name.endswith("+cpu") else "2.0" for name in installed}
    monkeypatch.setattr(system, "_package", lambda name: system.Package(name, versions.get(name), "", "x", ""))
    monkeypatch.setattr(system, "_gpus", lambda: [{"name": "GPU", "compute_cap": cap} for cap in gpus])
    monkeypatch.setattr(system, "has_driver", lambda: bool(gpus))
    found = fastest_build(checkpoint=checkpoint)
    assert (found.name if found else None) == expected


@pytest.mark.parametrize("works", [True, False])
def test_the_last_line_names_the_faster_target(cli, place, monkeypatch, works):
    """It is a command that works as it stands, and is not said where the bundle has it already."""
    pytest.importorskip("openvino", reason="needs the 'openvino' extra")
    monkeypatch.setattr("detrt.backends.targets.able", lambda abilities: [a for a in abilities if works and not a.on_gpu])
    lines = cli("build", "model.onnx", "-o", "plain").out.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("faster on this machine: "))
    if not works:
        assert ".[openvino]" in lines[-1] and at == len(lines) - 2
        return
    command = lines[-1].partition(": detrt ")[2].split()
    assert command == ["build", "plain", "--target", "openvino"]
    assert "faster on this machine" not in cli(*command).out
    assert {entry.kind for entry in Bundle.open("plain").files} >= {"onnx", "openvino"}
    assert "openvino" in {
        entry.kind for entry in cli("build", "model.onnx", "-o", "auto", "--target", "auto") and Bundle.open("auto").files
    }


# What a target does not have; FP8 with TensorRT-RTX on the GPUs of its default `--sm`, TF32 on a CPU. All else is built, with images for
# what needs them.
LACKING = {
    ("inductor", "int8"), ("inductor", "fp8"), ("inductor", "auto"), ("tensorrt-rtx", "int8"), ("tensorrt-rtx", "fp8"),
    ("inductor", "tf32"), ("onnx", "tf32"), ("openvino", "tf32"),
}  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("target", builds())
def test_what_a_target_lacks_is_said_before_images_are_asked_for(target, precision, tmp_path, monkeypatch, cli):
    pytest.importorskip("torch", reason="needs the 'export' extra")

    def began(*args, **options):
        raise DetrtError("the work began")

    monkeypatch.setattr("detrt.pipeline._GraphWork.export", began)
    images = write_images(tmp_path / "images")
    needs_images = precision in ("int8", "fp8", "auto")
    arguments = ["build", "embedded:shapes", "-o", tmp_path / "out", "--target", target, "--precision", precision]
    arguments += ["--budget", "drift=0.1"] if precision == "auto" else []
    without = cli(*arguments, code=2).err
    given = cli(*arguments, "--calibration", images, code=2).err if needs_images else without
    if "not installed" in without:
        assert without == given and "--calibration" not in without
    elif (target, precision) in LACKING:
        assert without == given and precision.upper() in without.upper() and "--calibration" not in without
    else:
        assert "the work began" in given
        assert ("--calibration" if needs_images else "the work began") in without

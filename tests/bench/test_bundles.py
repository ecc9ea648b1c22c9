"""`detrt bench` on bundles and their files: every backend that runs here, and honest figures."""

from __future__ import annotations

import importlib.util
import json
import math
import xml.etree.ElementTree as ET
from dataclasses import fields

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("onnx")

from checkpoint_folders import save_folder

from detrt.bench.bundles import targets_of
from detrt.bench.config import BUNDLES, CHECKPOINTS, BenchConfig
from detrt.bench.plot import pareto, write_plot
from detrt.bench.profile import kind_of_kernel, matmul_work, roofline, sum_by_run
from detrt.bench.run import bench
from detrt.bundle import Bundle
from detrt.cli import app
from detrt.cli.spellings import spelled
from detrt.data.scenes.scene import draw_scene
from detrt.errors import DetrtError, MissingPackageError, SessionError
from detrt.models import source
from detrt.models.load import load_source


def matmul_model(rows, width, out):
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(np.ones((width, out), np.float32), "w")
    sides = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [rows, width]), ("y", [rows, out]))]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="/product/MatMul")], "g", *[[s] for s in sides], [weight]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=onnx.IR_VERSION_2023_5_5)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    from detrt.export import ExportConfig
    from detrt.pipeline import build

    folder = tmp_path_factory.mktemp("bench") / "bundle"
    build("random:lw_detr/tiny", folder, export=ExportConfig(height=64, width=64, check=False))
    return folder


def test_figures_of_a_bundle(bundle, tmp_path):
    report = bench([str(bundle), str(bundle / "model.onnx")], BenchConfig(batches=(1, 2), repeats=5, warmup=1))
    assert len(report["rows"]) == 8 and report["machine"]["versions"]
    for row in report["rows"]:
        assert len(row["samples_ms"]) == 5 and 0 < row["min_ms"] <= row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert row["images_per_s"] == pytest.approx(row["batch"] * 1e3 / row["p50_ms"], rel=0.01)
        assert row["backend"] == "onnxruntime-cpu" and (row["height"], row["width"]) == (64, 64)


@pytest.mark.slow
def test_next_to_the_library_with_precision_and_parts(bundle, tmp_path):
    """All that one run can measure: its library, average precision, parts and the roofline, drawn."""
    from PIL import Image

    labels = Bundle.open(bundle).spec.labels
    Image.fromarray(draw_scene(3, size_hw=(64, 64)).image).save(tmp_path / "a.png")
    annotation = {"id": 1, "image_id": 1, "category_id": 7, "bbox": [5, 5, 30, 30], "area": 900, "iscrowd": 0}
    truth = {
        "images": [{"id": 1, "file_name": "a.png", "width": 64, "height": 64}],
        "categories": [{"id": 7, "name": next(iter(labels.values()))}],
        "annotations": [annotation],
    }
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    plot, figures = tmp_path / "plot.svg", tmp_path / "figures.json"
    command = ["bench", str(bundle), "--repeats", "2", "--warmup", "1", "--against", "random:lw_detr/tiny", "--parts"]
    command += ["--ground-truth", str(tmp_path / "truth.json"), "--images", str(tmp_path), "--plot", str(plot)]
    done = CliRunner().invoke(app, [*command, "--json", str(figures)])
    assert done.exit_code == 0, done.output
    assert "roofline:" in done.output and "kind of operator" in done.output and "transformers" in done.output
    report = json.loads(figures.read_text())
    assert {row["backend"] for row in report["rows"]} == {"onnxruntime-cpu", "transformers-cpu"}
    assert {row["scope"] for row in report["rows"]} == {"forward", "end_to_end"}
    ours = [row for row in report["rows"] if row["backend"] == "onnxruntime-cpu"]
    assert all(0 <= row["AP"] <= 1 for row in ours)
    (part,) = report["parts"]
    for shares in (part["modules"], part["kinds"]):
        assert sum(shares.values()) == pytest.approx(1, abs=0.01) and list(shares.values()) == sorted(
            shares.values(), reverse=True
        )
    assert any(name.startswith("model.") for name in part["modules"]) and "Conv" in part["kinds"]
    assert 0 < part["roofline"]["share"] < 1 and part["roofline"]["gflop"] > 0
    assert list(part["stages"]) == ["decode", "resize", "forward", "post-process"] and min(part["stages"].values()) > 0
    assert "post-process" in done.output
    panels = [e for e in ET.parse(plot).iter() if str(e.get("id", "")).startswith("axes_")]
    assert len(panels) == 7, "latency of two scopes, throughput, AP, modules, kinds, roofline"


@pytest.mark.parametrize(
    ("name", "prompt", "backend"),
    [
        *(
            ("eomt", None, "transformers-cpu"),
            ("mask2former", None, "transformers-cpu"),
            ("owlv2", "a cat. a dog.", "transformers-cpu"),
            ("ecdet", None, "pytorch-cpu"),
        ),
        *((f"pp_doclayout_v{version}", None, "transformers-cpu") for version in (2, 3, 4)),
        ("sam3", "a cat. a dog.", "transformers-cpu"),
    ],
)
def test_transformers_as_its_users_run_it(name, prompt, backend):
    """With torchvision where its processor needs it (make test-torchvision), which is named where it is missing."""
    from detrt.bench.reference import library_calls

    images = [draw_scene(seed, size_hw=(96, 128)).image for seed in range(2)]
    made = load_source(f"random:{name}/tiny")  # of its own: its attention becomes another
    size = (96, 128) if made.spec.input.dynamic and name != "sam3" else made.spec.input.size_hw
    calls = library_calls(made, threads=1, prompt=prompt)
    if name.startswith(("pp_", "sam3")) and importlib.util.find_spec("torchvision") is None:
        with pytest.raises(
            MissingPackageError, match="image processor of (SAM 3|PP-DocLayoutV.) needs the package 'torchvision'"
        ):
            calls(size, images)
        return
    if name == "sam3":
        with pytest.raises(SessionError, match="takes 112x112 only; leave `size` out"):
            calls((96, 128), images)
    ((found, scopes),) = calls(size, images).items()
    outputs, detections = scopes["forward"](), scopes["end_to_end"]()
    assert found == backend and len(detections) == 2 * (2 if name == "sam3" else 1)
    assert name not in ("eomt", "mask2former") or "masks_queries_logits" in outputs


def test_work_of_a_product_is_counted(tmp_path):
    model = matmul_model(3, 5, 7)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    work = matmul_work(path, {"x": np.ones((3, 5), np.float32)})
    assert list(work.values()) == [(2 * 3 * 5 * 7, 4 * (3 * 5 + 5 * 7 + 3 * 7))]
    found = roofline(path, {"x": np.ones((3, 5), np.float32)}, 1.0, False)
    assert found["bound_ms"] < 1 and math.isfinite(found["gflops"])


def test_times_of_kernels_are_sum_by_run_run_by_run():
    kernels = [("gemm", 10.0, 2000.0), ("_msda_kernel_0", 3000.0, 500.0), ("Memcpy HtoD (Pinned -> Device)", 0.0, 9000.0)]
    events = [(name, start + 1e5 * run, took + run) for run in range(4) for name, start, took in kernels]
    times = sum_by_run(events[::-1], 4)
    assert times.samples_ms == pytest.approx([2.5, 2.502, 2.504, 2.506]) and times.kernels == 2
    assert times.msda_samples_ms == pytest.approx([0.5, 0.501, 0.502, 0.503]) and times.msda_calls == 1
    uneven = sum_by_run([*events, ("late", 9e5, 4000.0)], 4)  # cannot be distinguished: one mean
    assert uneven.samples_ms == pytest.approx([2.503 + 1.0])
    with pytest.raises(SessionError, match="no kernel"):
        sum_by_run(events[2:3], 1)


def test_several_processors_of_one_bundle(bundle):
    both = targets_of(str(bundle), BenchConfig(providers=("cpu", "cuda:1")))
    assert [str(target) for target in both] == ["onnxruntime-cpu", "onnxruntime-cuda:1"]
    report = bench([str(bundle)], BenchConfig(repeats=1, warmup=0, providers=("cpu", "cuda"), scopes=("forward",)))
    assert [row["backend"] for row in report["rows"]] == ["onnxruntime-cpu"] and report["rows"][0]["build_s"] > 0
    assert [(skip["backend"], "available: cpu" in skip["why"]) for skip in report["skipped"]] == [("onnxruntime-cuda", True)]


def test_a_plot_of_many(tmp_path):
    """Three models, three backends, three batches: one line each in the panel of its scope."""
    rows = [
        {"model": f"/m/{m}", "backend": b, "scope": s, "batch": n, "p50_ms": t * n, "images_per_s": 1e3 / t, "AP": 0.3 + t / 1e3}
        for m, t in (("one", 1.0), ("two", 2.0), ("three", 30.0))
        for b in ("inductor-cuda", "onnxruntime-cuda", "onnxruntime-cpu")
        for s in ("kernel", "forward", "end_to_end")
        for n in (1, 4, 16)
    ]
    write_plot({"rows": rows, "parts": [], "machine": {"processor": "a CPU", "cores": 2}}, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert all(f"<!-- {name} -->" in text for name in ("one", "two", "three", "onnxruntime-cuda", "kernel", "end to end"))


def test_only_points_that_nothing_beats():
    assert pareto([(2.0, 0.5), (1.0, 0.3), (3.0, 0.4), (2.0, 0.6)]) == [(1.0, 0.3), (2.0, 0.6)]
    assert kind_of_kernel("triton_poi_fused_convolution_relu_3").startswith("fused")
    assert kind_of_kernel("sm90_xmma_fprop_implicit_gemm_f16") == "convolutions" and kind_of_kernel("nvjet_sm90_hsh") == "matmul"


def test_the_command(bundle, tmp_path):
    plot = tmp_path / "plot.png"
    done = CliRunner().invoke(app, ["bench", str(bundle), "--batches", "1,2", "--repeats", "2", "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert "forward" in done.output and "end to end" in done.output and plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batches", "1,x"], "--batch must be comma-separated integers above 0"),
        (["--batches", "0"], "got '0'"),
        (["--batches", "257"], "from 1 to 256"),
        (["--backends", "tpu"], "got tpu"),
        (["--backends", "tensorrt-rtx"], "what is built for it runs with --backends tensorrt"),
        (["--plot", "x.pdf"], "ends in .svg or .png"),
        (["--plot", "/dev/null/x.svg"], "a part of the path is a file"),
        (["--prompt", "a cat."], "takes no prompt"),
        (["--ground-truth", "x.json"], "needs both"),
        (["--ground-truth", "x.json", "--images", "."], "x.json"),
        (["--compile"], "give it with --against"),
        (["--against", "random:grounding_dino/tiny"], "takes a prompt; give --prompt"),
        (["--against", "a", "--against", "b"], "one for each of the 1; got 2"),
        (["--scopes", "forward,backward"], "of kernel, forward, end-to-end; got backward"),
        (["--provider", "cpu,gpu"], "--provider must be of cpu, cuda, tensorrt"),
        (["--device", "cuda:x"], "such as cpu,cuda:0; got 'cuda:x'"),
        (["--provider", "cuda"], "provider 'cuda' is not in this build"),
        (["--scopes", "kernel"], "on a CPU there is no device"),
        (["--scopes", "kernel", "--parts"], "add forward to --scopes"),
        (["--backends", "inductor", "--provider", "cpu"], "--provider chooses for ONNX Runtime"),
        (["--backends", "onnxruntime", "--device", "cpu"], "--device chooses for packages"),
        (["--size", "96"], "takes 64x64 only"),
        (["--backends", "inductor"], "runs with inductor; it has onnxruntime"),
        (["--against", "random:dino/tiny"], "transformers has no"),
        (["embedded:shapes"], "not both"),
    ],
)
def test_bad_choices(bundle, arguments, says):
    done = CliRunner().invoke(app, ["bench", str(bundle), "--repeats", "1", "--warmup", "0", *arguments])
    assert isinstance(done.exception, (DetrtError, SystemExit))
    assert says in (spelled(str(done.exception)) + done.output).replace("\n", " ")


# What each option is given, to see that it is refused where it has no effect.
GIVEN = {
    "engine": ["--engine"],
    "torch": ["--no-torch"],
    "msda": ["--msda", "auto"],
    "fixed": ["--symbolic"],
    "scopes": ["--scopes", "forward"],
    "backends": ["--backends", "onnxruntime"],
    "providers": ["--provider", "cpu"],
    "devices": ["--device", "cpu"],
    "prompt": ["--prompt", "a cat."],
    "against": ["--against", "embedded:shapes"],
    "compile": ["--compile", "--against", "embedded:shapes"],
    "ground_truth": ["--ground-truth", "x.json", "--images", "."],
    "images": ["--images", ".", "--ground-truth", "x.json"],
    "parts": ["--parts"],
    "plot": ["--plot", "x.svg"],
}


@pytest.mark.parametrize("entry", [f for f in fields(BenchConfig) if "only" in f.metadata], ids=lambda f: f.name)
def test_an_option_without_effect_is_refused(bundle, entry):
    """Every option of one kind of models, given with the other kind."""
    model, models = (str(bundle), BUNDLES) if entry.metadata["only"] == CHECKPOINTS else ("embedded:shapes", CHECKPOINTS)
    done = CliRunner().invoke(app, ["bench", model, *GIVEN[entry.name]])
    said = (spelled(str(done.exception)) + done.output).replace("\n", " ")
    assert f"is for {entry.metadata['only']} and has no effect on {models}" in said
    assert any(option in said for option in GIVEN[entry.name] if option.startswith("--"))


def test_untested_versions_of_transformers(bundle, monkeypatch):
    """Refused until the option is given, which bundles alone do not take."""
    monkeypatch.setattr(source, "installed_version", lambda package: "5.999.0" if package == "transformers" else None)
    arguments = ["bench", str(bundle), "--repeats", "1", "--warmup", "0", "--json", "-"]
    against, allow = ["--against", "random:lw_detr/tiny"], "--allow-untested-transformers"
    refused = CliRunner().invoke(app, arguments + against)
    assert "transformers 5.999.0, which detrt was not tested with" in str(refused.exception)
    done = CliRunner().invoke(app, [*arguments, *against, allow])
    assert done.exit_code == 0 and "transformers-cpu" in {row["backend"] for row in json.loads(done.stdout)["rows"]}
    said = spelled(str(CliRunner().invoke(app, [*arguments, allow]).exception))
    assert said == f"{allow} says how a checkpoint is loaded, and '{bundle}' is a bundle; leave it out"


def test_against_takes_how_a_checkpoint_is_read(bundle, tiny, tmp_path):
    """A folder without the file of its image processor, which is refused until the preprocessing is stated."""
    folder = save_folder(tiny("lw_detr"), tmp_path / "folder")
    (folder / "preprocessor_config.json").unlink()
    arguments = ["bench", str(bundle), "--repeats", "1", "--warmup", "0", "--json", "-", "--against", str(folder)]
    assert "--preprocess family-default" in spelled(str(CliRunner().invoke(app, arguments).exception))
    done = CliRunner().invoke(app, [*arguments, "--preprocess", "family-default"])
    report = json.loads(done.stdout)
    assert report["config"]["preprocess"] == "family-default" and not report["config"]["trust_remote_code"]
    assert "transformers-cpu" in {row["backend"] for row in report["rows"]}


def test_checkpoints_take_one_batch_size():
    done = CliRunner().invoke(app, ["bench", "embedded:shapes", "--batch", "1,4"])
    assert "one batch size" in str(done.exception) + done.output


@pytest.mark.slow
def test_a_prompted_bundle_needs_its_prompt(tmp_path):
    from detrt.export import ExportConfig
    from detrt.pipeline import build

    build("embedded:phrases", tmp_path / "b", export=ExportConfig(check=False))
    with pytest.raises(SessionError, match="`prompt='a cat"):
        bench([str(tmp_path / "b")], BenchConfig(repeats=1))
    given = ("embedded:phrases",)
    config = BenchConfig(repeats=1, warmup=0, prompt="a red circle. a square.", parts=True, against=given)
    report = bench([str(tmp_path / "b")], config)
    assert {row["backend"] for row in report["rows"]} == {"onnxruntime-cpu", "transformers-cpu"}
    assert {row["scope"] for row in report["rows"]} == {"forward", "end_to_end"} and report["parts"][0]["roofline"]["gflop"] > 0


def test_a_back_end_that_is_not_there(bundle):
    with pytest.raises(SessionError, match="nothing of"):
        bench([str(bundle)], BenchConfig(backends=("inductor",)))

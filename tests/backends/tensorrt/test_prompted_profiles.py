"""Engines of prompted models: profiles of the axes of a prompt, and builds of both graphs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest

pytest.importorskip("transformers", reason="needs the 'export' extra")

from detrt import EngineConfig, ExportConfig, build, graph
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.tensorrt.profile import NetworkTensor, check_shapes, plan_profile
from detrt.backends.tensorrt.rewrite import rewrite
from detrt.backends.tensorrt.versions import VERSIONS
from detrt.errors import EngineError, ExportError, GraphError, SessionError, SpecError
from detrt.graph.emulate_low_precision import emulate
from detrt.models.contract import contract, exported_spec, text_encoder_contract
from detrt.precision import PrecisionConfig
from detrt.precision.calibrate import PromptedImages, image_feeds
from detrt.precision.stage import text_feeds


def network(infos):
    return [NetworkTensor(i.name, i.dtype, tuple(-1 if isinstance(s, str) else s for s in i.shape)) for i in infos]


def shapes(profile, name):
    return [profile[name][point] for point in ("min", "opt", "max")]


def test_profile_of_phrases(tiny):
    spec = exported_spec(tiny("grounding_dino"), ExportConfig(decode="graph"))
    found = plan_profile(network(contract(spec)[0]), EngineConfig(batch=(1, 2, 4)), spec)
    assert shapes(found, "text_features") == [[1, 4, 32], [2, 32, 32], [4, 256, 32]]
    assert shapes(found, "text_self_mask") == [[1, 4, 4], [2, 32, 32], [4, 256, 256]]
    assert shapes(found, "phrase_mask") == [[1, 1, 4], [2, 8, 32], [4, 128, 256]]
    assert shapes(found, "pixel_mask") == [[1, 200, 200], [2, 800, 1067], [4, 1333, 1333]]
    text_encoder = plan_profile(network(text_encoder_contract(spec)[0]), EngineConfig(batch=(1, 2, 4)), spec)
    assert shapes(text_encoder, "input_ids") == [[1, 4], [2, 32], [4, 256]]


def test_profile_of_class_names(tiny):
    spec = exported_spec(tiny("omdet_turbo"), ExportConfig())
    found = plan_profile(network(contract(spec)[0]), EngineConfig(), spec)
    assert shapes(found, "class_mask") == [[1, 1], [1, 16], [8, 1000]]
    assert shapes(found, "task_features") == [[1, 4, 24], [1, 32, 24], [8, 77, 24]]
    # The text encoder's batch is names, whatever the batch of images.
    text_encoder = plan_profile(network(text_encoder_contract(spec)[0]), EngineConfig(batch=(1, 1, 2)), spec)
    assert shapes(text_encoder, "input_ids") == [[1, 4], [16, 32], [64, 77]]


def test_profile_of_phrases_with_queries_of_their_own(tiny):
    spec = exported_spec(tiny("sam3"), ExportConfig())
    found = plan_profile(network(contract(spec)[0]), EngineConfig(batch=(1, 1, 2)), spec)
    assert shapes(found, "phrase_features") == [[1, 1, 32, 32], [1, 1, 32, 32], [2, 4, 32, 32]]
    assert shapes(found, "phrase_mask") == [[1, 1, 32], [1, 1, 32], [2, 4, 32]]
    alone = plan_profile(network(contract(spec)[0]), EngineConfig(batch=(1, 1, 1)), spec, one_phrase=True)
    assert shapes(alone, "phrase_mask") == [[1, 1, 32]] * 3
    text_encoder = plan_profile(network(text_encoder_contract(spec)[0]), EngineConfig(), spec)
    assert shapes(text_encoder, "input_ids") == [[1, 32], [16, 32], [64, 32]]


def test_tensorrt_8_5_gets_a_graph_for_one_phrase(exported, tmp_path):
    """All of it is of fixed shape then: with a symbolic prompt the builder did not end."""
    report = exported("sam3")
    config = EngineConfig(batch=(1, 1, 1), height=(126, 126, 126), width=(126, 126, 126))
    for number in ((8, 5), (8, 6)):
        row = next(row for row in VERSIONS if row.target == "tensorrt" and row.since == number)
        model = onnx.load(rewrite(report.path, row, config, report.spec, tmp_path).path)
        sides = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
        assert sides["phrase_mask"] == [1, 1 if number == (8, 5) else 0, 32] and sides["phrase_features"][2] == 32


def test_a_short_limit_bounds_the_profile(tiny):
    spec = exported_spec(tiny("grounding_dino"), ExportConfig())
    spec = replace(spec, text=replace(spec.text, max_tokens=20))
    found = plan_profile(network(text_encoder_contract(spec)[0]), EngineConfig(), spec)
    assert shapes(found, "input_ids") == [[1, 4], [1, 20], [8, 20]]


def test_a_fixed_number_of_tokens_is_kept(tiny):
    spec = exported_spec(tiny("grounding_dino"), ExportConfig())
    inputs = [
        NetworkTensor("input_ids", "int64", (-1, 12)),
        NetworkTensor("attention_mask", "int64", (-1, 12)),
    ]
    assert shapes(plan_profile(inputs, EngineConfig(), spec), "input_ids") == [[1, 12], [1, 12], [8, 12]]


def test_text_axes_need_a_text_part(tiny):
    spec = replace(exported_spec(tiny("grounding_dino"), ExportConfig()), text=None)
    with pytest.raises(EngineError, match="'input_ids' axis 1"):
        plan_profile([NetworkTensor("input_ids", "int64", (-1, -1))], EngineConfig(), spec)


def test_a_prompt_outside_the_profile_is_named():
    profile = {"input_ids": ((1, 4), (1, 32), (8, 256))}
    with pytest.raises(SessionError, match=r"has tokens 300; this engine takes 4 to 256 .give a prompt with fewer tokens"):
        check_shapes({"input_ids": (1, 300)}, profile)


def test_a_bundle_has_every_file_and_kind(tiny, tmp_path):
    report = build("random:omdet_turbo/tiny", tmp_path / "b", export=ExportConfig(check=False))
    kinds = {"model.onnx": "onnx", "text.onnx": "text", "tokenizer.json": "tokenizer"}
    assert {f.path: f.kind for f in report.bundle.files} == kinds
    again = build(tmp_path / "b" / "model.onnx", tmp_path / "c")
    assert {f.path: (f.kind, f.sha256) for f in again.bundle.files} == {f.path: (f.kind, f.sha256) for f in report.bundle.files}
    with pytest.raises(SpecError, match="which has its own beside it"):
        build(
            tmp_path / "b" / "model.onnx",
            tmp_path / "d",
            tokenizer=tmp_path / "b" / "tokenizer.json",
        )
    for name in ("text.onnx", "tokenizer.json"):
        kept = (tmp_path / "b" / name).read_bytes()
        (tmp_path / "b" / name).unlink()
        with pytest.raises(SpecError, match=f"needs '{name}' beside it"):
            build(tmp_path / "b" / "model.onnx", tmp_path / "d")
        (tmp_path / "b" / name).write_bytes(kept)
    assert not (tmp_path / "d").exists()


@pytest.fixture
def photographs(tmp_path):
    from PIL import Image

    (tmp_path / "images").mkdir()
    rng = np.random.default_rng(0)
    for name in "ab":
        Image.fromarray(rng.integers(0, 256, (96, 64, 3), np.uint8)).save(tmp_path / "images" / f"{name}.png")
    return tmp_path / "images"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"precision": "fp16"}, r"give `prompt='a cat\. a dog\.'` with it"),
        ({"precision": "auto", "budget": ("drift", 0.1)}, r"give `prompt='a cat\. a dog\.'` with it"),
    ],
)
def test_calibration_asks_for_a_prompt(choices, message, photographs, tmp_path):
    types = PrecisionConfig(calibration=photographs, **choices)
    with pytest.raises(ExportError, match=message):
        build("random:omdet_turbo/tiny", tmp_path / "b", precision=types, export=ExportConfig(check=False))
    assert not (tmp_path / "b").exists()


def test_a_prompt_is_for_models_that_take_one(photographs, tmp_path):
    types = PrecisionConfig(precision="fp16", calibration=photographs, prompt="red.")
    with pytest.raises(ExportError, match="this one has fixed classes; leave it out"):
        build("random:yolos/tiny", tmp_path / "b", precision=types, export=ExportConfig(check=False))
    with pytest.raises(GraphError, match="needs the images of `calibration`"):
        PrecisionConfig(precision="fp16", prompt="red.")


@pytest.mark.parametrize(
    ("name", "low"),
    [
        pytest.param("grounding_dino", "int8", marks=pytest.mark.slow),
        pytest.param("grounding_dino", "fp16", marks=pytest.mark.slow),
        pytest.param("omdet_turbo", "fp8", marks=pytest.mark.slow),
    ],
)
def test_prompted_models_are_calibrated_with_their_prompt(name, low, photographs, tmp_path):
    """The ranges are those of the prompt: they hold every tensor that the text goes through."""
    # The size of OmDet-Turbo is fixed, and small.
    choices = ExportConfig(check=False, **({} if name == "omdet_turbo" else {"height": 96, "width": 128}))
    types = PrecisionConfig(
        low, calibration=photographs, prompt="red circle. blue square.", quantize_fraction=1.0, min_fraction=0.01
    )
    exact = build(f"random:{name}/tiny", tmp_path / "a", export=choices)
    report = build(tmp_path / "a" / "model.onnx", tmp_path / "b", precision=types)
    kept = report.bundle.provenance.options["precision"]
    assert kept["calibration_images"] == 2 and kept["prompt"] == "red circle. blue square." and kept["share"]["shares"][low] > 0
    ranges = json.loads((tmp_path / "b" / "ranges.json").read_text())["tensors"]
    text = [row for tensor, row in ranges.items() if "text" in tensor or "task" in tensor]
    assert text and all(row["absmax"] >= 0 and row["values"] > 0 for row in text)
    assert any(row["absmax"] > 0 for row in text)
    # The typed detector runs, and finds much the same as the exact one.
    outputs = []
    for folder in (exact.bundle.folder, report.bundle.folder):
        spec = exact.bundle.spec
        model = emulate(graph.load(folder / "model.onnx"))
        (feeds,) = (
            f
            for f in image_feeds(
                PromptedImages([photographs / "a.png"], text_feeds(exact.bundle.folder / "model.onnx", types.prompt)), spec
            )
        )
        with OnnxSession(model.SerializeToString(), spec) as session:
            outputs.append(session.run(feeds)["pred_boxes"])
    # A query of equal score may be another one; the median is not moved by it.
    assert np.median(np.abs(outputs[0] - outputs[1])) < {"fp16": 2e-3, "int8": 0.03, "fp8": 0.05}[low]


@pytest.mark.slow
def test_the_search_asks_for_the_prompt(photographs, tmp_path):
    """Candidates answer the prompt, the state is kept, and a budget that the whole graph keeps ends at once."""
    build("random:grounding_dino/tiny", tmp_path / "a", export=ExportConfig(check=False, height=96, width=128))

    def searched(allowed: float, folder: str) -> dict:
        types = PrecisionConfig(
            "auto",
            low="int8",
            quantize_fraction=1.0,
            calibration=photographs,
            prompt="red circle. blue square.",
            budget=("drift", allowed),
            min_fraction=0.01,
            state=tmp_path / "state.json",
        )
        report = build(tmp_path / "a" / "model.onnx", tmp_path / folder, precision=types)
        return report.bundle.provenance.options["precision"]["search"]

    whole = searched(10.0, "b")
    assert whole["kept"] == [] and whole["runs"] == 1 and 0 < whole["all_low"] < 10.0
    half = searched(whole["all_low"] / 2, "c")
    assert half["kept"] and half["result"] <= half["budget"][1] < half["all_low"] and len(half["drifts"]) > 5
    assert all(block for block in half["kept"]), "blocks have the names of modules"
    assert searched(whole["all_low"] / 2, "d") == half | {"runs": 0}


@pytest.mark.parametrize("name", ["grounding_dino", "omdet_turbo"])
def test_the_text_encoder_builds(name, tiny, tmp_path):
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the 'rtx' extra")
    from detrt import graph
    from detrt.backends.tensorrt import build_engine
    from detrt.export.prompted import _traced_text_encoder

    source = tiny(name)
    spec = exported_spec(source, ExportConfig())
    graph.save(_traced_text_encoder(source, spec, ExportConfig()), tmp_path / "text.onnx")
    built = build_engine(tmp_path / "text.onnx", tmp_path / "text.engine", EngineConfig(sms=(89,)), spec)
    assert built.facts.precision == "fp32" and built.facts.layers > 100
    assert {tensor["name"] for tensor in built.facts.inputs} == {"input_ids", "attention_mask"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grounding_dino", "mm_grounding_dino", "omdet_turbo", "sam3", "owlv2"])
@pytest.mark.parametrize("choices", [{}, {"decode": "graph", "msda": "gridsample"}], ids=str)
def test_both_graphs_build(name, choices, tmp_path):
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the 'rtx' extra")
    sides = (56, 112, 224) if name == "sam3" else (64, 128, 256)
    config = EngineConfig(sms=(89,), **({} if name == "owlv2" else {"height": sides, "width": sides}))
    export = ExportConfig(check=False, **choices)
    report = build(f"random:{name}/tiny", tmp_path / "b", targets=(config,), export=export)
    found = {f.kind: f.path for f in report.bundle.files}
    assert found["engine"] == "model.tensorrt-rtx-sm89.engine"
    assert found["text-engine"] == "text.tensorrt-rtx-sm89.engine"


@pytest.mark.slow
def test_a_low_precision_without_images(tmp_path):
    """FP16 needs no images; the text encoder stays as it is, and the trained detector finds the same things."""
    import numpy as np

    from detrt import Detector
    from detrt.cli.run_demo import IMAGE_SIZE_HW, PROMPT, PROMPT_SEED
    from detrt.data.scenes.scene import draw_scene

    image = draw_scene(PROMPT_SEED, size_hw=IMAGE_SIZE_HW).image
    build("embedded:phrases", tmp_path / "fp32", export=ExportConfig(check=False))
    report = build(tmp_path / "fp32" / "model.onnx", tmp_path / "fp16", precision=PrecisionConfig("fp16"))
    assert report.bundle.spec.text is not None
    found = []
    for name in ("fp32", "fp16"):
        with Detector.open(tmp_path / name, prompt=PROMPT, threshold=0.5) as detector:
            found.append(detector([image])[0])
    exact, low = found
    assert sorted(low.labels) == sorted(exact.labels) and len(exact) >= 5
    order = [low.labels.index(label) for label in exact.labels]
    np.testing.assert_allclose(low.scores[order], exact.scores, atol=0.02)
    np.testing.assert_allclose(low.boxes_xyxy[order], exact.boxes_xyxy, atol=1.0)

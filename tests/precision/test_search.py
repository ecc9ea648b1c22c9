"""The search of precisions with times. A trial whose engines ONNX Runtime runs, and whose times follow from the types of their layers."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace

import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")
pytest.importorskip("onnxruntime")

from PIL import Image
from precision_graphs import SPEC, images, pixel_model

from detrt import graph
from detrt.backends.building import Trial
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.errors import EngineError, GateError, GraphError, ImageError, MissingPackageError
from detrt.graph.emulate_low_precision import emulate
from detrt.graph.view import HALF, GraphView
from detrt.precision import PrecisionConfig, search
from detrt.precision.apply import apply_precision, calibrate
from detrt.precision.capability import check_before
from detrt.precision.search import Search, blocks_of, joined, plot

# Milliseconds that a layer takes in FP32 and in FP16; a conversion between them takes 0.1.
LAYERS = {"stem": (2, 2.5), "body": (3, 1), "fc1": (4, 2), "fc2": (4, 2), "class_head": (1, 0.9), "box_head": (1, 0.5)}


class Modelled(Trial):
    def __init__(self, where="tensorrt-rtx 1.6 on a GPU", layers=LAYERS, broken=()):
        self.where, self.layers, self.broken, self.opened = where, layers, broken, []

    def open(self, path):
        typed = graph.load(path)
        session = OnnxSession(emulate(typed).SerializeToString(), SPEC)
        view = GraphView.typed(typed)
        low = {name: any(view.types.get(node.output[0]) == HALF for node in view.nodes if name in node.name.split("/")
                         and node.op_type in ("Conv", "MatMul")) for name in self.layers}  # fmt: skip
        self.opened.append({name for name in low if low[name]})
        if self.opened[-1] and self.opened[-1] <= set(self.broken):
            raise EngineError("TensorRT refused it")
        casts = sum(node.op_type == "Cast" for node in view.nodes)
        session.ms = sum(times[low[name]] for name, times in self.layers.items()) + 0.1 * casts
        return session

    def times(self, session, plain):
        return session.ms, plain.ms


@pytest.fixture(scope="module")
def searched():
    """Makes a Search of a model whose FFN overflows beyond what FP16 holds, or does not."""
    config, prepared = PrecisionConfig("auto", calibration="x", budget=("drift", 0.02)), {}
    for scale in (1.0, 4e4):
        model = pixel_model(scale)
        prepared[scale > 1] = model, replace(calibrate(model, SPEC, config.without_search(), images()), fp16_failures={})

    def make(trial, progress=None, overflows=True, of=None, coco=None, **changes):
        model, blind = prepared[overflows]
        return Search(model, SPEC, replace(config, **changes), of or images(), blind, coco, trial=trial, progress=progress)

    return make


@pytest.mark.parametrize(("overflows", "allowed"), [(True, 0.0005), (True, 0.02), (False, 0.0005), (False, 0.02)])
def test_the_result_is_the_fastest_of_all_within_the_budget(searched, overflows, allowed):
    """Beside every choice of blocks: also where all are within the budget, the first convolution stays in FP32, because it gains nothing."""
    whole, said = searched(Modelled(), overflows=overflows), []
    every = {}
    for count in range(len(whole.blocks)):
        for left_out in itertools.combinations(whole.blocks, count):
            every[left_out] = whole._measure("drift", left_out, "")
    fastest = min((one for one in every.values() if one.loss <= allowed), key=lambda one: one.ms)
    trial = Modelled()
    result = searched(trial, lambda fraction, text: said.append((fraction, text)), overflows, budget=("drift", allowed)).run()
    assert result.result.ms == fastest.ms < result.result.plain_ms and result.result.loss <= allowed
    assert len(trial.opened) == result.runs + 1 <= 1 + 3 + 2 * 6 + 3  # the plain engine is built once
    assert "backbone.stem" in result.left_out and any("fc" in block for block in result.left_out) == overflows
    assert f"{result.result.ms:.3g} ms instead of {result.result.plain_ms:.3g} in fp32" in result.verdict
    assert [text.split(":")[0] for _, text in said[:2]] == ["measurement 1 of at most 18", "measurement 2 of at most 18"]
    assert all(0 < fraction <= 1 for fraction, _ in said)
    drawn = plot(result)
    assert f"{result.alone['box_head'].ms:.4g} ms instead of" in drawn and f"{result.result.ms:.3g} ms instead of" in drawn


def test_a_search_goes_on_where_it_ran_and_begins_again_on_another_gpu(searched, tmp_path):
    state = tmp_path / "search.json"
    first = searched(Modelled(), state=state).run()
    rows = json.loads(state.read_text())
    assert rows["where"] == "tensorrt-rtx 1.6 on a GPU" and all(
        {"loss", "ms", "plain_ms"} <= set(row) for row in rows["measured"].values()
    )
    again = Modelled()
    second = searched(again, state=state).run()
    assert (second.runs, again.opened, second.left_out, second.warnings) == (0, [], first.left_out, ())
    other = searched(Modelled("tensorrt-rtx 1.7 on a GPU"), state=state).run()
    assert other.runs == first.runs and "1.6 on a GPU; they are made again with tensorrt-rtx 1.7" in other.warnings[0]
    without = searched(None, state=state).run()
    assert without.result.ms is None and "no times" in without.verdict and len(without.warnings) == 1


def test_a_search_begins_again_where_images_or_annotations_have_other_content(searched, tmp_path):
    """Under the same names, which trainers and exporters of data sets write again and again."""
    pytest.importorskip("pycocotools")
    state, paths = tmp_path / "search.json", [tmp_path / f"{number}.png" for number in range(2)]
    truth = {
        "images": [{"id": number, "file_name": path.name, "width": 16, "height": 16} for number, path in enumerate(paths)],
        "categories": [{"id": 1, "name": "cat"}],
        "annotations": [{"id": 1, "image_id": 0, "category_id": 1, "bbox": [1, 2, 9, 8], "area": 72, "iscrowd": 0}],
    }

    def warned(seed):
        for path, image in zip(paths, images(seed=seed), strict=False):
            Image.fromarray(image).save(path)
        (tmp_path / "truth.json").write_text(json.dumps(truth))
        search = searched(None, state=state, of=paths, coco=(tmp_path / "truth.json", tmp_path))
        search._save()
        return "other images" in "".join(search.warnings)

    assert [warned(1), warned(1), warned(2), warned(2)] == [False, False, True, False]
    truth["annotations"][0]["bbox"][0] += 1
    assert [warned(2), warned(2)] == [True, False]


def test_what_cannot_be_built_is_not_the_result(searched):
    result = searched(Modelled(broken=["body"]), budget=("drift", 1.9)).run()
    assert any("backbone.body in fp16 could not be built" in warning for warning in result.warnings)
    assert result.result.ms is not None and result.result.loss <= 1.9


def test_a_low_type_that_gains_nothing_is_refused(searched):
    slow = {name: (one, one + 1) for name, (one, _) in LAYERS.items()}
    with pytest.raises(GateError, match=r"none with a block in fp16 is faster .* `precision=fp32`"):
        searched(Modelled(layers=slow), budget=("drift", 1.9)).run()


def test_neighbours_are_joined_where_engines_are_timed(monkeypatch, searched):
    model = pixel_model()
    blocks = blocks_of(model)
    assert joined(model, blocks, 6) == {block: (block,) for block in blocks}
    groups = joined(model, blocks, 2)
    assert list(groups) == ["backbone.stem to encoder.layers.0.fc1", "encoder.layers.0.fc2 to box_head"]
    assert [path for paths in groups.values() for path in paths] == blocks
    monkeypatch.setattr(search, "MAX_TIMED_BLOCKS", 3)
    result = searched(Modelled()).run()
    assert len(result.alone) == 3 and set(result.paths) < set(blocks) and len(result.paths) > len(result.left_out)


def test_beside_8_bits_a_block_is_left_out_in_16_bits():
    """In FP32 it would be slower than without the search."""
    model = pixel_model()
    config = PrecisionConfig("fp8", calibration="x", min_fraction=0.0, quantize_fraction=1.0)
    calibration = calibrate(model, SPEC, config, images())
    kinds = []
    for left_out in ((), ("encoder.layers.0.fc1",)):
        typed, report = apply_precision(model, SPEC, config, calibration=calibration, left_out=left_out)
        view = GraphView.typed(typed)
        kinds.append((view.types[view.nodes[view.index["inner"]].output[0]], report.quantized))
    assert kinds[0][0] == kinds[1][0] == HALF and kinds[1][1] == kinds[0][1] - 1
    assert report.excluded["/encoder/layers.0/fc1/MatMul"] == "the search leaves its block out"


@pytest.mark.parametrize(("crowd", "why"), [(1, "every annotated object is a crowd"), (0, "the FP32 graph finds none")])
def test_a_budget_in_ap_needs_objects_that_are_found(crowd, why, tmp_path):
    """Without, no graph would lose any AP."""
    pytest.importorskip("pycocotools")
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    row = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 0.01, 0.01], "iscrowd": crowd}
    data = {"images": [{"id": 1, "file_name": "a.png"}], "categories": [{"id": 1, "name": SPEC.label(0)}], "annotations": [row]}
    (tmp_path / "instances.json").write_text(json.dumps(data))
    model, config = pixel_model(), PrecisionConfig("auto", calibration="x", budget=("ap", 0.1))
    calibration = calibrate(model, SPEC, config.without_search(), images())
    with pytest.raises(GraphError, match=rf"`budget=ap=0\.1` cannot be measured .*: {why}.*`budget=drift="):
        Search(model, SPEC, config, images(), calibration, (tmp_path / "instances.json", tmp_path)).run()


def annotated(folder, images=5):
    """A COCO file with black images, each with one object that nothing finds."""
    rows = [{"id": i, "image_id": i, "category_id": 1, "bbox": [1, 1, 9, 9], "iscrowd": 0} for i in range(images)]
    for i in range(images):
        Image.new("RGB", (16, 16)).save(folder / f"{i}.png")
    named = [{"id": i, "file_name": f"{i}.png"} for i in range(images)]
    data = {"images": named, "categories": [{"id": 1, "name": SPEC.label(0)}], "annotations": rows}
    (folder / "instances.json").write_text(json.dumps(data))
    return folder / "instances.json"


@pytest.mark.parametrize(("ap_images", "evaluated"), [(None, 5), (3, 3)])
def test_it_is_said_on_how_many_images_a_budget_is_measured(ap_images, evaluated, monkeypatch, tmp_path):
    """AP on all annotated images or the first so many, whatever the number of calibration images is; drift on those."""
    pytest.importorskip("pycocotools")
    coco, said, counts = annotated(tmp_path), [], []

    def evaluate(*given, **options):
        report = real(*given, **options)
        counts.append(report.images)
        return replace(report, metrics={"AP": 0.5})

    real = search.evaluate_coco
    monkeypatch.setattr(search, "evaluate_coco", evaluate)
    model = pixel_model()
    config = PrecisionConfig("auto", calibration=coco, calibration_images=2, ap_images=ap_images, budget=("ap", 0.1))
    calibration = calibrate(model, SPEC, config.without_search(), images()[:2])
    given = (model, SPEC, config, images()[:2], calibration, (coco, tmp_path), lambda fraction, text: said.append(text))
    result = Search(*given).run()
    assert said == [f"measurement 1 of at most 18: every block in fp16, AP on {evaluated} images"]
    assert counts == [evaluated, evaluated] and result.to_dict()["images"] == evaluated
    assert f"0 blocks left out, AP on {evaluated} images, searched with" in result.verdict
    drift = Search(model, SPEC, replace(config, budget=("drift", 0.1)), *given[3:])
    assert "drift on 2 images" in drift.run().verdict and said[-1].endswith("drift on 2 images")


def test_what_a_budget_in_ap_lacks_is_said_before_the_export(monkeypatch, tmp_path):
    """It was said after the export and the calibration."""
    pytest.importorskip("pycocotools")
    coco = annotated(tmp_path)
    config = PrecisionConfig("auto", calibration=coco, calibration_images=1, budget=("ap", 0.1))
    assert check_before(config) == []
    with pytest.raises(GraphError, match=r"`budget=ap=\.\.\.` needs annotations: give a COCO file"):
        check_before(replace(config, calibration=tmp_path))
    Image.new("RGB", (8, 8)).save(tmp_path / "4.png")
    data = json.loads(coco.read_text())
    data["images"][4].update(width=16, height=16)
    coco.write_text(json.dumps(data))
    assert check_before(replace(config, ap_images=4)) == check_before(replace(config, budget=("drift", 0.1))) == []
    with pytest.raises(ImageError, match="16x16"):
        check_before(config)
    monkeypatch.setitem(sys.modules, "pycocotools.coco", None)
    with pytest.raises(MissingPackageError, match="pycocotools"):
        check_before(replace(config, ap_images=4))

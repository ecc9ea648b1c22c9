"""The page of `detrt verify`, the choice of reference and gate, exit codes, and engines through the fake."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")
pytest.importorskip("onnxslim", reason="needs the 'export' extra")

from browser import browser, needs_browser  # noqa: F401 - a fixture
from fake_tensorrt import FakeCuda, fake_engine_bytes, fake_trt
from PIL import Image

from detrt import bundle, graph
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.tensorrt import TensorRTSession
from detrt.backends.tensorrt.probing import engine_fetch
from detrt.bundle import Bundle, BundleFile, EngineFacts, Provenance
from detrt.cli import main
from detrt.data.matching import ImageMatch, gate_for
from detrt.data.scenes.scene import draw_scene
from detrt.errors import DetrtError
from detrt.evaluation.divergence import Divergence, TensorError, search
from detrt.evaluation.html import page
from detrt.evaluation.models import default_reference
from detrt.evaluation.parity import verify
from detrt.evaluation.report import VerifyReport
from detrt.files import sha256_of
from detrt.graph.names import module_path
from detrt.graph.view import GraphView, graph_precision, precision_map
from detrt.spec import TensorInfo

CHOICES = {"height": 128, "width": 128}
EVIL = '<script>alert("x")</script>'


@pytest.fixture(scope="module")
def images():
    return [draw_scene(seed, size_hw=(96, 128)).image for seed in range(3)]


@pytest.fixture
def scaled(exported, tmp_path):
    """A graph with one layer that is wrong, and the layer's module."""
    from onnx import numpy_helper

    model = graph.load(exported("rt_detr_v2", **CHOICES).path)
    node = next(n for n in model.graph.node if n.name == "/model/decoder/layers.1/encoder_attn/value_proj/MatMul")
    tensor = next(t for t in model.graph.initializer if t.name in node.input)
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.5), tensor.name))
    graph.save(model, tmp_path / "bad.onnx")
    return tmp_path / "bad.onnx", "model.decoder.layers.1.encoder_attn.value_proj"


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.links, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_whole_escaped_and_self_contained(exported, scaled, images):
    bad, module = scaled
    good = exported("rt_detr_v2", **CHOICES).path
    report = verify(good, bad, images, report_images=2, divergence="auto")
    text = page(report, candidate=EVIL, reference="ref")
    parsed = Page(text)
    assert not parsed.open, "every tag is closed"
    assert "script" not in parsed.tags and "&lt;script&gt;" in text
    assert "link" not in parsed.tags and "@import" not in text and "url(" not in text
    assert parsed.links and all(link.startswith("data:image/jpeg;base64,") for link in parsed.links)
    assert len(parsed.links) == 4  # two images, two sides
    assert parsed.tags.count("svg") == 2
    assert module in text and "first divergence" in text
    for title in (
        "Verdict",
        "First divergence",
        "Detections",
        "Images, the worst first",
        "Tensors and batch slots",
        "Precision map",
        "Environment",
    ):
        assert f"<h2>{title}" in text
    assert "prefers-color-scheme:dark" in text
    assert sum(m.compared for m in report.classes.values()) == report.compared > 0
    assert "<th>class</th>" in text and all(f"<td>{name}</td>" in text for name in report.classes)
    assert len(text) < 2_000_000
    assert re.search(r'class="badge fail"', text)


@needs_browser
def test_nothing_is_wider_than_its_card(exported, scaled, images, browser, tmp_path):
    """The tables of divergence and of images were, with a column of notes that nobody could read."""
    bad, _ = scaled
    report = verify(exported("rt_detr_v2", **CHOICES).path, bad, images, report_images=2, divergence="auto")
    (tmp_path / "report.html").write_text(page(report, candidate="candidate", reference="reference"), "utf-8")
    for width in (1920, 1280, 1000):
        browser.set_window_size(width, 900)
        browser.get((tmp_path / "report.html").as_uri())
        sizes = browser.execute_script(
            "return [document.documentElement, ...document.querySelectorAll('.scroll')].map(e => [e.scrollWidth, e.clientWidth])"
        )
        assert len(sizes) > 3 and all(inner <= outer for inner, outer in sizes), (width, sizes)
        rows = browser.execute_script("return [...document.querySelectorAll('.scroll tr')].map(row => row.offsetHeight)")
        assert max(rows) < 120, (width, rows)


def test_command_writes_the_page_and_exits_3(exported, scaled, images, tmp_path, capsys):
    bad, module = scaled
    Image.fromarray(images[0]).save(tmp_path / "a.png")
    html = tmp_path / "out" / "report.html"
    good = str(exported("rt_detr_v2", **CHOICES).path)
    code = main(["verify", str(bad), "--against", good, "--images", str(tmp_path / "a.png"), "--report", str(html)])
    said = capsys.readouterr()
    assert code == 3
    assert module in said.out and module in said.err and "verdict: DIFFERENT" in said.out
    text = html.read_text("utf-8")
    assert text.startswith("<!doctype html>") and f"<dd>{good} (onnxruntime-cpu)</dd>" in text


@pytest.mark.slow
def test_reference_is_what_the_bundle_was_made_from(exported, tmp_path, images, capsys):
    path = exported("detr", **CHOICES).path
    Image.fromarray(images[0]).save(tmp_path / "a.png")

    def make(source):
        folder = tmp_path / "bundle"
        folder.mkdir(exist_ok=True)
        (folder / "model.onnx").write_bytes(path.read_bytes())
        entry = BundleFile("onnx", "model.onnx", sha256_of(folder / "model.onnx"), path.stat().st_size)
        Bundle(folder, graph.read_spec(path), Provenance(source), (entry,)).save()
        return folder

    folder = make("random:detr/tiny")
    assert default_reference(folder) == "random:detr/tiny"
    assert main(["verify", str(folder), "--images", str(tmp_path / "a.png"), "--json", str(tmp_path / "r.json")]) == 0
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["reference"] == "torch-cpu" and written["sources"][0].startswith("random:detr/tiny")
    for source in ("hf:org/name", "/nowhere/at/all"):
        capsys.readouterr()
        assert main(["verify", str(make(source)), "--images", str(tmp_path / "a.png")]) == 2
        assert "--against" in capsys.readouterr().err
    assert main(["verify", str(path), "--images", str(tmp_path / "a.png")]) == 2
    assert "--against CHECKPOINT" in capsys.readouterr().err


def test_ground_truth_gives_the_ap_of_both(exported, tiny, tmp_path, images):
    pytest.importorskip("pycocotools", reason="needs the 'eval' extra")
    entries, boxes = [], []
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
        entries.append({"id": number, "file_name": f"{number}.png", "height": 96, "width": 128})
        boxes.append({"id": number + 1, "image_id": number, "category_id": 1, "bbox": [5, 5, 60, 60]})
    name = tiny("rt_detr_v2").spec.label(0)
    truth = {"images": entries, "annotations": boxes, "categories": [{"id": 1, "name": name}]}
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    good = exported("rt_detr_v2", **CHOICES).path
    report = verify(tiny("rt_detr_v2"), good, sorted(tmp_path.glob("*.png")), ground_truth=tmp_path / "truth.json", slots=False)
    assert report.ap["images"] == 3 and report.ap_loss == pytest.approx(0, abs=1e-3)
    assert set(report.ap["reference"]) == set(report.ap["candidate"]) and "APsmall" in report.ap["reference"]


def test_gates_grow_looser_and_unknown_ones_are_refused():
    gates = [gate_for(name) for name in ("fp32", "fp16", "bf16", "int8")]
    for field in ("box_px", "score", "tensor", "unmatched", "ap"):
        values = [getattr(gate, field) for gate in gates]
        assert values == sorted(values), field
    assert not gates[0].ap_decides and all(gate.ap_decides for gate in gates[1:])
    with pytest.raises(DetrtError, match="fp32, tf32, fp16"):
        gate_for("fp4")


def test_padding_content_does_not_matter(exported, images):
    report = verify(exported("detr", **CHOICES).path, exported("detr", **CHOICES).path, images)
    assert report.padding and all(row["passed"] for row in report.padding)
    assert report.passed


def test_module_paths_and_types(exported):
    assert module_path("/model/encoder/layers.0/self_attn/MatMul_2") == "model.encoder.layers.0.self_attn"
    assert module_path("/Cast") == "" and module_path("Reshape_12") == ""
    view = GraphView(graph.load(exported("rt_detr_v2", **CHOICES).path))
    assert graph_precision(view) == "fp32"
    found = precision_map(view)
    assert "model.decoder.layers.1.self_attn" in found
    assert {kind for counts in found.values() for kind in counts} == {"fp32"}


@pytest.mark.slow
def test_modules_are_compared_where_names_are_foreign(exported, tiny, scaled, images):
    """Against PyTorch by module outputs: for graphs of another exporter."""
    from detrt.backends.torch.session import TorchSession
    from detrt.data.preprocess import preprocess
    from detrt.evaluation.localize import search_modules
    from detrt.evaluation.models import same_contract

    bad, module = scaled
    with OnnxSession(bad) as cand:
        source = tiny("rt_detr_v2")
        ref = TorchSession(source, spec=same_contract(source.spec, cand.spec))
        feeds = preprocess(images[:2], cand.spec).feeds
        found = search_modules(GraphView(graph.load(bad)), cand, ref, cand.spec, feeds)
        assert found.first is not None and found.first.module == module
        assert found.compared > 40
        good = exported("rt_detr_v2", **CHOICES).path
        with OnnxSession(good) as same:
            clean = search_modules(GraphView(graph.load(good)), same, ref, cand.spec, feeds)
        assert all(layer.error < 1e-4 for layer in clean.layers)


def test_an_engine_is_searched_through_probe_engines(exported, scaled, images, tmp_path):
    """The engine of a good graph that computes what a bad one does, run by the fake runtime."""
    from detrt.data.preprocess import preprocess

    bad, module = scaled
    good = exported("rt_detr_v2", **CHOICES).path
    spec = graph.read_spec(good)
    wrong = GraphView(graph.load(bad))
    built = []

    def build(onnx_path, engine_path, config, given_spec):
        """Build what the fake can open: the names that were requested, the values of the bad graph."""
        from detrt.graph.probe import probe

        model = graph.load(onnx_path)
        built.append([value.name for value in model.graph.output])
        names = [value.name for value in model.graph.output]
        session = OnnxSession(probe(wrong, [n for n in names if n not in ("logits", "pred_boxes")])[0].SerializeToString(), spec)
        outputs = [TensorInfo(info.name, info.dtype, info.shape) for info in session.outputs if info.name in names]
        profile = {"pixel_values": {point: [2, 3, 128, 128] for point in ("min", "opt", "max")}}
        known = session.run(feeds)
        outputs = [TensorInfo(info.name, info.dtype, known[info.name].shape) for info in outputs]
        engine_path.write_bytes(fake_engine_bytes(session.inputs, outputs, profile))
        facts = EngineFacts("tensorrt-rtx", "1.7.1.116", (89,), "fp32", profile, "")
        bundle.write_sidecar(engine_path, given_spec, facts)
        build.session = session

    def open_engine(path):
        cuda = FakeCuda(89)
        return TensorRTSession(path, trt=fake_trt("tensorrt-rtx", cuda, build.session.run), cuda=cuda)

    feeds = preprocess(images[:2], spec).feeds
    facts = EngineFacts("tensorrt-rtx", "1.7.1.116", (89,), "fp32", {}, "")
    view = GraphView(graph.load(good))
    fetch = engine_fetch(view, spec, feeds, facts, compute_capability=89, build=build, open_engine=open_engine)
    found = search(view, view, spec, feeds, fetch=fetch)
    assert found.first is not None and found.first.module == module
    assert len(built) >= 2


def low_report(precision, **changes):
    match = ImageMatch(compared=5, missing=0, extra=0, box_px=26.6, score=0.19, beyond=5 if precision == "fp16" else 0)
    given = {"gate": gate_for(precision), "images": (match,), "precision": precision, **changes}
    return VerifyReport("torch-cpu", "onnxruntime-cpu", **given)


def test_verdict_below_fp32_names_its_tolerances():
    """26.6 px and 0.19 are allowed for INT8, and are not the same detections."""
    verdict = low_report("int8").verdict
    assert verdict == "within INT8 tolerances (worst box 26.6 px, worst score 0.19)"
    assert low_report("fp16").verdict == "DIFFERENT"
    # Rounding moves some detections of any image.
    many = (ImageMatch(compared=100, missing=0, extra=1, box_px=8.3, score=0.08, beyond=9),)
    assert (
        low_report("fp16", images=many).verdict
        == "within FP16 tolerances (9 of 100 beyond, worst box 8.3 px, worst score 0.08, 0 missing, 1 extra)"
    )
    (failed,) = low_report("fp16", images=(replace(many[0], beyond=10),)).failures
    assert failed == "11 of 100 detections are beyond 4 px or a score difference of 0.02, or have no partner; allowed 10%"
    strict = replace(gate_for("fp16"), mismatched=0.0)
    assert [text.split()[0] for text in low_report("fp16", images=many, gate=strict).failures] == ["box_px", "score"]
    match = ImageMatch(compared=20, missing=1, extra=2, box_px=1.0, score=0.01)
    assert low_report("int8", images=(match,)).verdict.endswith("worst score 0.01, 1 missing, 2 extra)")
    same = low_report("fp32", images=(ImageMatch(5, 0, 0, 0.01, 1e-5),))
    assert same.verdict == "the same detections"
    assert "within INT8 tolerances" in page(low_report("int8"), candidate="a", reference="b")


def test_a_divergence_within_the_tolerances_is_no_alarm():
    root = TensorError("t", "/model/backbone/very/long/Conv_12", "Conv", "model.backbone", 0.02, 1e-4, 7, "values overflow")
    found = Divergence("the checkpoint", 10, "max", 1e-3, root, (root,))
    passed = page(low_report("int8", divergence=found), candidate="a", reference="b")
    assert 'class="alarm"' not in passed and "within the tolerances all the same" in passed
    failed = page(low_report("fp16", divergence=found), candidate="a", reference="b")
    assert 'class="alarm"' in failed and "all the same" not in failed
    # What is said about a node stands under its module: a column of its own is wider than the page.
    cell = "model.backbone<br><small>/model/backbone/very/long/Conv_12</small><br><small>values overflow</small>"
    assert f"<td>{cell}</td>" in passed and "<th></th></tr></thead><tbody><tr><td>model.backbone" not in passed


def test_report_of_fp32_that_passes_searches_nothing(exported, images):
    """The search would compare the graph with an export of itself."""
    graph = exported("rt_detr_v2", **CHOICES).path
    report = verify(graph, graph, images, report_images=1, divergence="auto")
    assert report.passed and report.divergence is None and report.precision_map
    assert "First divergence" not in page(report, candidate="a", reference="b")


def test_head_names_threshold_and_version():
    text = page(low_report("int8"), candidate="a", reference="b")
    assert "<dt>score threshold</dt><dd>0.3</dd>" in text and "<dt>detrt</dt>" in text

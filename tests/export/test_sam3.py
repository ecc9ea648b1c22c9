"""SAM 3: a text prompt to boxes and masks, beside transformers' own model and post-processing."""

from __future__ import annotations

import ast
import importlib.util
import json
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
transformers = pytest.importorskip("transformers", reason="needs the 'export' extra")
pytest.importorskip("onnxslim", reason="needs the 'export' extra")

from checkpoint_folders import save_folder

from detrt import Detector, ExportConfig, export_onnx, graph
from detrt.backends.compare import unpadded
from detrt.backends.open import open_session
from detrt.backends.prompted import PromptedSession
from detrt.cli import main
from detrt.data.preprocess import preprocess
from detrt.data.scenes.scene import draw_scene
from detrt.errors import PromptError, SourceError
from detrt.evaluation.parity import verify
from detrt.models.example_inputs import example_ids, image_feeds, text_feeds
from detrt.models.layers.sam3 import both
from detrt.models.load import load_source
from detrt.models.published import check_processing
from detrt.models.wrapper import StockTextEncoder, StockTextModule
from detrt.precision.apply import blank_feeds
from detrt.tasks.masks import Masks, mask_iou
from detrt.text.tensors import PHRASE_FEATURES, PHRASE_MASK

SIZE = (150, 200)
IMAGE = draw_scene(1, size_hw=SIZE).image
PROMPT = "a cat. dog. red bus. chair. person. table."  # more phrases than one run takes


@pytest.fixture(scope="module")
def model(exported):
    """The exported detector with its text encoder, without a prompt."""
    with open_session(str(exported("sam3").path)) as session:
        yield session


@pytest.fixture(scope="module")
def their_post_processing():
    """`Sam3ImageProcessor.post_process_instance_segmentation` of transformers, whose module needs torchvision."""
    text = (Path(transformers.__file__).parent / "models" / "sam3" / "image_processing_sam3.py").read_text("utf-8")
    scope = {"torch": torch}
    for name in ("_scale_boxes", "post_process_instance_segmentation"):
        (node,) = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name)
        exec("from __future__ import annotations\n" + textwrap.dedent(ast.get_source_segment(text, node, padded=True)), scope)
    return lambda outputs: scope["post_process_instance_segmentation"](None, outputs, threshold=0.0, target_sizes=[SIZE])[0]


def test_detections_are_those_of_transformers(tiny, model, their_post_processing):
    """From pixels and token ids: its model, one phrase at a time, its scores with presence, its boxes and its masks."""
    source = tiny("sam3")
    pixels = preprocess([IMAGE], source.spec.with_input(normalize_in_graph=False, dtype="float32")).feeds["pixel_values"]
    bound = model.bind(PROMPT)
    parts = []
    for chunk in bound.prompts[0].chunks:
        for class_id, ids in zip(chunk.prompt.class_ids, chunk.names, strict=True):
            # As its processor: every prompt filled up to 32 tokens.
            tokens = torch.full((1, 32), source.spec.text.pad_id)
            tokens[0, : len(ids)] = torch.from_numpy(ids)
            mask = (torch.arange(32) < len(ids)).long()[None]
            with torch.no_grad():
                outputs = source.module(pixel_values=torch.from_numpy(pixels), input_ids=tokens, attention_mask=mask)
            parts.append((class_id, their_post_processing(outputs)))
    scores = np.concatenate([part["scores"].numpy() for _, part in parts])
    ids = np.concatenate([[class_id] * len(part["scores"]) for class_id, part in parts])
    best = np.argsort(-scores, kind="stable")[: source.spec.decode.max_detections]
    boxes = np.concatenate([part["boxes"].numpy() for _, part in parts])[best]
    masks = Masks.from_array(np.concatenate([part["masks"].numpy().astype(bool) for _, part in parts])[best])
    found = Detector(bound, threshold=0.0)(IMAGE)
    assert len(found) == len(best) == 20 and len(set(found.class_ids.tolist())) > 2
    assert found.class_ids.tolist() == ids[best].tolist()
    np.testing.assert_allclose(found.scores, scores[best], atol=1e-5)
    np.testing.assert_allclose(found.boxes_xyxy, np.clip(boxes, 0, [200, 150, 200, 150]), atol=0.01)
    # It takes the sigmoid before it enlarges the maps, which moves pixels at the edges.
    assert np.diag(mask_iou(found.masks, masks)).min() >= 0.99 and (found.masks.areas > 0).all()
    assert {label: PROMPT[first:last] for label, (first, last) in zip(found.labels, found.phrase_spans, strict=True)} == {
        label: label for label in found.labels
    }


@pytest.mark.parametrize("case", [(1, (112, 112), 4), (4, (70, 154), 32)], ids=["usual", "other"])
def test_untraced_prompts_sizes_and_batches_equal_the_library(case, tiny, exported, model):
    batch, size, tokens = case
    source, spec = tiny("sam3"), exported("sam3").spec
    ids = example_ids(source, batch, tokens, seed=7)
    encoder = model.text_encoder
    with torch.no_grad():
        (want,) = StockTextEncoder(source)(*map(torch.from_numpy, ids))
    encode = lambda rows, mask: encoder.run({"input_ids": rows, "attention_mask": mask})  # noqa: E731
    np.testing.assert_allclose(encode(*ids)["text_features"], want.numpy(), atol=1e-5)
    feeds = image_feeds(spec, batch, size) | text_feeds(source, spec, ids, encode)
    got = model.detector.run(feeds)
    stock = StockTextModule(source, spec).eval()
    with torch.no_grad():
        expected = stock(*(torch.from_numpy(feeds[name]) for name in stock.input_names))
    for name, tensor in zip(got, expected, strict=True):
        a, b = unpadded(tensor.numpy(), got[name], feeds, name)
        assert np.abs(a - b).max() < 1e-3 and a.std() > 0.01
    padded = ~feeds[PHRASE_MASK].any(-1)
    assert padded.sum() == batch - 1 and (got["logits"][padded] == -1e4).all()


@pytest.mark.parametrize(
    "choices", [pytest.param({}, id="raw"), pytest.param({"decode": "graph"}, id="graph", marks=pytest.mark.slow)]
)
def test_a_phrase_does_not_depend_on_the_others(choices, exported, model):
    """In one run, in chunks, as a list, and in a batch of other prompts: each phrase gets what it gets alone."""
    session = open_session(str(exported("sam3", **choices).path)) if choices else model
    alone = {name: Detector(session, prompt=name, threshold=0.0)(IMAGE) for name in ("a cat", "red bus", "table")}
    together = Detector(session, prompt=PROMPT, threshold=0.0)
    listed = Detector(session, prompt=[name.strip() for name in PROMPT.split(".")], threshold=0.0)
    for found in (together(IMAGE), listed(IMAGE)):
        best = sorted((score for one in alone.values() for score in one.scores.tolist()), reverse=True)
        kept = [score for score, label in zip(found.scores.tolist(), found.labels, strict=True) if label in alone]
        np.testing.assert_allclose(kept, best[: len(kept)], atol=1e-6)
        for name, one in alone.items():
            mine = found[np.array([label == name for label in found.labels])]
            np.testing.assert_allclose(mine.boxes_xyxy, one.boxes_xyxy[: len(mine)], atol=1e-3)
            assert mask_iou(mine.masks, one[: len(mine)].masks).diagonal().min(initial=1.0) > 0.999
    two = Detector(session, prompt="dog", threshold=0.0, batch_size=2)([IMAGE, IMAGE], prompts=["red bus. a cat.", "a cat"])
    np.testing.assert_allclose(two[1].scores, alone["a cat"].scores, atol=1e-6)


def test_the_text_is_encoded_once(model):
    calls = []
    encoder = SimpleNamespace(
        **{name: getattr(model.text_encoder, name) for name in ("info", "inputs", "outputs", "spec", "close")},
        run=lambda feeds: calls.append(feeds["input_ids"].shape) or model.text_encoder.run(feeds),
    )
    session = model.with_sessions(model.detector, encoder)
    for prompt in ("a cat. dog.", "dog. table.", "a cat. dog."):
        session.bind(prompt).texts(1)
    assert [shape[0] for shape in calls] == [2, 1]


@pytest.mark.parametrize(("phrases", "runs"), [(4, [1, 3, 4]), (1, [1, 1, 1])])
def test_an_engine_runs_no_more_phrases_than_are_asked_for(model, phrases, runs):
    """Each costs a run of the decoder, so that none is added up to a multiple of 16, as classes are."""
    shapes = {
        PHRASE_MASK: [(1, count, 32) for count in (1, 1, phrases)],
        PHRASE_FEATURES: [(1, count, 32, 32) for count in (1, 1, phrases)],
    }
    facts = replace(model.detector.info, few_lengths=True, profile={name: tuple(shape) for name, shape in shapes.items()})
    detector = SimpleNamespace(info=facts, inputs=model.detector.inputs, outputs=model.detector.outputs, spec=model.spec)
    engine = PromptedSession(detector, model.tokenizer, model.text_encoder)
    for prompt, count in zip(("a cat", "a cat. dog. red bus", PROMPT), runs, strict=True):
        chunks = engine.encode(prompt).chunks
        assert engine.text_feeds(chunks[:1])[PHRASE_MASK].shape == (1, count, 32)
        assert sum(len(chunk.names) for chunk in chunks) == prompt.count(".") + (prompt is not PROMPT)


def test_the_logit_of_a_score_with_presence():
    logit, presence = torch.meshgrid(torch.linspace(-12, 12, 9), torch.linspace(-10, 10, 9), indexing="ij")
    logit, presence = logit.reshape(-1, 1), presence.reshape(-1, 1)
    want = logit.double().sigmoid() * presence.double().sigmoid()
    torch.testing.assert_close(both(logit, presence).double().sigmoid(), want, rtol=1e-5, atol=0)
    half = both(logit.half(), presence.half())
    assert torch.isfinite(half).all() and (half.float() - want.logit().float()).abs().max() < 0.05


def test_bad_prompts(model):
    with pytest.raises(PromptError, match="takes no task"):
        model.bind("cat", task="Find it.")
    with pytest.raises(PromptError, match=r"has \d+ tokens, this model takes at most 32 in one name"):
        model.bind("cat " * 40)
    with pytest.raises(PromptError, match="needs a score for each token"):
        model.bind("cat", phrases="tokens")


def test_facts(tiny):
    spec = tiny("sam3").spec
    assert (spec.task, spec.decode.mask_stride, spec.text.kind, spec.text.max_tokens) == (
        "instance-segmentation",
        3.5,
        "phrases",
        32,
    )
    assert type(spec).from_json(spec.to_json()) == spec
    assert (spec.input.resize, spec.input.mean, spec.input.std) == ("stretch", (0.5,) * 3, (0.5,) * 3)


def test_commands(exported, tmp_path, capsys):
    """detect writes masks as run lengths, and eval scores them, with the categories as the prompt."""
    model = str(exported("sam3").path)
    assert main(["demo-data", str(tmp_path / "scenes"), "--count", "2"]) == 0
    images = tmp_path / "scenes" / "images"
    found = tmp_path / "found.jsonl"
    assert main(["detect", model, str(images), "--prompt", PROMPT, "--threshold", "0.1", "--json", str(found)]) == 0
    rows = [json.loads(line) for line in found.read_text().splitlines()]
    first = rows[0]["detections"][0]
    assert first["label"] in PROMPT and set(first["segmentation"]) == {"size", "counts"}
    pytest.importorskip("pycocotools")
    annotations = tmp_path / "scenes" / "annotations.json"
    options = ["--ground-truth", str(annotations), "--images", str(images), "--json", str(tmp_path / "ap.json")]
    assert main(["eval", model, *options]) == 0
    assert "segm" in (tmp_path / "ap.json").read_text() + capsys.readouterr().out


@pytest.mark.slow
def test_no_masks(tiny, model, tmp_path):
    """The same boxes without the mask head."""
    export_onnx(load_source("random:sam3/tiny", no_masks=True), tmp_path / "model.onnx", ExportConfig(check=False))
    nodes = [node.name for node in graph.load(tmp_path / "model.onnx").graph.node]
    assert not any("pixel_decoder" in name for name in nodes)
    with open_session(str(tmp_path / "model.onnx")) as boxes:
        found, want = (Detector(one, prompt=PROMPT, threshold=0.0)(IMAGE) for one in (boxes, model))
    assert found.masks is None and found.class_ids.tolist() == want.class_ids.tolist()
    np.testing.assert_allclose(found.boxes_xyxy, want.boxes_xyxy, atol=1e-3)


def test_a_server_answers_with_masks(exported):
    httpx = pytest.importorskip("httpx", reason="needs the 'dev' extra")
    pytest.importorskip("fastapi", reason="needs the 'serve' extra")
    from serve_support import Server, png

    path = exported("sam3").path
    with Detector.open(str(path), prompt="red bus. dog.", threads=1, threshold=0.1) as detector:
        expected = detector(IMAGE).to_list()
    with Server(path, "--workers", 1) as server, httpx.Client(base_url=server.address, timeout=60) as client:
        asked = {"prompt": "red bus. dog.", "threshold": "0.1"}
        answer = client.post("/v1/detect", files={"images": png(IMAGE)}, data=asked).json()
    found = answer["images"][0]["detections"]
    assert [one["label"] for one in found] == [one["label"] for one in expected] and expected[0]["segmentation"]["counts"]
    assert found[0]["segmentation"] == expected[0]["segmentation"]


@pytest.mark.slow
def test_a_compiled_package(exported, tmp_path):
    """Four phrases in a run, so that six take two runs."""
    from detrt.backends.inductor.config import InductorConfig
    from detrt.pipeline import build

    build("random:sam3/tiny", tmp_path / "b", targets=(InductorConfig(tokens=4),), export=ExportConfig(check=False))
    found = []
    for backend in ("inductor", "onnxruntime"):
        with Detector.open(str(tmp_path / "b"), backend=backend, prompt=PROMPT, threshold=0.0) as detector:
            found.append(detector(IMAGE))
    np.testing.assert_allclose(found[0].scores, found[1].scores, atol=1e-5)
    assert mask_iou(found[0].masks, found[1].masks).max(1).min() >= 0.99


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="SAM 3's processor needs torchvision: make test-torchvision"
)
def test_its_processor_by_torchvision(tiny, tmp_path):
    """Pixels, and from pixels and text to boxes, by transformers' own classes."""
    folder = save_folder(tiny("sam3"), tmp_path)
    source = load_source(str(folder))
    done = check_processing(source)
    assert done.oracle == "Sam3ImageProcessor" and done.pixels < 1e-5
    report = verify(str(folder), str(folder), [IMAGE], slots=False, prompt="a cat. red bus.")
    assert report.passed and report.published.images and not report.published.differences


@pytest.fixture(scope="module")
def published(tiny, tmp_path_factory):
    """A folder as facebook/sam3 is published: the detector beside a tracker of videos."""
    source = tiny("sam3")
    folder = save_folder(source, tmp_path_factory.mktemp("sam3"))
    from safetensors.torch import load_file, save_file

    weights = {f"detector_model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    weights["tracker_model.memory.weight"] = torch.zeros(2)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = transformers.Sam3VideoConfig(detector_config=source.module.config.to_dict()).to_dict()
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Sam3VideoModel"]}))
    return folder


def test_the_published_folder(published, tiny):
    """Its config is that of the video model; the detector inside is read whole, and the tracker is named as left out."""
    source, want = load_source(str(published)), tiny("sam3")
    state = source.module.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in want.module.state_dict().items())
    assert source.spec.decode == want.spec.decode and source.spec.input == want.spec.input and source.spec.text == want.spec.text
    assert any("its detector is read, its tracker of videos is not" in note for note in source.notes)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("sam3_tracker", "follows objects that points, boxes or masks show"),
        ("sam3_tracker_video", "follows objects that points, boxes or masks show"),
        ("sam3_lite_text", "MobileCLIP"),
    ],
)
def test_relatives_are_refused_by_name(model_type, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(SourceError, match=rf"has model_type '{model_type}', which detrt does not export: .*{words}"):
        load_source(str(tmp_path))


def test_a_graph_is_measured_with_one_phrase(exported):
    """At full size each phrase needs 0.9 GB for the scores of one attention: with eight a conversion to FP16 took over 19 GB."""
    feeds = blank_feeds(exported("sam3").spec)
    assert feeds[PHRASE_MASK].shape[:2] == (1, 1) and feeds[PHRASE_MASK].all()

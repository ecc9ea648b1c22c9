"""Exports of the prompted families: nothing of a prompt, a size or a batch is traced into a graph."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("onnxslim", reason="needs the 'export' extra")

from tiny_exports import SHARED

from detrt import graph
from detrt.backends.base import Choices
from detrt.backends.compare import relative_error, unpadded
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.data.postprocess import decode
from detrt.errors import ExportError, SourceError
from detrt.export import ExportConfig, export_onnx
from detrt.export.prompted import CHECKS, TRACED_ROWS, TRACED_TOKENS, _StockSession
from detrt.graph.clean import with_outputs
from detrt.graph.selections import topk_outputs
from detrt.models.contract import contract, text_encoder_contract
from detrt.models.example_inputs import example_ids, image_feeds, text_feeds
from detrt.models.load import load_source
from detrt.models.wrapper import StockTextModule, TextExportModule, best_phrases
from detrt.spec import LOGITS, PIXEL_MASK, PRED_BOXES, Precision
from detrt.text.kinds import token_feeds
from detrt.text.tensors import CLASS_MASK, PHRASE_MASK

# Both lowerings, both ways to decode, both kinds of prompt, one graph and two.
VARIANTS = {
    "grounding": ("grounding_dino", SHARED["grounding_dino"]),
    "mm": ("mm_grounding_dino", SHARED["mm_grounding_dino"]),
    "omdet": ("omdet_turbo", SHARED["omdet_turbo"]),
    "sam3": ("sam3", SHARED["sam3"]),
    "single": (
        "grounding_dino-swin-b",
        {"single_graph": True, "height": 96, "width": 128, "msda": "gridsample"},
    ),
    "five-levels": ("mm_grounding_dino-swin-l", {}),
}
# (batch, height, width, tokens); the trace has batch 2, 256x320 and 9 tokens
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in ("single", "five-levels"))) for name in VARIANTS]
SHAPES = [(1, 97, 130, 4), (3, 160, 64, 33), (4, 65, 201, 256)]


@pytest.fixture(scope="module")
def made(tiny, exported):
    return lambda name: (tiny(VARIANTS[name][0]), exported(VARIANTS[name][0], **VARIANTS[name][1]))


class Pair:
    """An exported detector with its text encoder, next to the library's own model."""

    def __init__(self, source, report):
        self.source, self.spec = source, report.spec
        model = graph.load(report.path)
        self.selections = topk_outputs(model)
        self.session = OnnxSession(with_outputs(model, self.selections).SerializeToString(), report.spec)
        self.encoder = None
        if report.spec.text.encoder:
            self.encoder = OnnxSession(report.path.with_name(report.spec.text.encoder), report.spec)
        self.module = TextExportModule(source, report.spec).eval()
        self.stock = StockTextModule(source, report.spec).eval()

    def encode(self, ids, mask):
        return self.encoder.run({"input_ids": ids, "attention_mask": mask})

    def feeds(self, batch, size, tokens, seed=0):
        self.ids = example_ids(self.source, batch, tokens, seed)
        return image_feeds(self.spec, batch, size, seed) | text_feeds(self.source, self.spec, self.ids, self.encode)

    def expected(self, feeds, got):
        plain = {**feeds, **token_feeds(self.ids, self.spec)} if PIXEL_MASK in self.stock.input_names else feeds
        chosen = Choices([got[name] for name in self.selections])
        return list(_StockSession(self.stock, self.module).run(plain, chosen).values())


@pytest.fixture(scope="module")
def pairs(made):
    return lru_cache(maxsize=None)(lambda name: Pair(*made(name)))


@pytest.mark.parametrize("name", NAMES)
def test_facts_of_the_files(name, made):
    source, report = made(name)
    spec = report.spec
    inputs, outputs = contract(spec)
    assert dict(report.summary.inputs) == {i.name: (i.dtype, i.shape) for i in inputs}
    assert dict(report.summary.outputs) == {o.name: (o.dtype, o.shape) for o in outputs}
    assert graph.read_spec(report.path) == spec
    folder = report.path.parent
    assert (folder / spec.text.tokenizer).read_bytes() == source.tokenizer
    files = {"model.onnx", spec.text.tokenizer, *([spec.text.encoder] if spec.text.encoder else [])}
    assert {path.name for path in folder.iterdir()} == files
    assert (spec.text.encoder == "") is ("single_graph" in VARIANTS[name][1])
    if spec.text.encoder:
        text_encoder = graph.load(folder / spec.text.encoder)
        assert graph.read_spec(folder / spec.text.encoder) == spec
        summary = graph.summarise(text_encoder)
        wanted_in, wanted_out = text_encoder_contract(spec)
        assert dict(summary.inputs) == {i.name: (i.dtype, i.shape) for i in wanted_in}
        assert dict(summary.outputs) == {o.name: (o.dtype, o.shape) for o in wanted_out}
    model = graph.load(report.path)
    assert {node.domain for node in model.graph.node} == {""}
    assert sum(node.op_type == "GridSample" for node in model.graph.node) == (
        0 if "msda" not in VARIANTS[name][1] else 4 * 4  # four levels, two layers in encoder and decoder
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_built_in_check_ran_at_what_was_not_traced(name, made):
    _, report = made(name)
    cases = {(row["batch"], row["tokens"]) for row in report.errors}
    assert cases == {(batch, tokens) for batch, _, tokens in CHECKS}
    assert not {batch for batch, _ in cases} & {TRACED_ROWS}
    assert not {tokens for _, tokens in cases} & {TRACED_TOKENS}
    assert {row["output"] for row in report.errors} == {info.name for info in contract(report.spec)[1]}
    assert report.worst <= Precision.FP32.output_tolerance / 10


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["grounding", "omdet"])
def test_untraced_prompts_sizes_and_batches_equal_the_library(name, shape, pairs):
    batch, height, width, tokens = shape
    pair = pairs(name)
    step = pair.spec.input.multiple_of
    size = (-(-height // step) * step, -(-width // step) * step)
    feeds = pair.feeds(batch, size, min(tokens, pair.spec.text.max_tokens), seed=tokens)
    got = pair.session.run(feeds)
    for output, want in zip((LOGITS, PRED_BOXES), pair.expected(feeds, got), strict=True):
        expected, found = unpadded(want, got[output], feeds, output)
        assert relative_error(expected, found) < 1e-4
        assert np.abs(expected - found).max() < 1e-3
    # The comparison is of something: boxes and logits differ from query to query.
    assert got[PRED_BOXES].std(1).max() > 0.01
    if batch > 1:
        mask = feeds.get("attention_mask", feeds.get(CLASS_MASK))
        assert len(set(mask.sum(1).tolist())) > 1  # prompts of different lengths in one batch
        assert (got[LOGITS].transpose(0, 2, 1)[mask == 0] == -1e4).all()


@pytest.mark.parametrize("name", ["grounding", "omdet"])
def test_an_image_in_a_batch_gets_what_it_gets_alone(name, pairs):
    pair = pairs(name)
    feeds = pair.feeds(3, (96, 128), 21, seed=5)
    feeds = {n: np.repeat(a[2:], 3, 0) if n in ("pixel_values", PIXEL_MASK) else a for n, a in feeds.items()}
    together = pair.session.run(feeds)
    # The prompt of image 1 alone, without its padding.
    real = int(feeds.get("attention_mask", feeds.get(CLASS_MASK))[1].sum())
    task = int(feeds["task_mask"][1].sum()) if name == "omdet" else real
    limits = {"task_features": task, "task_mask": task}
    alone = {n: a[1:2] if n in ("pixel_values", PIXEL_MASK) else a[1:2, : limits.get(n, real)] for n, a in feeds.items()}
    if name == "grounding":
        alone["text_self_mask"] = alone["text_self_mask"][:, :, :real]
    single = pair.session.run(alone)
    order = [together[s][1] for s in pair.selections], [single[s][0] for s in pair.selections]
    assert all(np.array_equal(a, b) for a, b in zip(*order, strict=True))
    np.testing.assert_allclose(together[LOGITS][1, :, :real], single[LOGITS][0], atol=1e-4)
    np.testing.assert_allclose(together[PRED_BOXES][1], single[PRED_BOXES][0], atol=1e-5)


def test_different_prompts_give_different_results(pairs):
    pair = pairs("grounding")
    feeds = pair.feeds(3, (96, 128), 15, seed=1)
    feeds["pixel_values"][:] = feeds["pixel_values"][0]
    feeds[PIXEL_MASK][:] = 1
    found = pair.session.run(feeds)[PRED_BOXES]
    assert np.abs(found[0] - found[1]).max() > 1e-3 and np.abs(found[1] - found[2]).max() > 1e-3


@pytest.mark.slow
def test_the_single_graph_is_text_encoder_and_detector(pairs, tiny):
    pair = pairs("single")
    assert [info.name for info in pair.session.inputs][-2:] == ["input_ids", "attention_mask"]
    feeds = pair.feeds(2, (96, 128), 12, seed=4)
    got = pair.session.run(feeds)
    for output, want in zip((LOGITS, PRED_BOXES), pair.expected(feeds, got), strict=True):
        assert relative_error(*unpadded(want, got[output], feeds, output)) < 1e-4


def test_decoding_in_the_graph_gives_the_best_phrase_of_each_query(pairs):
    """In a single graph, which has the text encoder inside."""
    pair = pairs("mm")
    assert {"input_ids", "attention_mask"} < {info.name for info in pair.session.inputs}
    feeds = pair.feeds(3, (96, 128), 19, seed=2)
    got = pair.session.run(feeds)
    sizes = feeds["target_sizes"]
    raw = StockTextModule(pair.source, pair.spec)
    plain = {**feeds, **token_feeds(pair.ids, pair.spec)}
    from detrt.models.hooks import forced_topk

    query_selection = [torch.from_numpy(got[pair.selections[0]])]
    with torch.no_grad(), forced_topk(query_selection):
        logits, boxes = raw(*(torch.from_numpy(plain[n]) for n in raw.input_names))
    probabilities = torch.sigmoid(logits.double()).numpy()
    for image in range(3):
        # Score of a phrase: the largest of its tokens'.
        scores = np.stack(
            [
                probabilities[image][:, mask > 0].max(1) if mask.any() else np.zeros(pair.spec.decode.num_queries)
                for mask in feeds[PHRASE_MASK][image]
            ],
            1,
        )
        order = np.argsort(-scores.max(1), kind="stable")
        np.testing.assert_allclose(got["scores"][image], scores.max(1)[order], atol=1e-5)
        assert (got["labels"][image] == scores.argmax(1)[order]).mean() > 0.9  # ties within rounding aside
        cx, cy, w, h = boxes[image].numpy()[order].T
        corners = np.clip(np.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], 1), 0, 1)
        height, width = sizes[image]
        close = np.abs(corners * [width, height, width, height] - got["boxes"][image]).max(1) < 0.05
        assert close.mean() > 0.9
    assert got["num_detections"].tolist() == [pair.spec.decode.max_detections] * 3


def test_a_phrase_without_tokens_scores_nothing():
    mask = torch.tensor([[[0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]])
    best, phrase = best_phrases(torch.tensor([[[0.99, 0.2, 0.1, 0.6], [0.99, 0.3, 0.1, 0.1]]]), mask)
    assert best.tolist() == [[pytest.approx(0.6), pytest.approx(0.3)]] and phrase.tolist() == [[1, 0]]
    best, _ = best_phrases(torch.tensor([[[0.9, 0.9]]]), torch.zeros(1, 2, 2))
    assert best.tolist() == [[0.0]]


def test_raw_outputs_decode_outside(pairs):
    pair = pairs("omdet")
    found = pair.session.run(pair.feeds(1, (96, 128), 8))
    assert len(decode({n: found[n] for n in (LOGITS, PRED_BOXES)}, pair.spec.with_decode(num_classes=3), [(96, 128)])) == 1


@pytest.mark.parametrize(
    ("name", "choices", "message"),
    [
        ("omdet_turbo", {"single_graph": True}, "leave `single_graph` out"),
        ("rt_detr_v2", {"single_graph": True}, "models that take a prompt"),
        ("omdet_turbo", {"height": 100, "width": 128}, "multiple of 32; got 100"),
        ("grounding_dino", {"decode": "graph", "max_detections": 21}, "at most 20"),
    ],
)
def test_choices_that_a_family_cannot_take(name, choices, message, tiny, tmp_path):
    with pytest.raises(ExportError, match=message):
        export_onnx(tiny(name), tmp_path / "model.onnx", ExportConfig(**choices))
    assert list(tmp_path.iterdir()) == []


def test_a_source_without_tokenizer_is_refused(tiny, tmp_path):
    from dataclasses import replace

    with pytest.raises(SourceError, match="no tokenizer; give one with `tokenizer=FILE`"):
        export_onnx(replace(tiny("grounding_dino"), tokenizer=None), tmp_path / "model.onnx")
    with pytest.raises(ExportError, match="'text.onnx' is the name of"):
        export_onnx(tiny("grounding_dino"), tmp_path / "text.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # 8 s; tests/export/test_faults.py has the same of a model without a prompt
def test_a_graph_that_differs_is_not_written(tiny, tmp_path, monkeypatch, plain_simplifier):
    from detrt.errors import GateError
    from detrt.models.layers import grounding_dino as grounding

    monkeypatch.setattr(grounding, "logit", lambda x, eps=1e-5: torch.log(x.clamp(eps, 1 - eps)))
    with pytest.raises(GateError, match="differs from PyTorch"):
        export_onnx(tiny("grounding_dino"), tmp_path / "model.onnx", ExportConfig(msda="gridsample"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_full_size_equals_the_library(tmp_path):
    source = load_source("random:grounding_dino")
    pair = Pair(source, export_onnx(source, tmp_path / "model.onnx", ExportConfig(msda="gridsample", check=False)))
    feeds = pair.feeds(1, (800, 1200), 12)
    got = pair.session.run(feeds)
    for output, want in zip((LOGITS, PRED_BOXES), pair.expected(feeds, got), strict=True):
        expected, found = unpadded(want, got[output], feeds, output)
        assert np.abs(expected - found).max() < 1e-3

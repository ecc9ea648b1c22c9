"""Hard NMS in the graph of `--decode graph`, and the choices of `--nms`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")

from detrt.backends.onnxruntime.session import OnnxSession
from detrt.data.postprocess import decode
from detrt.errors import ExportError, SpecError
from detrt.export.trace import trace
from detrt.models.contract import ExportConfig, contract, exported_spec, trace_size
from detrt.models.example_inputs import example_feeds
from detrt.models.families import BY_NAME
from detrt.models.wrapper import ExportModule
from detrt.spec import DecodeSpec, InputSpec, ModelSpec

QUERIES, CLASSES = 40, 3


class Crowd(torch.nn.Module):
    """A "detector" whose boxes come in heaps: logits and boxes are two tables, moved a little by the image."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        heaps = torch.rand(5, 2, generator=generator) * 0.6 + 0.2
        centres = heaps[torch.randint(0, 5, (QUERIES,), generator=generator)]
        self.register_buffer(
            "boxes",
            torch.cat(
                [
                    centres + torch.randn(QUERIES, 2, generator=generator) * 0.01,
                    torch.full((QUERIES, 2), 0.2),
                ],
                1,
            ),
        )
        self.register_buffer("logits", torch.randn(QUERIES, CLASSES, generator=generator) * 2)

    def forward(self, pixel_values, **_):
        shift = pixel_values.mean((1, 2, 3), keepdim=False).view(-1, 1, 1) / 1000
        return SimpleNamespace(logits=self.logits + shift, pred_boxes=self.boxes + shift * 0.01)


def source(nms):
    rule = DecodeSpec("sigmoid", "topk", QUERIES, CLASSES, 25, nms=nms, nms_iou=0.5)
    spec = ModelSpec("co_dino", InputSpec("stretch", 32, 48, dynamic=True), rule, {})
    return SimpleNamespace(spec=spec, family=BY_NAME["co_dino"], module=Crowd())


def run(spec, module, feeds, tmp_path):
    path = tmp_path / f"{spec.decode.nms_in_graph}.onnx"
    traced = example_feeds(spec, 2, trace_size(spec))
    model = trace(ExportModule(module, spec).eval(), traced, contract(spec), module, {}, 17)
    path.write_bytes(model.SerializeToString())
    return OnnxSession(path, spec).run(feeds)


@pytest.mark.parametrize("nms", ("nms", "soft_nms"))
def test_in_the_graph_equals_hard_nms_outside(nms, tmp_path):
    given = source(nms)
    spec = exported_spec(given, ExportConfig(decode="graph", nms="graph-hard", score_threshold=0.2))
    assert (spec.decode.nms, spec.decode.nms_in_graph, spec.decode.max_detections) == ("nms", True, 25)
    feeds = example_feeds(spec, 3, (32, 48))
    got = run(spec, given.module, feeds, tmp_path)
    sizes = [tuple(map(int, row)) for row in feeds["target_sizes"]]
    assert got["scores"].shape == (3, 25) and (np.diff(got["scores"], axis=1) <= 0).all()
    raw = ExportModule(given.module, exported_spec(given, ExportConfig(nms="hard"))).eval()
    with torch.no_grad():
        outputs = dict(
            zip(
                raw.output_names,
                (t.numpy() for t in raw(torch.from_numpy(feeds["pixel_values"]))),
                strict=True,
            )
        )
    assert raw.spec.decode.nms == "nms" and not raw.spec.decode.nms_in_graph
    plain = decode(outputs, raw.spec.with_decode(nms="none"), sizes, threshold=0.2)
    for a, b, c in zip(
        decode(got, spec, sizes, threshold=0.2),
        decode(outputs, raw.spec, sizes, threshold=0.2),
        plain,
        strict=True,
    ):
        assert 0 < len(a) == len(b) < len(c)
        np.testing.assert_allclose(a.scores, b.scores, atol=1e-6)
        np.testing.assert_array_equal(a.class_ids, b.class_ids)
        np.testing.assert_allclose(a.boxes_xyxy, b.boxes_xyxy, atol=0.01)


def test_in_the_graph_equals_pytorch(tmp_path):
    given = source("nms")
    spec = exported_spec(given, ExportConfig(decode="graph", nms="graph"))
    feeds = example_feeds(spec, 2, (40, 56))
    got = run(spec, given.module, feeds, tmp_path)
    module = ExportModule(given.module, spec).eval()
    with torch.no_grad():
        want = module(*(torch.from_numpy(feeds[name]) for name in module.input_names))
    for name, tensor in zip(module.output_names, want, strict=True):
        where = got["scores"] > 0 if got[name].ndim > 1 else slice(None)
        np.testing.assert_allclose(got[name][where], tensor.numpy()[where], rtol=1e-5, atol=1e-4)


def test_nms_outside_sees_every_candidate_of_a_decoding_graph():
    spec = exported_spec(source("soft_nms"), ExportConfig(decode="graph"))
    assert (spec.decode.max_detections, spec.decode.nms, spec.decode.nms_in_graph) == (
        QUERIES,
        "soft_nms",
        False,
    )
    assert exported_spec(source("none"), ExportConfig(decode="graph")).decode.max_detections == 25
    assert exported_spec(source("soft_nms"), ExportConfig(nms="none")).decode.nms == "none"


@pytest.mark.parametrize(
    ("nms", "choices", "words"),
    (
        (
            "soft_nms",
            {"decode": "graph", "nms": "graph"},
            "soft-NMS, which ONNX has no operator for; use `nms=graph-hard`",
        ),
        ("none", {"decode": "graph", "nms": "graph"}, "asks for no NMS; use `nms=graph-hard`"),
    ),
)
def test_what_no_graph_has_is_refused(nms, choices, words):
    with pytest.raises(ExportError, match=words):
        exported_spec(source(nms), ExportConfig(**choices))


def test_nonsense_is_refused():
    with pytest.raises(ExportError, match="needs `decode=graph`"):
        ExportConfig(nms="graph-hard")
    with pytest.raises(ExportError, match="`nms` must be one of"):
        ExportConfig(nms="soft")
    with pytest.raises(SpecError, match="nms_in_graph needs"):
        source("soft_nms").spec.with_decode(in_graph=True, nms_in_graph=True)

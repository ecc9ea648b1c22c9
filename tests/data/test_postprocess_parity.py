"""`detrt.data.postprocess` against transformers' post_process_object_detection on random tensors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from detrt.data.postprocess import decode
from detrt.spec import DecodeSpec, InputSpec, ModelSpec

SIZES = [(480, 640), (333, 77), (1080, 1920)]
# name: processor, activation, selection, number of boxes of q queries
RULES = {
    "DetrImageProcessorPil": ("softmax", "query", lambda q, c: q),
    "YolosImageProcessorPil": ("softmax", "query", lambda q, c: q),
    "ConditionalDetrImageProcessorPil": ("sigmoid", "topk", lambda q, c: min(100, q * c)),
    "DeformableDetrImageProcessorPil": ("sigmoid", "topk", lambda q, c: min(100, q * c)),
    "RTDetrImageProcessorPil": ("sigmoid", "topk", lambda q, c: q),
}


def processor(name):
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    return getattr(transformers, name)()


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize(("queries", "classes"), [(100, 91), (300, 80), (7, 3), (1, 1)])
@pytest.mark.parametrize("name", RULES)
def test_equal(name, queries, classes, threshold):
    activation, select, keep = RULES[name]
    rng = np.random.default_rng(queries)
    columns = classes + (activation == "softmax")
    if activation == "softmax":
        logits = rng.normal(0, 3, (3, queries, columns)).astype(np.float32)
    else:
        # Scores far enough apart that a last-digit difference of two sigmoids swaps none; the order of
        # equal scores is our own rule (lower index first), which torch.topk does not promise.
        steps = np.linspace(-6, 3, queries * columns, dtype=np.float32)
        logits = np.stack([rng.permutation(steps) for _ in SIZES]).reshape(3, queries, columns)
    boxes = rng.uniform(0, 1, (3, queries, 4)).astype(np.float32)
    outputs = SimpleNamespace(logits=torch.from_numpy(logits), pred_boxes=torch.from_numpy(boxes))
    expected = processor(name).post_process_object_detection(outputs, threshold=threshold, target_sizes=torch.tensor(SIZES))
    spec = ModelSpec(
        "test",
        InputSpec("stretch", 8, 8),
        DecodeSpec(activation, select, queries, classes, keep(queries, classes)),
        {},
    )
    found = decode({"logits": logits, "pred_boxes": boxes}, spec, SIZES, threshold=threshold)
    for ours, theirs, (height, width) in zip(found, expected, SIZES, strict=True):
        order = torch.sort(theirs["scores"], descending=True, stable=True).indices
        clip = torch.tensor([width, height, width, height], dtype=torch.float32)
        # Theirs may lie outside of the image; ours never do.
        corners = torch.minimum(theirs["boxes"][order].clamp(min=0), clip).numpy()
        assert len(ours) == len(order)
        np.testing.assert_allclose(ours.scores, theirs["scores"][order].numpy(), atol=1e-6)
        np.testing.assert_array_equal(ours.class_ids, theirs["labels"][order].numpy())
        np.testing.assert_allclose(ours.boxes_xyxy, corners, atol=2e-3)

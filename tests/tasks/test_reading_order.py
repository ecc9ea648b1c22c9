"""Reading order and quadrilaterals beside transformers' processors of PP-DocLayout, on random outputs."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("transformers", reason="needs the 'export' extra")

from document_processors import document_processor

from detrt.data.postprocess import decode
from detrt.data.sinks import Record, csv_writer
from detrt.errors import SessionError, SpecError
from detrt.models.wrapper import named_outputs
from detrt.spec import DecodeSpec, InputSpec, ModelSpec
from detrt.tasks.reading_order import reading_order

SIZE = (300, 200)
QUERIES, CLASSES = 40, 6


def spec_of(version):
    rule = {"reading_order": "votes"} if version < 4 else {"reading_order": "successors", "quads": True}
    decode_spec = DecodeSpec("sigmoid", "topk", QUERIES, CLASSES, QUERIES, mask_stride=4 * (version == 3), **rule)
    task = "instance-segmentation" if version == 3 else "detection"
    return ModelSpec(f"pp_doclayout_v{version}", InputSpec("stretch", 800, 800, dynamic=True), decode_spec, {}, task=task)


def random_outputs(version, seed, dense=1.0):
    """What a model of transformers returns for two images. dense: 1: half of the successor logits are above 0."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(2, *shape, generator=generator)

    found = {"logits": draw(QUERIES, CLASSES), "pred_boxes": draw(QUERIES, 4).sigmoid()}
    pairs = draw(QUERIES, QUERIES)
    if version == 4:
        found["pred_boxes"] = torch.cat([draw(QUERIES, 2).sigmoid(), 0.5 + 0.1 * draw(QUERIES, 8)], -1)
        successor = draw(QUERIES, QUERIES) + np.log(dense)
        found |= {
            "relative_order_logits": pairs - pairs.transpose(1, 2),
            "successor_order_logits": successor - 1e4 * torch.eye(QUERIES),
        }
    else:
        found["order_logits"] = pairs.masked_fill(torch.ones(QUERIES, QUERIES).tril().bool(), -1e4)
    if version == 3:
        found["out_masks"] = draw(QUERIES, 20, 30)
    return transformers_output(found)


def transformers_output(found):
    from transformers.utils import ModelOutput

    return ModelOutput(found)


CASES = [(2, 0, 1.0), (3, 1, 1.0), (4, 2, 1.0), (4, 3, 0.3), (4, 4, 0.1), (4, 5, 0.01)]


@pytest.mark.parametrize(("version", "seed", "dense"), CASES)
def test_detections_are_those_of_transformers(version, seed, dense):
    outputs, spec = random_outputs(version, seed, dense), spec_of(version)
    theirs = document_processor(version).post_process_object_detection(
        outputs, threshold=0.7, target_sizes=torch.tensor([SIZE] * 2)
    )
    ours = decode({k: v.numpy() for k, v in named_outputs(outputs, spec).items()}, spec, [SIZE] * 2, threshold=0.7)
    for found, want in zip(ours, theirs, strict=True):
        assert len(found) > 20
        np.testing.assert_array_equal(found.reading_order, want["order_seq"])
        assert (np.diff(found.reading_order) >= 0).all()
        # transformers gives labels of one query, which have one rank, in no defined order.
        mine = np.lexsort((found.class_ids, found.reading_order))
        other = np.lexsort((want["labels"].numpy(), want["order_seq"].numpy()))
        np.testing.assert_array_equal(found.class_ids[mine], want["labels"].numpy()[other])
        np.testing.assert_allclose(found.scores[mine], want["scores"].numpy()[other], atol=1e-6)
        boxes = np.clip(want["boxes"].numpy()[other], 0, [200, 300, 200, 300])
        np.testing.assert_allclose(found.boxes_xyxy[mine], boxes, atol=1e-3)
        if version == 4:
            np.testing.assert_allclose(found.quads[mine], want["polygon_points"].numpy()[other], atol=1e-3)
        assert (found.masks is not None) is (version == 3)


def test_no_detection_and_one():
    outputs, spec = random_outputs(4, 0), spec_of(4)
    arrays = {k: v.numpy() for k, v in named_outputs(outputs, spec).items()}
    assert [len(one) for one in decode(arrays, spec, [SIZE] * 2, threshold=1.0)] == [0, 0]
    (one, _) = decode(arrays, spec, [SIZE] * 2, threshold=0.0, max_detections=1)
    assert one.reading_order.tolist() == [0] and one.quads.shape == (1, 4, 2)


def test_a_chain_of_successors_is_read_from_its_start():
    """4, 2, 0, 3, 1, and an edge back to the start that is weaker than all others."""
    chain = [4, 2, 0, 3, 1]
    successor = np.full((5, 5), -5.0, np.float32)
    for first, second in itertools.pairwise(chain):
        successor[first, second] = 3
    successor[1, 4] = 1
    ranks = reading_order({"order_logits": np.zeros((5, 5), np.float32), "successor_logits": successor}, np.arange(5))
    assert [int(np.flatnonzero(ranks == i)[0]) for i in range(5)] == chain


def test_what_is_written(tmp_path):
    outputs, spec = random_outputs(4, 0), spec_of(4)
    found = decode({k: v.numpy() for k, v in named_outputs(outputs, spec).items()}, spec, [SIZE] * 2, threshold=0.9)[0]
    rows = json.loads(json.dumps(found.to_list()))
    assert [row["reading_order"] for row in rows] == found.reading_order.tolist()
    assert np.allclose([row["quad"] for row in rows], found.quads, atol=1e-3)
    assert [row["reading_order"] for row in found.to_coco(1)] == found.reading_order.tolist()
    assert found[::-1].reading_order.tolist() == found.reading_order.tolist()[::-1]
    with csv_writer(tmp_path / "a.csv", ("reading_order",)) as write:
        write(Record("page.png", found))
    lines = (tmp_path / "a.csv").read_text().splitlines()
    assert (
        lines[0].endswith(",reading_order")
        and [int(line.rsplit(",", 1)[1]) for line in lines[1:]] == found.reading_order.tolist()
    )


def test_overflow_is_an_error():
    outputs, spec = random_outputs(4, 0), spec_of(4)
    for name in ("order_logits", "successor_logits", "quads"):
        arrays = {k: v.numpy().copy() for k, v in named_outputs(outputs, spec).items()}
        arrays[name][:] = np.nan
        with pytest.raises(SessionError, match=f"NaN or infinite values in '{name}'"):
            decode(arrays, spec, [SIZE] * 2)


def test_the_spec_refuses_what_no_graph_does():
    with pytest.raises(SpecError, match="no graph sorts by them"):
        spec_of(2).with_decode(in_graph=True)
    assert ModelSpec.from_dict(spec_of(4).to_dict()) == spec_of(4)
    assert not {"reading_order", "quads"} & set(spec_of(2).with_decode(reading_order="none").to_dict()["decode"])

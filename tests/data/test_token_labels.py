"""Phrases from token scores: the best phrase, and the published ways, against transformers and against the formula."""

from __future__ import annotations

import bisect
from types import SimpleNamespace

import numpy as np
import pytest
from text_cases import SEPARATORS, colour_image, make_prompted, model_spec, text_spec, tokenizer_json

pytest.importorskip("tokenizers", reason="needs the 'text' extra")

from detrt.data.postprocess import decode, sigmoid
from detrt.data.token_labels import decode_tokens, published_tokens
from detrt.detections import box_iou
from detrt.detector import Detector
from detrt.errors import PromptError, SessionError
from detrt.text.kinds import phrase_logits
from detrt.text.tokenizer import PromptTokenizer

PROMPTS = [
    "a cat. a remote control.",
    "red circle. striped star. the 3 inch disk",
    "cat",
    "is it a dog? a cat. the star? red",
    "cat. cat. dogs.",
]
TOKENIZER = PromptTokenizer(tokenizer_json(), text_spec())


def parts_of(prompt):
    return TOKENIZER.encode(TOKENIZER.parse(prompt)).chunks[0]


def random_outputs(lengths, queries=40, seed=0):
    """Logits around the usual thresholds, -1e4 after the end of each prompt."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1.2, 1.5, (len(lengths), queries, max(lengths))).astype(np.float32)
    for row, length in zip(logits, lengths, strict=True):
        row[:, length:] = -1e4
    boxes = np.concatenate(
        [rng.uniform(0.3, 0.7, (len(lengths), queries, 2)), rng.uniform(0.05, 0.5, (len(lengths), queries, 2))], -1
    )
    return {"logits": logits, "pred_boxes": boxes.astype(np.float32)}


def test_best_phrase_by_hand():
    part = parts_of("a cat. dog.")
    logits = np.full((2, part.length), -9.0, np.float32)
    logits[0, [1, 2, 4]] = [0.5, 1.5, 1.0]  # a, cat, dog
    logits[1, [0, 3, 4]] = [5.0, 6.0, -1.0]  # what frames and separates does not count
    by_phrase = phrase_logits(logits, part.phrase_mask)
    np.testing.assert_array_equal(by_phrase, [[1.5, 1.0], [-9.0, -1.0]])
    np.testing.assert_array_equal(phrase_logits(logits, np.zeros((1, part.length), bool)), np.full((2, 1), -np.inf))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_best_phrase_is_the_largest_score_of_its_tokens(prompt):
    part = parts_of(prompt)
    logits = random_outputs([part.length])["logits"][0]
    scores = sigmoid(logits)
    expected = np.stack([scores[:, row].max(-1) for row in part.phrase_mask], -1)
    np.testing.assert_array_equal(sigmoid(phrase_logits(logits, part.phrase_mask)), expected)


def original_phrase_ids(posmap, ids, left=0, right=255):
    """The rule of the published `get_phrases_from_posmap`, written from its description, on 256 columns."""
    chosen = [i for i in range(256) if posmap[i] and left < i < right]
    return [ids[i] for i in chosen]


def original_phrases(logit, ids, text_threshold, remove_combined):
    """Published `predict` for one box: logit (256,) are scores, padded with zeros after the prompt."""
    if not remove_combined:
        return original_phrase_ids(logit > text_threshold, ids)
    ends = [i for i, token in enumerate(ids) if token in (101, 102, 1012)]
    at = bisect.bisect_left(ends, int(logit.argmax()))
    return original_phrase_ids(logit > text_threshold, ids, ends[at - 1], ends[at])


@pytest.mark.parametrize("remove_combined", [False, True])
@pytest.mark.parametrize("text_threshold", [0.0, 0.25, 0.6, 1.0])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_as_the_original_code_takes_them(prompt, text_threshold, remove_combined):
    part = parts_of(prompt)
    scores = sigmoid(random_outputs([part.length], queries=200, seed=3)["logits"][0])
    frames = TOKENIZER.frame_ids if remove_combined else ()
    found = published_tokens(scores, part.ids, text_threshold, max_tokens=256, frame_ids=frames)
    padded = np.pad(scores, ((0, 0), (0, 256 - part.length)))
    assert found == [original_phrases(row, part.ids.tolist(), text_threshold, remove_combined) for row in padded]


@pytest.mark.parametrize("best", range(8))
def test_every_place_of_the_best_token(best):
    """Also where it is one of the tokens that frame: what the original does there."""
    part = parts_of("a cat. a dog.")  # [CLS] a cat . a dog . [SEP]
    scores = np.full((1, part.length), 0.4, np.float32)
    scores[0, best] = 0.9
    found = published_tokens(scores, part.ids, 0.25, max_tokens=256, frame_ids=TOKENIZER.frame_ids)
    expected = original_phrases(np.pad(scores[0], (0, 256 - part.length)), part.ids.tolist(), 0.25, True)
    assert found == [expected]
    texts = ["", "a cat", "a cat", "a cat", "a dog", "a dog", "a dog", ""]
    assert TOKENIZER.decode(found[0]) == texts[best]


def test_the_last_place_of_a_full_prompt_does_not_count():
    ids = np.array([101, *[2001] * 254, 102])
    scores = np.full((1, 256), 0.9, np.float32)
    assert published_tokens(scores, ids, 0.5, max_tokens=256) == [[2001] * 254]
    assert published_tokens(scores, ids, 0.5, max_tokens=256) == [original_phrases(scores[0], ids.tolist(), 0.5, False)]


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("text_threshold", [0.2, 0.5])
def test_transformers_processor_gives_the_same(threshold, text_threshold):
    torch = pytest.importorskip("torch", reason="needs the 'export' extra")
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    from tokenizers import Tokenizer
    from transformers import GroundingDinoImageProcessor, GroundingDinoProcessor, PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_json().decode()), pad_token="[PAD]")
    processor = GroundingDinoProcessor.__new__(GroundingDinoProcessor)
    processor.image_processor, processor.tokenizer = GroundingDinoImageProcessor(), theirs
    parts = [parts_of(prompt) for prompt in PROMPTS]
    outputs = random_outputs([part.length for part in parts], seed=1)
    sizes = [(480, 640), (100, 30), (7, 900), (64, 64), (333, 500)]
    count = len(parts)
    # As the library returns them: 256 columns, minus infinity after the prompt.
    logits = np.full((count, 40, 256), -np.inf, np.float32)
    ids = np.zeros((count, max(part.length for part in parts)), np.int64)
    for i, part in enumerate(parts):
        logits[i, :, : part.length] = outputs["logits"][i, :, : part.length]
        ids[i, : part.length] = part.ids
    stock = SimpleNamespace(logits=torch.from_numpy(logits), pred_boxes=torch.from_numpy(outputs["pred_boxes"]))
    wanted = processor.post_process_grounded_object_detection(
        stock, torch.from_numpy(ids), threshold=threshold, text_threshold=text_threshold, target_sizes=sizes
    )
    spec = model_spec(decode={"num_queries": 40, "max_detections": 40})
    found = decode_tokens(
        outputs, spec, sizes, [p.ids for p in parts], [p.phrase_mask for p in parts], TOKENIZER.decode,
        threshold=threshold, text_threshold=text_threshold,
    )  # fmt: skip
    assert sum(map(len, found)) > 0
    for mine, their, (height, width) in zip(found, wanted, sizes, strict=True):
        order = np.argsort(-their["scores"].numpy(), kind="stable")
        np.testing.assert_allclose(mine.scores, their["scores"].numpy()[order], atol=1e-6)
        boxes = np.clip(their["boxes"].numpy()[order], 0, [width, height, width, height])
        np.testing.assert_allclose(mine.boxes_xyxy, boxes, atol=1e-3)
        assert list(mine.labels) == [their["text_labels"][i].replace(".", "") for i in order]


@pytest.mark.parametrize("kind", ["logits", "pred_boxes"])
def test_overflow_is_told(kind):
    part = parts_of("a cat.")
    outputs = random_outputs([part.length], queries=3)
    outputs[kind][0, 0, 0] = np.nan
    with pytest.raises(SessionError, match=f"NaN or infinite values in '{kind}'"):
        decode_tokens(outputs, model_spec(), [(8, 8)], [part.ids], [part.phrase_mask], TOKENIZER.decode, threshold=0.1)


def test_labels_of_tokens_through_the_detector():
    image = colour_image("red", "green", "black")
    session = make_prompted()
    with pytest.raises(PromptError, match="must be one of best, tokens, tokens-of-best"):
        Detector(session, prompt="red.", phrases="words")
    (found,) = Detector(session, prompt="red cat. a green star.", phrases="tokens", text_threshold=0.9)([image])
    assert sorted(zip(found.labels, found.class_ids.tolist(), strict=True)) == [("green", 1), ("red", 0)]
    assert dict(zip(found.labels, found.phrase_spans, strict=True)) == {"red": (0, 7), "green": (9, 21)}
    (found,) = Detector(session, phrases="tokens-of-best", text_threshold=0.0)([image], prompts=["red cat. a green star."])
    assert sorted(found.labels) == ["a green star", "red cat"]
    (found,) = Detector(session, phrases="tokens", text_threshold=0.0, max_detections=1)([image], prompts=["red cat. star."])
    assert len(found) == 1 and {"red", "cat", "star"} <= set(found.labels[0].split())
    with pytest.raises(PromptError, match="list of class names"):
        Detector(session, prompt=["red", "green"], phrases="tokens")
    with pytest.raises(PromptError, match="one for each class"):
        Detector(make_prompted("classes"), prompt="red.", phrases="tokens")
    with pytest.raises(PromptError, match="without `decode=graph`"):
        Detector(make_prompted(spec=model_spec(decode={"in_graph": True})), prompt="red.", phrases="tokens")
    with pytest.raises(ValueError, match="text_threshold must be a number from 0 to 1"):
        Detector(session, prompt="red.", phrases="tokens", text_threshold=2)


def omdet_boxes(logits, boxes, size_hw, threshold, iou):
    """What OmDet-Turbo's published processor does, written from its description: the best (query, class) pairs, as
    many as queries; those above the threshold; NMS inside a class; boxes cut off at the image."""
    flat = sigmoid(logits).reshape(-1)
    best = np.argsort(-flat, kind="stable")[: len(boxes)]
    best = best[flat[best] > threshold]
    query, ids = np.divmod(best, logits.shape[-1])
    scale = np.array([size_hw[1], size_hw[0]] * 2)
    corners = np.concatenate([boxes[query, :2] - boxes[query, 2:] / 2, boxes[query, :2] + boxes[query, 2:] / 2], 1) * scale
    overlap = box_iou(corners, corners)
    kept = []
    for i in range(len(best)):
        if not any(ids[i] == ids[j] and overlap[i, j] > iou for j in kept):
            kept.append(i)
    return np.clip(corners[kept], 0, scale), flat[best][kept], ids[kept]


def test_omdet_processor_gives_the_same():
    """Kind "classes" is a detector of fixed classes, with the NMS of its processor."""
    names = ["cat", "remote control", "dog"]
    outputs = random_outputs([3], queries=60, seed=5)
    outputs["pred_boxes"][0, 1::2, :2] = outputs["pred_boxes"][0, ::2, :2] + 0.02
    outputs["pred_boxes"][0, 1::2, 2:] = outputs["pred_boxes"][0, ::2, 2:]
    rule = {"select": "topk", "num_queries": 60, "num_classes": 3, "max_detections": 60, "nms": "nms", "nms_iou": 0.5}
    session = make_prompted("classes", spec=model_spec("classes", decode=rule))
    for threshold in (0.1, 0.3):
        (found,) = decode(outputs, session.bind(names).spec, [(300, 200)], threshold=threshold)
        boxes, scores, ids = omdet_boxes(outputs["logits"][0], outputs["pred_boxes"][0], (300, 200), threshold, 0.5)
        assert 5 < len(found) < 60 and found.class_ids.tolist() == ids.tolist()
        np.testing.assert_allclose(found.scores, scores, atol=1e-6)
        np.testing.assert_allclose(found.boxes_xyxy, boxes, atol=1e-3)


def test_separators_of_the_cases():
    assert TOKENIZER.frame_ids == (101, 102, 1012) and tuple(TOKENIZER.text.separators) == SEPARATORS

"""A model that takes a prompt, through the Detector: phrases and boxes, one run of the text encoder a prompt, lists in parts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from runtime_cases import make_session
from runtime_cases import make_spec as fixed_spec
from text_cases import (
    colour_image,
    detector_tensors,
    make_prompted,
    model_spec,
    run_detector,
    run_text_encoder,
    tensors,
    text_encoder_outputs,
    text_spec,
    tokenizer_json,
)

pytest.importorskip("tokenizers", reason="needs the 'text' extra")

from detrt.backends.base import FakeSession, Session
from detrt.backends.prompted import ENGINE_BUCKET, BoundSession, PromptedSession
from detrt.detector import Detector
from detrt.errors import PromptError, SessionError
from detrt.spec import ModelSpec, TensorInfo
from detrt.text.tokenizer import PromptTokenizer

RED_BLUE = colour_image("red", "black", "blue")
GREEN = colour_image("black", "green", "black")


def labels(found):
    """Label -> the thirds that it was found in."""
    return [
        sorted((label, round(float(box[0]) / d.image_size_hw[1] * 3)) for label, box in zip(d.labels, d.boxes_xyxy, strict=True))
        for d in found
    ]


@pytest.fixture(params=["tokens", "single graph", "in graph", "classes"])
def model(request):
    """The same model in its four forms."""
    kind = "classes" if request.param == "classes" else "tokens"
    text = text_spec(kind, encoder="" if request.param == "single graph" else "text.onnx")
    decode = {"in_graph": True} if request.param == "in graph" else {}
    return make_prompted(kind, spec=model_spec(kind, text=text, decode=decode))


def test_phrases_of_a_prompt(model):
    assert isinstance(model, Session)
    detector = Detector(model, prompt="blue square. red.")
    (found,) = detector([RED_BLUE])
    # "blue square" of kind "classes" is the mean of its words, so less sure; of kind "tokens" its best word counts.
    assert labels([found])[0] == [("blue square", 2), ("red", 0)]
    by_label = dict(zip(found.labels, zip(found.class_ids, found.phrase_spans, strict=True), strict=True))
    assert by_label == {"blue square": (0, (0, 11)), "red": (1, (13, 16))}
    assert found.prompt == "blue square. red."
    row = found.to_list()[0]
    assert found.prompt[slice(*row["phrase_span"])] == row["label"]
    assert found[:1].phrase_spans == found.phrase_spans[:1] and found[:1].prompt == found.prompt
    assert detector.spec.labels == {0: "blue square", 1: "red"} and detector.spec.text is None


def test_a_prompt_for_each_image(model):
    detector = Detector(model, batch_size=4)
    images = [RED_BLUE, RED_BLUE, GREEN, GREEN]
    prompts = ["red. cat. dog.", "a cat. blue", ["red", "green"], "green. green."]
    found = detector(images, prompts=prompts)
    assert labels(found) == [[("red", 0)], [("blue", 2)], [("green", 1)], [("green", 1)] * (len(found[3]))]
    assert found[1].prompt == "a cat. blue" and found[1].phrase_spans == ((7, 11),)
    assert found[2].phrase_spans is None and found[2].class_ids.tolist() == [1]
    alone = [Detector(model)([image], prompts=[prompt])[0] for image, prompt in zip(images, prompts, strict=True)]
    for together, single in zip(found, alone, strict=True):
        np.testing.assert_allclose(together.boxes_xyxy, single.boxes_xyxy, atol=1e-5)
        np.testing.assert_allclose(together.scores, single.scores, atol=1e-6)
        assert together.class_ids.tolist() == single.class_ids.tolist()


def test_duplicated_phrases_keep_their_places():
    (found,) = Detector(make_prompted(), prompt="red. blue. red.")([RED_BLUE])
    assert sorted(zip(found.labels, found.class_ids.tolist(), strict=True)) == [("blue", 1), ("red", 0)]


def test_a_video_pays_for_its_prompt_once():
    log = Counter()
    detector = Detector(make_prompted(log=log), batch_size=2, prompt="red. blue.")
    for _ in detector.stream(RED_BLUE for _ in range(9)):
        pass
    assert log["text_encoder"] == 1 and log["detector"] == 5
    detector([GREEN] * 4, prompts=["a cat.", "red. blue.", "a cat.", "a dog."])
    assert log["text_encoder"] == 3
    detector([GREEN], prompts=["red.  BLUE"])  # the same tokens
    assert log["text_encoder"] == 3


def test_the_cache_keeps_what_was_used_last():
    log = Counter()
    detector = Detector(make_prompted(log=log, cache_size=2))
    for prompt in ("cat.", "dog.", "cat.", "red.", "cat.", "dog."):
        detector([GREEN], prompts=[prompt])
    assert log["text_encoder"] == 4  # "dog." had to go for "red."
    with pytest.raises(SessionError, match="at least 1"):
        make_prompted(cache_size=0)


def test_what_is_kept_does_not_change_the_result():
    detector = Detector(make_prompted())
    first, again = (detector([RED_BLUE], prompts=["blue. red."])[0] for _ in range(2))
    assert first.boxes_xyxy.tobytes() == again.boxes_xyxy.tobytes() and first.scores.tobytes() == again.scores.tobytes()


def test_class_names_are_encoded_once_each():
    log = Counter()
    detector = Detector(make_prompted("classes", log=log))
    detector([RED_BLUE, GREEN], prompts=["red. blue.", "blue. green."])
    rows = [shapes["input_ids"][0] for name, shapes in log["shapes"] if name == "text_encoder"]
    assert rows == [2, 1, 1, 1]  # the names of the first image and its task; one new name and a new task
    detector([GREEN], prompts=["green. red. blue."])
    assert [shapes["input_ids"][0] for name, shapes in log["shapes"] if name == "text_encoder"][4:] == [1]  # its task


def test_a_task_of_ones_own():
    log = Counter()
    detector = Detector(make_prompted("classes", log=log), prompt="red. blue.", task="the cat")
    assert labels(detector([RED_BLUE])) == [[("blue", 2), ("red", 0)]]
    shape = next(shapes["task_features"] for name, shapes in log["shapes"] if name == "detector")
    assert shape[1] == 4  # the, cat and the two that frame them
    with pytest.raises(PromptError, match="no task"):
        Detector(make_prompted(), prompt="red.", task="the cat")


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("kind", ["tokens", "classes"])
def test_a_long_list_in_parts_equals_the_list_at_once(kind, in_graph):
    if kind == "classes" and in_graph:
        pytest.skip("the fake of kind 'classes' has no decoding")
    names = ["cat", "", "red", "dog", "remote control", "blue", "RED", "green circle", "star"]
    decode = {"in_graph": in_graph} if kind == "tokens" else {"num_classes": 256}
    whole = Detector(make_prompted(kind, spec=model_spec(kind, decode=decode)), prompt=names)
    small_text = text_spec(kind, max_tokens=7 if kind == "tokens" else 256)
    small = model_spec(kind, text=small_text, decode={**decode, **({"num_classes": 2} if kind == "classes" else {})})
    log = Counter()
    parts = Detector(make_prompted(kind, spec=small, log=log), prompt=names)
    assert isinstance(parts.session, BoundSession) and parts.session.chunks >= 3
    for image in (RED_BLUE, GREEN, colour_image("red", "red", "green")):
        (a,), (b,) = whole([image]), parts([image])
        assert labels([a]) == labels([b]) and a.labels
        assert sorted(a.class_ids.tolist()) == sorted(b.class_ids.tolist())
        np.testing.assert_allclose(sorted(a.scores), sorted(b.scores), atol=1e-6)
    assert sorted(b.class_ids.tolist()) == [2, 2, 7]  # line numbers
    assert b.phrase_spans is None and b.prompt == ""
    assert log["detector"] == 3 * parts.session.chunks


@pytest.mark.parametrize("in_graph", [False, True])
def test_parts_do_not_repeat_an_object(in_graph):
    """Every part finds the same two boxes, a third one lies apart, and each part has its own sureness."""
    spec = model_spec(text=text_spec(max_tokens=5), decode={"in_graph": in_graph})
    session = make_prompted(spec=spec)
    corners = np.array([[0, 0, 60, 60], [0, 0, 60, 59], [100, 100, 160, 160]], np.float32)  # IoU 0.98 of the first two
    sure = iter([0.8, 0.9, 0.6])  # of "red", "blue" and "green"

    def run(feeds):
        score = next(sure)
        if in_graph:
            scores = np.array([[score, score - 0.1, score - 0.2]], np.float32)
            return {
                "boxes": corners[None],
                "scores": scores,
                "labels": np.zeros((1, 3), np.int64),
                "num_detections": np.array([3]),
            }
        scores = np.array([score, score - 0.1, score - 0.2])
        logits = np.tile(np.log(scores / (1 - scores))[None, :, None], (1, 1, feeds["attention_mask"].shape[1]))
        centre, size = (corners[:, :2] + corners[:, 2:]) / 400, (corners[:, 2:] - corners[:, :2]) / 200
        return {"logits": logits.astype(np.float32), "pred_boxes": np.concatenate([centre, size], 1)[None].astype(np.float32)}

    session.detector._function = run
    bound = session.bind(["red", "blue", "green"])
    assert bound.chunks == 3 and bound.spec.decode.max_detections == 3
    (found,) = Detector(bound, threshold=0.1)([np.zeros((200, 200, 3), np.uint8)])
    # "blue" is the surest everywhere; that it finds two boxes on one place stays, as in a prompt.
    assert found.labels == ("blue", "blue", "blue")
    np.testing.assert_allclose(found.scores, [0.9, 0.8, 0.7], atol=1e-6)
    np.testing.assert_allclose(found.boxes_xyxy, corners, atol=1e-3)


def test_every_class_counts_for_average_precision():
    session = make_prompted()
    (best,) = Detector(session.bind(["red", "red cat", "blue"]), threshold=0.05)([RED_BLUE])
    bound = session.bind(["red", "red cat", "blue"], every_class=True)
    (every,) = Detector(bound, threshold=0.05)([RED_BLUE])
    assert bound.spec.decode.select == "topk" and len(every) == bound.spec.decode.max_detections
    assert "red cat" not in best.labels
    assert sorted(every.labels) == ["blue", "red", "red cat"]  # the three best pairs
    decoding = make_prompted(spec=model_spec(decode={"in_graph": True}))
    assert decoding.bind("red.", every_class=True).spec.decode.select == "query"


def test_lists_of_different_length_share_a_call():
    small = make_prompted(spec=model_spec(text=text_spec(max_tokens=7)))
    detector = Detector(small, batch_size=4)
    prompts = [["cat", "red", "dog", "blue"], "blue.", ["cat", "red", "dog", "blue"], "green."]
    found = detector([RED_BLUE, RED_BLUE, RED_BLUE, GREEN], prompts=prompts)
    assert labels(found) == [[("blue", 2), ("red", 0)], [("blue", 2)], [("blue", 2), ("red", 0)], [("green", 1)]]


def test_a_fixed_batch_is_filled_up():
    log = Counter()
    detector = Detector(make_prompted(batch=3, log=log))
    assert labels(detector([RED_BLUE, GREEN], prompts=["red.", "a green dog."])) == [[("red", 0)], [("a green dog", 1)]]
    assert labels(detector([GREEN, GREEN], prompts=["green.", "green."])) == [[("green", 1)]] * 2
    assert all(shapes["pixel_values"][0] == 3 for name, shapes in log["shapes"] if name == "detector")


def test_padding_of_a_batch_of_prompts():
    session = make_prompted()
    parts = [session.encode(p).chunks[0] for p in ("red.", "a remote control. a cat.")]
    feeds = session.text_feeds(parts)
    short, long = (session.text_feeds([part]) for part in parts)
    n = parts[0].length
    assert feeds["attention_mask"].tolist() == [[1] * n + [0] * (parts[1].length - n), [1] * parts[1].length]
    for name in ("text_features", "text_position_ids"):
        np.testing.assert_array_equal(feeds[name][0, :n], short[name][0])
        assert not feeds[name][0, n:].any()
    np.testing.assert_array_equal(feeds["text_self_mask"][0, :n, :n], short["text_self_mask"][0])
    np.testing.assert_array_equal(feeds["text_self_mask"][0, n:], np.eye(parts[1].length, dtype=np.int64)[n:])
    assert not feeds["text_self_mask"][0, :n, n:].any()
    for name, array in long.items():
        np.testing.assert_array_equal(feeds[name][1:], array)


def profiled(text_max=64, minimum=4):
    """Detector and text encoder with the profiles of engines."""
    spec = model_spec()

    def fake(inputs, outputs, function):
        bounds = {"tokens": (minimum, text_max), "batch": (1, 8), "phrases": (1, 32)}
        profile = {
            i.name: tuple(
                tuple(bounds.get(axis, (axis, axis))[k] if isinstance(axis, str) else axis for axis in i.shape) for k in (0, 0, 1)
            )
            for i in inputs
        }
        return FakeSession(spec, inputs, outputs, function, few_lengths=True, profile=profile)

    shapes = []

    def detect(feeds):
        shapes.append(feeds["text_features"].shape)
        return run_detector(feeds)

    outs = text_encoder_outputs("tokens")

    def text_encoder(feeds):
        made = run_text_encoder(feeds)
        return {info.name: made[info.name] for info in outs}

    inputs, outputs = detector_tensors(spec)
    both = fake(inputs, outputs, detect), fake(tensors("input_ids", "attention_mask"), outs, text_encoder)
    return PromptedSession(both[0], PromptTokenizer(tokenizer_json(), spec.text), both[1]), shapes


def test_engines_get_few_lengths():
    session, shapes = profiled()
    detector = Detector(session)
    prompts = ["red.", "a red cat. blue.", "red cat. blue dog. green star. striped circle. a dog. a cat."]
    found = detector([RED_BLUE] * 3, prompts=prompts)
    assert {shape[1] for shape in shapes} == {ENGINE_BUCKET, 2 * ENGINE_BUCKET}
    plain = Detector(make_prompted())([RED_BLUE] * 3, prompts=prompts)
    for a, b in zip(found, plain, strict=True):
        assert a.labels == b.labels and a.scores.tobytes() == b.scores.tobytes()
    session, shapes = profiled(text_max=20, minimum=18)
    Detector(session)([RED_BLUE], prompts=["red."])
    assert shapes[-1][1] == 18
    with pytest.raises(PromptError, match=r"has 27 tokens .*at most 20"):
        Detector(session, prompt="cat " * 24)
    listed = Detector(session, prompt=[f"red {i}" for i in ("cat", "dog", "star", "circle", "square", "disk", "3")])
    assert listed.session.chunks == 2
    assert session.info.max_batch is None and session.info.profile["text_features"][2][1] == 20


def test_words_that_the_tokenizer_does_not_know():
    bound = make_prompted().bind("zebra. red. okapi")
    assert "knows no part of 'zebra', 'okapi'" in bound.info.note
    assert make_prompted().bind("a zebra.").info.note == ""


def test_no_prompt():
    detector = Detector(make_prompted())
    for run in (lambda: detector([GREEN]), detector.check_prompt, lambda: next(detector.stream([GREEN]))):
        with pytest.raises(PromptError, match=r"there is none.*`prompt="):
            run()
    with pytest.raises(PromptError, match=r"text_features.*`prompt`"):
        make_prompted().run({"pixel_values": np.zeros((1, 3, 8, 12), np.uint8)})


def test_prompts_and_classes_do_not_mix():
    with pytest.raises(PromptError, match=r"no classes of its own.*`prompt`"):
        Detector(make_prompted(), prompt="red.", classes=["red"])
    fixed = make_session(fixed_spec())
    for options in ({"prompt": "a cat."}, {"task": "Find it."}, {"phrases": "tokens"}):
        with pytest.raises(PromptError, match=r"fixed classes.*`classes`"):
            Detector(fixed, **options)
    with pytest.raises(PromptError, match="fixed classes"):
        Detector(fixed)([GREEN], prompts=["a cat."])


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (["red."], "fewer prompts"),
        (["red."] * 3, "more prompts"),
        ("red.", "list of prompts"),
        (["red.", ""], "is empty"),
        (["red.", 5], "got int"),
        (["red.", "cat " * 300], "has 303 tokens"),
    ],
)
def test_bad_prompts(prompts, words):
    with pytest.raises(PromptError, match=words):
        Detector(make_prompted(), batch_size=2)([RED_BLUE, GREEN], prompts=prompts)


def test_pairs_that_do_not_fit():
    spec, made = model_spec(), PromptTokenizer(tokenizer_json(), text_spec())
    inputs, outputs = detector_tensors(spec)
    detector = FakeSession(spec, inputs, outputs, run_detector)
    with pytest.raises(SessionError, match=r"needs its text encoder 'text.onnx'"):
        PromptedSession(detector, made)
    with pytest.raises(SessionError, match="the text encoder must take"):
        PromptedSession(detector, made, detector)
    with pytest.raises(SessionError, match="fixed classes"):
        PromptedSession(make_session(fixed_spec()), made)
    single = model_spec(text=text_spec(encoder=""))
    with pytest.raises(SessionError, match="is one graph"):
        PromptedSession(FakeSession(single, *detector_tensors(single), run_detector), made, detector)


def test_closing_closes_both():
    session = make_prompted()
    with Detector(session, prompt="red.") as detector:
        detector([GREEN])
    assert session.detector.closed and session.text_encoder.closed


@pytest.mark.parametrize("where", ["text_encoder", "detector", "queries"])
def test_numbers_that_overflowed(where):
    session = make_prompted()
    if where == "text_encoder":
        good = session.text_encoder._function
        session.text_encoder._function = lambda feeds: {
            n: a * np.nan if n == "text_features" else a for n, a in good(feeds).items()
        }
        expected = "text encoder returned NaN"
    elif where == "detector":
        good = session.detector._function
        session.detector._function = lambda feeds: {**good(feeds), "logits": good(feeds)["logits"] * np.nan}
        expected = "NaN or infinite values in 'logits'"
    else:
        good = session.detector._function
        session.detector._function = lambda feeds: {**good(feeds), "logits": good(feeds)["logits"][:, :, :2]}
        expected = "2 columns of 'logits' for 4 tokens"
    with pytest.raises(SessionError, match=expected):
        Detector(session, prompt="red.")([GREEN])


def test_the_spec_goes_through_json():
    spec = model_spec("classes")
    assert ModelSpec.from_json(spec.to_json()) == spec
    assert make_prompted("classes").bind("red.").inputs == (TensorInfo("pixel_values", "uint8", ("batch", 3, 8, 12)),)

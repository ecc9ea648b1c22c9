from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import itertools
import pickle
import threading
import time

import numpy as np
import pytest
from PIL import Image
from runtime_cases import make_session, make_spec, red

from detrt import build, load_source, open_session, verify
from detrt.backends import batches
from detrt.backends.base import FakeSession, Session, check_feeds, check_spec
from detrt.backends.search import SessionOptions
from detrt.data.images import expand_inputs
from detrt.data.preprocess import preprocess
from detrt.detections import Detections
from detrt.detector import Detector, DetectorOptions
from detrt.errors import ImageError, PromptError, SessionError, SpecError
from detrt.jobs.run import detect_inputs
from detrt.models.load_options import LoadChanges, LoadOptions
from detrt.spec import TensorInfo

EDGE = {
    "resize": "shortest_edge",
    "height": 16,
    "width": 24,
    "shortest_edge": 16,
    "longest_edge": 24,
    "dynamic": True,
}


def reds(found):
    """The red value that made each score."""
    return [round(float(d.scores[0]) * 255) if len(d) else None for d in found]


def test_list_in_list_out():
    log = []
    detector = Detector(make_session(make_spec(), log=log), threshold=0.1)
    images = [red(10, 20, 100), red(30, 5, 200), red(8, 12, 0)]
    found = detector(images)
    assert reds(found) == [100, 200, None] and log == [(1, 3, 8, 12)] * 3
    assert [d.image_size_hw for d in found] == [(10, 20), (30, 5), (8, 12)]
    assert found[0].boxes_xyxy.tolist() == [[5, 2.5, 15, 7.5]] and found[0].labels == ("cat",)
    assert detector([]) == [] and len(log) == 3


def test_a_detector_for_another_process_is_opened_there():
    """`multiprocessing` said that it cannot pickle a module."""
    detector = Detector(make_session(make_spec()))
    for copied in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match=r"cannot be pickled or copied; open one in each process: Detector\('bundle'\)"):
            copied(detector)


def test_all_kinds_of_images(tmp_path):
    image = red(8, 12, 150)
    path = tmp_path / "a.png"
    Image.fromarray(image).save(path)
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    detector = Detector(make_session(make_spec()), batch_size=2)
    assert reds(detector([path, str(path), image, file.getvalue(), Image.fromarray(image)])) == [150] * 5
    assert reds(detector(iter([image]))) == [150]


@pytest.mark.parametrize(
    ("max_batch", "batch", "batch_size", "expected"),
    [
        (None, "batch", None, [1] * 5),
        (None, "batch", 2, [2, 2, 1]),
        (4, "batch", None, [4, 1]),
        (4, "batch", 2, [2, 2, 1]),
        (4, "batch", 9, [4, 1]),
        (None, 2, None, [2, 2, 2]),  # a fixed batch is filled up
        (None, 4, 3, [4, 4]),
        (1, 1, 8, [1] * 5),
    ],
)
def test_batches(max_batch, batch, batch_size, expected):
    log = []
    session = make_session(make_spec(), max_batch=max_batch, batch=batch, log=log)
    found = Detector(session, threshold=0.01, batch_size=batch_size)([red(8, 12, v) for v in (50, 60, 70, 80, 90)])
    assert reds(found) == [50, 60, 70, 80, 90]
    assert [shape[0] for shape in log] == expected


def test_without_a_mask_only_equal_sizes_share_a_batch():
    log = []
    detector = Detector(make_session(make_spec(**EDGE, multiple_of=8), log=log), threshold=0.01, batch_size=4)
    found = detector([red(16, 24, 50), red(24, 16, 60), red(32, 48, 70), red(16, 16, 80), red(24, 16, 90)])
    assert reds(found) == [50, 60, 70, 80, 90]
    assert log == [(2, 3, 16, 24), (1, 3, 24, 16), (1, 3, 16, 16), (1, 3, 24, 16)]


def test_with_a_mask_too_only_equal_sizes_share_a_batch():
    log = []
    detector = Detector(make_session(make_spec(**EDGE, mask=True), log=log), threshold=0.01, batch_size=4)
    assert reds(detector([red(16, 24, 50), red(24, 16, 60), red(32, 48, 70)])) == [50, 60, 70]
    assert log == [(2, 3, 16, 24), (1, 3, 24, 16)]


def test_size():
    log = []
    session = make_session(make_spec(**EDGE, mask=True), log=log)
    Detector(session, size=(8, 8))([red(16, 24, 50)])
    assert log == [(1, 3, 8, 8)]
    with pytest.raises(SpecError, match="9x12"):
        Detector(make_session(make_spec()), size=(9, 12))


def test_a_session_of_one_size_decides_the_size():
    spec = make_spec(**EDGE, mask=True)
    log = []
    free = make_session(spec, log=log)
    inputs = tuple(
        TensorInfo(i.name, i.dtype, tuple({"height": 16, "width": 32}.get(a, a) for a in i.shape)) for i in free.inputs
    )
    session = FakeSession(spec, inputs, free.outputs, free._function)
    assert reds(Detector(session, threshold=0.01)([red(100, 100, 77)])) == [77] and log == [(1, 3, 16, 32)]


def test_stream_is_lazy_and_ordered():
    taken = []

    def source():
        for value in itertools.count(10):
            taken.append(value)
            yield red(8, 12, value)

    stream = Detector(make_session(make_spec()), threshold=0.01, batch_size=2).stream(source())
    assert reds(itertools.islice(stream, 3)) == [10, 11, 12]
    assert len(taken) == 4


def _with_function(function, **facts):
    """A detector of a session whose model is `function` of the red value, which it gives back."""
    good = make_session(make_spec())
    shown = lambda feeds: function(int(feeds["pixel_values"].max())) or good._function(feeds)  # noqa: E731
    return Detector(FakeSession(good.spec, good.inputs, good.outputs, shown, **facts), threshold=0.01)


def test_on_a_cpu_the_next_image_is_prepared_while_the_model_runs(tmp_path, monkeypatch):
    """Of a list and of a folder; each run waits here until the next image is prepared."""
    prepared, values = threading.Semaphore(0), [50, 60, 70]

    def preparing(images, *args, **kwargs):
        if images[0].max() != values[0]:
            prepared.release()
        return preprocess(images, *args, **kwargs)

    def model(value):
        if value != values[-1]:
            assert prepared.acquire(timeout=20), f"nothing was prepared beside {value}"

    monkeypatch.setattr(batches, "preprocess", preparing)
    for value in values:
        Image.fromarray(red(8, 12, value)).save(tmp_path / f"{value}.png")
    for source in (tmp_path, [red(8, 12, value) for value in values]):
        prepared = threading.Semaphore(0)
        with _with_function(model) as detector:
            assert reds(detector.stream(source)) == values
    prepared = threading.Semaphore(0)
    with _with_function(model) as detector:
        assert [result.record.detections.scores[0] for result in detect_inputs(detector, expand_inputs([tmp_path]))]


def test_runs_beside_the_caller_come_one_after_another():
    running = threading.Lock()

    def model(value):
        assert running.acquire(blocking=False), "two runs at a time"
        time.sleep(0.01)
        running.release()

    with _with_function(model) as detector:
        for found in detector.stream([red(8, 12, value) for value in (50, 60, 70)]):
            assert reds([found, detector(red(8, 12, 90))]) != [90, 90]
    with pytest.raises(SessionError, match="closed"):
        detector(red(8, 12, 1))


def test_what_came_before_a_bad_image_or_a_failing_run_is_given():
    def model(value):
        if value == 70:
            raise SessionError("seventy")

    with _with_function(model) as detector:
        stream = detector.stream([red(8, 12, 50), red(8, 12, 60), b"no image", red(8, 12, 80)])
        assert reds(itertools.islice(stream, 2)) == [50, 60]
        with pytest.raises(ImageError):
            next(stream)
        stream = detector.stream([red(8, 12, value) for value in (50, 60, 70, 80)])
        assert reds(itertools.islice(stream, 2)) == [50, 60]
        with pytest.raises(SessionError, match="seventy"):
            next(stream)


def test_an_iterable_may_wait_for_each_result():
    """A generator that makes the next image from the last result."""
    found = []

    def source():
        for value in (50, 60, 70):
            yield red(8, 12, value)
            assert len(found) == (value - 40) // 10

    with _with_function(lambda value: None) as detector:
        for one in detector.stream(source()):
            found.append(one)
    assert reds(found) == [50, 60, 70]


def test_threshold_classes_and_count():
    image = [red(8, 12, 200)]
    assert reds(Detector(make_session(make_spec()), threshold=0.9)(image)) == [None]
    assert reds(Detector(make_session(make_spec()), classes=["DOG", 2])(image)) == [None]
    assert reds(Detector(make_session(make_spec()), classes=["cat"], max_detections=1)(image)) == [200]
    with pytest.raises(SpecError, match="'horse'"):
        Detector(make_session(make_spec()), classes=["horse"])


@pytest.mark.parametrize("options", [{"threshold": 2}, {"batch_size": 0}, {"max_detections": -1}, {"threshold": -0.5}])
def test_bad_options(options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=rf"{name}.*{value}"):
        Detector(make_session(make_spec()), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": "0.5"}, "threshold must be a number from 0 to 1; got '0.5'"),
        ({"classes": "cat"}, r"such as \['cat'\]; got 'cat'"),
        ({"classes": 0}, "classes are a list"),
        ({"classes": []}, "empty"),
        ({"classes": [True]}, "name or an id"),
    ],
)
def test_options_of_another_type(options, words):
    """A text is a sequence of letters, which are no classes."""
    with pytest.raises((TypeError, SpecError), match=words):
        Detector(make_session(make_spec()), **options)
    with pytest.raises((TypeError, SpecError), match=words):
        Detector(make_session(make_spec()))(red(8, 12, 150), **options)


def test_one_image_gives_one_result(tmp_path):
    image = red(8, 12, 150)
    Image.fromarray(image).save(tmp_path / "a.png")
    detector = Detector(make_session(make_spec()))
    for source in (image, tmp_path / "a.png", str(tmp_path / "a.png"), (tmp_path / "a.png").read_bytes(), Image.fromarray(image)):
        found = detector(source)
        assert isinstance(found, Detections) and reds([found]) == [150]


def test_what_is_no_image():
    with pytest.raises(TypeError, match="int"):
        Detector(make_session(make_spec()))(5)  # type: ignore[call-overload]


def test_classes_of_a_call():
    """The fake session finds cats alone."""
    detector = Detector(make_session(make_spec()), threshold=0.1)
    image = red(8, 12, 150)
    assert len(detector(image, classes=["cat"])) == len(detector(image, classes=[0])) == len(detector(image)) == 1
    assert len(detector(image, classes=["dog"])) == 0
    with pytest.raises(SpecError, match="horse"):
        detector(image, classes=["horse"])
    with pytest.raises(PromptError, match="fixed classes"):
        detector(image, prompt="a cat.")


def test_bgr_arrays():
    """Arrays alone: a file knows its order."""
    image, alpha = red(8, 12, 150), np.dstack([red(8, 12, 150), np.full((8, 12), 255, np.uint8)])
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    detector = Detector(make_session(make_spec()), color="bgr")
    swapped = alpha[..., [2, 1, 0, 3]]
    assert reds(detector([image[..., ::-1], swapped, file.getvalue(), Image.fromarray(image)])) == [150] * 4
    assert reds([detector(image)]) == [None]  # blue, read so
    with pytest.raises(ValueError, match=r"color must be one of rgb, bgr; got 'hsv'"):
        Detector(make_session(make_spec()), color="hsv")


def test_repr_says_what_it_is():
    text = repr(Detector(make_session(make_spec(), max_batch=4), threshold=0.25))
    assert text == "<Detector unnamed (test): 3 classes, input 8x12, batch size 4, fake, threshold 0.25>"


def test_options_are_the_arguments_of_the_constructor():
    given = list(inspect.signature(Detector).parameters)[1:]
    own = [one.name for one in dataclasses.fields(DetectorOptions)]
    opening = [
        one.name
        for one in dataclasses.fields(SessionOptions)
        if one.name not in ("eager_kernels", "emulate_low_precision", "tuning")
    ]
    assert given[: len(own)] == own  # in this order
    assert {*given[len(own) :]} == {*opening, "performance", "streams", "changes"}
    detector = Detector.with_options(make_session(make_spec()), DetectorOptions(threshold=0.25, tile=64))
    assert detector.threshold == 0.25 and detector.tiling is not None


def test_open_is_the_constructor():
    opened = Detector.open(make_session(make_spec()), threshold=0.25, color="bgr")
    assert opened.threshold == 0.25
    with pytest.raises(TypeError, match="backend, device"):
        Detector(make_session(make_spec()), device="cpu", backend="torch")


def test_keywords_of_loading_are_the_fields():
    assert set(LoadChanges.__annotations__) == {one.name for one in dataclasses.fields(LoadOptions)}


def test_a_keyword_that_is_close_to_none():
    with pytest.raises(TypeError, match="^build has no keyword 'nothing_like_it'; it takes: "):
        build("model", "bundle", nothing_like_it="onnx")  # type: ignore[call-arg]


@pytest.mark.parametrize("function", [Detector, build, load_source, open_session, verify])
def test_signatures_name_the_keywords_of_loading(function):
    """Editors and type checkers read the annotation, no signature is written at run time; an unknown keyword gets the closest one."""
    parameters = inspect.signature(function).parameters
    assert parameters["changes"].annotation == "Unpack[LoadChanges]" and not hasattr(function, "__signature__")
    name = function.__qualname__
    required = ["nothing" for one in parameters.values() if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    with pytest.raises(TypeError, match=rf"^{name} has no keyword 'lables'; did you mean labels\?$"):
        function(*required, lables="names.txt")
    with pytest.raises(TypeError, match=rf"^{name} has no keyword 'zzz'; it takes: .*trust_remote_code"):
        function(*required, zzz=1)


def test_bad_image_is_named():
    with pytest.raises(ImageError, match=r"nope.jpg"):
        Detector(make_session(make_spec()))([red(8, 8, 9), "nope.jpg"])


def test_close():
    with Detector(make_session(make_spec())) as detector:
        assert isinstance(detector.session, Session)
    assert detector.session.closed
    with pytest.raises(SessionError, match="closed"):
        detector([red(8, 12, 1)])


def test_nan_of_the_model_is_an_error():
    spec = make_spec()
    good = make_session(spec)
    bad = FakeSession(
        spec,
        good.inputs,
        good.outputs,
        lambda feeds: {**good._function(feeds), "logits": np.full((1, 4, 3), np.nan)},
    )
    with pytest.raises(SessionError, match="NaN"):
        Detector(bad)([red(8, 12, 1)])


@pytest.mark.parametrize(
    ("feeds", "words"),
    [
        ({}, ["missing: ['x']"]),
        ({"x": np.zeros((1, 3), np.uint8), "y": 0}, ["unknown: ['y']"]),
        ({"x": np.zeros((1, 3), np.float32)}, ["uint8", "float32"]),
        ({"x": np.zeros((3,), np.uint8)}, ["('batch', 3)", "(3,)"]),
        ({"x": np.zeros((1, 4), np.uint8)}, ["(1, 4)", "axis 1 must be 3"]),
    ],
)
def test_check_feeds(feeds, words):
    with pytest.raises(SessionError) as caught:
        check_feeds((TensorInfo("x", "uint8", ("batch", 3)),), feeds)
    assert all(word in str(caught.value) for word in words)


def test_check_feeds_compares_symbolic_axes():
    inputs = (TensorInfo("x", "uint8", ("n",)), TensorInfo("y", "uint8", ("n",)))
    with pytest.raises(SessionError, match=r"'y'.*axis 0 must be 2"):
        check_feeds(inputs, {"x": np.zeros(2, np.uint8), "y": np.zeros(3, np.uint8)})


def test_check_spec():
    spec = make_spec(mask=True)
    session = make_session(spec)
    check_spec("m", spec, session.inputs, session.outputs)
    with pytest.raises(SpecError, match=r"m has the inputs \['pixel_values', 'pixel_mask'\].*\['pixel_values'\]"):
        check_spec("m", make_spec(), session.inputs, session.outputs)
    with pytest.raises(SpecError, match="num_detections"):
        check_spec("m", make_spec(mask=True, decode={"in_graph": True}), session.inputs, session.outputs)
    with pytest.raises(SpecError, match="as uint8, its spec says float32"):
        check_spec("m", make_spec(mask=True, dtype="float32"), session.inputs, session.outputs)
    with pytest.raises(SpecError, match="height 8, its spec says 16"):
        check_spec("m", make_spec(mask=True, height=16), session.inputs, session.outputs)


def test_the_threshold_is_an_argument_of_the_call():
    detector = Detector(make_session(make_spec()), threshold=0.9)
    images = [red(8, 12, 100)]
    assert reds(detector(images, threshold=0.1)) == [100] and reds(detector(images)) == [None]
    assert reds(detector.stream(images, threshold=0.0)) == [100]
    assert reds(detector.submit(images, threshold=0.1).result()) == [100] and detector.threshold == 0.9
    with pytest.raises(ValueError, match="from 0 to 1"):
        detector(images, threshold=2)


def test_pending_detections_keep_their_threshold():
    detector = Detector(make_session(make_spec()), threshold=0.1, batch_size=2)
    low, high = detector.submit([red(8, 12, 100)]), detector.submit([red(8, 12, 100), red(8, 12, 250)], threshold=0.8)
    assert reds(high.result()) == [None, 250] and reds(low.result()) == [100]


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_bad_images_are_errors_in_their_place(tmp_path, batch_size):
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    images = [tmp_path / "gone.png", red(8, 12, 100), tmp_path / "bad.jpg", red(8, 12, 200), red(9, 12, 150), b"junk"]
    detector = Detector(make_session(make_spec(), max_batch=4), threshold=0.1, batch_size=batch_size)
    found = detector(images, skip_bad=True)
    assert [isinstance(one, ImageError) for one in found] == [True, False, True, False, False, True]
    assert reds([one for one in found if not isinstance(one, ImageError)]) == [100, 200, 150]
    assert "gone.png" in str(found[0]) and "bad.jpg" in str(found[2])
    assert [type(one) for one in detector.stream(iter(images), skip_bad=True)] == [type(one) for one in found]
    assert [type(one) for one in detector([tmp_path / "bad.jpg"], skip_bad=True)] == [ImageError]
    with pytest.raises(ImageError, match=r"gone\.png"):
        detector(images)
    with pytest.raises(ImageError, match=r"bad\.jpg"):
        detector(tmp_path / "bad.jpg", skip_bad=True)

"""Tensors of the KServe v2 protocol: right ones arrive as they are, wrong ones are refused as text."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs the 'serve' extra")

from detrt.serve.detection_tensors import image_tasks
from detrt.serve.errors import Refused
from detrt.serve.kserve import InferRequest, binary_length, build_infer, parse_infer
from detrt.spec import TensorInfo

INPUTS = (TensorInfo("x", "uint8", ("batch", 2)), TensorInfo("y", "float32", ("batch", "n")))
OUTPUTS = (TensorInfo("p", "float32", ("batch", 2)), TensorInfo("q", "int64", ("batch",)))
X = {"name": "x", "shape": [2, 2], "datatype": "UINT8", "data": [1, 2, 3, 255]}
Y = {"name": "y", "shape": [2, 1], "datatype": "FP32", "data": [[0.5], [2]]}


def parse(data, tail=b"", length=True):
    head = json.dumps(data).encode()
    return parse_infer(head + tail, len(head) if tail or not length else None, INPUTS, OUTPUTS)


def test_json_tensors():
    got = parse({"id": "7", "inputs": [X, Y], "parameters": {"timeout": 2500}})
    np.testing.assert_array_equal(got.inputs["x"], np.array([[1, 2], [3, 255]], np.uint8))
    np.testing.assert_array_equal(got.inputs["y"], np.array([[0.5], [2]], np.float32))
    assert got.inputs["x"].dtype == np.uint8 and got.inputs["y"].dtype == np.float32
    assert (got.id, got.timeout_ms, got.outputs) == ("7", 2.5, (("p", False), ("q", False)))


def test_binary_tensors():
    x, y = np.arange(4, dtype=np.uint8).reshape(2, 2), np.array([[1.5], [-2]], np.float32)
    rows = [
        {"name": name, "shape": list(a.shape), "datatype": kind, "parameters": {"binary_data_size": a.nbytes}}
        for name, kind, a in (("x", "UINT8", x), ("y", "FP32", y))
    ]
    wanted = [{"name": "q", "parameters": {"binary_data": True}}, {"name": "p"}]
    got = parse({"inputs": rows, "outputs": wanted}, x.tobytes() + y.tobytes())
    np.testing.assert_array_equal(got.inputs["x"], x)
    np.testing.assert_array_equal(got.inputs["y"], y)
    assert got.outputs == (("q", True), ("p", False))


def test_answers():
    request = InferRequest("a", {}, (("q", True), ("p", False)))
    p, q = np.array([[1, 2], [3, 4]], np.float32), np.array([5, 6])
    body, length = build_infer("m", request, {"p": p, "q": q})
    head = json.loads(body[:length])
    assert head["id"] == "a" and head["model_name"] == "m"
    assert head["outputs"][0] == {"name": "q", "datatype": "INT64", "shape": [2], "parameters": {"binary_data_size": 16}}
    assert head["outputs"][1]["data"] == [1, 2, 3, 4]
    np.testing.assert_array_equal(np.frombuffer(body[length:], np.int64), q)
    with pytest.raises(Refused, match="binary_data"):
        build_infer("m", InferRequest("", {}, (("p", False),)), {"p": p * np.inf})
    assert build_infer("m", InferRequest("", {}, (("p", False),)), {"p": p})[1] is None


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (None, "'inputs' must be a list"),
        ([X], "missing: y"),
        ([X, X, Y], "given twice"),
        ([X, {**Y, "name": "z"}], "is not one of the model's: x, y"),
        ([{**X, "datatype": "FP32"}, Y], "must be UINT8"),
        ([{**X, "shape": [2, 3], "data": [1] * 6}, Y], r"must have the shape \['batch', 2\]"),
        ([{**X, "shape": [2]}, Y], "must have the shape"),
        ([{**X, "shape": [0, 2], "data": []}, Y], "is empty"),
        ([{**X, "shape": [-2, 2]}, Y], "integers"),
        ([{**X, "shape": [2**40, 2**40]}, Y], "must have the shape"),
        ([{**X, "shape": [1, 2], "data": [1, 2]}, Y], "the same number of images"),
        ([{**X, "data": [1, 2, 3]}, Y], "needs 4 numbers; 'data' has 3"),
        ([{**X, "data": [1, 2, 3, 256]}, Y], "from 0 to 255"),
        ([{**X, "data": [1, 2, 3, -1]}, Y], "from 0 to 255"),
        ([{**X, "data": [1, 2, 3, 10**30]}, Y], "x"),
        ([{**X, "data": [1, 2, 3, 0.5]}, Y], "holds other values"),
        ([{**X, "data": ["1", "2", "3", "4"]}, Y], "holds other values"),
        ([{**X, "data": [1, [2], 3, 4]}, Y], "flat or nested"),
        ([{**X, "data": None}, Y], "a list of numbers"),
        ([{**X, "data": [True, False, True, None]}, Y], "holds other values"),
        ([{**X, "parameters": {"shared_memory_region": "r"}}, Y], "shared memory"),
        ([{**X, "parameters": {"binary_data_size": 4}}, Y], "behind the JSON"),
        ([{**X, "parameters": {"binary_data_size": 5}}, Y], "has 4 bytes; binary_data_size says 5"),
        ([{**X, "parameters": 3}, Y], "must be an object"),
    ],
)
def test_bad_inputs(inputs, words):
    with pytest.raises(Refused, match=words) as caught:
        parse({"inputs": inputs})
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"outputs": [{"name": "r"}]}, "is not one of the model's: p, q"),
        ({"outputs": "p"}, "list of objects"),
        ({"outputs": [{"name": "p", "parameters": {"classification": 3}}]}, "not offered"),
        ({"parameters": {"sequence_id": 4}}, "keeps no state"),
        ({"parameters": {"speed": 4}}, "'speed' is not known"),
        ({"parameters": {"timeout": -1}}, "microseconds"),
        ({"id": 3}, "'id' must be text"),
    ],
)
def test_bad_requests(more, words):
    with pytest.raises(Refused, match=words):
        parse({"inputs": [X, Y], **more})


@pytest.mark.parametrize("body", [b"", b"nothing", b"[]", b"[" * 100_000, b'{"inputs": [NaN]}', b"\xff\xfe"])
def test_bodies_that_are_no_request(body):
    with pytest.raises(Refused) as caught:
        parse_infer(body, None, INPUTS, OUTPUTS)
    assert caught.value.status == 400


def test_a_key_that_is_there_twice_is_refused():
    text = json.dumps({"id": "a", "inputs": [X, Y]})
    with pytest.raises(Refused, match="it has the key 'id' twice"):
        parse_infer(text.replace("{", '{"id": "b", ', 1).encode(), None, INPUTS, OUTPUTS)


def test_lengths():
    assert binary_length(None) is None and binary_length("12") == 12
    for text in ("-1", "x", "1" * 30, "²"):
        with pytest.raises(Refused, match="number of bytes"):
            binary_length(text)
    for length in (0, 999):
        with pytest.raises(Refused, match="must be from 1 to"):
            parse_infer(b"{}", length, INPUTS, OUTPUTS)
    with pytest.raises(Refused, match="3 bytes follow the JSON, but the inputs name 0"):
        parse({"inputs": [X, Y]}, b"abc")


TEXTS = (TensorInfo("t", "bytes", ("batch", "names")), TensorInfo("x", "uint8", ("batch", 2)))


def parse_texts(row, tail=b"", **options):
    head = json.dumps({"inputs": [{"name": "t", "datatype": "BYTES", **row}]}).encode()
    return parse_infer(head + tail, len(head) if tail else None, TEXTS, TEXTS, optional=True, **options).inputs["t"]


def packed(*elements):
    return b"".join(len(one).to_bytes(4, "little") + one for one in elements)


def test_bytes_in_both_forms():
    tail = packed(b"a", b"", "ü".encode(), b"\xff")
    got = parse_texts({"shape": [2, 2], "parameters": {"binary_data_size": len(tail)}}, tail)
    assert got.tolist() == [[b"a", b""], ["ü".encode(), b"\xff"]]
    assert parse_texts({"shape": [1, 2], "data": ["a", "ü"]}).tolist() == [[b"a", "ü".encode()]]
    request = InferRequest("", {}, (("t", True),))
    body, length = build_infer("m", request, {"t": got})
    assert body[length:] == tail and json.loads(body[:length])["outputs"][0]["datatype"] == "BYTES"
    body, _ = build_infer("m", InferRequest("", {}, (("t", False),)), {"t": got[:1]})
    assert json.loads(body)["outputs"][0]["data"] == ["a", ""]


@pytest.mark.parametrize(
    ("row", "tail", "words"),
    [
        ({"shape": [1, 2], "data": ["a"]}, b"", "needs 2 numbers|needs 2"),
        ({"shape": [1, 1], "data": [1]}, b"", "as texts"),
        ({"shape": [1, 1], "parameters": {"binary_data_size": 5}}, packed(b"abc"), "5 bytes|needs 1 element,"),
        ({"shape": [1, 1], "parameters": {"binary_data_size": 7}}, b"\xff\xff\xff\xffabc", "needs 1 element,"),
        ({"shape": [1, 2], "parameters": {"binary_data_size": 7}}, packed(b"abc"), "needs 2 elements"),
        ({"shape": [1, 1], "parameters": {"binary_data_size": 10}}, packed(b"a", b"b"), "needs 1 element,"),
        ({"shape": [1, 1], "parameters": {"binary_data_size": -1}}, packed(b"a"), "binary_data_size says -1"),
        ({"shape": [2**20, 2**20], "parameters": {"binary_data_size": 5}}, packed(b"a"), "elements"),
    ],
)
def test_bytes_that_are_wrong(row, tail, words):
    with pytest.raises(Refused, match=words):
        parse_texts(row, tail)


def test_inputs_that_may_be_left_out():
    assert parse_infer(b'{"inputs": []}', None, TEXTS, TEXTS, optional=True).inputs == {}
    with pytest.raises(Refused, match=r"takes the inputs t, x; missing: t, x"):
        parse_infer(b'{"inputs": []}', None, TEXTS, TEXTS)
    with pytest.raises(Refused, match=r"IMAGE \(the content of image files\) or PIXELS \(RGB\), and this one has neither"):
        image_tasks({}, 0.5)

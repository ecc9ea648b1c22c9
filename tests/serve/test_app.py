"""The server with real models: what it answers is what a Detector finds, in every form of request."""

from __future__ import annotations

import base64
import gzip
import json
import os
import shutil

import numpy as np
import pytest

httpx = pytest.importorskip("httpx", reason="needs the 'dev' extra")
pytest.importorskip("fastapi", reason="needs the 'serve' extra")
pytest.importorskip("onnxslim", reason="needs the 'export' extra")

from serve_support import Server, in_base64, png, together
from slow_images import png_chunk
from text_cases import colour_image
from text_models import write_text_bundle
from tiny_exports import SHARED

from detrt import Detector, ImageQueries
from detrt.backends.base import Session
from detrt.data.preprocess import preprocess
from detrt.data.scenes.scene import draw_scene

SIZES = [(240, 320), (300, 200), (135, 455), (320, 320), (64, 96), (400, 300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, exported):
    """shapes.onnx, the embedded detector without masks, and prompted/, a bundle that takes a prompt."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copyfile(exported("embedded:shapes-boxes").path, folder / "shapes.onnx")  # tests/serve/test_masks.py has masks
    write_text_bundle(folder / "prompted")
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with Server(folder / "shapes.onnx", f"asked={folder / 'prompted'}", "--max-images", 8) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.address, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def scenes():
    return [draw_scene(seed, size_hw=SIZES[seed % len(SIZES)]).image for seed in range(12)]


@pytest.fixture(scope="module")
def expected(folder, scenes):
    """What a Detector finds at threshold 0.3, as the JSON of the server."""
    with Detector.open(folder / "shapes.onnx", threads=1, threshold=0.3) as detector:
        return [found.to_list() for found in detector(scenes)]


def check(found: list[dict], wanted: list[dict]) -> None:
    """The same boxes; the batch that an image shared changes the last digits of its numbers."""
    assert [row["label"] for row in found] == [row["label"] for row in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert a["class_id"] == b["class_id"]
        assert a["score"] == pytest.approx(b["score"], abs=1e-4)
        assert a["box_xyxy"] == pytest.approx(b["box_xyxy"], abs=0.05)


def detect(client, **request) -> dict:
    answer = client.post("/v1/detect", **request)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_forms_of_a_request(client, scenes, expected):
    data = png(scenes[0])
    options = {"model": "shapes", "threshold": 0.3}
    answers = [
        detect(client, content=data, headers={"Content-Type": "image/png"}, params=options),
        detect(client, content=data, params=options),
        detect(client, content=gzip.compress(data), headers={"Content-Encoding": "gzip"}, params=options),
        detect(client, files={"images": ("a.png", data)}, data=options),
        detect(client, files={"images": ("a.png", data)}, params=options),
        detect(client, json={"images": [in_base64(data)], **options}),
        detect(client, json={"images": [base64.encodebytes(data).decode().replace("\n", "\r\n")], **options}),
        detect(client, json={"images": [f"data:image/png;base64,{in_base64(data)}"]}, params=options),
        detect(client, json={"images": [{"name": "a.png", "data": in_base64(data)}], **options}),
    ]
    assert expected[0]
    for answer in answers:
        (image,) = answer["images"]
        assert (answer["model"], image["height"], image["width"]) == ("shapes", *scenes[0].shape[:2])
        check(image["detections"], expected[0])
        assert answer["time_ms"]["total"] >= answer["time_ms"]["model"] > 0
    assert [a["images"][0].get("image") for a in answers] == [None, None, None, "a.png", "a.png", None, None, None, "a.png"]


def test_several_images_keep_their_order(client, scenes, expected):
    files = [("images", (f"é{i}.png", png(scenes[i]))) for i in range(8)]
    answer = detect(client, files=files, data={"model": "shapes", "threshold": "0.3"})
    assert [image["image"] for image in answer["images"]] == [f"é{i}.png" for i in range(8)]
    for image, wanted in zip(answer["images"], expected, strict=False):
        check(image["detections"], wanted)


def test_options(client, scenes, expected):
    data = png(scenes[1])
    rows = expected[1]
    label = rows[0]["label"]
    for classes in (label, str(rows[0]["class_id"])):
        found = detect(client, content=data, params={"model": "shapes", "threshold": 0.3, "classes": classes})
        check(found["images"][0]["detections"], [row for row in rows if row["label"] == label])
    body = {"model": "shapes", "threshold": 0.3, "classes": [rows[0]["class_id"]], "images": [in_base64(data)]}
    check(detect(client, json=body)["images"][0]["detections"], [row for row in rows if row["label"] == label])
    one = detect(client, content=data, params={"model": "shapes", "threshold": 0.3, "max_detections": 1})
    check(one["images"][0]["detections"], rows[:1])
    usual = detect(client, content=data, params={"model": "shapes"})
    check(usual["images"][0]["detections"], [row for row in rows if row["score"] > 0.5])


def test_tiles(client, folder, scenes):
    """As those of a detector, also beside images without tiles."""
    large = draw_scene(5, size_hw=(600, 800)).image
    with Detector.open(folder / "shapes.onnx", threads=1, threshold=0.3) as detector:
        tiled, plain = detector(large, tile=300, overlap=0.25), detector(scenes[0])
    options = {"model": "shapes", "threshold": "0.3", "tile": "300", "overlap": "0.25"}
    small = client.post("/v1/detect", files={"images": png(large)}, data={**options, "tile": "20"})
    assert small.status_code == 400 and "tiles of 20x20, overlap 0.25, and at most 128" in small.text
    for _ in range(2):
        check(detect(client, files={"images": png(large)}, data=options)["images"][0]["detections"], tiled.to_list())
        check(
            detect(client, content=png(scenes[0]), params={"model": "shapes", "threshold": 0.3})["images"][0]["detections"],
            plain.to_list(),
        )


def test_many_clients_each_get_their_own(server, scenes, expected):
    """Different images and options share batches, and no answer goes to another request."""
    files = [png(scene) for scene in scenes]

    def ask(number: int) -> int:
        with httpx.Client(base_url=server.address, timeout=60) as client:
            for turn in range(4):
                which = (number + turn) % len(files)
                threshold = (0.3, 0.6, 0.9)[(number + turn) % 3]
                answer = detect(client, content=files[which], params={"model": "shapes", "threshold": threshold})
                check(answer["images"][0]["detections"], [row for row in expected[which] if row["score"] > threshold])
        return 4

    assert together(ask, 24) == [4] * 24
    with httpx.Client(base_url=server.address, timeout=60) as client:
        text = client.get("/metrics").text
    batches = next(line for line in text.splitlines() if line.startswith('detrt_batch_size_bucket{le="1.0",model="shapes"}'))
    count = next(line for line in text.splitlines() if line.startswith('detrt_batch_size_count{model="shapes"}'))
    assert float(batches.split()[-1]) < float(count.split()[-1]), "no two requests ever shared a batch"


def test_prompts(client):
    data = png(colour_image("red", "green", "blue"))
    text = detect(client, content=data, params={"model": "asked", "prompt": "blue. red.", "threshold": 0.6})
    found = text["images"][0]
    assert found["prompt"] == "blue. red."
    assert {row["label"]: row["phrase_span"] for row in found["detections"]} == {"blue": [0, 4], "red": [6, 9]}
    names = detect(client, json={"images": [in_base64(data)], "model": "asked", "prompt": ["green", "red"], "threshold": 0.6})
    assert {row["label"]: row["class_id"] for row in names["images"][0]["detections"]} == {"green": 0, "red": 1}
    # Requests with different prompts share batches.
    prompts = ["red.", "green. blue.", "blue."] * 4
    both = together(
        lambda i: detect(client, content=data, params={"model": "asked", "prompt": prompts[i], "threshold": 0.6}), len(prompts)
    )
    for prompt, answer in zip(prompts, both, strict=True):
        labels = {row["label"] for row in answer["images"][0]["detections"]}
        assert labels == {word.strip() for word in prompt.split(".") if word.strip()}


@pytest.mark.slow
def test_query_images(tmp_path, exported, scenes):
    """As files of a form and in JSON; what a Detector finds by them, in batches with other prompts."""
    model = exported("owlv2", **SHARED["owlv2"]).path
    shutil.copytree(model.parent, tmp_path / "plain", ignore=shutil.ignore_patterns("query.onnx"))
    image, shown = png(scenes[0]), (png(scenes[1]), png(scenes[2][20:90, 10:60]))
    with Detector.open(model, threads=1, threshold=0.2, prompt=ImageQueries(shown, ("one", "two"))) as detector:
        want = detector(image).to_list()
    with Detector.open(model, threads=1, threshold=0.2, prompt="a cat.") as detector:
        worded = detector(image).to_list()
    options = {"model": "shown", "threshold": 0.2}
    served = (f"shown={model}", f"plain={tmp_path / 'plain' / model.name}", "--workers", 1)
    with Server(*served, "--max-images", 2) as running, httpx.Client(base_url=running.address, timeout=60) as client:
        cards = {card["name"]: card["takes_query_images"] for card in client.get("/v1/models").json()["models"]}
        assert cards == {"shown": True, "plain": False}
        files = [("images", ("a.png", image)), ("query_images", ("one.png", shown[0])), ("query_images", ("two.jpg", shown[1]))]
        named = [{"name": name, "data": in_base64(data)} for name, data in zip(("one", "two"), shown, strict=True)]
        body = {"images": [in_base64(image)] * 2, "query_images": named, **options}
        asks = [{"files": files, "data": options}, {"json": body}, {"content": image, "params": {**options, "prompt": "a cat."}}]
        for number, answer in enumerate(together(lambda i: detect(client, **asks[i % 3]), 6)):
            found = [one["detections"] for one in answer["images"]]
            assert len(want) > 1 and len(found) == (1, 2, 1)[number % 3]
            for one in found:
                check(one, worded if number % 3 == 2 else want)
        bad = [
            ({"query_images": ["AAAA"]}, 400, "query image 0: the image (3 bytes) is not an image"),
            ({"query_images": ["http://x/a.png"]}, 400, "query_images[0] is an address"),
            ({"query_images": [in_base64(image)] * 3}, 413, "3 query images; at most 2"),
            ({"query_images": [in_base64(image)], "prompt": "a cat."}, 400, "both say what to find"),
            ({"query_images": [in_base64(image)], "task": "Find."}, 400, "takes no task"),
            ({"query_images": [in_base64(image)], "model": "plain"}, 400, "`image_queries`"),
        ]
        for change, status, words in bad:
            answer = client.post("/v1/detect", json={"images": [in_base64(image)], **options, **change})
            assert answer.status_code == status and words in answer.json()["error"]["message"], answer.text
        check(detect(client, json=body)["images"][0]["detections"], want)


@pytest.mark.slow  # the quick tests serve a small prompted model
def test_embedded_phrases(tmp_path):
    from detrt import ExportConfig, build

    build("embedded:phrases", tmp_path / "phrases", export=ExportConfig(check=False))
    scene = draw_scene(3)
    prompt = "red circle. striped star. blue square."
    with Detector.open(tmp_path / "phrases", threads=1, threshold=0.3, prompt=prompt) as detector:
        (expected,) = detector([scene.image])
    with Server(tmp_path / "phrases") as server, httpx.Client(base_url=server.address, timeout=60) as client:
        answer = detect(client, content=png(scene.image), params={"prompt": prompt, "threshold": 0.3})
    check(answer["images"][0]["detections"], expected.to_list())


IMAGE = {"content": png(np.zeros((8, 8, 3), np.uint8))}
ONE = {"images": [in_base64(IMAGE["content"])]}
JSON_TYPE = {"headers": {"Content-Type": "application/json"}}
UNENDED = {"headers": {"Content-Type": "multipart/form-data; boundary=b"}}
REFUSED = [
    ({"content": b"GIF89a and no more"}, 400, "not an image"),
    ({"content": b""}, 400, "no image"),
    ({**IMAGE, "params": {"model": "none"}}, 404, "served are: shapes, asked"),
    ({**IMAGE, "params": {}}, 400, "say which model"),
    ({**IMAGE, "params": {"threshold": "2"}}, 400, "threshold"),
    ({**IMAGE, "params": {"threshold": "nan"}}, 400, "threshold"),
    ({**IMAGE, "params": {"speed": "9"}}, 400, "unknown field 'speed'"),
    ({**IMAGE, "params": {"classes": "unicorn"}}, 400, "unicorn"),
    ({**IMAGE, "params": {"prompt": "a cat."}}, 400, "takes no prompt"),
    ({**IMAGE, "params": {"model": "asked"}}, 400, "finds what a prompt names"),
    ({**IMAGE, "params": {"model": "asked", "prompt": "..."}}, 400, "has no words"),
    ({**IMAGE, "params": {"model": "asked", "prompt": "red " * 3000}}, 400, "tokens"),
    ({**IMAGE, "params": {"max_detections": "0"}}, 400, "max_detections"),
    ({**IMAGE, "params": {"tile": "0"}}, 400, "tile"),
    ({**IMAGE, "params": {"overlap": "0.2"}}, 400, "'overlap' is of tiles"),
    ({**IMAGE, "params": {"tile": "64", "overlap": "0.95"}}, 400, "overlap"),
    ({"json": {"images": []}}, 400, "images"),
    ({"json": {"images": ["no base64!"]}}, 400, "is not base64"),
    ({"json": {"images": ["https://example.org/a.jpg"]}}, 400, "opens none"),
    ({"json": {"images": ["file:///etc/passwd"]}}, 400, "opens none"),
    ({"json": {"images": ["AAAA"], "url": "http://x"}}, 400, "url"),
    ({"json": {"images": [in_base64(IMAGE["content"])] * 9}}, 413, "at most 8"),
    ({"json": [1]}, 400, "body"),
    ({"content": b"{" * 100_000, **JSON_TYPE}, 400, "JSON"),
    ({"content": b"x", "headers": {"Content-Type": "text/html"}}, 415, "Content-Type must be"),
    ({"content": b"x", "headers": {"Content-Type": "application/x-www-form-urlencoded"}}, 415, "with curl --data-binary add: -H"),
    ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 400, "oundary"),
    ({"content": b"x" * 99, "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400, "multipart"),
    ({"data": {"images": "text"}, "files": {"other": b""}}, 400, "is text"),
    ({"content": b"no gzip", "headers": {"Content-Encoding": "gzip"}}, 400, "not gzip"),
    ({"content": gzip.compress(bytes(99))[:-9], "headers": {"Content-Encoding": "gzip"}}, 400, "cut off"),
    ({"content": gzip.compress(b"a") * 2, "headers": {"Content-Encoding": "gzip"}}, 400, "more follows the end of the gzip body"),
    ({"content": gzip.compress(b"a") + bytes(300_000), "headers": {"Content-Encoding": "gzip"}}, 400, "more follows the end"),
    ({"content": b"x", "headers": {"Content-Encoding": "br"}}, 415, "Content-Encoding"),
    ({"content": gzip.compress(bytes(40 * 2**20)), "headers": {"Content-Encoding": "gzip"}}, 413, "unpacked"),
    ({"content": bytes(33 * 2**20)}, 413, "at most 33554432"),
    ({**IMAGE, "params": {"classes": "\u00b2"}}, 400, "no class '\u00b2'"),  # a digit for str.isdigit, but not for int
    (
        {"content": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"},
        400,
        "not an image in one of the formats JPEG",
    ),
    ({"json": {**ONE, "threshold": True}}, 400, "'threshold' must be a number from 0 to 1; got true"),
    ({"json": {**ONE, "max_detections": True}}, 400, "'max_detections' must be an integer from 1 to 100000; got true"),
    ({"json": {**ONE, "masks": "rle"}}, 400, "the body has an unknown field 'masks'; known are: model, threshold, classes,"),
    ({"json": {**ONE, "prompt": ["a", 1]}}, 400, "'prompt[1]' must be a text of at most 1000 characters; got 1"),
    ({"json": {"images": [{"data": 1}]}}, 400, "'images[0].data' must be a text; got 1"),
    ({"json": {"images": [{"data": "", "url": "x"}]}}, 400, "images[0] has an unknown field 'url'; known are: data, name"),
    ({**IMAGE, "params": {"threshold": "nan"}}, 400, "'threshold' must be a number from 0 to 1; got \"nan\""),
    (
        {"json": {**ONE, "classes": ["a", 1.5]}},
        400,
        "'classes[1]' must be a text of at most 1000 characters or an integer from 0",
    ),
    ({"json": {**ONE, "classes": []}}, 400, "'classes' must be a list of 1 to 5000, each a text of at most"),
    ({"json": {**ONE, "prompt": "a" * 20_001}}, 400, "; got a text of 20001 characters"),
    ({"json": {"images": [{"name": "a"}]}}, 400, "'images[0].data' must be a text; got nothing"),
    ({"json": {"images": [None]}}, 400, "'images[0]' must be a text or an object with data and name; got null"),
    ({"json": {}}, 400, "'images' must be a list of at least 1, each a text or an object"),
    ({**IMAGE, **JSON_TYPE}, 400, "not JSON: 'utf-8' codec can't decode byte"),
    ({"json": [1]}, 400, "the body must be a JSON object; got a list; send {"),
    ({"content": b"null", **JSON_TYPE}, 400, "must be a JSON object; got null; send {"),
    (
        {"content": b'{"images": [], "threshold": 0.5, "threshold": 0.9}', **JSON_TYPE},
        400,
        "it has the key 'threshold' twice; send {",
    ),
    ({"content": rb'{"images": ["AAAA"], "prompt": "\ud800"}', **JSON_TYPE}, 400, "'prompt' must be a text"),
    ({"content": rb'{"images": [{"data": "AAAA", "name": "\ud800"}]}', **JSON_TYPE}, 400, "'images[0].name' must be a text"),
    ({"files": {"images": b"", "prompt": b"a cat."}}, 400, "the field 'prompt' is a file; send its content as text"),
    ({**UNENDED, "content": b'--b\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\nabc'}, 400, "cut off"),
]


@pytest.mark.parametrize(("request_", "status", "words"), REFUSED, ids=range(len(REFUSED)))
def test_refusals(client, request_, status, words):
    params = {} if request_.get("params") == {} else {"model": "shapes", **request_.get("params", {})}
    answer = client.post("/v1/detect", **{**request_, "params": params})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error["message"] and error["code"], error
    assert "Traceback" not in answer.text


def test_openapi_has_the_limits_that_messages_name(client):
    detect = client.get("/openapi.json").json()["paths"]["/v1/detect"]["post"]
    schemas = {row["name"]: row["schema"] for row in detect["parameters"]}
    assert (schemas["threshold"]["minimum"], schemas["threshold"]["maximum"]) == (0, 1)
    assert all({"minimum", "maximum"} <= set(one) for one in schemas.values() if one["type"] in ("integer", "number"))


def test_giant_images(client, server):
    """A PNG of 56 million pixels is 160 kB; it is refused by its header."""
    import zlib

    head = (8000).to_bytes(4, "big") + (7000).to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    rows = zlib.compress(bytes(7000 * 24_001), 9)
    bomb = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")
    before = server.memory_mib()
    answer = client.post("/v1/detect", content=bomb, params={"model": "shapes"})
    assert answer.status_code == 400 and "too large: 8000x7000" in answer.text
    assert server.memory_mib() < before + 100


def test_one_bad_image_names_itself_and_spoils_no_neighbour(client, server, scenes, expected):
    files = [("images", ("good.png", png(scenes[0]))), ("images", ("bad.png", b"nothing"))]
    answer = client.post("/v1/detect", files=files, data={"model": "shapes"})
    assert answer.status_code == 400 and "image 1" in answer.json()["error"]["message"]

    def ask(i: int) -> int:
        data = png(scenes[0]) if i % 2 else b"nothing"
        found = client.post("/v1/detect", content=data, params={"model": "shapes", "threshold": 0.3})
        if i % 2:
            check(found.json()["images"][0]["detections"], expected[0])
        return found.status_code

    assert together(ask, 16) == [400, 200] * 8


def test_models_health_and_metrics(client):
    cards = {card["name"]: card for card in client.get("/v1/models").json()["models"]}
    assert cards["shapes"]["takes_prompt"] is False and "hexagon" in cards["shapes"]["classes"]
    assert cards["shapes"]["input"] == {"height": 320, "width": 320, "resize": "stretch"}
    assert cards["asked"]["takes_prompt"] is True
    assert client.get("/healthz").status_code == 200
    assert client.get("/readyz").json() == {"status": "ready", "workers": min(2, len(os.sched_getaffinity(0)))}
    text = client.get("/metrics").text
    for name in ("detrt_requests_total", "detrt_queue_images", "detrt_workers_ready", "detrt_model_seconds_bucket"):
        assert name in text
    assert "_created" not in text
    missing = client.get("/v1/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "no_route"
    assert client.get("/v1/detect").json()["error"]["message"] == "this address takes POST; got GET"
    head = client.head("/healthz")
    assert (head.status_code, head.content) == (200, b"")
    assert client.get("/v1/detect").status_code == 405
    assert str(client.base_url.port) not in json.dumps(cards)


@pytest.fixture(scope="module")
def triton(server):
    http = pytest.importorskip("tritonclient.http", reason="needs the 'dev' extra")
    with http.InferenceServerClient(f"{server.host}:{server.port}", concurrency=8) as client:
        yield client


def outputs_of(folder, images) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    from detrt import open_session

    session: Session = open_session(folder / "shapes.onnx", threads=1)
    feeds = preprocess(images, session.spec).feeds
    outputs = session.run(feeds)
    session.close()
    return dict(feeds), outputs


def test_tritonclient_asks_about_models(triton):
    assert triton.is_server_live() and triton.is_server_ready()
    assert triton.is_model_ready("shapes") and triton.is_model_ready("shapes", "1")
    assert triton.get_server_metadata()["name"] == "detrt"
    assert triton.get_model_metadata("shapes")["inputs"][0] == {"name": "IMAGE", "datatype": "BYTES", "shape": [-1, 1]}
    tensors = triton.get_model_metadata("shapes:graph")
    assert tensors["inputs"] == [{"name": "pixel_values", "datatype": "UINT8", "shape": [-1, 3, -1, -1]}]
    assert [row["name"] for row in tensors["outputs"]] == ["logits", "pred_boxes"]
    assert triton.get_model_config("shapes:graph")["max_batch_size"] == 8
    assert {row["name"] for row in triton.get_model_repository_index()} == {"shapes", "shapes:graph", "asked", "asked:graph"}


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_tritonclient_infers(triton, folder, binary_in, binary_out):
    from tritonclient.http import InferInput, InferRequestedOutput

    # Numbers as JSON are long, so the image is small where they are used.
    images = [draw_scene(seed, size_hw=(320, 320)).image for seed in range(2 if binary_in else 1)]
    feeds, wanted = outputs_of(folder, images)
    pixels = feeds["pixel_values"]
    given = InferInput("pixel_values", list(pixels.shape), "UINT8")
    given.set_data_from_numpy(pixels, binary_data=binary_in)
    asked = [InferRequestedOutput(name, binary_data=binary_out) for name in ("pred_boxes", "logits")]
    options = {"request_compression_algorithm": "gzip"} if binary_in else {}
    answer = triton.infer("shapes:graph", [given], outputs=asked, request_id="r7", **options)
    assert answer.get_response()["id"] == "r7"
    for name, array in wanted.items():
        np.testing.assert_allclose(answer.as_numpy(name), array, rtol=1e-3, atol=1e-3)


def test_tritonclient_requests_share_batches(triton, folder):
    from tritonclient.http import InferInput

    sets = [outputs_of(folder, [draw_scene(seed, size_hw=(320, 320)).image]) for seed in range(3)]
    waiting = []
    for turn in range(24):
        pixels = sets[turn % 3][0]["pixel_values"]
        given = InferInput("pixel_values", list(pixels.shape), "UINT8")
        given.set_data_from_numpy(pixels)
        waiting.append(triton.async_infer("shapes:graph", [given]))
    for turn, one in enumerate(waiting):
        got = one.get_result()
        for name, array in sets[turn % 3][1].items():
            np.testing.assert_allclose(got.as_numpy(name), array, rtol=1e-3, atol=1e-3)


def test_tritonclient_is_refused_in_words(triton):
    from tritonclient.http import InferInput
    from tritonclient.utils import InferenceServerException

    def infer(name: str, tensor: str, array: np.ndarray, kind: str, **options) -> str:
        given = InferInput(tensor, list(array.shape), kind)
        given.set_data_from_numpy(array)
        with pytest.raises(InferenceServerException) as caught:
            triton.infer(name, [given], **options)
        return str(caught.value)

    pixels = np.zeros((1, 3, 320, 320), np.uint8)
    assert "no model 'none'" in infer("none", "pixel_values", pixels, "UINT8")
    assert "is not one of the model's: pixel_values" in infer("shapes:graph", "pixels", pixels, "UINT8")
    assert "must be UINT8" in infer("shapes:graph", "pixel_values", pixels.astype(np.float32), "FP32")
    assert "at most 8" in infer("shapes:graph", "pixel_values", np.repeat(pixels, 9, axis=0), "UINT8")
    assert "version 1 only" in infer("shapes:graph", "pixel_values", pixels, "UINT8", model_version="3")
    assert "pixels; at most" in infer("shapes:graph", "pixel_values", np.zeros((1, 3, 3200, 3200), np.uint8), "UINT8")
    assert "missing: " in infer("asked:graph", "pixel_values", np.zeros((1, 3, 8, 12), np.uint8), "UINT8")
    assert "both sides must be positive multiples of 32; the nearest are" in infer(
        "shapes:graph", "pixel_values", pixels[:, :, :7, :7], "UINT8"
    )


def test_fuzzed_requests(server):
    """Requests made from the OpenAPI document, right and wrong ones; `benchmarks/load/fuzz.py` sends ten thousand."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs the 'dev' extra")
    from hypothesis import HealthCheck, given, settings

    schema = schemathesis.openapi.from_url(f"{server.address}/openapi.json")
    seen: list[int] = []
    for operation in schema.get_all_operations():
        strategy = operation.ok().as_strategy()

        @given(case=strategy)
        @settings(max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
        def send(case):
            answer = case.call(timeout=30)
            seen.append(answer.status_code)
            assert answer.status_code < 500, (case.as_curl_command(), answer.status_code)

        send()
    assert len(seen) > 50 and len(set(seen)) > 2
    assert httpx.get(f"{server.address}/readyz", timeout=60).status_code == 200

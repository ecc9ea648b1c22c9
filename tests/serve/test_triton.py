"""`detrt triton-repo`, in the real Triton Inference Server on the CPU, through `tritonclient` over HTTP and gRPC."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest

httpx = pytest.importorskip("httpx", reason="needs the 'dev' extra")
pytest.importorskip("fastapi", reason="needs the 'serve' extra")
onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")
over_http = pytest.importorskip("tritonclient.http", reason="needs the 'dev' extra")
over_grpc = pytest.importorskip("tritonclient.grpc", reason="needs the 'dev' extra")

from native import CLASSES, QUERIES, SIDES, package, small_module
from triton_support import ENVIRONMENT, Triton, require_triton

require_triton()

from cli_support import cli, write_onnx  # noqa: F401 - a fixture
from serve_support import Server, png, together, wait_until
from tritonclient.utils import InferenceServerException

from detrt import Detections, Detector
from detrt.cli import main
from detrt.graph.io import read_spec, with_spec
from detrt.models import trust
from detrt.serve.triton import write_triton_repo
from detrt.serve.triton_config import TritonConfig
from detrt.spec import DecodeSpec, InputSpec, ModelSpec
from detrt.tasks.masks import Masks

# A stretched family, a padded one, one that takes a prompt, masks, and reading order with quadrilaterals.
FAMILIES = {"rt_detr_v2": "", "detr": "", "grounding_dino": "red. blue.", "rf_detr-seg": "", "pp_doclayout_v4": ""}
EXTRAS = {"rf_detr-seg": "segmentation", "pp_doclayout_v4": "quad"}  # fields of a detection that has more than a box
CLIENTS = {"http": over_http, "grpc": over_grpc}
SIZES = [(60, 90), (90, 60), (64, 64), (48, 100), (100, 48), (60, 90), (80, 72), (50, 98)]


def bundle_of(path: Path, folder: Path) -> Path:
    assert main(["build", str(path), "-o", str(folder), "--target", "onnx", "--json", f"{folder}.json"]) == 0
    return folder


@pytest.fixture(scope="module")
def shades(tmp_path_factory):
    """A bundle of a few nodes, whose detections tell the colour of an image."""
    place = tmp_path_factory.mktemp("shades")
    return bundle_of(write_onnx(place / "shades.onnx"), place / "shades")


@pytest.fixture(scope="module")
def bundles(shades, exported, tmp_path_factory):
    """name -> bundle of a tiny model."""
    place = tmp_path_factory.mktemp("bundles")
    found = {"shades": shades}
    for name in FAMILIES:
        path = exported(name).path
        if name in ("detr", "grounding_dino"):  # whose rule would make large tensors
            path = Path(shutil.copytree(path.parent, place / f"{name}-graph")) / path.name
            small = read_spec(path).with_input(height=96, width=128, shortest_edge=96, longest_edge=160)
            onnx.save(with_spec(onnx.load(path), small), path)
        found[name] = bundle_of(path, place / name)
    return found


@pytest.fixture(scope="module")
def images():
    rng = np.random.default_rng(5)
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in SIZES]


@pytest.fixture(scope="module")
def server(bundles, tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    for folder in bundles.values():
        write_triton_repo(folder, repository, TritonConfig(threshold=0.0, threads=1, max_delay_ms=20))
    with Triton(repository) as server:
        yield server


def client_of(server: Triton, kind: str):
    return CLIENTS[kind].InferenceServerClient(getattr(server, kind))


def tensor(kind: str, name: str, values, dtype: str):
    array = np.asarray(values, object if dtype == "BYTES" else None)
    given = CLIENTS[kind].InferInput(name, list(array.shape), dtype)
    given.set_data_from_numpy(array)
    return given


def encoded(kind: str, images):
    return tensor(kind, "IMAGE", [[png(image)] for image in images], "BYTES")


def texts(kind: str, name: str, rows):
    return tensor(kind, name, [[one.encode() for one in row] for row in rows], "BYTES")


def detections_of(answer, row: int) -> Detections:
    """What the outputs of a request say of one of its images."""
    count = int(answer.as_numpy("COUNT")[row, 0])
    size = tuple(answer.as_numpy("SIZE")[row].tolist())

    def rows(name: str):
        found = answer.as_numpy(name)
        return None if found is None else found[row, :count]

    masks, spans = rows("MASKS"), rows("PHRASE_SPANS")
    return Detections(
        rows("BOXES"),
        rows("SCORES"),
        rows("CLASS_IDS"),
        tuple(one.decode() for one in rows("LABELS")),
        size,
        phrase_spans=None if spans is None else tuple(map(tuple, spans.tolist())),
        masks=None if masks is None else Masks.from_coco([{"counts": one.decode()} for one in masks], size),
        reading_order=rows("READING_ORDER"),
        quads=rows("QUADS"),
    )


@pytest.mark.parametrize("kind", CLIENTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_detections_are_those_of_detect(server, bundles, images, cli, tmp_path, name, kind):
    prompt = FAMILIES[name]
    for index, image in enumerate(images):
        (tmp_path / f"{index}.png").write_bytes(png(image))
    said = ("--prompt", prompt) if prompt else ()
    lines = cli("detect", bundles[name], tmp_path, "--json", "-", "--threshold", 0.0, *said).lines
    expected = [row["detections"] for row in sorted(lines, key=lambda row: row["image"])]
    more = [texts(kind, "PROMPT", [[prompt]] * len(images))] if prompt else []
    with client_of(server, kind) as client:
        answer = client.infer(name, [encoded(kind, images), *more])
        by_one = [
            client.infer(name, [encoded(kind, [image]), *[texts(kind, "PROMPT", [[prompt]])][: len(more)]]) for image in images
        ]
    got = [detections_of(answer, row).to_list() for row in range(len(images))]
    assert [json.dumps(one) for one in got] == [json.dumps(one) for one in expected]
    assert all(len(one) > 2 for one in expected)
    assert [detections_of(one, 0).to_list() for one in by_one] == expected


def test_pixels_and_options(server, bundles, images):
    image = images[0]
    with Detector(bundles["rt_detr_v2"], threads=1, threshold=0.0) as detector:
        found = detector(image)
        label, middle = found.labels[0], float(np.median(found.scores))
        strong, named = detector(image, threshold=middle), detector(image, classes=[label])
    with client_of(server, "grpc") as client:

        def ask(*more):
            return detections_of(client.infer("rt_detr_v2", [tensor("grpc", "PIXELS", image[None], "UINT8"), *more]), 0)

        assert ask() == found
        assert ask(tensor("grpc", "THRESHOLD", np.array([[middle]], np.float32), "FP32")) == strong and len(strong) < len(found)
        assert ask(texts("grpc", "CLASSES", [[label, ""]])) == named
        assert ask(tensor("grpc", "MAX_DETECTIONS", np.array([[2]]), "INT64")) == found[:2]


def test_a_list_of_names_is_a_prompt(server, bundles, images):
    with Detector(bundles["grounding_dino"], threads=1, threshold=0.0) as detector:
        want = [detector(images[0], prompt=["red", "blue"]), detector(images[1], prompt="green.")]
    with client_of(server, "http") as client:
        answer = client.infer(
            "grounding_dino", [encoded("http", images[:2]), texts("http", "PROMPT", [["red", "blue"], ["green.", ""]])]
        )
    assert [detections_of(answer, row).to_list() for row in range(2)] != []
    np.testing.assert_array_equal(detections_of(answer, 0).scores, want[0].scores)
    assert detections_of(answer, 1).to_list() == want[1].to_list()


@pytest.mark.parametrize("kind", CLIENTS)
def test_wrong_requests(server, images, kind):
    image = encoded(kind, images[:1])
    half = np.array([[0.5]], np.float32)
    with client_of(server, kind) as client:
        for name, inputs, words in (
            ("shades", [tensor(kind, "IMAGE", [[b"no image"]], "BYTES")], "is not an image"),
            ("shades", [tensor(kind, "IMAGE", [[b""]], "BYTES")], "empty|no image"),
            (
                "shades",
                [tensor(kind, "IMAGE", [[png(images[0])], [png(images[0])[:60]]], "BYTES")],
                "image 1: .*truncated|damaged|cut",
            ),
            ("shades", [image, tensor(kind, "THRESHOLD", half * 3, "FP32")], "from 0 to 1; got 1.5"),
            ("shades", [image, tensor(kind, "THRESHOLD", half * np.nan, "FP32")], "from 0 to 1; got nan"),
            ("shades", [tensor(kind, "THRESHOLD", half, "FP32")], "this one has neither"),
            ("shades", [image, tensor(kind, "PIXELS", images[0][None], "UINT8")], "this one has both"),
            ("shades", [tensor(kind, "PIXELS", images[0][None, ..., 0], "UINT8")], "shape|dims|dimensions"),
            ("shades", [image, tensor(kind, "MAX_DETECTIONS", np.array([[0]]), "INT64")], "from 1 to"),
            ("shades", [image, texts(kind, "CLASSES", [["unicorn"]])], "no class 'unicorn'"),
            ("shades", [image, tensor(kind, "CLASSES", [[b"\xff"]], "BYTES")], "UTF-8"),
            ("shades", [image, texts(kind, "PROMPT", [["a cat."]])], "PROMPT"),
            ("grounding_dino", [image], "there is none"),
            ("grounding_dino", [image, texts(kind, "PROMPT", [[" "]])], "prompt"),
            ("shades", [encoded(kind, images[:1] * 9)], "batch"),
            ("nothing", [image], "unknown model|not found"),
        ):
            with pytest.raises(InferenceServerException, match=f"(?is){words}"):
                client.infer(name, inputs)
        assert len(detections_of(client.infer("shades", [image]), 0))


def colour_of(number: int):
    """An image whose answers belong to it alone: its size and the score of what is found in it."""
    return np.full((16 + number % 7, 24 + number % 5, 3), (0, 0, 100 + number % 150), np.uint8)


def crossed(server: Triton, bundle: Path, requests: int, clients: int = 64) -> tuple[int, int]:
    """How many answers of so many requests were lost, and how many belong to another image."""
    with Detector(bundle, threads=1, threshold=0.0) as detector:
        distinct = [colour_of(number) for number in range(150 * 7 * 5)][::7]
        expected = detector(distinct)
    files = [png(image) for image in distinct]
    each = -(-requests // clients)
    bad = [4 * index for index in range(clients // 8)]  # some send what is no image, which must not touch the others

    def client(index: int) -> tuple[int, int]:
        lost = wrong = 0
        with over_grpc.InferenceServerClient(server.grpc) as one:
            for turn in range(each):
                number = (index * each + turn) % len(files)
                if index in bad and turn % 2:
                    with pytest.raises(InferenceServerException, match="not an image"):
                        one.infer("shades", [tensor("grpc", "IMAGE", [[b"no image"]], "BYTES")], client_timeout=120)
                try:
                    answer = one.infer("shades", [tensor("grpc", "IMAGE", [[files[number]]], "BYTES")], client_timeout=120)
                except InferenceServerException:
                    lost += 1
                    continue
                wrong += detections_of(answer, 0) != expected[number]
        return lost, wrong

    results = together(client, clients)
    assert all(isinstance(one, tuple) for one in results), [one for one in results if not isinstance(one, tuple)][:3]
    return sum(one[0] for one in results), sum(one[1] for one in results)


@pytest.mark.parametrize("requests", [128, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nothing_is_lost_or_crossed(server, bundles, requests):
    assert crossed(server, bundles["shades"], requests) == (0, 0)


def test_metrics_count_images_and_runs(server, images):
    def counters() -> dict[str, float]:
        text = urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=30).read().decode()
        rows = [line.rpartition(" ") for line in text.splitlines() if 'model="shades"' in line]
        return {
            name.partition("{")[0] + (".failed" if "failure" in name else ""): float(value)
            for name, _, value in rows
            if "reason" not in name
        }

    before = counters()
    with client_of(server, "http") as client:
        client.infer("shades", [encoded("http", images[:3])])
    # Triton adds to each of them on its own, behind the answer.
    more = {"nv_inference_count": 3, "nv_inference_exec_count": 1, "nv_inference_request_success": 1}
    wait_until(lambda: (after := counters()) and {name: after[name] - before[name] for name in more} == more)


def test_one_client_for_triton_and_for_detrt(server, bundles, images):
    names = ("rt_detr_v2", "grounding_dino", "rf_detr-seg", "pp_doclayout_v4")
    with Server(*(f"{name}={bundles[name]}" for name in names), "--workers", 1, "--threshold", 0.0) as ours:
        clients = [over_http.InferenceServerClient(address) for address in (server.http, f"{ours.host}:{ours.port}")]
        for name in names:
            metadata = [client.get_model_metadata(name) for client in clients]
            for side in ("inputs", "outputs"):
                assert metadata[0][side] == metadata[1][side], name
            more = [texts("http", "PROMPT", [["red. blue."]] * 3)] if FAMILIES[name] else []
            answers = [client.infer(name, [encoded("http", images[:3]), *more]) for client in clients]
            for row in metadata[0]["outputs"]:
                np.testing.assert_array_equal(
                    *(answer.as_numpy(row["name"]) for answer in answers), err_msg=f"{name} {row['name']}"
                )
            told = httpx.post(
                f"{ours.address}/v1/detect",
                params={"model": name} | ({"prompt": "red. blue."} if FAMILIES[name] else {}),
                files=[("images", png(image)) for image in images[:3]],
                timeout=60,
            ).json()
            listed = [row["detections"] for row in told["images"]]
            assert listed == [detections_of(answers[1], row).to_list() for row in range(3)], name
            assert (EXTRAS.get(name, "label") in listed[0][0]) and ("reading_order" in listed[0][0]) == (
                name == "pp_doclayout_v4"
            )
            both = [
                client.infer(
                    name,
                    [tensor("http", "PIXELS", images[2][None], "UINT8"), *[texts("http", "PROMPT", [["red."]])][: len(more)]],
                )
                for client in clients
            ]
            assert detections_of(both[0], 0) == detections_of(both[1], 0)
            for client in clients:
                with pytest.raises(InferenceServerException, match="not an image"):
                    client.infer(
                        name,
                        [tensor("http", "IMAGE", [[b"nothing"]], "BYTES"), *[texts("http", "PROMPT", [["red."]])][: len(more)]],
                    )
                client.close() if name == names[-1] else None


def test_a_model_is_replaced_while_it_serves(shades, tmp_path):
    write_triton_repo(shades, tmp_path / "r", TritonConfig(name="live", threads=1))
    image = tensor("grpc", "IMAGE", [[png(colour_of(0))]], "BYTES")
    with Triton(tmp_path / "r", "--model-control-mode=explicit", "--load-model=live") as server:
        stop, seen, failed = threading.Event(), [], []

        def ask() -> None:
            with client_of(server, "grpc") as client:
                while not stop.is_set():
                    try:
                        seen.append(client.infer("live", [image]).get_response().model_version)
                    except InferenceServerException as error:
                        failed.append(str(error))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: "1" in seen)
            write_triton_repo(shades, tmp_path / "r", TritonConfig(name="live", threads=1, version=2))
            with client_of(server, "grpc") as client:
                client.load_model("live")
            wait_until(lambda: "2" in seen)
            count = len(seen)  # a few of those in flight may still be of the first one
            wait_until(lambda: len(seen) > count + 10)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert failed == [] and seen[-1] == "2" and set(seen) == {"1", "2"}
        # A version that cannot be opened: the old one stays.
        write_triton_repo(shades, tmp_path / "r", TritonConfig(name="live", threads=1, version=3))
        (tmp_path / "r/live/3/bundle/model.onnx").write_bytes(b"changed")
        with client_of(server, "grpc") as client:
            with pytest.raises(InferenceServerException, match="model.onnx.*build it again|model.onnx.*digest"):
                client.load_model("live")
            assert client.infer("live", [image]).get_response().model_version == "2"


def test_triton_says_that_an_instance_was_killed(shades, tmp_path):
    """Triton 2.51 does not start it again; who unloads and loads the model does."""
    write_triton_repo(shades, tmp_path / "r", TritonConfig(name="killed", threads=1))
    image = tensor("grpc", "IMAGE", [[png(colour_of(0))]], "BYTES")
    with (
        Triton(tmp_path / "r", "--model-control-mode=explicit", "--load-model=killed") as server,
        client_of(server, "grpc") as client,
    ):
        want = detections_of(client.infer("killed", [image]), 0)
        (stub,) = server.stubs("killed")
        stub.send_signal(signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(InferenceServerException, match="'killed_0_0' is not healthy"):
                client.infer("killed", [image], client_timeout=30)
        client.unload_model("killed")
        client.load_model("killed")
        assert detections_of(client.infer("killed", [image]), 0) == want


def test_what_cannot_be_loaded_says_why(shades, tmp_path):
    for name, changes, old, new in (
        ("unknown", {}, '"image_decoder"', '"decoder"'),
        ("precise", {"precision": "fp16"}, "", ""),
        ("threads", {}, 'string_value: "0.5"', 'string_value: "much"'),
        ("backend", {"backend": "tensorrt", "devices": ("cpu",)}, "", ""),
        ("output", {}, '"LABELS"', '"NAMES"'),
        ("input", {}, '"CLASSES"', '"PROMPT"'),
        ("type", {}, '"BOXES" data_type: TYPE_FP32', '"BOXES" data_type: TYPE_FP64'),
        ("axis", {}, '"THRESHOLD" data_type: TYPE_FP32 dims: [1]', '"THRESHOLD" data_type: TYPE_FP32 dims: [-1]'),
        ("side", {}, "dims: [-1, 4]", "dims: [-1, 5]"),
        ("rows", {}, "dims: [-1, 4]", "dims: [3, 4]"),
        ("batch", {"max_batch": 8}, "max_batch_size: 8", "max_batch_size: 0"),
    ):
        write_triton_repo(shades, tmp_path / "r", TritonConfig(name=name, **changes))
        path = tmp_path / "r" / name / "config.pbtxt"
        path.write_text(path.read_text().replace(old, new))
    with Triton(tmp_path / "r", "--exit-on-error=false") as server:
        log = server.log
    for words in (
        "'decoder', which is not known",
        "in fp32, and config.pbtxt asks for fp16",
        "'threshold' must be a number; got 'much'",
        "tensorrt",
        "the output 'NAMES', and this bundle has: BOXES",
        "the input 'PROMPT', and this bundle has: IMAGE",
        "the output 'BOXES' as TYPE_FP64 [-1, 4]; this bundle has it as TYPE_FP32 [-1, 4]",
        "the input 'THRESHOLD' as TYPE_FP32 [-1]; this bundle has it as TYPE_FP32 [1]",
        "the output 'BOXES' as TYPE_FP32 [-1, 5]; this bundle",
        "the same number of detections, the first axis, in all outputs; got {'BOXES': 3, 'SCORES': -1",
        "max_batch_size of at least 1",
    ):
        assert words in log, words
    assert "Traceback" not in log


def test_an_edited_configuration(bundles, shades, images, tmp_path):
    """Outputs may be left out, axes be fixed, and limits of requests be others."""
    write_triton_repo(shades, tmp_path / "r", TritonConfig(name="edited", threshold=0.0))
    path = tmp_path / "r/edited/config.pbtxt"
    text = path.read_text().replace("dims: [-1, -1, 3]", "dims: [-1, 90, 3]")
    kept = [line for line in text.splitlines(keepends=True) if '"LABELS"' not in line]
    path.write_text("".join(kept).replace("parameters [", 'parameters [ { key: "max_pixels" value { string_value: "6000" } },'))
    write_triton_repo(bundles["grounding_dino"], tmp_path / "r", TritonConfig(name="prompted", threshold=0.0))
    path = tmp_path / "r/prompted/config.pbtxt"
    text = path.read_text()
    path.write_text(text.replace("parameters [", 'parameters [ { key: "max_prompt_runs" value { string_value: "20" } },'))
    with Triton(tmp_path / "r") as server, client_of(server, "grpc") as client:
        answer = client.infer("edited", [tensor("grpc", "PIXELS", images[0][None], "UINT8")])
        assert answer.as_numpy("LABELS") is None and answer.as_numpy("COUNT")[0, 0] > 0
        for image, words in ((images[1], "shape"), (images[3], None), (np.zeros((80, 90, 3), np.uint8), "1 to 6000 pixels")):
            given = tensor("grpc", "PIXELS", image[None], "UINT8") if words else encoded("grpc", [image])
            if words is None:
                assert client.infer("edited", [given]).as_numpy("COUNT")[0, 0] > 0
                continue
            with pytest.raises(InferenceServerException, match=words):
                client.infer("edited", [given])
        names = [f"name{number}" for number in range(500)]
        answer = client.infer("prompted", [encoded("grpc", images[:1]), texts("grpc", "PROMPT", [names])])
        assert answer.as_numpy("COUNT")[0, 0] > 0


def test_numpy_2_is_refused_in_words(shades, tmp_path):
    """The backend of this version repeats the first element of every array of NumPy 2, and returns empty ones."""
    import sys

    if np.__version__.startswith("1."):
        pytest.skip("needs NumPy 2")
    write_triton_repo(shades, tmp_path / "r", TritonConfig(name="shades"))
    with Triton(tmp_path / "r", environment=Path(sys.prefix), starts=False) as server:
        server.process.wait(60)
        assert "was built for NumPy 1" in server.log and "pip install 'numpy<2'" in server.log


def test_the_environment_is_a_parameter(shades, tmp_path):
    """Triton activates it before it starts the model, whatever its own is."""
    write_triton_repo(shades, tmp_path / "r", TritonConfig(name="shades", environment=str(ENVIRONMENT), rows=5, threshold=0.0))
    with Triton(tmp_path / "r", environment=tmp_path) as server, client_of(server, "http") as client:
        answer = client.infer("shades", [encoded("http", [colour_of(0)])])
        assert answer.as_numpy("BOXES").shape == (1, 5, 4) and answer.as_numpy("LABELS").shape == (1, 5)
        assert 0 < answer.as_numpy("COUNT")[0, 0] <= 5


@pytest.mark.slow
def test_native_code_runs_by_consent_of_the_server(tmp_path, monkeypatch):
    """A package that was built elsewhere: the repository cannot consent, the environment of Triton can."""
    pytest.importorskip("torch", reason="needs the 'export' extra")
    labels, rule = {0: "red", 1: "green", 2: "blue"}, DecodeSpec("sigmoid", "topk", QUERIES, CLASSES, 10)
    spec = ModelSpec("test", InputSpec("stretch", *SIDES), rule, labels)
    (tmp_path / "bundle").mkdir()
    package(small_module(), spec, tmp_path / "bundle")
    monkeypatch.setenv(trust.STORE, "off")
    monkeypatch.setenv(trust.VARIABLE, "1")
    write_triton_repo(tmp_path / "bundle", tmp_path / "r", TritonConfig(name="native", backend="inductor", threshold=0.0))
    image = colour_of(0)
    with Detector(tmp_path / "bundle", threads=1, threshold=0.0) as detector:
        want = detector(image)
    with Triton(tmp_path / "r") as server, client_of(server, "http") as client:
        assert detections_of(client.infer("native", [encoded("http", [image])]), 0) == want and len(want) > 2
    for answer in ("0", None):
        monkeypatch.setenv(trust.VARIABLE, answer) if answer else monkeypatch.delenv(trust.VARIABLE)
        with Triton(tmp_path / "r", "--exit-on-error=false") as server, client_of(server, "http") as client:
            assert "holds native code" in server.log and trust.VARIABLE in server.log and "Traceback" not in server.log
            assert not client.is_model_ready("native")

"""One name, one content: a model whose files change under a running server is served as it was, or replaced in all workers at once."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest

httpx = pytest.importorskip("httpx", reason="needs the 'dev' extra")
pytest.importorskip("fastapi", reason="needs the 'serve' extra")

from cli_support import write_onnx
from onnx_models import make_spec
from serve_support import Server, png, wait_until

from detrt.bundle import Bundle
from detrt.pipeline import build as build_bundle
from detrt.spec import ModelSpec

RED = png(np.full((8, 12, 3), (255, 0, 0), np.uint8))


def build(folder, word: str):
    """A bundle, in the place of the one that is there, which calls red `word`."""
    spec: ModelSpec = replace(make_spec(), labels={0: word, 1: "green", 2: "blue"})
    model = write_onnx(folder.parent / f"{folder.name}.onnx", spec)
    build_bundle(model, folder)
    return folder


def ask(client, model="shapes") -> str:
    """What the server calls red."""
    answer = client.post("/v1/detect", params={"model": model}, content=RED, headers={"Content-Type": "image/png"})
    assert answer.status_code == 200, answer.text
    return answer.json()["images"][0]["detections"][0]["label"]


class Load:
    """Clients that ask all the time. answers: label of each answer, in their order, of each client."""

    def __init__(self, server: Server, clients: int = 4) -> None:
        self.server = server
        self.answers: list[list[str]] = [[] for _ in range(clients)]
        self.errors: list[Exception] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(one,)) for one in self.answers]

    def _run(self, answers: list[str]) -> None:
        try:
            with httpx.Client(base_url=self.server.address, timeout=60) as client:
                while not self._stop.is_set():
                    answers.append(ask(client))
        except Exception as error:
            self.errors.append(error)

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self.errors == []

    def wait_for(self, label: str, count: int = 1) -> None:
        """Until each client has so many answers, of which the last one is `label`."""
        wait_until(lambda: self.errors or all(len(one) >= count and one[-1] == label for one in self.answers), 60)


@pytest.fixture(autouse=True)
def hangups_arrive():
    """Under nohup the tests ignore SIGHUP, and a server that they start would, too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def bundle(tmp_path):
    return build(tmp_path / "shapes", "old")


@pytest.fixture
def client_of():
    clients = []

    def connect(server: Server):
        clients.append(httpx.Client(base_url=server.address, timeout=120))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def contents(client) -> dict[str, str]:
    return {model["name"]: model["content"] for model in client.get("/v1/models").json()["models"]}


def metric(client, name: str) -> float:
    return next(float(line.split()[-1]) for line in client.get("/metrics").text.splitlines() if line.startswith(name))


def test_a_worker_that_is_replaced_does_not_bring_another_model(bundle, client_of):
    """Two workers, of which one dies after the bundle was built again: 16 answers of the old and 14 of the new model were given."""
    with Server(bundle, "--workers", 2) as server, Load(server) as load:
        client = client_of(server)
        before = contents(client)
        assert before == {"shapes": Bundle.open(bundle).digest}
        load.wait_for("old", 6)
        build(bundle, "new")
        server.workers()[0].kill()
        wait_until(lambda: "is not what the server opened first" in server.log, 60)
        assert contents(client) == before and client.get("/readyz").json() == {"status": "ready", "workers": 1}
        assert client.post("/v2/repository/models/shapes/load", json={}).status_code == 200
        assert ask(client) == "new" and contents(client) == {"shapes": Bundle.open(bundle).digest} != before
        assert client.get("/readyz").json()["workers"] == 2
        load.wait_for("new")
    for answers in load.answers:
        first = answers.index("new")  # each client sees one change, from the old to the new
        assert first > 5 and answers == ["old"] * first + ["new"] * (len(answers) - first)
    assert len(server.log.split("opened other content")) == 1


def hold_second_worker(server):
    """The second of two workers of a server that starts, stopped; the first one is ready."""
    wait_until(lambda: len(server.workers()) == 2)
    held = server.workers()[1]
    held.send_signal(signal.SIGSTOP)
    wait_until(lambda: "1 of 2" in server.log, 60)
    return held


@pytest.mark.parametrize("killed", [False, True], ids=["", "killed"])
def test_a_bundle_that_is_replaced_while_workers_start_is_served_as_it_is_then(bundle, client_of, killed):
    """The first worker is ready with the old content when the second one, held here, begins to open. The server ended."""

    def replace_meanwhile(server):
        held = hold_second_worker(server)
        build(bundle, "new")
        held.send_signal(signal.SIGKILL if killed else signal.SIGCONT)

    with Server(bundle, "--workers", 2, while_starting=replace_meanwhile) as server:
        client = client_of(server)
        assert {ask(client) for _ in range(20)} == {"new"}
        assert contents(client) == {"shapes": Bundle.open(bundle).digest}
        assert client.get("/readyz").json()["workers"] == 2 and len(server.workers()) == 2
        assert server.log.count("were replaced while workers opened them") == 1


def test_a_bundle_that_cannot_be_opened_ends_the_start_with_its_reason(bundle):
    """Also where the one before it was replaced by it while workers started."""

    def damage(server):
        held = hold_second_worker(server)
        build(bundle, "new")
        (bundle / "model.onnx").write_bytes(b"")
        held.send_signal(signal.SIGCONT)
        assert server.process.wait(60) == 2
        assert "model.onnx" in server.log and "Traceback" not in server.log

    with pytest.raises(AssertionError, match="the server did not start"):
        Server(bundle, "--workers", 2, while_starting=damage)


def test_builds_meet_a_start_and_loads(bundle, client_of):
    """What is served is one of what was built, by all workers alike, whenever it was built."""
    built = [Bundle.open(bundle).digest]

    def build_one(pause: float) -> None:
        time.sleep(pause)
        build(bundle, f"{len(built)}")
        built.append(Bundle.open(bundle).digest)

    with Server(bundle, "--workers", 3, while_starting=lambda server: [build_one(0.6) for _ in range(3)]) as server:
        client = client_of(server)
        assert contents(client)["shapes"] in built  # those after all had started are not asked for
        assert len({ask(client) for _ in range(12)}) == 1
        for pause in (0.2, 0.6, 1.0, 1.4):
            builder = threading.Thread(target=build_one, args=(pause,))
            builder.start()
            loaded = client.post("/v2/repository/models/shapes/load")
            builder.join()
            assert loaded.status_code == 200, loaded.text
            assert contents(client)["shapes"] in built[-2:]
            assert len({ask(client) for _ in range(12)}) == 1
            assert client.get("/readyz").json()["workers"] == 3


@pytest.mark.slow
def test_what_waits_for_a_worker_that_is_being_restarted_ends_with_a_load(bundle, client_of):
    """It waited for its deadline, and the old generation stayed for ever."""
    with Server(bundle, "--workers", 1) as server:
        client, answers = client_of(server), []
        (bundle / "model.onnx").write_bytes(b"")
        server.workers()[0].kill()
        wait_until(lambda: server.log.count("cannot start") == 6, 120)  # the next start is six seconds away
        wait_until(lambda: not server.workers())
        thread = threading.Thread(
            target=lambda: answers.append(
                client_of(server).post("/v1/detect", content=RED, headers={"Content-Type": "image/png"})
            )
        )
        thread.start()
        wait_until(lambda: metric(client, "detrt_queue_images") == 1)
        build(bundle, "new")
        assert client.post("/v2/repository/models/shapes/load").status_code == 200
        thread.join(5)
        assert [answer.json()["error"]["code"] for answer in answers] == ["replaced"]
        assert ask(client) == "new" and len(server.workers()) == 1


def test_requests_in_flight_finish_on_what_they_were_sent_to(bundle, client_of):
    with Server(bundle, "--workers", 1, "--max-batch", 2) as server:
        client, labels = client_of(server), []
        with server.frozen():  # the old worker
            threads = [threading.Thread(target=lambda: labels.append(ask(client_of(server)))) for _ in range(6)]
            for thread in threads:
                thread.start()
            wait_until(lambda: metric(client, "detrt_running_images") + metric(client, "detrt_queue_images") == 6)
            build(bundle, "new")
            assert client.post("/v2/repository/models/shapes/load").status_code == 200
            assert [ask(client) for _ in range(3)] == ["new"] * 3 and labels == []
            assert len(server.workers()) == 2
        for thread in threads:
            thread.join()
        assert labels == ["old"] * 6
        wait_until(lambda: len(server.workers()) == 1)
        assert ask(client) == "new"


def test_a_bad_bundle_leaves_the_old_one_serving(bundle, client_of):
    with Server(bundle, "--workers", 2) as server, Load(server) as load:
        client = client_of(server)
        graph = bundle / "model.onnx"
        whole = graph.read_bytes()
        graph.write_bytes(whole[:-10])  # as a copy that was cut off
        for _ in range(2):
            refused = client.post("/v2/repository/models/shapes/load")
            assert refused.status_code == 400 and "model.onnx" in refused.json()["error"]
            assert "what was served before still is" in refused.json()["error"]
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "SIGHUP: the models cannot be loaded" in server.log, 60)
        assert ask(client) == "old"
        wait_until(lambda: len(server.workers()) == 2)
        assert metric(client, 'detrt_model_loads_total{outcome="failed"}') == 3
        graph.write_bytes(whole)
        build(bundle, "new")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: ask(client) == "new", 60)
        wait_until(lambda: len(server.workers()) == 2)
        load.wait_for("new")
    assert {label for answers in load.answers for label in answers} == {"old", "new"}


def test_a_hangup_of_the_whole_group_ends_no_worker(bundle, client_of):
    """`timeout`, `systemctl kill` and terminals send SIGHUP to the workers and readers, too."""
    with Server(bundle, "--workers", 2) as server, Load(server):
        client = client_of(server)
        build(bundle, "new")
        for process in [*psutil.Process(server.process.pid).children(recursive=True), server.process]:
            process.send_signal(signal.SIGHUP)
        wait_until(lambda: ask(client) == "new", 60)
    assert "is gone" not in server.log and "cannot be loaded" not in server.log


def test_only_the_named_model_is_loaded(bundle, client_of):
    other = build(bundle.parent / "cars", "old")
    with Server(bundle, other, "--workers", 1) as server:
        client = client_of(server)
        build(bundle, "new"), build(other, "new")
        refused = client.post("/v2/repository/models/shapes/load")
        assert refused.status_code == 400 and "'cars'" in refused.json()["error"] and "SIGHUP" in refused.json()["error"]
        assert {ask(client, "shapes"), ask(client, "cars")} == {"old"}
        build(other, "old")
        assert client.post("/v2/repository/models/shapes/load").status_code == 200
        assert (ask(client, "shapes"), ask(client, "cars")) == ("new", "old")


def test_what_no_worker_holds_any_more_is_opened_as_it_is(bundle, client_of):
    """As a new start of the server would do; no answer is mixed, since none of the old content is left."""
    with Server(bundle, "--workers", 1) as server:
        client = client_of(server)
        build(bundle, "new")
        server.workers()[0].kill()
        wait_until(lambda: "no worker is left that holds what was served" in server.log, 60)
        assert ask(client) == "new"


def test_who_may_load_and_what(bundle, client_of):
    with Server(bundle, "--workers", 1, "--host", "0.0.0.0") as server:
        client = httpx.Client(base_url=server.address.replace("0.0.0.0", "127.0.0.1"), timeout=60)
        refused = client.post("/v2/repository/models/shapes/load")
        assert refused.status_code == 403 and "--api-key-file" in refused.json()["error"]
    with Server(bundle, "--workers", 1) as server:
        client = client_of(server)
        assert client.post("/v2/repository/models/other/load").status_code == 404
        for body in (b"[1]", b"{", b'{"parameters": {"config": "{}"}}', b"[" * 60_000):
            assert client.post("/v2/repository/models/shapes/load", content=body).status_code == 400
        triton = pytest.importorskip("tritonclient.http", reason="needs the 'dev' extra")
        triton.InferenceServerClient(f"{server.host}:{server.port}").load_model("shapes")
        assert ask(client) == "old"


@pytest.mark.parametrize("kind", ["onnx", "data"])
def test_files_without_a_bundle_are_pinned_too(tmp_path, kind):
    from detrt.serve.content import stored_content

    model = write_onnx(tmp_path / "model.onnx")
    (tmp_path / "model.onnx.data").write_bytes(b"1")
    (tmp_path / "tokenizer.json").write_bytes(b"1")
    (tmp_path / "notes.txt").write_bytes(b"1")
    before = stored_content(str(model))
    (tmp_path / "notes.txt").write_bytes(b"2")
    assert stored_content(str(model)) == before
    changed = {"onnx": "model.onnx", "data": "model.onnx.data"}[kind]
    (tmp_path / changed).write_bytes((tmp_path / changed).read_bytes() + b"\0")
    assert stored_content(str(model)) != before

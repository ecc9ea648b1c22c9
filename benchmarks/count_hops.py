"""Count the functions of detrt that a thing passes: one JPEG, a checkpoint, a request, a prompt.

    python benchmarks/count_hops.py image checkpoint request prompt [--json FILE]

Each journey runs the real command in a process of its own (the request: the processes of a server) under `sys.setprofile`,
with the package that PYTHONPATH names. Distinct functions are counted, in the order in which the thing first reaches them.

The rule. A *hop* is a function, method, generator or lambda of detrt that takes the thing as an argument (`self` and
variables of an enclosing function included), gets it as the result of another function of detrt, or returns it.
The thing is, at first, a value that equals the one given to the command: the path or the bytes of the image, the reference
of the checkpoint, the text of the prompt. It becomes, on its way,

* what a hop returns or yields, if that is data of the journey's kind (below), or a container or an object of detrt that
  holds the thing;
* an object of detrt whose constructor takes the thing, unless it can be closed or stopped (sessions, detectors, pools and
  processes keep the thing for others);
* image and request: image data that a hop passes on to another function of detrt, since it was made there from the thing by
  a library (`np.asarray(image)`).

Data of a journey's kind: *image*, *request*: bytes, arrays, tensors, Pillow images, `Detections`; *checkpoint*: the root
module, the ONNX model, a path of a graph or an engine; *prompt*: arrays, until the first `Detections` are made.
Not the thing: objects that were there before it came (the session, the spec, tables), numbers, names and flags taken from
it, so functions that see nothing but such values are no hops. Such a name is the reference of the checkpoint in records and
messages, once the module is loaded, and the name of a graph or an engine without its folder. Code that dataclasses generate,
comprehensions, and special methods such as `__len__` and `__post_init__` are not counted. Opening is left out: a JPEG counts from
the moment that the Detector is there, a request from the first bytes of its body. A checkpoint and a prompt are read in order to
open, so they count from the command line.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

JOURNEYS = ("image", "checkpoint", "request", "prompt")
BAR = {"image": 25, "checkpoint": 35, "request": 35, "prompt": 20}
_VARIABLE = "DETRT_COUNT_HOPS"  # journey, value, log, for the processes that run the journey
_SKIPPED = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<module>")
_SPECIAL = ("__init__", "__call__", "__iter__", "__next__", "__enter__", "__exit__")  # other special methods are no hops
_CONTAINERS = (list, tuple, dict, set, frozenset)
_DEEP = 3  # containers and objects inside each other that are looked into
_MANY = 64  # elements of a container that are looked at


class Recorder:
    """The profile function of one process."""

    def __init__(self, journey: str, value: str, log: str) -> None:
        self.journey, self.log = journey, log
        self.value = Path(value).read_bytes() if journey == "request" else value
        self.recording = journey != "image"
        self.before: set[int] = set()
        self.loaded = False  # whether the module of the checkpoint is there
        self.alive: list[Any] = []  # keeps what is followed, so that no id is used again
        self.followed: set[int] = set()
        self.holders: dict[int, FrameType] = {}
        self.hops: set[str] = set()
        self.of_detrt: dict[CodeType, bool] = {}
        self.lock = threading.RLock()
        if self.recording:
            self.look_around()

    def look_around(self) -> None:
        self.alive.extend(gc.get_objects())
        self.before = {id(o) for o in self.alive}

    # What is the thing

    def equals(self, x: object) -> bool:
        if isinstance(x, (bytes, bytearray, memoryview)):
            return isinstance(self.value, bytes) and len(x) == len(self.value) and bytes(x) == self.value
        if not isinstance(x, (str, Path)):
            return False
        text = str(x)
        if self.journey != "checkpoint":
            return text == self.value
        file = text.endswith((".onnx", ".engine")) and " " not in text and os.sep in text
        return file or (text == self.value and not self.loaded)

    @staticmethod
    def keeps(x: object) -> bool:
        """Whether an object keeps the thing for others: a session, a detector, a pool, a process."""
        if hasattr(x, "gi_frame") or type(x).__module__.startswith("PIL."):
            return False
        return any(hasattr(type(x), name) for name in ("close", "stop"))

    def data(self, x: object) -> bool:
        """Whether it is data of the journey's kind."""
        kind = type(x)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if self.journey == "checkpoint":
            return name in ("onnx.onnx_ml_pb2.ModelProto", "onnx.onnx_pb.ModelProto")
        if self.journey == "prompt":
            return name == "numpy.ndarray" and not self.pixels(x)
        return (
            (isinstance(x, (bytes, bytearray, memoryview)) and len(x) > 64)
            or name == "numpy.ndarray"
            or any((c.__module__, c.__qualname__) == ("PIL.Image", "Image") for c in kind.__mro__)
            or name in ("torch.Tensor", "detrt.detections.Detections")
        )

    @staticmethod
    def pixels(x: Any) -> bool:
        return type(x).__name__ == "ndarray" and (x.ndim == 4 or (x.ndim == 3 and x.dtype.name == "uint8"))

    def module(self, x: object) -> bool:
        """A whole model: the root of its modules."""
        nn = sys.modules.get("torch.nn")
        return self.journey == "checkpoint" and nn is not None and isinstance(x, nn.Module)

    def holds(self, x: object, made: bool, deep: int = _DEEP) -> bool:
        """Whether x is or holds the thing. made: data of the journey's kind counts, because a hop made it."""
        if x is None or isinstance(x, (bool, int, float, complex)):
            return False
        if isinstance(x, (str, Path)) and self.journey == "checkpoint":
            return self.equals(x)
        if id(x) in self.followed or self.equals(x):
            return True
        if made and self.data(x):
            return True
        if deep == 0 or id(x) in self.before or self.keeps(x):
            return False
        if isinstance(x, dict):
            return any(self.holds(v, made, deep - 1) for v in list(x.values())[:_MANY])
        if isinstance(x, _CONTAINERS):
            return any(self.holds(v, made, deep - 1) for v in list(x)[:_MANY])
        if type(x).__module__.startswith("detrt") and not isinstance(x, type) and not self.module(x):
            names = [n for c in type(x).__mro__ for n in getattr(c, "__slots__", ()) if isinstance(n, str)]
            fields = [getattr(x, n, None) for n in names] + list(getattr(x, "__dict__", {}).values())
            return any(self.holds(v, made, deep - 1) for v in fields)
        return False

    def follow(self, x: object) -> None:
        if self.keeps(x):
            return
        if id(x) not in self.before and id(x) not in self.followed and not isinstance(x, (bool, int, float, type(None))):
            self.followed.add(id(x))
            self.alive.append(x)

    # Events

    def ours(self, code: CodeType) -> bool:
        found = self.of_detrt.get(code)
        if found is None:
            path = code.co_filename.replace(os.sep, "/")
            found = "/detrt/" in path and "/site-packages/" not in path.replace("/site-packages/detrt/", "/")
            self.of_detrt[code] = found
        return found

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        generated = code.co_filename == "<string>" and str(frame.f_globals.get("__name__", "")).startswith("detrt")
        if code.co_name in _SKIPPED or not (generated or self.ours(code)):
            return
        with self.lock:
            if (
                self.journey == "prompt"
                and generated
                and code.co_name == "__init__"
                and frame.f_globals["__name__"] == "detrt.detections"
            ):
                self.journey, self.recording = "ended", True  # the first Detections are made: from here on it is the image
            if self.journey == "ended":
                return
            if not self.recording:
                # The first opening of a Detector ends when its constructor returns.
                if event == "return" and code.co_name == "__init__" and code.co_filename.endswith("detector.py"):
                    self.recording = True
                    self.look_around()
                return
            (self.called if event == "call" else self.returned)(frame, arg, generated)

    def arguments(self, frame: FrameType) -> list[tuple[str, Any]]:
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        values = frame.f_locals
        return [(n, values[n]) for n in (*code.co_varnames[:count], *code.co_freevars) if n in values]

    def caller(self, frame: FrameType) -> FrameType | None:
        found = frame.f_back
        while found is not None and (found.f_code.co_name in _SKIPPED or not self.ours(found.f_code)):
            found = found.f_back
        return found

    def called(self, frame: FrameType, _: object, generated: bool) -> None:
        caller = self.caller(frame)
        made = self.journey in ("image", "request") and caller is not None and id(caller) in self.holders
        hop = False
        for name, x in self.arguments(frame):
            # Long-lived objects hold the thing for a while; a method that sees nothing else is no hop.
            known = id(x) in self.followed if name == "self" or name == "cls" else self.holds(x, made)
            if known:
                hop = True
                if not isinstance(x, str) or self.equals(x):
                    self.follow(x)
        if hop:
            self.hold(frame, generated)

    def hold(self, frame: FrameType, generated: bool) -> None:
        self.holders[id(frame)] = frame
        code = frame.f_code
        if code.co_name == "__init__" and "self" in frame.f_locals:
            self.follow(frame.f_locals["self"])
        if generated or (code.co_name.startswith("__") and code.co_name not in _SPECIAL):
            return
        module = code.co_filename.replace(os.sep, "/").rpartition("/detrt/")[2].removesuffix(".py").replace("/", ".")
        name = f"{module}:{code.co_qualname}" if hasattr(code, "co_qualname") else f"{module}:{code.co_name}"
        if name not in self.hops:
            self.hops.add(name)
            with open(self.log, "a", encoding="utf-8") as file:
                file.write(json.dumps({"time": time.time(), "process": os.getpid(), "name": name}) + "\n")

    def returned(self, frame: FrameType, result: object, generated: bool) -> None:
        holder = self.holders.pop(id(frame), None) is not None
        if self.journey == "prompt" and holder and any(self.meets_image(x) for _, x in self.arguments(frame)):
            return
        made = holder and self.journey != "checkpoint"
        gone_on = self.holds(result, made) or (
            holder and (self.data(result) or self.module(result) or hasattr(result, "gi_frame"))
        )
        if not gone_on or (isinstance(result, str) and self.journey != "prompt" and not self.equals(result)):
            return
        if id(result) in self.before:
            return
        self.loaded |= self.module(result)
        self.follow(result)
        if not holder:
            self.hold(frame, generated)
            self.holders.pop(id(frame), None)
        caller = self.caller(frame)
        if caller is not None and id(caller) not in self.holders and frame.f_back is caller:
            self.hold(caller, False)

    def meets_image(self, x: object, deep: int = 2) -> bool:
        if self.pixels(x) or type(x).__name__ == "Detections" or (isinstance(x, dict) and "logits" in x):
            return True
        if deep and isinstance(x, (list, tuple, dict)):
            return any(self.meets_image(v, deep - 1) for v in list(x.values() if isinstance(x, dict) else x)[:_MANY])
        return False


def install() -> None:
    """Called in every process of a journey, before anything of detrt is loaded."""
    asked = os.environ.get(_VARIABLE)
    if asked:
        recorder = Recorder(*json.loads(asked))
        threading.setprofile(recorder)
        sys.setprofile(recorder)


def environment(folder: Path, journey: str, value: str) -> tuple[dict[str, str], Path]:
    log = folder / f"{journey}.jsonl"
    hook = folder / "hook"
    hook.mkdir(exist_ok=True)
    here = str(Path(__file__).resolve().parent)
    (hook / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({here!r})\nimport count_hops\ncount_hops.install()\n", "utf-8"
    )
    path = os.pathsep.join([str(hook), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, _VARIABLE: json.dumps([journey, value, str(log)])}, log


def command(*words: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run([sys.executable, "-m", "detrt", *words], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"detrt {' '.join(words)} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")


def serve(bundle: str, image: Path, env: dict[str, str]) -> float:
    """Send one request; the time of its answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "detrt", "serve", bundle, "--port", str(port), "--workers", "1"]
    server = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(address + "/readyz")
                break
            except OSError:
                time.sleep(0.2)
        request = urllib.request.Request(address + "/v1/detect?threshold=0.4", image.read_bytes())
        request.add_header("Content-Type", "image/jpeg")
        print(f"request: answered {urllib.request.urlopen(request).status}", file=sys.stderr)
    finally:
        answered = time.time()
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    return answered


def run(journey: str, folder: Path, target: str) -> list[str]:
    """The hops of one journey, in order."""
    image = folder / "scenes" / "images" / "000001.jpg"
    if not image.is_file():
        command("demo-data", str(folder / "scenes"), "--count", "1")
    bundle = folder / ("phrases" if journey == "prompt" else "shapes")
    if journey != "checkpoint" and not bundle.is_dir():
        boxes = ("--no-masks",) if bundle.name == "shapes" else ()
        command("build", f"embedded:{bundle.name}", *boxes, "-o", str(bundle), "--target", "onnx")
    out = str(folder / f"out-{journey}")
    if journey == "image":
        env, log = environment(folder, journey, str(image))
        command("detect", str(bundle), str(image), "--save-dir", out, env=env)
    elif journey == "checkpoint":
        env, log = environment(folder, journey, "embedded:shapes")
        command("build", "embedded:shapes", "-o", out, "--target", target, env=env)
    elif journey == "prompt":
        prompt = "red circle. striped star."
        env, log = environment(folder, journey, prompt)
        command("detect", str(bundle), str(image), "--prompt", prompt, "--save-dir", out, env=env)
    end = time.time()
    if journey == "request":
        env, log = environment(folder, journey, str(image))
        end = serve(str(bundle), image, env)
    rows = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    rows = sorted((row for row in rows if row["time"] <= end), key=lambda row: row["time"])
    return list(dict.fromkeys(row["name"] for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("journeys", nargs="*", default=JOURNEYS, metavar="JOURNEY", help=f"of {', '.join(JOURNEYS)}; default all")
    parser.add_argument("--target", default="tensorrt-rtx", help="of the build")
    parser.add_argument("--json", type=Path, help="write the names of the functions there")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for journey in options.journeys:
            found[journey] = hops = run(journey, Path(name), options.target)
            modules = {hop.partition(":")[0] for hop in hops}
            print(f"{journey}: {len(hops)} functions in {len(modules)} modules (at most {BAR[journey]})")
            print("  " + " -> ".join(hops))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

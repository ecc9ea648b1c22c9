"""Throughput of a bundle in Triton Inference Server, in `detrt serve`, and in a plain `Detector`, with the same images.

    python benchmarks/measure_triton.py BUNDLE --device cpu --workers 2 --clients 1,4,16
    python benchmarks/measure_triton.py BUNDLE --device cuda:0 --backend inductor --image-decoder gpu --batches 1,4,8

needs `make triton` (or --triton FOLDER, an environment with nvidia-pytriton and NumPy 1), tritonclient[grpc,http], and detrt with what
the bundle needs. Triton is asked over gRPC and HTTP, `detrt serve` over HTTP by the same client, with the same tensors. A client is a thread
of a process of its own, which sends its next request when it has the answer. Prints one JSON line for each measurement.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import threading
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
from PIL import Image
from program import at_least, make_parser, run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))


def files_of(folder: str, count: int) -> list[bytes]:
    """Image files: those of a folder, or JPEG files of noise in blocks, 640 x 480."""
    if folder:
        found = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
        return [path.read_bytes() for path in found[:count]]
    rng, made = np.random.default_rng(0), []
    for _ in range(count):
        buffer = io.BytesIO()
        blocks = rng.integers(0, 256, (30, 40, 3), np.uint8)
        Image.fromarray(blocks).resize((640, 480), Image.Resampling.BILINEAR).save(buffer, "JPEG", quality=90)
        made.append(buffer.getvalue())
    return made


def drive(kind: str, address: str, model: str, files: list[bytes], clients: int, batch: int, seconds: float, prompt: str) -> dict:
    """Images per second and latencies of clients that ask for `seconds`."""
    import tritonclient.grpc as over_grpc
    import tritonclient.http as over_http

    lib = over_grpc if kind == "grpc" else over_http
    took: list[float] = []
    failed: list[str] = []
    lock, go = threading.Lock(), threading.Event()
    stop_at = [0.0]

    def request(number: int) -> list:
        rows = [[files[(number + i) % len(files)]] for i in range(batch)]
        image = lib.InferInput("IMAGE", [batch, 1], "BYTES")
        image.set_data_from_numpy(np.array(rows, object))
        if not prompt:
            return [image]
        text = lib.InferInput("PROMPT", [batch, 1], "BYTES")
        text.set_data_from_numpy(np.array([[prompt.encode()]] * batch, object))
        return [image, text]

    def work(index: int) -> None:
        inputs = [request(index + turn) for turn in range(8)]
        with lib.InferenceServerClient(address) as client:
            client.infer(model, inputs[0])  # connects
            go.wait()
            mine, turn = [], 0
            while time.perf_counter() < stop_at[0]:
                start = time.perf_counter()
                try:
                    client.infer(model, inputs[turn % 8])
                except Exception as error:
                    with lock:
                        failed.append(str(error))
                mine.append(time.perf_counter() - start)
                turn += 1
        with lock:
            took.extend(mine)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(clients)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    begun = time.perf_counter()
    stop_at[0] = begun + seconds
    go.set()
    for thread in threads:
        thread.join()
    whole, took = time.perf_counter() - begun, sorted(took)
    return {
        "images_s": round(len(took) * batch / whole, 2),
        "p50_ms": round(took[len(took) // 2] * 1e3, 2),
        "p95_ms": round(took[int(len(took) * 0.95)] * 1e3, 2),
        "requests": len(took),
        "failed": failed[:3],
    }


def driven(asked: dict, files: list[bytes]) -> dict:
    """`drive` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(files):
            Path(folder, f"{number:03}").write_bytes(data)
        command = [sys.executable, __file__, "--drive", json.dumps(asked | {"files": folder})]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


@contextlib.contextmanager
def triton(options: Namespace) -> Iterator[tuple[dict[str, str], int]]:
    """(addresses by protocol, process) of Triton with the bundle."""
    import triton_support

    from detrt.serve.triton import write_triton_repo
    from detrt.serve.triton_config import TritonConfig
    from detrt.system import parse_devices

    if options.triton:
        triton_support.ENVIRONMENT = Path(options.triton).resolve()
        version = "python{}.{}".format(*sys.version_info[:2])
        triton_support.PACKAGES = triton_support.ENVIRONMENT / "lib" / version / "site-packages"
        triton_support.SERVER = triton_support.PACKAGES / "pytriton/tritonserver"
        triton_support.STUB = triton_support.SERVER / f"python_backend_stubs/{version[6:]}/triton_python_backend_stub"
    config = TritonConfig(
        name="model",
        devices=parse_devices(options.device),
        backend=options.backend,
        instances=options.workers,
        max_batch=options.max_batch,
        max_delay_ms=options.max_delay_ms,
        image_decoder=options.image_decoder,
    )
    with tempfile.TemporaryDirectory() as folder:
        write_triton_repo(options.bundle, folder, config)
        environment = triton_support.ENVIRONMENT
        with triton_support.Triton(Path(folder), environment=environment, one_thread=False) as server:
            line = next((line for line in server.log.splitlines() if line.startswith("detrt: model on")), "")
            print(json.dumps({"triton": line, "gpus": "GPU" in server.log and "NVML" not in server.log}), flush=True)
            yield {"grpc": server.grpc, "http": server.http}, server.process.pid


@contextlib.contextmanager
def serve(options: Namespace) -> Iterator[tuple[dict[str, str], int]]:
    """(addresses by protocol, process) of `detrt serve` with the bundle."""
    from serve_support import Server

    arguments = ["--device", options.device, "--backend", options.backend, "--workers", options.workers]
    arguments += [
        "--max-batch",
        options.max_batch,
        "--max-delay-ms",
        options.max_delay_ms,
        "--image-decoder",
        options.image_decoder,
    ]
    with Server(f"model={options.bundle}", *arguments, "--queue", 4096, one_thread=False) as server:
        yield {"http": f"{server.host}:{server.port}"}, server.process.pid


def cpu_seconds(process: int) -> float:
    """Processor time of a process and its children."""
    total = 0.0
    for one in [parent := psutil.Process(process), *parent.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def plain(options: Namespace, files: list[bytes], batch: int) -> dict:
    """The same files through a `Detector`, decoded by it, in batches."""
    from detrt import Detector

    prompt = {"prompt": options.prompt} if options.prompt else {}
    decoder = {"image_decoder": options.image_decoder}
    with Detector(
        options.bundle, device=options.device, backend=options.backend, batch_size=batch, **decoder, **prompt
    ) as detector:
        list(detector.stream(files[: 2 * batch]))
        count, begun = 0, time.perf_counter()
        endless = (files[i % len(files)] for i in range(10**9))
        for _ in detector.stream(endless):
            count += 1
            if time.perf_counter() - begun > options.seconds:
                break
        return {"images_s": round(count / (time.perf_counter() - begun), 2)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundle", nargs="?", metavar="BUNDLE")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--image-decoder", default="cpu")
    parser.add_argument("--workers", type=at_least(1), default=2, help="worker processes, and instances of Triton")
    parser.add_argument("--clients", default="16")
    parser.add_argument("--batches", default="1", help="images in a request, and in a run of the plain session")
    parser.add_argument("--max-batch", type=at_least(1), default=8)
    parser.add_argument("--max-delay-ms", type=at_least(0.0), default=2.0)
    parser.add_argument("--seconds", type=at_least(0.1), default=10)
    parser.add_argument("--repeats", type=at_least(1), default=1)
    parser.add_argument("--images", default="", help="folder of image files")
    parser.add_argument("--prompt", default="")
    parser.add_argument("--triton", default="", help="environment; default: that of `make triton`")
    parser.add_argument("--drive", help=SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        asked = json.loads(options.drive)
        asked["files"] = [path.read_bytes() for path in sorted(Path(asked["files"]).iterdir())]
        print(json.dumps(drive(**asked)))
        return
    if options.bundle is None:
        parser.error("give a BUNDLE")
    files = files_of(options.images, 64)
    for batch in map(int, options.batches.split(",")):
        print(json.dumps({"what": "plain session", "batch": batch, **plain(options, files, batch)}), flush=True)
    for _ in range(options.repeats):
        for what, opened in (("triton", triton), ("detrt serve", serve)):
            with opened(options) as (addresses, process):
                for kind, address in addresses.items():
                    for clients in map(int, options.clients.split(",")):
                        for batch in map(int, options.batches.split(",")):
                            asked = {"kind": kind, "address": address, "model": "model", "clients": clients, "batch": batch}
                            before = cpu_seconds(process)
                            measured = driven({**asked, "seconds": options.seconds, "prompt": options.prompt}, files)
                            images = (measured["requests"] + clients) * batch  # each has connected with one
                            spent = round((cpu_seconds(process) - before) / images * 1e3, 2)
                            row = {"what": what, "protocol": kind, "clients": clients, "batch": batch, **measured}
                            row["cpu_ms_an_image"] = spent
                            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    run(main)

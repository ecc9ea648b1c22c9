"""Images through an engine on its device: PyTorch on the CPU in place of the GPU, with the fakes of TensorRT and CUDA."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fake_cuda import FakeCuda, host_view
from fake_tensorrt import fake_engine_bytes, fake_trt

from detrt import bundle
from detrt.backends.batches import BATCHES_ON_GPU
from detrt.backends.gpu import runner
from detrt.backends.gpu.runner import GpuRunner
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.tensorrt import TensorRTSession, gpu
from detrt.backends.tensorrt.cuda import IoBuffer
from detrt.bundle import EngineFacts
from detrt.detector import Detector
from detrt.errors import SessionError
from detrt.spec import TensorInfo

VERSIONS = {"8.5": ("tensorrt", "8.5.3"), "10": ("tensorrt", "10.13.3.9"), "rtx": ("tensorrt-rtx", "1.7.1.116")}
SIZE = (64, 96)
RNG = np.random.default_rng(5)


class DeviceOfTorch(FakeCuda):
    """PyTorch's memory is the device's as well, and work is done when it is enqueued, as PyTorch does it on a CPU."""

    def memory(self, kind, address, nbytes):
        try:
            return super().memory(kind, address, nbytes)
        except SessionError:
            self.calls["foreign"] += 1
            return host_view(address, nbytes)

    def enqueue(self, operation, stream):
        operation()


class Recorded:
    """A CUDA graph that repeats the step that it was captured from."""

    captured = 0

    def __init__(self, step):
        self.replay = step
        type(self).captured += 1


def opened(path, folder, version, onnx, **options):
    """An engine session of the ONNX file that `onnx` runs."""
    target, number = VERSIONS[version]
    profile = {}
    for info in onnx.inputs:
        limits = [(1, 4) if axis == "batch" else (32, 128) if isinstance(axis, str) else (axis, axis) for axis in info.shape]
        least, most = ([limit[end] for limit in limits] for end in (0, 1))
        profile[info.name] = {"min": least, "opt": least, "max": most}
    native = lambda info: TensorInfo(info.name, "int32" if info.dtype == "int64" and version == "8.5" else info.dtype, info.shape)  # noqa: E731
    engine = folder / f"{version}.engine"
    engine.write_bytes(fake_engine_bytes([native(i) for i in onnx.inputs], [native(o) for o in onnx.outputs], profile))
    described = [
        [{"name": i.name, "dtype": i.dtype, "shape": list(i.shape)} for i in side] for side in (onnx.inputs, onnx.outputs)
    ]
    facts = EngineFacts(target, number, (89,), "fp32", profile, "", inputs=described[0], outputs=described[1])
    bundle.write_sidecar(engine, onnx.spec, facts)
    cuda = DeviceOfTorch(89)

    def function(feeds):
        return onnx.run({info.name: feeds[info.name].astype(info.dtype) for info in onnx.inputs})

    session = TensorRTSession(engine, trt=fake_trt(target, cuda, function, number), cuda=cuda, **options)
    return session, cuda


def with_runner(session, stream=None):
    """Give the session the runner that it has on a GPU, here with the CPU as the device."""
    session._runner_sought = True
    session._runner = GpuRunner(
        session.spec,
        session.inputs,
        session.outputs,
        torch.device("cpu"),
        lambda tensors, finish: gpu.prepare(session, tensors, finish, stream),
    )
    return session


def images(*sizes):
    return [RNG.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["detr", "rt_detr_v2"])
def test_detections_are_those_of_the_graph(exported, tmp_path, name, version):
    path = exported(name).path
    given = images((50, 70), (90, 60), (50, 70), (41, 43), (50, 70))
    with OnnxSession(path) as onnx:
        options = {"threshold": 0.0, "batch_size": 2, "size": SIZE if onnx.spec.input.dynamic else None}
        session, cuda = opened(path, tmp_path, version, onnx)
        with Detector(onnx, **options) as here, Detector(with_runner(session), **options) as there:
            assert there.ahead == BATCHES_ON_GPU
            for want, got in zip(here(given), there(given), strict=True):
                assert len(want) == len(got) > 0 and np.array_equal(want.class_ids, got.class_ids)
                assert np.abs(want.scores - got.scores).max() < 1e-6 and np.abs(want.boxes_xyxy - got.boxes_xyxy).max() < 1e-3
            assert cuda.calls["foreign"], "tensors went through the session's own buffers"
            assert not any(buffer.nbytes for buffer in session._buffers.values())
    assert cuda.alive == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_arrays_and_images_share_a_session(exported, tmp_path, version, monkeypatch):
    """Runs of `run` between those of images set the contexts again, and no graph of before is replayed."""
    path = exported("detr").path
    (image,) = images((40, 60))
    Recorded.captured = 0
    monkeypatch.setattr(gpu, "capture_graph", lambda step, stream: (Recorded(step), []))
    with OnnxSession(path) as onnx:
        session, cuda = opened(path, tmp_path, version, onnx)
        with_runner(session, stream=object())
        from detrt.data.preprocess import preprocess

        with Detector(onnx, threshold=0.0, size=SIZE) as here, Detector(session, threshold=0.0, size=SIZE) as there:
            want, feeds = here(image), preprocess([image], onnx.spec, size_hw=SIZE).feeds
            exact = onnx.run(feeds)
            for _ in range(6):
                assert np.allclose(there(image).boxes_xyxy, want.boxes_xyxy, atol=1e-3)
            # TensorRT-RTX records graphs itself.
            assert Recorded.captured == (version != "rtx")
            for _ in range(2):
                for name, array in session.run(feeds).items():
                    assert np.array_equal(array, exact[name])
                assert len(session.forward_times(2)) == 2
                assert np.allclose(there(image).boxes_xyxy, want.boxes_xyxy, atol=1e-3)
            for _ in range(4):
                there(image)
            assert len(session.forward_times(2)) == 2, "of the arrays, also after images"
            # Before TensorRT 10 there is one context for both, which `run` has set to its own memory.
            assert Recorded.captured == {"8.5": 2, "10": 1, "rtx": 0}[version]
    assert cuda.alive == 0


def test_an_engine_that_cannot_be_recorded_runs_without_a_graph(exported, tmp_path, monkeypatch):
    path = exported("detr").path
    (image,) = images((40, 60))

    def refuse(step, stream):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(gpu, "capture_graph", refuse)
    with OnnxSession(path) as onnx:
        session, _ = opened(path, tmp_path, "10", onnx)
        with (
            Detector(onnx, threshold=0.0, size=SIZE) as here,
            Detector(with_runner(session, object()), threshold=0.0, size=SIZE) as there,
        ):
            for _ in range(4):
                assert np.allclose(there(image).boxes_xyxy, here(image).boxes_xyxy, atol=1e-3)
            assert "cannot be recorded" in session.graph_note and "not permitted" in session.graph_note


def test_without_cuda_in_pytorch_images_are_resized_on_the_cpu(exported, tmp_path, monkeypatch):
    path = exported("detr").path
    given = images((40, 60), (60, 40))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with OnnxSession(path) as onnx:
        session, _ = opened(path, tmp_path, "10", onnx)
        with Detector(onnx, threshold=0.0, size=SIZE) as here, Detector(session, threshold=0.0, size=SIZE) as there:
            assert there.ahead == 0 and "resized on the CPU" in session.info.note
            for want, got in zip(here(given), there(given), strict=True):
                assert np.array_equal(want.boxes_xyxy, got.boxes_xyxy)


def test_shapes_outside_the_profile_are_refused(exported, tmp_path):
    path = exported("detr").path
    with OnnxSession(path) as onnx:
        session, _ = opened(path, tmp_path, "10", onnx)
        with Detector(with_runner(session), size=(192, 160)) as there, pytest.raises(SessionError, match="192"):
            there(images((40, 60)))
        with pytest.raises(SessionError, match="closed"):
            session.output_shapes(((1, 3, 64, 64),))


def test_large_arrays_go_up_in_parts():
    cuda = FakeCuda(89)
    stream, buffer = cuda.create_stream(), IoBuffer(cuda)
    uploads = []
    monitored = cuda.copy_to_device

    def copy_to_device(device, host, nbytes, on):
        uploads.append(nbytes)
        monitored(device, host, nbytes, on)

    cuda.copy_to_device = copy_to_device
    whole = RNG.random((2, 3, 480, 500), np.float32)
    with ThreadPoolExecutor(3) as pool:
        for array, parts in (
            (whole, 6),
            (whole[:, :, ::-1], 1),
            (whole[:, :, :40, :40].copy(), 1),
            (np.tile(whole, (4, 1, 1, 1)), 16),
        ):
            uploads.clear()
            buffer.ensure(array.nbytes)
            buffer.upload(array, "float32", stream, pool)
            buffer.start_download(array.nbytes, stream)
            cuda.synchronize(stream)
            assert np.array_equal(buffer.downloaded(array.shape, "float32"), array)
            assert len(uploads) == parts and sum(uploads) == array.nbytes
        mask = RNG.integers(0, 2, (8, 300, 500))
        buffer.upload(mask, "int32", stream, pool)
        buffer.start_download(mask.nbytes // 2, stream)
        cuda.synchronize(stream)
        assert np.array_equal(buffer.downloaded(mask.shape, "int32"), mask)


def test_a_server_opens_an_engine_on_the_first_gpu(exported, tmp_path, monkeypatch):
    """`serve --backend tensorrt` without --device: from the choices of the command line to the session of a worker."""
    from detrt.serve import ServeConfig, named_models, worker
    from detrt.serve.metrics import Metrics
    from detrt.serve.scheduler import Pool

    path, devices = exported("detr").path, []
    with OnnxSession(path) as onnx:
        session, _ = opened(path, tmp_path, "10", onnx)

        def open_with(ref, options):
            devices.append((options.device, options.backend))
            return session

        monkeypatch.setattr(worker, "open_with", open_with)
        config = ServeConfig(named_models([str(path)]), backend="tensorrt", size=SIZE, max_batch=2)
        (setup,) = Pool(config, Metrics())._setups
        served = worker.Model(config.models[0], setup)
        served.warm_up()
        assert devices == [("cuda:0", "tensorrt")] and served.facts.backend == "tensorrt" and served.facts.max_batch == 2
        served.session.close()


def test_no_run_of_another_thread_is_captured_with_a_batch(exported, tmp_path, monkeypatch):
    """`run` captures CUDA graphs on the stream of the images, so all that a batch enqueues there holds the session's lock."""
    path = exported("detr").path
    stream = SimpleNamespace(device=torch.device("cpu"))
    monkeypatch.setattr(runner, "stream_for", lambda index: stream)
    monkeypatch.setattr(gpu, "capture_graph", lambda step, stream: (Recorded(step), []))
    download, held = runner._HostBuffers.download, []
    with OnnxSession(path) as onnx:
        session, _ = opened(path, tmp_path, "10", onnx)
        stream.cuda_stream = session._stream

        def start_download(*arguments):
            held.append(session._lock._is_owned())
            return download(*arguments)

        monkeypatch.setattr(runner._HostBuffers, "download", start_download)
        with Detector(session, threshold=0.0, batch_size=1, size=SIZE) as there:
            there(images((50, 70), (40, 60)))
    assert held == [True, True]

"""engine/cuda.py on a real GPU: copies, recording and replay. Run with: pytest -m gpu tests/gpu"""

from __future__ import annotations

import numpy as np
import pytest

from detrt.backends.tensorrt.cuda import Cuda, IoBuffer
from detrt.errors import EngineError, SessionError

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda():
    pytest.importorskip("cuda.bindings", reason="needs detrt[gpu]")
    found = Cuda()
    if found.device_count() == 0:
        pytest.skip("needs an NVIDIA GPU")
    found.use_device(0)
    return found


def test_device(cuda):
    cuda.check_device(0)
    assert 50 <= cuda.compute_capability(0) < 1000
    assert cuda.device_name(0)
    with pytest.raises(EngineError, match="no CUDA device 99"):
        cuda.check_device(99)


def test_round_trip_and_growth(cuda):
    stream, buffer = cuda.create_stream(), IoBuffer(cuda)
    for shape in ((2, 3), (64, 3, 100), (1, 1)):
        array = np.random.default_rng(0).normal(size=shape).astype(np.float32)[:, ::-1]
        buffer.ensure(array.nbytes)
        buffer.upload(array, "float32", stream)
        buffer.start_download(array.nbytes, stream)
        cuda.synchronize(stream)
        np.testing.assert_array_equal(buffer.downloaded(array.shape, "float32"), array)
    buffer.free()
    cuda.destroy_stream(stream)


def test_a_recorded_graph_repeats_its_work(cuda):
    stream = cuda.create_stream()
    device, source, target = cuda.alloc(64), cuda.alloc_host(64), cuda.alloc_host(64)
    assert device % 256 == 0
    cuda.begin_capture(stream)
    cuda.copy_to_device(device, source, 64, stream)
    cuda.copy_to_host(target, device, 64, stream)
    graph = cuda.end_capture(stream)
    for value in (1, 2, 3):
        cuda.host_view(source, 64)[:] = value
        cuda.launch(graph, stream)
        cuda.synchronize(stream)
        assert (cuda.host_view(target, 64) == value).all()
    cuda.destroy_graph(graph)
    cuda.free(device)
    cuda.free_host(source)
    cuda.free_host(target)
    cuda.destroy_stream(stream)


def test_errors_have_a_message(cuda):
    with pytest.raises(SessionError, match="out of memory"):
        cuda.alloc(1 << 50)
    with pytest.raises(SessionError, match="cudaError"):
        cuda.free(12345)

"""Files and videos decoded by an NVIDIA GPU against Pillow and FFmpeg: `pytest -m gpu tests/gpu/test_decode_cuda.py`."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from detrt.backends.onnxruntime.session import OnnxSession
from detrt.data.images import Input, load_image
from detrt.data.raw_image import YuvImage
from detrt.data.scenes.scene import draw_scene
from detrt.data.video import Frame, raw_frames, read_frames, video_writer
from detrt.detector import Detector
from detrt.jobs.run import ImageResult, detect_inputs

torch = pytest.importorskip("torch")
from on_device import OnDevice

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def decoder() -> Any:
    from detrt.backends.gpu.decoder import GpuDecoder

    return GpuDecoder(torch.device("cuda", 0))


class OnGpu(OnDevice):
    """A model on the CPU whose images are made on the GPU."""

    device = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Any:
    from detrt.export import ExportConfig, export_onnx
    from detrt.models.load import load_source

    path = tmp_path_factory.mktemp("model") / "model.onnx"
    export_onnx(load_source("embedded:shapes"), path, ExportConfig(check=False))
    return path


@pytest.fixture(scope="module")
def clip(tmp_path_factory: Any) -> Any:
    pytest.importorskip("av")
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    with video_writer(path, fps=10, size=(240, 320)) as write:
        for seed in range(30):
            write(draw_scene(seed // 3, size_hw=(240, 320)).image)
    return path


def on_gpu(clip: Any, decoder: Any) -> list[Any]:
    frames = [f if isinstance(f, Frame) else f() for f in raw_frames(clip, planar=True, gpu=decoder)]
    if not (isinstance(frames[0].image, YuvImage) and frames[0].image.on_gpu):
        pytest.skip("this machine has no video decoder: libnvcuvid.so.1, or the codec of the clip")
    return frames


def test_frames_are_ffmpegs(clip: Any, decoder: Any) -> None:
    frames = on_gpu(clip, decoder)
    want = list(read_frames(clip))
    assert [(f.index, f.time_s) for f in frames] == [(f.index, f.time_s) for f in want]
    for got, frame in zip(frames, want, strict=True):
        assert np.array_equal(got.image.rgb(), frame.image)


def test_detections_in_a_video_are_the_same(clip: Any, model: Any, decoder: Any) -> None:
    on_gpu(clip, decoder)
    found = []
    for session, options in ((OnGpu(model), {"image_decoder": "gpu"}), (OnGpu(model), {}), (OnnxSession(model), {})):
        with Detector(session, threshold=0.3, **options) as detector:
            found.append(list(detect_inputs(detector, [Input(clip, "video")])))
            assert options == {} or detector.decoder.counts["videos on the GPU"] == 1
            if isinstance(session, OnGpu):  # what was done to a frame was recorded
                assert session.image_runner._layout_graphs._entries and not session.image_runner._layout_graphs.failure
    assert len(found[0]) == 30 and sum(len(one.record.detections) for one in found[0]) > 30
    for gpu, planar, plain in zip(*found, strict=True):
        assert np.array_equal(gpu.record.detections.boxes_xyxy, planar.record.detections.boxes_xyxy)
        assert np.allclose(gpu.record.detections.boxes_xyxy, plain.record.detections.boxes_xyxy, atol=1e-2)
        assert np.array_equal(gpu.image, plain.image)


def jpeg(image: np.ndarray, mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).convert(mode).save(buffer, "JPEG", **{"quality": 90, **options})
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "mode", "options", "most", "mean"),
    [
        ("4:4:4", "RGB", {"subsampling": 0}, 8, 0.6),
        ("4:2:2", "RGB", {"subsampling": 1}, 40, 0.9),
        ("4:2:0", "RGB", {"subsampling": 2}, 40, 0.9),
        ("grey", "L", {}, 3, 0.2),
        ("turned", "RGB", {"subsampling": 0, "exif": 6}, 8, 0.6),
    ],
)
def test_pixels_of_jpeg_files_are_near_pillows(name: str, mode: str, options: Any, most: int, mean: float, decoder: Any) -> None:
    pytest.importorskip("nvidia.nvimgcodec")
    if "exif" in options:
        tags = Image.Exif()
        tags[0x0112] = options["exif"]
        options = {**options, "exif": tags}
    files = [jpeg(draw_scene(seed, size_hw=(333 + seed, 479)).image, mode, **options) for seed in range(6)]
    before = decoder.counts["files on the GPU"]
    images = decoder.decode([decoder.open(data) for data in files])
    assert decoder.counts["files on the GPU"] == before + 6
    for image, data in zip(images, files, strict=True):
        want = load_image(data)
        assert image.shape == want.shape
        levels = np.abs(image.rgb().astype(int) - want)
        assert levels.max() <= most and levels.mean() <= mean, (levels.max(), levels.mean())


def test_detections_in_files(model: Any, tmp_path: Any) -> None:
    pytest.importorskip("nvidia.nvimgcodec")
    for seed in range(20):
        (tmp_path / f"{seed:02}.jpg").write_bytes(jpeg(draw_scene(seed).image, quality=95))
    Image.fromarray(draw_scene(20).image).save(tmp_path / "20.png")
    (tmp_path / "21.jpg").write_bytes(jpeg(draw_scene(21).image, "CMYK"))
    (tmp_path / "22.jpg").write_bytes(jpeg(draw_scene(22).image)[:-500])
    inputs = [Input(path) for path in sorted(tmp_path.iterdir())]
    with Detector(OnGpu(model), threshold=0.4, image_decoder="gpu") as there, Detector(OnnxSession(model), threshold=0.4) as here:
        got, want = list(detect_inputs(there, inputs)), list(detect_inputs(here, inputs))
        assert there.decoder.counts["files on the GPU"] == 20 and there.decoder.counts["files on the CPU"] == 2
    assert str(got[-1].error) == str(want[-1].error)
    for one, other in zip(got[:-1], want[:-1], strict=True):
        assert isinstance(one, ImageResult) and isinstance(other, ImageResult)
        mine, theirs = one.record.detections, other.record.detections
        assert mine.labels == theirs.labels and np.abs(mine.boxes_xyxy - theirs.boxes_xyxy).max(initial=0) < 3


@pytest.mark.parametrize("other_stream", [False, True])
def test_tensors_on_the_gpu(model: Any, other_stream: bool) -> None:
    """Equal to the same image as an array, also where the caller fills the tensor on a stream of its own."""
    image = draw_scene(3).image
    with Detector(OnGpu(model), threshold=0.0) as detector:
        want = detector(image)
        stream = torch.cuda.Stream() if other_stream else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            tensor = torch.zeros((3, *image.shape[:2]), device="cuda")
            torch.cuda._sleep(100_000_000)
            tensor.copy_(torch.from_numpy(image).permute(2, 0, 1).float() / 255)
            found = detector(tensor)
        assert np.array_equal(found.scores, want.scores) and np.array_equal(load_image(found.image), image)

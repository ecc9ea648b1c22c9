"""Frames of videos that become RGB on the device, against FFmpeg's own conversion."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

av = pytest.importorskip("av", reason="PyAV comes with detrt[video]")
torch = pytest.importorskip("torch")

from detrt.backends.gpu.resize import resize_batch
from detrt.backends.gpu.staging import layout
from detrt.backends.gpu.yuv import convert_to_rgb, fill_rgb
from detrt.data.images import load_image
from detrt.data.preprocess import resize
from detrt.data.raw_image import Colours, YuvImage, yuv_to_rgb
from detrt.data.video import _download, _planar, _suits, _upright, raw_frames, read_frames, video_writer
from detrt.spec import InputSpec

RNG = np.random.default_rng(3)


def frame(height: int, width: int, matrix: int = 2, levels: int = 0, form: str = "yuv420p"):
    """A frame of noise, with every level of Y, U and V in it."""
    made = av.VideoFrame(width, height, form)
    for plane in made.planes:
        plane.update(RNG.integers(0, 256, plane.buffer_size, np.uint8).tobytes())
    made.colorspace, made.color_range = matrix, levels
    return made


@pytest.mark.parametrize("matrix", [1, 2, 4, 5, 6, 7, 9])
@pytest.mark.parametrize("levels", [1, 2], ids=["limited", "full"])
def test_the_arithmetic_is_ffmpegs(matrix, levels):
    for size in ((64, 130), (16, 641)):
        one = frame(*size, matrix, levels)
        image = _planar(one, None)
        assert np.array_equal(yuv_to_rgb(*image.planes, image.colours), _upright(one, 1))
    old_name = frame(32, 32, matrix, levels, "yuvj420p")
    image = _planar(old_name, None)
    assert np.array_equal(yuv_to_rgb(*image.planes, image.colours), _upright(old_name, 1))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_frame_stands_upright_on_the_device(orientation):
    one = frame(34, 50)
    y, u, v = _planar(one, None).planes
    rgb = torch.zeros(34 * 50 * 3, dtype=torch.uint8)
    tensors = [torch.from_numpy(plane.copy()) for plane in (y, u, v)]
    fill_rgb(rgb, *tensors, Colours.of(2, False), orientation)
    want = _upright(one, orientation)
    assert np.array_equal(rgb.numpy().reshape(want.shape), want)


def test_arrays_and_frames_share_a_batch():
    frames = [_planar(frame(48, 70), None), _planar(frame(30, 44), None)]
    images = [RNG.integers(0, 256, (41, 33, 3), np.uint8), *frames, frames[0]]
    given = InputSpec("stretch", 40, 56)
    plan = layout(images, [(40, 56)] * 4, given.resample)
    assert [len(source.planes) for source in plan.sources] == [0, 3, 3] and plan.header_size < plan.upload_size < plan.block_size
    block = np.empty(plan.block_size, np.uint8)
    plan.write(block, images)
    device = torch.from_numpy(block)
    convert_to_rgb(device, plan, images)
    pixels = torch.empty((4, 3, 40, 56), dtype=torch.uint8)
    resize_batch(device, 4, pixels, None, given)
    for got, image in zip(pixels.numpy(), images, strict=True):
        assert np.array_equal(got, resize(load_image(image), (40, 56), given.resample).transpose(2, 0, 1))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    from detrt.data.scenes.scene import draw_scene

    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    with video_writer(path, fps=10, size=(120, 160)) as write:
        for seed in range(5):
            write(draw_scene(seed, size_hw=(120, 160)).image)
    return path


def test_frames_of_a_video_stay_planar(clip):
    whole = [f.image for f in read_frames(clip)]
    left = [one.image for one in raw_frames(clip, planar=True)]
    assert len(left) == len(whole) == 5 and all(isinstance(one, YuvImage) for one in left)
    for one, want in zip(left, whole, strict=True):
        assert one.shape == want.shape
        assert np.array_equal(one.rgb(), want) and np.array_equal(yuv_to_rgb(*one.planes, one.colours), want)


@pytest.mark.skipif("libx264" not in av.codecs_available, reason="this PyAV writes no H.264")
def test_interlaced_frames(tmp_path):
    path = tmp_path / "fields.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"x264-params": "interlaced=1:qp=10"})
        stream.width, stream.height, stream.pix_fmt = 160, 128, "yuv420p"
        for _ in range(3):
            rough = np.repeat(np.repeat(RNG.integers(0, 256, (64, 40, 3), np.uint8), 2, 0), 4, 1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(rough, "rgb24")))
        container.mux(stream.encode())
    frames = list(raw_frames(path, planar=True))
    assert len(frames) == 3
    for one, want in zip(frames, read_frames(path), strict=True):
        image = one.image
        assert isinstance(image, YuvImage) and image.fields
        made = torch.zeros(want.image.size, dtype=torch.uint8)
        fill_rgb(made, *(torch.from_numpy(plane.copy()) for plane in image.planes), image.colours, 1, True)
        assert np.array_equal(made.numpy(), want.image.reshape(-1)) and np.array_equal(image.rgb(), want.image)
        assert not np.array_equal(yuv_to_rgb(*image.planes, image.colours), want.image)
    # The fields of this one have an odd height.
    assert not _suits(SimpleNamespace(height=126, interlaced_frame=True, colorspace=2))


def test_a_frame_of_a_gpu_becomes_the_same_rgb_here():
    whole = frame(32, 130, 1, 2)
    two_planes = whole.reformat(format="nv12")  # as it comes back from a GPU
    assert np.array_equal(_upright(_download(two_planes), 1), _upright(whole, 1))


def test_odd_heights_and_unknown_matrices_are_turned_to_rgb_by_ffmpeg():
    from detrt.data.video import _is_planar

    assert _is_planar(frame(32, 32)) and not _is_planar(frame(33, 32))
    assert not _is_planar(frame(32, 32, 8)) and not _is_planar(frame(32, 32, form="yuv444p"))

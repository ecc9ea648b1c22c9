"""Images resized and candidates chosen by the device's code, here on a CPU, against Pillow and the reference decoder."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from interpreted import run_interpreted
from on_device import OnDevice

from detrt.backends.batches import BATCHES_ON_GPU
from detrt.backends.gpu.resize import resize_batch
from detrt.backends.gpu.runner import DEPTH
from detrt.backends.gpu.staging import COPY_CHUNK_BYTES, layout
from detrt.backends.gpu.top_k import select, unpack
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.data.images import Input, load_image
from detrt.data.postprocess import decode
from detrt.data.preprocess import plan_batch, preprocess, resize
from detrt.data.resample import resized
from detrt.detector import Detector
from detrt.errors import ImageError, SessionError
from detrt.jobs.run import detect_inputs
from detrt.spec import LOGITS, PIXEL_MASK, PIXEL_VALUES, PRED_BOXES, RESAMPLES, InputSpec, ModelSpec
from detrt.tasks.masks import mask_iou

RNG = np.random.default_rng(7)


def source(height: int, width: int) -> np.ndarray:
    return RNG.integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("resample", RESAMPLES)
def test_tables_give_pillows_pixels(resample):
    # Both ways, one way, none, a single pixel, and many more rows than columns gone, where Pillow 13 turns the order.
    sizes = [
        ((60, 80), (90, 31)),
        ((60, 80), (60, 33)),
        ((7, 9), (7, 9)),
        ((1, 50), (20, 3)),
        ((200, 20), (13, 31)),
        ((5, 3), (64, 48)),
    ]
    sizes += [tuple((int(a), int(b)) for a, b in RNG.integers(1, 120, (2, 2))) for _ in range(20)]
    for original, size in sizes:
        image = source(*original)
        assert (resized(image, size, resample) == resize(image, size, resample)).all(), (original, size)


INPUTS = {
    "stretch": InputSpec("stretch", 40, 56),
    "padded": InputSpec("shortest_edge", 40, 56, 32, 60, "bicubic", mask=True, dynamic=True, multiple_of=8),
    "normalised": InputSpec(
        "fit", 48, 40, mask=True, dtype="float32", normalize_in_graph=False, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25)
    ),
    "raw float": InputSpec("stretch", 24, 33, dtype="float32", resample="lanczos"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_images_are_those_of_preprocess(name, tiny):
    from dataclasses import replace

    given = INPUTS[name]
    spec = replace(tiny("detr").spec, input=given)
    images = [source(50, 30), source(33, 90), source(64, 64)]
    want = preprocess(images, spec)
    plan = layout([*images, images[-1]], [*want.resized_sizes_hw, want.resized_sizes_hw[-1]], given.resample)
    assert len(plan.sources) == 3, "an image that fills a batch up is not uploaded again"
    block = np.empty(plan.upload_size, np.uint8)
    plan.write(block, [*images, images[-1]])
    pixels = torch.full((4, *want.feeds[PIXEL_VALUES].shape[1:]), 9, dtype=getattr(torch, given.dtype))
    mask = torch.full((4, *pixels.shape[2:]), 9) if given.mask else None
    resize_batch(torch.from_numpy(block), 4, pixels, mask, given)
    assert np.array_equal(pixels[:3].numpy(), want.feeds[PIXEL_VALUES])
    assert torch.equal(pixels[3], pixels[2])
    if mask is not None:
        assert np.array_equal(mask[:3].numpy(), want.feeds[PIXEL_MASK])


def test_large_images_are_packed_by_several_threads():
    images = [source(700, 900), source(10, 10), source(400, 1200)]
    plan = layout(images, [(20, 30)] * 3, "bilinear")
    alone, shared = np.zeros(plan.upload_size, np.uint8), np.zeros(plan.upload_size, np.uint8)
    plan.write(alone, images)
    with ThreadPoolExecutor(3) as pool:
        plan.write(shared, images, pool)
    assert np.array_equal(alone, shared) and max(image.size for image in images) > COPY_CHUNK_BYTES


def test_kernel_gives_the_same_pixels_interpreted():
    run_interpreted("interpret_resize.py")


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("detr", {}),
        ("rt_detr_v2", {}),
        pytest.param("rf_detr-seg", {}, marks=pytest.mark.slow),
        pytest.param("yolos", {}, marks=pytest.mark.slow),
        pytest.param("detr", {"decode": "graph"}, marks=pytest.mark.slow),
    ],
)
def test_detections_are_those_of_the_cpu(name, choices, exported):
    path = exported(name, **choices).path
    images = [source(50, 70), source(90, 60), source(50, 70), source(41, 43), source(50, 70)]
    options = {"threshold": 0.0, "batch_size": 2}
    with Detector(OnnxSession(path), **options) as here, Detector(OnDevice(path), **options) as there:
        assert here.ahead == 1 and there.ahead == BATCHES_ON_GPU
        for want, got in zip(here(images), there(images), strict=True):
            assert want.image_size_hw == got.image_size_hw and len(want) == len(got) > 0
            assert np.array_equal(want.class_ids, got.class_ids)
            assert np.array_equal(want.scores, got.scores) or np.abs(want.scores - got.scores).max() < 1e-6
            assert np.abs(want.boxes_xyxy - got.boxes_xyxy).max() < 1e-3
            if want.masks is not None:
                assert np.diag(mask_iou(want.masks, got.masks)).min() > 0.99 and want.masks.areas.any()
        with Detector(OnDevice(path), on_device=False) as plain:
            assert plain.ahead == 1


def test_files_are_decoded_side_by_side(exported, tmp_path):
    from PIL import Image

    path = exported("detr").path
    names = [tmp_path / f"{index}.png" for index in range(3)]
    for index, name in enumerate(names):
        Image.fromarray(source(40 + index, 60)).save(name)
    options = {"threshold": 0.0, "batch_size": 2}
    with Detector(OnDevice(path), **options) as there, Detector(OnnxSession(path), **options) as here:
        for want, got in zip(here(names), there(names), strict=True):
            assert want.image_size_hw == got.image_size_hw and np.allclose(want.boxes_xyxy, got.boxes_xyxy, atol=1e-3)
        (tmp_path / "bad.png").write_bytes(b"no image")
        with pytest.raises(ImageError, match=r"bad\.png"):
            there([names[0], tmp_path / "bad.png"])


def test_frames_go_to_the_device_as_they_are(exported, tmp_path):
    pytest.importorskip("av", reason="PyAV comes with detrt[video]")
    from detrt.data.raw_image import YuvImage
    from detrt.data.video import video_writer

    clip = Input(tmp_path / "clip.mp4", "video")
    with video_writer(clip.path, fps=10, size=(48, 64)) as write:
        for _ in range(5):
            write(np.repeat(np.repeat(source(6, 8), 8, 0), 8, 1))
    path = exported("detr").path
    options = {"threshold": 0.0, "batch_size": 2}
    with Detector(OnDevice(path), **options) as there, Detector(OnnxSession(path), **options) as here:
        pairs = list(zip(detect_inputs(there, [clip]), detect_inputs(here, [clip]), strict=True))
    assert len(pairs) == 5
    for got, want in pairs:
        assert isinstance(got.image, YuvImage) and np.array_equal(load_image(got.image), want.image)
        assert len(want.record.detections) > 0
        assert np.allclose(got.record.detections.boxes_xyxy, want.record.detections.boxes_xyxy, atol=1e-3)


def test_layouts_that_come_again_are_recorded(exported):
    path = exported("detr").path
    with Detector(OnDevice(path), threshold=0.0) as there, Detector(OnnxSession(path), threshold=0.0) as here:
        cache = there.session.image_runner._layout_graphs
        cache._capacity, cache._patience = 2, 6
        sizes = [(40, 60)] * 4 + [(30, 60)] * 4 + [(50, 60)] * 5
        for size, count in zip(sizes, [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2], strict=True):
            image = source(*size)
            assert np.allclose(there([image])[0].boxes_xyxy, here([image])[0].boxes_xyxy, atol=1e-3)
            assert len(cache._entries) == count and not cache.failure
        # The third size came when the first had not been asked for lately.
        assert {tuple(one.plan.rows[0, 1:3]) for one in cache._entries.values()} == {(30, 60), (50, 60)}


def test_batches_may_be_asked_for_late(exported):
    path = exported("detr").path
    images = [source(40 + i, 60) for i in range(DEPTH + 2)]
    with Detector(OnDevice(path), threshold=0.0) as there, Detector(OnnxSession(path), threshold=0.0) as here:
        waiting = [there.submit([image]) for image in images]
        for pending, image in reversed(list(zip(waiting, images, strict=True))):
            got, want = pending.result()[0].boxes_xyxy, here([image])[0].boxes_xyxy
            # In any order: scores of random weights are nearly equal.
            apart = np.abs(got[:, None] - want[None]).max(-1)
            assert got.shape == want.shape and max(apart.min(0).max(), apart.min(1).max()) < 1e-3
        assert there.submit([]).result() == []


@pytest.mark.parametrize("name", ["detr", "rt_detr_v2"])
def test_stages_are_timed_one_by_one(exported, name):
    from detrt.bench.measure import jpeg_of
    from detrt.bench.stages import stage_times

    path = exported(name).path
    files = [jpeg_of(source(60, 80)) for _ in range(2)]
    with OnDevice(path) as there, OnnxSession(path) as here:
        size = (64, 96) if here.spec.input.dynamic else None
        there_ms, here_ms = stage_times(there, files, size), stage_times(here, files, size)
    assert list(there_ms) == ["decode", "upload", "resize", "forward", "selection", "download", "post-process"]
    assert list(here_ms) == ["decode", "resize", "forward", "post-process"]
    for times in (there_ms, here_ms):
        assert min(times.values()) > 0


@pytest.mark.parametrize("name", ["detr", "rt_detr_v2", "yolos"])
def test_selection_is_the_rule_of_decode(name, tiny):
    spec: ModelSpec = tiny(name).spec
    rule = spec.decode
    logits = RNG.normal(0, 3, (3, rule.num_queries, rule.num_classes + (rule.activation == "softmax"))).astype(np.float32)
    logits[0, 3] = logits[0, 1]  # equal scores
    logits[1, :, : rule.num_classes] -= 40  # an image without detections
    logits[2, :, 0] = -np.inf  # classes that cannot be
    boxes = RNG.uniform(0.1, 0.9, (3, rule.num_queries, 4)).astype(np.float32)
    sizes = [(480, 640), (50, 70), (100, 90)]
    found = unpack(select(torch.from_numpy(logits), torch.from_numpy(boxes), spec).numpy(), 3)
    for threshold in (0.0, 0.6):
        raw = decode({LOGITS: logits, PRED_BOXES: boxes}, spec, sizes, threshold=threshold)
        assert (len(raw[1]) == 0) == (threshold > 0)
        for want, got in zip(raw, decode(found, spec, sizes, threshold=threshold), strict=True):
            assert np.array_equal(want.class_ids, got.class_ids)
            assert np.abs(want.scores - got.scores).max(initial=0) < 1e-6
            assert np.abs(want.boxes_xyxy - got.boxes_xyxy).max(initial=0) < 1e-3
    for output, array in ((LOGITS, logits), (PRED_BOXES, boxes)):
        kept = array[1, 2, 1]
        array[1, 2, 1] = np.nan
        found = unpack(select(torch.from_numpy(logits), torch.from_numpy(boxes), spec).numpy(), 3)
        with pytest.raises(SessionError, match=f"infinite values in '{output}'"):
            decode(found, spec, sizes)
        array[1, 2, 1] = kept


def test_a_prompt_is_told_once(tmp_path):
    """A prompted model whose detector takes prompts of one length, as a package does."""
    from text_models import write_text_model

    from detrt.backends.prompted import PromptedSession
    from detrt.spec import TensorInfo
    from detrt.text.tokenizer import PromptTokenizer

    path = write_text_model(tmp_path)
    tokens = 16

    class Fixed(OnDevice):
        def __init__(self, path):
            super().__init__(path)
            fixed = lambda axis: tokens if axis == "tokens" else axis  # noqa: E731
            inputs = tuple(TensorInfo(i.name, i.dtype, tuple(map(fixed, i.shape))) for i in self.inputs)
            self._info = replace(self._info, inputs=inputs)

    def opened(kind):
        detector = kind(path)
        text = detector.spec.text
        return PromptedSession(
            detector, PromptTokenizer(tmp_path / text.tokenizer, text), OnnxSession(tmp_path / text.encoder, detector.spec)
        )

    images = [source(40, 60), source(60, 40), source(44, 44)]
    for prompt in ("red. blue.", ["red", "green", "blue"]):
        here = Detector(opened(OnnxSession), threshold=0.0, prompt=prompt, batch_size=2)
        there = Detector(opened(Fixed), threshold=0.0, prompt=prompt, batch_size=2)
        assert there.ahead == BATCHES_ON_GPU
        for want, got in zip(here(images), there(images), strict=True):
            assert len(want) > 0 and want.labels == got.labels
            assert np.allclose(want.scores, got.scores, atol=1e-6)
            assert np.allclose(want.boxes_xyxy, got.boxes_xyxy, atol=1e-3)
        loaded = [source(40, 60), source(60, 40)]
        plan = plan_batch([(40, 60), (60, 40)], there.spec.input)
        times = there.session.image_runner.stage_times(loaded, plan, 2)
        assert all(len(found) == 2 for found in times.values()) and min(map(min, times.values())) > 0
        # Prompts of their own take the CPU's way.
        assert len(there(images[:1], prompts=["blue."])[0]) == len(here(images[:1], prompts=["blue."])[0])


@pytest.mark.parametrize("form", ["channels first", "channels last", "float", "one channel", "four channels"])
def test_a_tensor_of_the_device_stays_there(form, exported):
    image = source(50, 70)
    tensor = {
        "channels first": torch.from_numpy(image).permute(2, 0, 1),
        "channels last": torch.from_numpy(image),
        "float": torch.from_numpy(image).permute(2, 0, 1).contiguous() / 255,
        "one channel": torch.from_numpy(image[..., 0]),
        "four channels": torch.from_numpy(np.dstack([image, image[..., :1]])),
    }[form]
    want = np.repeat(image[..., :1], 3, 2) if form == "one channel" else image
    with Detector(OnDevice(exported("detr").path), threshold=0.0, batch_size=2) as detector:
        expected = detector(want)
        first, second = detector([tensor, tensor])
        kept = detector(tensor)
        for found in (first, second, kept):
            assert np.array_equal(found.boxes_xyxy, expected.boxes_xyxy) and np.array_equal(found.scores, expected.scores)
        assert np.array_equal(load_image(kept.image), want) and kept.plot().size == (70, 50)
        (refused,) = detector([tensor.float() + 2], skip_bad=True)
        assert isinstance(refused, ImageError) and "before any normalisation" in str(refused)
        seen = []
        submit = detector.submit
        detector.submit = lambda images, *args, **more: seen.extend(images) or submit(images, *args, **more)
        detector([tensor, image])
        assert [type(one).__name__ for one in seen] == ["GpuImage", "ndarray"]

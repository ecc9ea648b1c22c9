"""`image_decoder="gpu"` with a decoder of JPEG files that runs on the CPU, behind the interface of the real one."""

from __future__ import annotations

import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

torch = pytest.importorskip("torch")

from on_device import OnDevice

from detrt.backends.gpu.decoder import GpuDecoder, upright_tensor
from detrt.backends.gpu.yuv import GpuImage
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.data.images import FAST_FORMATS, Input, common_jpeg, load_encoded, load_image
from detrt.data.raw_image import EncodedImage
from detrt.detector import Detector
from detrt.errors import ArgumentError, ImageError, MissingPackageError, OutputError, SessionError
from detrt.jobs.run import ImageFailure, detect_inputs

RNG = np.random.default_rng(5)


class Jpegs:
    """Decodes as stored, one level brighter, so that it is seen who decoded; not progressive files."""

    def __init__(self):
        self.groups, self.threads = [], set()

    def decode(self, files):
        self.groups.append(len(files))
        self.threads.add(threading.current_thread().name)
        return [self._one(data) for data in files]

    def _one(self, data):
        image = Image.open(io.BytesIO(data))
        if image.info.get("progressive"):
            return None
        if image.size == (72, 72):
            raise RuntimeError("no memory left on the device")
        return torch.from_numpy(np.minimum(np.asarray(image.convert("RGB")), 254) + 1)


class Decoding(OnDevice):
    """A session whose images are decoded by `Jpegs`."""

    @property
    def image_runner(self):
        runner = super().image_runner
        if not hasattr(self, "jpegs"):
            self.jpegs = Jpegs()
            runner.decoder = lambda: GpuDecoder(torch.device("cpu"), jpegs=self.jpegs)
        return runner


def jpeg(height=48, width=64, mode="RGB", **options):
    rough = RNG.integers(0, 200, (height // 8, width // 8, 3), np.uint8)
    image = Image.fromarray(rough).resize((width, height)).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def exif(orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_stand_upright(orientation):
    data = jpeg(exif=exif(orientation))
    want = load_image(data)
    encoded = load_encoded(data)
    assert isinstance(encoded, EncodedImage) and encoded.shape == want.shape
    stored = torch.from_numpy(np.array(Image.open(io.BytesIO(data))))
    assert np.array_equal(upright_tensor(stored, encoded.orientation).numpy(), want)
    assert np.array_equal(encoded.rgb(), want)


def test_what_stays_encoded(tmp_path):
    for data in (jpeg(), jpeg(mode="L"), jpeg(progressive=True), jpeg(subsampling=0), jpeg() + b"\0" * 100):
        assert isinstance(load_encoded(data), EncodedImage)
    for data in (jpeg(mode="CMYK"), jpeg(subsampling=0, keep_rgb=True)):
        assert np.array_equal(load_encoded(data), load_image(data))
    png = tmp_path / "a.png"
    Image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(png)
    assert load_encoded(png).shape == (4, 6, 3) and load_encoded(np.zeros((4, 6, 3), np.uint8)).shape == (4, 6, 3)


@pytest.mark.parametrize("name", ["cut", "empty", "text", "large", "gone"])
def test_bad_files_are_told_as_before(name, tmp_path):
    data = {"cut": jpeg()[:-200], "empty": b"", "text": b"\xff\xd8\xff no image \xff\xd9", "large": jpeg(), "gone": None}[name]
    path = tmp_path / "bad.jpg"
    if data is not None:
        path.write_bytes(data)
    limit = {"max_pixels": 100} if name == "large" else {}
    with pytest.raises(ImageError) as want:
        load_image(path, **limit)
    with pytest.raises(ImageError) as got:
        load_encoded(path, **limit)
    assert str(got.value) == str(want.value)


def test_files_are_decoded_there_and_the_rest_here(exported, tmp_path):
    files = {"a.jpg": jpeg(), "b.jpg": jpeg(40, 64, exif=exif(6)), "c.jpg": jpeg(progressive=True), "d.jpg": jpeg()[:-300]}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    Image.fromarray(RNG.integers(0, 255, (40, 50, 3), np.uint8)).save(tmp_path / "e.png")
    inputs = [Input(path) for path in sorted(tmp_path.iterdir())]
    session = Decoding(exported("detr").path)
    with Detector(session, threshold=0.0, batch_size=2, image_decoder="gpu") as detector:
        found = list(detect_inputs(detector, inputs))
        assert [type(one) is ImageFailure for one in found] == [False, False, False, True, False]
        assert "d.jpg" in str(found[3].error)
        assert [isinstance(one.image, GpuImage) for one in found if not isinstance(one, ImageFailure)] == [
            True,
            True,
            False,
            False,
        ]
        bright = [np.minimum(load_image(files[name]), 254) + 1 for name in ("a.jpg", "b.jpg")]
        with Detector(OnnxSession(exported("detr").path), threshold=0.0, batch_size=2) as plain:
            for one, image, want in zip(found[:2], bright, plain(bright), strict=True):
                assert np.array_equal(load_image(one.image), image)
                assert np.allclose(one.record.detections.boxes_xyxy, want.boxes_xyxy, atol=1e-3)
        counts = detector.decoder.counts
        assert counts["files on the GPU"] == 2 and counts["files on the CPU"] == 2
        assert session.jpegs.threads == {"detrt-gpu-decode"} and sum(session.jpegs.groups) == 3
        # The same through a call, which decodes a batch together.
        session.jpegs.groups.clear()
        again = detector([tmp_path / "a.jpg", files["b.jpg"], np.zeros((8, 8, 3), np.uint8)])
        assert session.jpegs.groups == [2] and np.array_equal(again[0].boxes_xyxy, found[0].record.detections.boxes_xyxy)
        with pytest.raises(ImageError, match=r"d\.jpg"):
            detector([tmp_path / "d.jpg"])


def test_one_file_does_not_spoil_the_others():
    decoder = GpuDecoder(torch.device("cpu"), jpegs=Jpegs())
    files = [jpeg(), jpeg(72, 72), jpeg()]
    images = decoder.decode([decoder.open(data) for data in files])
    assert [isinstance(one, GpuImage) for one in images] == [True, False, True]
    assert np.array_equal(images[1], load_image(files[1])) and str(decoder) == "2 files on the GPU, 1 file on the CPU"


def test_a_group_takes_what_is_there(exported, tmp_path):
    for index in range(28):
        (tmp_path / f"{index:02}.jpg").write_bytes(jpeg())
    inputs = [Input(path) for path in sorted(tmp_path.iterdir())]
    session = Decoding(exported("detr").path)
    with Detector(session, threshold=0.0, batch_size=4, image_decoder="gpu") as detector:
        stream = detect_inputs(detector, inputs)
        names = [next(stream).input.path.name for _ in range(18)]
        stream.close()  # in the middle: its threads end
    assert names == [f"{index:02}.jpg" for index in range(18)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("detrt-read", "detrt-gpu"))]
    assert max(session.jpegs.groups) <= 16


def test_where_it_is_refused(exported, tmp_path, capsys):
    from detrt.cli import main

    path = exported("detr").path
    (tmp_path / "a.jpg").write_bytes(jpeg())
    for choice, words in (("gpu", "onnxruntime-cpu"), ("nvjpeg", "cpu or gpu; got 'nvjpeg'")):
        assert main(["detect", str(path), str(tmp_path / "a.jpg"), "--image-decoder", choice]) == 2
        assert words in capsys.readouterr().err
    with OnnxSession(path) as session:
        with pytest.raises(SessionError, match=r"`image_decoder=gpu`.*onnxruntime-cpu"):
            Detector(session, image_decoder="gpu")
        with pytest.raises(ValueError, match="`image_decoder` must be cpu or gpu; got 'cuda'"):
            Detector(session, image_decoder="cuda")
    with Detector(OnDevice(path), image_decoder="gpu") as detector, pytest.raises(MissingPackageError, match=r"\.\[decode\]"):
        detector([jpeg()])


def test_an_evaluation_is_not_gone_on_with_by_another_decoder(tmp_path):
    from detrt.evaluation.results import ResumeFile

    state = tmp_path / "state.jsonl"
    state.write_text('{"detrt_eval": 1, "batch": 4}\n')  # as it was before there was a choice
    with ResumeFile(state, {"batch": 4, "decode": "cpu"}) as file:
        assert file.done == {}
    with pytest.raises(OutputError, match="decode 'cpu', now 'gpu'"):
        ResumeFile(state, {"batch": 4, "decode": "gpu"})


def test_a_server_decodes_there(exported, monkeypatch):
    from detrt.serve import worker as runner
    from detrt.serve.config import ServeConfig, ServedModel
    from detrt.serve.errors import Refused
    from detrt.serve.messages import Batch, ImageTask, Setup

    path, served = exported("detr").path, ServedModel("detr", "unused")
    setup = Setup((served,), "cuda:0", 1, "auto", {}, None, 4, 10**6, "gpu", FAST_FORMATS, 8)
    monkeypatch.setattr(runner, "open_with", lambda *args, **kwargs: Decoding(path))
    model = runner.Model(served, setup)
    model.warm_up()
    assert set(model.session.jpegs.groups) <= {1, 2, 3, 4}
    model.session.jpegs.groups.clear()
    png = io.BytesIO()
    Image.fromarray(np.zeros((40, 50, 3), np.uint8)).save(png, "PNG")
    broken = bytearray(jpeg(progressive=True))
    table = broken.index(b"\xff\xc4") + 5
    broken[table : table + 16] = b"\xff" * 16  # the header is fine, a Huffman table is not
    tasks = [ImageTask(data, 0.0) for data in (jpeg(), bytes(broken), png.getvalue(), jpeg(40, 48))]
    batch = Batch(1, "detr", tuple(tasks))
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as opener:
        answers = runner.run_batch({"detr": model}, batch, runner.BatchImages(batch, pool, opener, setup)).results
    assert isinstance(answers[1], Refused) and (answers[1].status, answers[1].code) == (400, "bad_image")
    sizes = [(json.loads(a.value)["height"], json.loads(a.value)["width"]) for a in answers if not isinstance(a, Refused)]
    assert sizes == [(48, 64), (40, 50), (40, 48)] and model.session.jpegs.groups == [3]
    assert answers[0].decode_ms > 0
    monkeypatch.setattr(runner, "open_with", lambda *args, **kwargs: OnDevice(path))
    with pytest.raises(MissingPackageError, match=r"\.\[decode\]"):
        runner.Model(served, setup)
    with pytest.raises(ArgumentError, match="`image_decoder` must be cpu or gpu; got 'nvdec'"):
        ServeConfig((served,), image_decoder="nvdec")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow, about tags that were cut
def test_headers_are_those_that_pillow_reads():
    tags = exif(6)
    for data in (jpeg(), jpeg(mode="L"), jpeg(progressive=True), jpeg(exif=tags), jpeg(comment=b"\xff\xff\xda" * 9)):
        with Image.open(io.BytesIO(data)) as image:
            assert common_jpeg(data) == (*image.size, image.getexif().get(0x0112, 1))
    whole = jpeg(exif=tags)
    for data in (b"", whole[:-2], jpeg(mode="CMYK"), jpeg(subsampling=0, keep_rgb=True), whole.replace(b"\xff\xc0", b"\xff\xc9")):
        assert common_jpeg(data) is None
    for end in range(0, len(whole), 3):  # cut anywhere, with an end put behind it
        found = common_jpeg(whole[:end] + b"\xff\xd9")
        assert found is None or found == (64, 48, 6) or found[2] == 1
    rng = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(whole)
        broken[rng.integers(2, 700)] = rng.integers(0, 256)
        common_jpeg(bytes(broken))

"""A video is what a player shows: times from the start of the file, frames upright, and copies as long as the original.

What a player shows is what the programs of FFmpeg say: `ffprobe` for times and counts, `ffmpeg` for upright frames.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import struct
import subprocess
import time
from fractions import Fraction

import numpy as np
import pytest

av = pytest.importorskip("av", reason="needs the 'video' extra")

from detrt.data.images import Input
from detrt.data.live import LiveSource, live_frames
from detrt.data.sinks import Record
from detrt.data.video import raw_frames, read_frames, video_facts, video_writer
from detrt.detections import Detections
from detrt.jobs.annotate import AnnotatedCopies
from detrt.jobs.run import ImageResult

VARIABLE = [0, 0.1, 0.2, 0.3, 4.0, 8.0]
# Name -> container, codec, times of the frames on the clock of the file.
CLOCKS = {
    "zero.mp4": ("mp4", "mpeg4", [0, 0.1, 0.2, 0.3]),
    "hour.mkv": ("matroska", "mpeg4", [3600 + i / 10 for i in range(20)]),
    "hundred.webm": ("webm", "vp8", [100 + i / 10 for i in range(20)]),
    "recording.ts": ("mpegts", "mpeg2video", [70 + i / 25 for i in range(20)]),
    "late.flv": ("flv", "flv", [5 + i / 10 for i in range(20)]),
    "ntsc.mkv": ("matroska", "mpeg4", [60 + i * 1001 / 30000 for i in range(20)]),
    "variable.mp4": ("mp4", "mpeg4", VARIABLE),
    "variable.mkv": ("matroska", "mpeg4", [50 + t for t in VARIABLE]),
}
TICK = Fraction(1, 1000)


def needs(program):
    return pytest.mark.skipif(
        shutil.which(program) is None, reason=f"the oracle of this test is {program}, which is not installed"
    )


def write(path, container, codec, times, size=(64, 48)):
    width, height = size
    with av.open(str(path), "w", format=container) as out:
        stream = out.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        if codec != "mpeg2video":  # which knows standard rates only
            stream.codec_context.time_base = TICK
        base = Fraction(1, 25) if codec == "mpeg2video" else TICK
        for index, time_s in enumerate(times):
            image = np.full((height, width, 3), 10 * index % 250, np.uint8)
            frame = av.VideoFrame.from_ndarray(image, "rgb24")
            frame.pts, frame.time_base = round(Fraction(time_s) / base), base
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


def probe(path, *entries):
    command = ["ffprobe", "-v", "error", "-select_streams", "v:0", "-of", "json", *entries, str(path)]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


@needs("ffprobe")
@pytest.mark.parametrize("name", CLOCKS)
def test_times_and_counts_are_those_of_ffprobe(name, tmp_path):
    path = write(tmp_path / name, *CLOCKS[name])
    told = probe(
        path, "-count_frames", "-show_entries", "format=start_time:stream=nb_read_frames:frame=best_effort_timestamp_time"
    )
    start = float(told["format"]["start_time"])
    want = [float(frame["best_effort_timestamp_time"]) - start for frame in told["frames"]]
    got = [frame.time_s for frame in read_frames(path)]
    assert got == pytest.approx(want, abs=2e-6) and got[0] == 0
    times = CLOCKS[name][2]
    assert got == pytest.approx([time - times[0] for time in times], abs=1e-3)
    assert video_facts(path).frames == int(told["streams"][0]["nb_read_frames"]) == len(times)


def test_every_other_frame_keeps_its_time(tmp_path):
    path = write(tmp_path / "v.mkv", *CLOCKS["variable.mkv"])
    assert [(f.index, round(f.time_s, 6)) for f in read_frames(path, every=2)] == [(0, 0), (2, 0.2), (4, 4)]


@needs("ffprobe")
def test_frames_may_start_after_the_sound(tmp_path):
    path = tmp_path / "sound.mkv"
    with av.open(str(path), "w") as out:
        sound = out.add_stream("pcm_s16le", rate=8000)
        stream = out.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.int16), format="s16", layout="mono")
        samples.sample_rate, samples.pts, samples.time_base = 8000, 80_000, Fraction(1, 8000)  # at 10 s
        out.mux(sound.encode(samples))
        for index in range(3):
            frame = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), "rgb24")
            frame.pts, frame.time_base = 105 + index, Fraction(1, 10)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    assert float(probe(path, "-show_entries", "format=start_time")["format"]["start_time"]) == 10
    assert [f.time_s for f in read_frames(path)] == pytest.approx([0.5, 0.6, 0.7])


def test_a_file_read_like_a_camera_starts_at_once(tmp_path):
    path = write(tmp_path / "hour.mkv", *CLOCKS["hour.mkv"])
    began = time.monotonic()
    frames = list(live_frames(LiveSource(str(path), "file"), timeout_s=1))
    assert len(frames) == 20 and 1.5 < time.monotonic() - began < 30  # 2 s of video


@needs("ffmpeg")
@pytest.mark.parametrize("starts", [(500, 100), (100, 500), (100, 100), (100, 105)], ids=str)
def test_joined_recordings_go_on(starts, tmp_path):
    """The clock starts again where recordings were joined."""
    joined = b""
    for start in starts:
        part = write(tmp_path / "part.ts", "mpegts", "mpeg2video", [start + i / 25 for i in range(10)])
        joined += part.read_bytes()
    (tmp_path / "joined.ts").write_bytes(joined)
    command = ["ffmpeg", "-v", "info", "-i", "joined.ts", "-vf", "showinfo", "-fps_mode", "passthrough", "-f", "null", "-"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, text=True).stderr
    want = [float(time) for time in re.findall(r"showinfo.* pts_time:(\S+)", told)]
    got = [f.time_s for f in read_frames(tmp_path / "joined.ts")]
    assert len(got) == 20 and got == pytest.approx([time - want[0] for time in want], abs=0.05)


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_copy_has_the_times_of_the_original(suffix, every, tmp_path):
    path = write(tmp_path / f"variable{suffix}", *CLOCKS[f"variable{suffix}"])
    source = Input(path, "video")
    times = []
    with AnnotatedCopies(tmp_path / "copies", [source], every=every) as copies:
        for frame in read_frames(path, every=every):
            found = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64), (), (48, 64))
            copies.save(ImageResult(source, Record(str(path), found, frame.index, frame.time_s), frame.image))
            times.append(frame.time_s)
    copy = next((tmp_path / "copies").iterdir())
    assert times == pytest.approx(VARIABLE[::every], abs=1e-6)
    assert [f.time_s for f in read_frames(copy)] == pytest.approx(times, abs=1e-4)


@pytest.mark.parametrize("rate", [24000 / 1001, 25, 30000 / 1001, 50, 60000 / 1001, 60, 7.5, 1 / 3])
def test_written_rates(rate, tmp_path):
    with video_writer(tmp_path / "v.mp4", fps=rate, size=(16, 16)) as put:
        for _ in range(12):
            put(np.zeros((16, 16, 3), np.uint8))
    assert video_facts(tmp_path / "v.mp4").fps == pytest.approx(rate, rel=2e-5)
    assert [f.time_s for f in read_frames(tmp_path / "v.mp4")] == pytest.approx([i / rate for i in range(12)], abs=2e-5)


ONE = 1 << 16
# All turns by 90 degrees and their mirror images, and turns that are not by 90 degrees: a, b, c, d in x' = a x + c y, y' = b x + d y.
MATRICES = {
    "as stored": (1, 0, 0, 1),
    "mirrored": (-1, 0, 0, 1),
    "by 180": (-1, 0, 0, -1),
    "upside down": (1, 0, 0, -1),
    "transposed": (0, 1, 1, 0),
    "by 90 clockwise": (0, 1, -1, 0),
    "transposed the other way": (0, -1, -1, 0),
    "by 90 counter-clockwise": (0, -1, 1, 0),
    "twice as large": (2, 0, 0, 2),
    "mirrored, wider": (-2, 0, 0, 1),
}


def oriented(path, matrix):
    """A video with the matrix in the header of its track."""
    with video_writer(path, fps=5, size=(48, 64)) as put:
        rows, columns = np.mgrid[:48, :64]
        for _ in range(2):
            put(np.stack((rows * 5, columns * 3, (rows > 24) * 200), -1).astype(np.uint8))
    return turned(path, matrix)


def turned(path, matrix):
    """Writes the matrix into the header of the track."""
    a, b, c, d = (round(v * ONE) for v in matrix)
    data = bytearray(path.read_bytes())
    at = data.index(b"tkhd") + 4 + 4 + 4 * 5 + 8 + 8
    assert struct.unpack_from(">9i", data, at) == (ONE, 0, 0, 0, ONE, 0, 0, 0, 1 << 30)
    struct.pack_into(">9i", data, at, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    return path


@needs("ffmpeg")
@pytest.mark.parametrize("name", MATRICES)
def test_frames_stand_as_ffmpeg_shows_them(name, tmp_path):
    path = oriented(tmp_path / "v.mp4", MATRICES[name])
    frames = list(read_frames(path))
    height, width, _ = frames[0].image.shape
    command = ["ffmpeg", "-v", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    shown = np.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, np.uint8)
    shown = shown.reshape(len(frames), height, width, 3)
    for frame, want in zip(frames, shown, strict=True):
        assert np.abs(frame.image.astype(int) - want).max() <= 24  # chroma is interpolated before or after the turn
        assert np.abs(frame.image.astype(int) - want).mean() < 2
    planar = [one.image for one in raw_frames(path, planar=True)]
    assert [one.shape for one in planar] == [f.image.shape for f in frames]
    assert all(np.array_equal(one.rgb(), f.image) for one, f in zip(planar, frames, strict=True))


def test_the_eight_orientations_differ(tmp_path):
    images = [next(read_frames(oriented(tmp_path / f"{i}.mp4", m))).image for i, m in enumerate(list(MATRICES.values())[:8])]
    for one, other in itertools.combinations(images, 2):
        assert one.shape != other.shape or np.abs(one.astype(int) - other).mean() > 5


def test_another_angle_is_shown_at_the_nearest_right_one(tmp_path):
    cosine, sine = np.cos(np.radians(80)), np.sin(np.radians(80))
    almost = next(read_frames(oriented(tmp_path / "a.mp4", (cosine, sine, -sine, cosine)))).image
    right = next(read_frames(oriented(tmp_path / "b.mp4", MATRICES["by 90 clockwise"]))).image
    assert np.array_equal(almost, right)


@pytest.mark.parametrize(("matrix", "shown"), [("as stored", Fraction(16, 15)), ("by 90 clockwise", Fraction(15, 16))])
def test_a_copy_has_the_pixels_of_the_original(matrix, shown, tmp_path):
    """Of PAL recordings, whose pixels are wider than tall: a player would show a copy without that too narrow."""
    av = pytest.importorskip("av")
    with video_writer(tmp_path / "v.mp4", fps=5, size=(48, 64), pixel_aspect=Fraction(16, 15)) as put:
        put(np.zeros((48, 64, 3), np.uint8))
    path = turned(tmp_path / "v.mp4", MATRICES[matrix])
    source = Input(path, "video")
    with AnnotatedCopies(tmp_path / "copies", [source]) as copies:
        for frame in read_frames(path):
            size = frame.image.shape[:2]
            found = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64), (), size)
            copies.save(ImageResult(source, Record(str(path), found, frame.index, frame.time_s), frame.image))
    with av.open(str(next((tmp_path / "copies").iterdir()))) as container:
        assert container.streams.video[0].sample_aspect_ratio == shown

"""Which files are read as videos: the containers of the suffixes, under any of their names, and no list that names other files."""

from __future__ import annotations

import shutil
import warnings

import numpy as np
import pytest

av = pytest.importorskip("av", reason="needs the 'video' extra")

from detrt.data.frames import DamageWarning
from detrt.data.images import VIDEO_SUFFIXES
from detrt.data.video import read_frames
from detrt.errors import ImageError

# Suffix -> FFmpeg's name for the writer, and a codec that it takes.
WRITERS = {
    ".3gp": ("3gp", "mpeg4"),
    ".avi": ("avi", "mpeg4"),
    ".flv": ("flv", "flv"),
    ".m2ts": ("mpegts", "mpeg2video"),
    ".m4v": ("m4v", "mpeg4"),
    ".mkv": ("matroska", "mpeg4"),
    ".mov": ("mov", "mpeg4"),
    ".mp4": ("mp4", "mpeg4"),
    ".mpeg": ("mpeg", "mpeg1video"),
    ".mpg": ("mpeg2video", "mpeg2video"),
    ".mts": ("mpegts", "mpeg2video"),
    ".ogv": ("ogg", "vp8"),
    ".ts": ("mpegts", "mpeg2video"),
    ".webm": ("webm", "vp8"),
    ".wmv": ("asf", "wmv2"),
    ".y4m": ("yuv4mpegpipe", "wrapped_avframe"),
}
COUNT = 12


def write(path, writer, codec):
    noise = np.random.default_rng(0).integers(0, 256, (COUNT, 96, 128, 3), np.uint8)
    with av.open(str(path), "w", format=writer) as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for image in noise:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return path


def test_every_suffix_has_a_case():
    assert set(WRITERS) == VIDEO_SUFFIXES


@pytest.mark.parametrize("suffix", WRITERS)
def test_is_read(suffix, tmp_path):
    path = write(tmp_path / f"video{suffix}", *WRITERS[suffix])
    assert len(list(read_frames(path))) == COUNT


@pytest.mark.parametrize("suffix", [".ts", ".avi"])
def test_damage_is_warned_of(suffix, tmp_path):
    """FFmpeg decodes such frames as far as it can: what is found in them may be anything."""
    path = write(tmp_path / f"a{suffix}", *WRITERS[suffix])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(read_frames(path))) == COUNT
    content = bytearray(path.read_bytes())
    if suffix == ".ts":
        content[len(content) // 3 : len(content) // 2 : 89] = bytes(len(range(len(content) // 3, len(content) // 2, 89)))
    else:
        del content[len(content) * 2 // 3 :]
    path.write_bytes(content)
    with pytest.warns(DamageWarning, match=rf"a\{suffix}' is damaged or truncated"):
        assert 0 < len(list(read_frames(path))) <= COUNT


def test_a_container_under_another_name(tmp_path):
    assert len(list(read_frames(write(tmp_path / "really-matroska.mp4", *WRITERS[".mkv"])))) == COUNT


LISTS = {
    "concat": "ffconcat version 1.0\nfile neighbour.mp4\n",
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:1,\nneighbour.ts\n#EXT-X-ENDLIST\n",
    "dash": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" mediaPresentationDuration="PT1S"><Period>'
    '<AdaptationSet contentType="video"><Representation id="v" bandwidth="1"><BaseURL>neighbour.mp4</BaseURL></Representation>'
    "</AdaptationSet></Period></MPD>",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 32\n",
    "subtitles": "WEBVTT\n\n00:00.000 --> 00:01.000\ntext\n",
    "ffmetadata": ";FFMETADATA1\ntitle=x\n",
}


@pytest.mark.parametrize("suffix", [".mp4", ".ts", ".mkv"])
@pytest.mark.parametrize("kind", LISTS)
def test_a_list_is_refused(kind, suffix, tmp_path):

    neighbour = write(tmp_path / "neighbour.mp4", *WRITERS[".mp4"])
    shutil.copy(neighbour, tmp_path / "neighbour.ts")
    path = tmp_path / f"list{suffix}"
    path.write_text(LISTS[kind])
    with pytest.raises(ImageError, match="cannot be read as a video"):
        list(read_frames(path))

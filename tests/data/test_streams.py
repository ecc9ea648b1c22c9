"""Live sources, from simulated cameras in processes of their own and a real decoder."""

from __future__ import annotations

import contextlib
import http.server
import re
import socket
import threading
import time
from urllib.parse import quote

import numpy as np
import pytest

pytest.importorskip("av", reason="needs the 'video' extra")
from ports import free_port
from stream_sender import cameras, read_number

from detrt.data.addresses import without_secrets
from detrt.data.live import _Lag, live_frames, live_source
from detrt.data.stream_config import StreamConfig
from detrt.data.streams import LiveStreams
from detrt.data.video import video_writer
from detrt.errors import DetrtError, ImageError

ONCE = StreamConfig(reconnect_s=0)


def sources(addresses):
    return [live_source(address) for address in addresses]


def watch(streams, *, work_s=0.0, most=8):
    """(frames, [(source, error)] of lost ones) until all have ended."""
    seen, lost = [], []
    while True:
        frames = streams.next_frames(most)
        time.sleep(work_s)
        for frame in frames:
            streams.done(frame)
        seen += frames
        ended = streams.ended  # before `lost`, which has by then whatever ended
        while (one := streams.lost()) is not None:
            lost.append(one)
        if not frames and ended:
            return seen, lost


def test_what_is_live(tmp_path):
    for name, kind in {"rtsp://cam/1": "network", "HTTP://cam/video.cgi?x=1.jpg": "network", "/dev/video12": "device"}.items():
        assert live_source(name).kind == kind
    for name in ("http://cam/still.jpg", "https://host/clip.mp4?x=1", "s3://bucket/a", "clip.mp4", "/dev/video", "a://b"):
        assert live_source(name) is None, name
    with pytest.raises(ImageError, match="no video file"):
        live_source(str(tmp_path / "clip.mp4"), files=True)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("rtsp://admin:p@ss@cam:554/live", "rtsp://cam:554/live"),
        ("rtsp://cam/live@2", "rtsp://cam/live@2"),
        ("rtsp://admin:12/34@cam/live", "rtsp://...@cam/live"),
        ("rtsp://admin:12/3@4/5@cam", "rtsp://...@cam"),
        ("rtsp://cam:554/live/2", "rtsp://cam:554/live/2"),
        ("rtsp://[fe80::1]:554/live@2", "rtsp://[fe80::1]:554/live@2"),
        ("http://cam/v?channel=0&user=admin&password=secret", "http://cam/v?channel=0&user=...&password=..."),
        ("http://cam/v?access_token=a_b=/c==#x", "http://cam/v?access_token=...#x"),
        (
            "rtsp://dvr:554/user=me_password=a_b_channel=2_stream=0.sdp",
            "rtsp://dvr:554/user=..._password=..._channel=2_stream=0.sdp",
        ),
        ("rtsp://dvr/user=me&password=a&channel=2", "rtsp://dvr/user=...&password=...&channel=2"),
        ("/dev/video0", "/dev/video0"),
    ],
)
def test_passwords_are_not_shown(address, shown):
    assert without_secrets(address) == shown == live_source(address).path


@pytest.mark.parametrize("secret", ["pa/ss", "pa?ss", "pa#ss", "1/pa2", "pa/s:s@x"])
def test_a_password_that_ends_the_host_is_refused(secret):
    """It would be shown, and FFmpeg would look for another host. Percent-encoded it is a password."""
    address = f"rtsp://admin:{secret}@10.0.0.5:554/live"
    with pytest.raises(ImageError, match="write them as %2F, %3F and %23") as error:
        live_source(address)
    assert "10.0.0.5:554/live" in str(error.value) and "pa" not in str(error.value).replace("password", "")
    assert live_source(f"rtsp://admin:{quote(secret, safe='')}@cam/live").path == "rtsp://cam/live"


@pytest.mark.parametrize(
    "address", ["rtsp://[::1]:554/live@2", "rtsp://cam:554/a:b@2", "rtsp://cam:/live@2", "rtsp://me:pw@cam/live@2"]
)
def test_addresses_with_an_at_sign_in_the_path(address):
    assert live_source(address).kind == "network"


@pytest.mark.parametrize(
    "at", ["rtsp://cam/a\r\nX-Evil: 1", "http://cam\0/a", "rtsp://cam/\x1b[31m", "rtsp://u\n@cam/a b", "udp://c\x7f"]
)
def test_characters_that_are_no_part_of_an_address(at):
    with pytest.raises(ImageError, match="has the character .* write it as %") as refused:
        live_source(at)
    assert "\r" not in str(refused.value) and "\x1b" not in str(refused.value) and "\0" not in str(refused.value)


@contextlib.contextmanager
def pages(contents):
    """The address of a web server with these pages."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = contents.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_what_a_camera_sends_opens_nothing_else(tmp_path):
    """Only a playlist of its own: no file of this machine, no list of files, no description of other hosts."""
    with video_writer(tmp_path / "clip.mp4", fps=25, size=(48, 64)) as write:
        for _ in range(5):
            write(np.zeros((48, 64, 3), np.uint8))
    playlist = "#EXTM3U\n#EXT-X-VERSION:7\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n"
    with pages(
        {
            "/clip.mp4": (tmp_path / "clip.mp4").read_bytes(),
            "/own.m3u8": playlist.format("clip.mp4").encode(),
            "/file.m3u8": playlist.format(f"file://{tmp_path}/clip.mp4").encode(),
            "/path.m3u8": playlist.format(f"{tmp_path}/clip.mp4").encode(),
            "/concat": b"ffconcat version 1.0\nfile clip.mp4\n",
            "/sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
        }
    ) as address:
        for name in ("own.m3u8", "file.m3u8", "path.m3u8", "concat", "sdp"):
            try:
                count = len(list(live_frames(live_source(f"{address}/{name}"), timeout_s=5)))
            except ImageError as refused:
                assert "cannot be opened" in str(refused) and name != "own.m3u8", refused
            else:
                assert name == "own.m3u8" and count == 5


def test_lag_of_packets():
    lag = _Lag()
    assert [lag.after(100 + i / 10, 5 + i / 10) for i in range(5)] == pytest.approx([0] * 5, abs=1e-3)
    assert lag.after(102.5, 5.5) == pytest.approx(2, abs=1e-2), "read two seconds late"
    assert lag.after(102.5, 7.5) == pytest.approx(0, abs=1e-2), "caught up"
    assert lag.after(102.6, 1000.0) == 0 and lag.after(102.7, 1000.1) == pytest.approx(0, abs=1e-3), "the clock was set"
    assert lag.after(102.8, 3.0) == 0 and lag.after(103.8, 3.5) == pytest.approx(0.5, abs=1e-2), "and set back"
    assert lag.after(104, None) == 0
    slow = _Lag()  # a camera whose clock loses 0.05 %, which a day later is no delay
    assert max(slow.after(t * 1.0005, t) for t in range(0, 86400, 5)) < 0.1


def test_time_stamps_that_fall_behind_the_clock():
    """Nothing waits to be read, so that skipping packets cannot make the lag smaller."""
    for speed in (0.1, 0.5):
        lag = _Lag()
        late = [lag.after(t, t * speed) for t in range(4)]
        assert late[-1] == pytest.approx(3 * (1 - speed), abs=0.01)
        assert lag.after(5, 5 * speed) > late[-1] and lag.after_skipping(3, late[-1]) == 0
        assert lag.after(6, 6 * speed) == pytest.approx(0, abs=0.01)
        for t in range(7, 3600):
            lag.after(t, t * speed)
        assert lag.after(3600, 3600 * speed) < 0.1
    lag = _Lag()
    lag.after(0, 0), lag.after(3, 0.1)
    assert lag.after(3.5, 0.6) == pytest.approx(2.9, abs=0.01) and lag.after_skipping(3, 2.9) == 0, "a pause of the sender"
    lag = _Lag()
    lag.after(0, 0), lag.after(3, 0.1)
    assert lag.after(3.01, 1.1) == pytest.approx(1.9, abs=0.01)
    assert lag.after_skipping(3, 2.9) == pytest.approx(1.9, abs=0.01), "packets that waited"


def test_a_camera_that_pauses_without_its_clock():
    """Its time stamps count frames, so that all frames after the pause seem late."""
    with cameras([{"frames": 30}, {"sleep": 1.5}, {"frames": 60}], fps=40) as (address,):
        decoded = [
            read_number(frame.convert())[1]
            for frame in live_frames(live_source(address), timeout_s=ONCE.timeout_s, max_lag_s=0.4)
            if frame.convert is not None
        ]
    assert decoded == sorted(decoded) and decoded[-1] > 45


def test_every_frame_is_counted_and_belongs_to_its_camera():
    with cameras([{"frames": 40}], fps=20, count=3) as addresses, LiveStreams(sources(addresses), ONCE) as streams:
        seen, lost = watch(streams, work_s=0.12, most=2)  # slower than three cameras send
        counts = streams.counts
    assert [counts[source].received for source in sources(addresses)] == [40] * 3
    for camera, source in enumerate(sources(addresses)):
        mine = [frame for frame in seen if frame.source == source]
        one = counts[source]
        assert one.processed == len(mine) >= 2 and one.dropped > 0 and one.damaged == 0
        assert one.received == one.processed + one.dropped
        numbers = [read_number(frame.image) for frame in mine]
        assert numbers == [(camera, frame.index) for frame in mine]
        assert [index for _, index in numbers] == sorted({index for _, index in numbers})
        # Two of three share a batch: none waits longer than one batch and the time between its frames. In a queue it would be 5 s.
        assert max(one.latencies_s) < 3.0
        np.testing.assert_allclose([frame.time_s for frame in mine], [frame.index / 20 for frame in mine], atol=0.02)
    assert {str(error).split("'")[1] for _, error in lost} == set(addresses), "each has ended, and none came back"


def test_a_camera_that_stalls_comes_back():
    """It is lost after two seconds without data, and connected again; frames and times go on."""
    steps = [{"frames": 10}, {"sleep": 30}], [{"frames": 10}]
    config = StreamConfig(timeout_s=2.0, reconnect_s=3.0)
    with cameras(*steps, fps=20) as addresses, LiveStreams(sources(addresses), config) as streams:
        seen, lost = watch(streams)
        (counts,) = streams.counts.values()
    assert counts.connections == 2 and len(lost) == 1
    numbers = [read_number(frame.image)[1] for frame in seen]
    assert numbers == sorted(numbers) and numbers[-1] == 19 and numbers[0] < 10
    times = [frame.time_s for frame in seen]
    assert times == sorted(times)
    first, after = (next(f for f in seen if read_number(f.image)[1] >= n) for n in (0, 10))
    # By the clock of this machine, three seconds or more; by time stamps it would be less than one. A first frame may be read late.
    assert after.time_s - first.time_s == pytest.approx(after.arrived_s - first.arrived_s, abs=0.8)
    assert after.wall_time == pytest.approx(time.time(), abs=30)


def test_a_camera_that_is_lost_does_not_stop_the_others():
    with (
        cameras([{"frames": 5}], fps=20) as (short,),
        cameras([{"frames": 50}], fps=20) as (long,),
        LiveStreams(sources([short, long]), ONCE) as streams,
    ):
        seen, lost = watch(streams)
    assert [source.address for source, _ in lost] == [short, long]
    assert seen[-1].source.address == long and seen[-1].index >= 45


def test_frames_that_change_their_size():
    steps = [{"frames": 15}, {"frames": 15, "size": [160, 256]}, {"frames": 15, "size": [96, 128]}]
    with cameras(steps, fps=20) as addresses, LiveStreams(sources(addresses), ONCE) as streams:
        seen, _ = watch(streams)
    shapes = [frame.image.shape[:2] for frame in seen]
    assert list(dict.fromkeys(shapes)) == [(96, 128), (160, 256)] and shapes[-1] == (96, 128)
    assert all(read_number(frame.image)[1] == frame.index for frame in seen)


def test_a_decoder_that_is_late_goes_on_with_a_key_frame():
    """Frames are read at a third of the speed at which they come: what is decoded stays recent, and what is not is counted."""
    with cameras([{"frames": 120}], fps=40) as (address,):
        decoded, skipped, behind = [], 0, []
        started, begun = None, time.monotonic()
        for frame in live_frames(live_source(address), timeout_s=ONCE.timeout_s, max_lag_s=0.4):
            if frame.convert is None:
                assert not frame.damaged
                skipped += 1
                continue
            time.sleep(3 / 40)
            number = read_number(frame.convert())[1]
            started = time.monotonic() - number / 40 if started is None else started
            behind.append(time.monotonic() - started - number / 40)
            decoded.append(number)
    assert skipped and len(decoded) + skipped == 120
    assert skipped > 30 or time.monotonic() - begun > 5  # a busy machine sends late, and fewer frames too many
    assert decoded == sorted(decoded)
    # The limit and the frames up to the next key frame are 0.65 s; a decoder that skips nothing ends 6 s behind.
    assert max(behind) < 3.0


def test_a_file_is_read_at_its_own_speed(tmp_path):
    path = tmp_path / "clip.mp4"
    with video_writer(path, fps=20, size=(64, 64)) as write:
        for level in range(20):
            write(np.full((64, 64, 3), 10 * level, np.uint8))
    started = time.monotonic()
    with LiveStreams([live_source(str(path), files=True)]) as streams:
        seen, lost = watch(streams)
        (counts,) = streams.counts.values()
    assert time.monotonic() - started > 0.7 and not lost
    assert counts.received == 20 == counts.processed + counts.dropped and seen[-1].index == 19


def test_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
        with (
            pytest.raises(ImageError, match="did not answer|sent nothing"),
            LiveStreams(sources([f"tcp://127.0.0.1:{port}"]), StreamConfig(timeout_s=0.5, reconnect_s=0)),
        ):
            pass
    address = f"rtsp://me:secret@127.0.0.1:{free_port()}/live"
    with pytest.raises(ImageError, match="Connection refused.*check the address") as error, LiveStreams(sources([address])):
        pass
    assert "secret" not in str(error.value)
    with pytest.raises(ImageError, match="no camera '/dev/video99'"), LiveStreams(sources(["/dev/video99"])):
        pass


def test_a_capture_device_through_opencv(tmp_path, monkeypatch):
    """PyAV's wheels read no devices; OpenCV does, which here reads a file."""
    pytest.importorskip("cv2", reason="OpenCV is not installed")
    import av

    path = tmp_path / "video.avi"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for _ in range(5):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((48, 64, 3), (200, 40, 10), np.uint8), "rgb24")))
        container.mux(stream.encode())
    monkeypatch.setattr("detrt.data.live._DEVICE", re.compile(r".*\.avi"))
    monkeypatch.setattr(av, "formats_available", set())
    source = live_source(str(path))
    images = []
    with pytest.raises(ImageError, match="was lost"):
        for frame in live_frames(source, timeout_s=1):
            images.append(frame.convert())
    assert source.kind == "device" and [image.shape for image in images] == [(48, 64, 3)] * 5
    assert np.abs(images[0].astype(int).mean((0, 1)) - (200, 40, 10)).max() < 6, "OpenCV's BGR as RGB"


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"timeout_s": float("nan")}, {"reconnect_s": -1}, {"transport": "tls"}])
def test_bad_options(options):
    with pytest.raises(DetrtError, match=f"got {next(iter(options.values()))!r}"):
        StreamConfig(**options)

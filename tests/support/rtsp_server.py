"""A real RTSP server, GStreamer's. As a program, by Debian's Python: plays a video file to every client."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PYTHON = "/usr/bin/python3"  # which has Debian's packages
NEEDED = "gir1.2-gst-rtsp-server-1.0 gstreamer1.0-plugins-base gstreamer1.0-plugins-good python3-gi"


@contextlib.contextmanager
def rtsp_server(video: Path, login: str = "") -> Iterator[str]:
    """The address of a server; skips the test where there is none. login: "user:password" that it asks for."""
    import pytest  # which Debian's Python has not

    try:
        process = subprocess.Popen(
            [PYTHON, __file__, str(video), login], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError:
        pytest.skip(f"there is no {PYTHON}, which runs the RTSP server")
    try:
        port = process.stdout.readline().strip()
        if not port:
            reason = process.stderr.read().strip().splitlines()[-1:]
            pytest.skip(f"the RTSP server does not start ({''.join(reason)}); it needs: apt install {NEEDED}")
        yield f"rtsp://127.0.0.1:{port}/live"
    finally:
        process.kill()
        process.communicate()


def main(video: str, login: str) -> None:
    import gi

    gi.require_version("Gst", "1.0")
    gi.require_version("GstRtspServer", "1.0")
    from gi.repository import GLib, Gst, GstRtspServer

    Gst.init(None)
    server = GstRtspServer.RTSPServer(address="127.0.0.1", service="0")
    factory = GstRtspServer.RTSPMediaFactory()
    factory.set_launch(f'( filesrc location="{video}" ! qtdemux ! h264parse config-interval=-1 ! rtph264pay name=pay0 pt=96 )')
    if login:
        user, _, password = login.partition(":")
        auth, token = GstRtspServer.RTSPAuth(), GstRtspServer.RTSPToken()
        token.set_string("media.factory.role", "viewer")
        auth.add_basic(GstRtspServer.RTSPAuth.make_basic(user, password), token)
        server.set_auth(auth)
        role = Gst.Structure.new_empty("viewer")
        role.set_value("media.factory.access", True)
        role.set_value("media.factory.construct", True)
        factory.add_role_from_structure(role)
    server.get_mount_points().add_factory("/live", factory)
    server.attach(None)
    print(server.get_bound_port(), flush=True)
    GLib.MainLoop().run()


if __name__ == "__main__":
    main(*sys.argv[1:])

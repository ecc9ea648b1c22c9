"""A web server with the files of a folder, and with answers that a client must not trust."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path


class Handler(http.server.SimpleHTTPRequestHandler):
    """/endless sends for ever, /slow a byte now and then, /drip a header without end, /elsewhere leads to a file of the machine, /circle to
    itself, /short has less than it announces, /odd answers what is no HTTP."""

    def do_GET(self):
        if self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b"x" * 65536)
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(1000):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    time.sleep(0.05)
        elif self.path == "/drip":
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Long: ")
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.05)
        elif self.path in ("/elsewhere", "/circle"):
            self.send_response(302)
            self.send_header("Location", "file:///etc/hostname?token=s3cret" if self.path == "/elsewhere" else "/circle")
            self.end_headers()
        elif self.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"x" * 60)
        elif self.path == "/odd":
            self.wfile.write(b"\x1b[2Jhello\r\n\r\n")
        else:
            super().do_GET()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def web(folder: Path) -> Iterator[str]:
    """The address of a running server."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()  # it looks so often whether it is to end
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()

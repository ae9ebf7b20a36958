"""A reward server for tests: it scores an image by its mean, and fails as told."""

from __future__ import annotations

import base64
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image


class Server(ThreadingHTTPServer):
    """An HTTP server that scores an image by its mean.

    ``answers`` are given first, one per request: a status, or a kind of failure; "slow" takes
    ``slow_s``.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[int | str | bytes] = []
        self.requests: list[dict] = []
        self.slow_s = 0.6
        self.location = ""  # the target of redirects
        self.seen = self.sent = 0  # the number of all requests; the bytes of endless answers

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.seen += 1
        self.send_error(405)

    def stream(self, answer: str) -> None:
        """Send an endless answer until the client closes the connection."""
        piece = b" " if answer == "drip" else b" " * 2**16
        with suppress(OSError):
            while self.server.sent < 2**30:
                self.wfile.write(piece)
                self.wfile.flush()
                self.server.sent += len(piece)
                if answer == "drip":
                    time.sleep(0.05)

    def do_POST(self) -> None:
        self.server.seen += 1
        body = self.rfile.read(int(self.headers["Content-Length"]))
        recorded = self.read(body)
        self.server.requests.append(recorded)
        answer = self.server.answers.pop(0) if self.server.answers else 200
        if answer == "slow":
            time.sleep(self.server.slow_s)
            answer = 200
        if answer == "hang up":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        scores = json.dumps(
            {"scores": [float(image.mean()) for image in recorded["images"]]}
        ).encode()
        self.send_response(answer if isinstance(answer, int) else 200)
        if isinstance(answer, int) and 300 <= answer < 400:
            self.send_header("Location", self.server.location)
        self.end_headers()
        if answer in ("endless", "drip"):
            self.stream(answer)
            return
        self.wfile.write(answer if isinstance(answer, bytes) else scores)

    def read(self, body: bytes) -> dict:
        if self.headers["Content-Type"] == "application/json":
            recorded = json.loads(body)
            return recorded | {
                name: [pixels(text) for text in recorded[name]]
                for name in ("images", "sources")
                if name in recorded
            }
        arrays = np.load(io.BytesIO(body), allow_pickle=False)
        recorded = json.loads(arrays["request"].tobytes())
        return recorded | {name: list(arrays[name]) for name in arrays if name != "request"}

    def log_message(self, *_: object) -> None:
        pass


def pixels(text: str) -> np.ndarray:
    """Return the pixels of a PNG in base64, uint8 [3, H, W]."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))).transpose(2, 0, 1)


@contextmanager
def serving() -> Iterator[Server]:
    """Run a server in a thread of this process."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

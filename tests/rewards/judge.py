"""Fake endpoint of a vision-language model: it rates and ranks images by how red they are.

Tests can make it fail.
"""

from __future__ import annotations

import base64
import io
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

from rewards.endpoint import EDITED


class Judge(ThreadingHTTPServer):
    """An HTTP server whose first ``answers``, one per request, are given by the test.

    An answer is a status, (status, headers), "prose", the text of a message, or (text, reason of
    its end).
    """

    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock, self.under_way, self.most = threading.Lock(), 0, 0
        self.meet: threading.Barrier | None = None
        self.closing = threading.Event()
        self.drips = False  # True: answers are sent byte by byte, slowly

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Judge

    def do_GET(self) -> None:
        self.server.requests.append({})
        self.send_error(405)

    def do_POST(self) -> None:
        judge = self.server
        recorded = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with judge.lock:
            judge.requests.append(recorded)
            judge.keys.append(self.headers.get("Authorization"))
            judge.under_way += 1
            judge.most = max(judge.most, judge.under_way)
            answer = judge.answers.pop(0) if judge.answers else 200
        if judge.meet is not None:
            judge.meet.wait(5)
        with judge.lock:
            judge.under_way -= 1
        text, why = answer if isinstance(answer, tuple) else (answer, "stop")
        headers = why if isinstance(why, dict) else {}
        status = text if isinstance(text, int) else 200
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        made = completion(recorded, text if isinstance(text, str) else None)
        made["choices"][0]["finish_reason"] = why
        body = json.dumps(made).encode()
        with suppress(OSError):  # clients need not wait for the whole answer
            for start in range(0, len(body), size := 1 if judge.drips else len(body)):
                self.wfile.write(body[start : start + size])
                self.wfile.flush()
                if judge.drips:
                    judge.closing.wait(0.05)

    def log_message(self, *_: object) -> None:
        pass


def pixels(part: dict[str, Any]) -> np.ndarray:
    """Return the image of a message's part, uint8 [H, W, 3]."""
    data = base64.b64decode(part["image_url"]["url"].removeprefix("data:image/png;base64,"))
    return np.asarray(Image.open(io.BytesIO(data)))


def redness(recorded: dict[str, Any]) -> list[float]:
    """Return the mean of the red channel in [0, 1] of each image in a request, except the source
    image.
    """
    content = recorded["messages"][0]["content"]
    content = content[2:] if content[0].get("text") == EDITED[0] else content
    parts = [part for part in content if part["type"] == "image_url"]
    return [float(pixels(part)[..., 0].mean() / 255) for part in parts]


def completion(recorded: dict[str, Any], text: str | None) -> dict[str, Any]:
    """Return the answer about the images of a request.

    For one image: ratings 1 and 5 with probabilities whose mean rating is 1 + 4 x redness; as JSON
    or text that mean. For two: "1" and "2" with probabilities in proportion to redness; as JSON the
    ranking of all.
    """
    reds, asks_json = redness(recorded), "response_format" in recorded
    red, choice = reds[0] if len(reds) == 1 else reds[0] / (sum(reds[:2]) or 1.0), {}
    if recorded.get("logprobs"):
        first, second = ("5", " 1") if len(reds) == 1 else (" 1", "2")
        words = [(first, red * 0.9), (second, (1 - red) * 0.9), ("The", 0.1)]
        if text is not None:
            words = [(text, 0.9), ("3", 0.1)]
        top = [{"token": w, "logprob": math.log(p)} for w, p in words if p > 0]
        choice = {"logprobs": {"content": [{"token": top[0]["token"], "top_logprobs": top}]}}
    if text is not None:
        written = text
    elif len(reds) == 1:
        score = 1 + 4 * red + recorded["seed"] * 0.5
        written = json.dumps({"score": score}) if asks_json else f"Score: {score}"
    else:
        best_first = sorted(range(len(reds)), key=lambda row: -reds[row])
        written = json.dumps({"ranking": [row + 1 for row in best_first]})
    return {
        "choices": [{**choice, "message": {"role": "assistant", "content": written}}],
        "usage": {"prompt_tokens": 300, "completion_tokens": 2},
    }


@contextmanager
def judging() -> Iterator[Judge]:
    """Run a judge in a thread of this process."""
    judge = Judge()
    thread = threading.Thread(target=judge.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield judge
    finally:
        judge.closing.set()
        judge.shutdown()
        judge.server_close()
        thread.join()

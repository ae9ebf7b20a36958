"""Targets for addresses with a server that is no cluster: silent, closing or sending nonsense."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from tools.fuzz.inputs import json_values
from tools.fuzz.invariants import InvariantViolation, outcome
from tools.fuzz.target import Target

SUBMIT = ["submit", "quickstart", "--set", "run_root=/nowhere/there", "--follow"]
BY_URL = (
    SUBMIT,
    [*SUBMIT, "--resume"],
    ["status"],
    ["scale", "--rollout", "2"],
    ["doctor"],
    ["doctor", "quickstart", "--json"],
)
BY_HEAD = (
    ["status", "--run", "x"],
    ["scale", "--reward", "2"],
    ["doctor", "quickstart"],
    ["plan", "quickstart"],
    ["train", "quickstart"],  # by RAY_ADDRESS
)
JOB = {"job_id": "1", "submission_id": "s", "type": "SUBMISSION", "status": "RUNNING",
       "entrypoint": "python -m cluster train x", "runtime_env": {}}  # fmt: skip
ENDED = JOB | {"status": "FAILED", "driver_exit_code": 2}
USUAL: dict[str, Any] = {"version": "4", "ray_version": "2.0", "ray_commit": "x"}


@contextlib.contextmanager
def listening(answers: bytes | None) -> Iterator[int]:
    """Yield a port that accepts connections and sends ``answers``, or nothing if it is None."""
    connections: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connections.append(connection)
                    if answers is not None:
                        with contextlib.suppress(OSError):
                            connection.sendall(answers)
                            connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


@contextlib.contextmanager
def answering(status: int, body: bytes, honest: bool) -> Iterator[int]:
    """Yield the port of an HTTP server that always gives the same answer.

    If ``honest``, it answers requests for its version as Ray does.
    """

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            is_version = honest and self.path == "/api/version"
            self.send_response(200 if is_version else status)
            self.end_headers()
            self.wfile.write(json.dumps(USUAL).encode() if is_version else body)

        do_GET = do_POST = do_PUT = do_DELETE = reply

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def dashboard(folder: Path, example: tuple[list[str], int | None, bytes | None, bool]) -> None:
    """Run a command with the URL of such a server; it must not accept it as a cluster."""
    command, status, body, honest = example
    server = listening(body) if status is None else answering(status, body or b"", honest)
    with server as port:
        code, _ = outcome(*command, "--address", f"http://127.0.0.1:{port}", codes=(2, 3, 4))
    if code is None:
        raise InvariantViolation(f"{command} took {example} for a cluster")


def head(folder: Path, example: tuple[list[str], bytes | None]) -> None:
    """Run a command with host:port of such a server; it must refuse it before calling Ray."""
    command, answers = example
    with listening(answers) as port:
        address = f"127.0.0.1:{port}"
        train = command[0] == "train"
        with mock.patch.dict("os.environ", {"RAY_ADDRESS": address} if train else {}):
            if train:
                from cluster.driver import train as module
                from cluster.driver.connect import join_or_start_ray

                with mock.patch.object(module, "join_or_start_ray", join_or_start_ray):
                    outcome(*command, codes=(2,))
                return
            code, _ = outcome(*command, "--address", address, codes=(2,))
    if code is None:
        raise InvariantViolation(f"{command} took {example} for a cluster's head")


def targets() -> dict[str, Target]:
    """Return the targets for servers that are neither a dashboard nor a cluster's head."""
    rows = st.sampled_from([[JOB], [ENDED], JOB, ENDED]).map(lambda v: json.dumps(v).encode())
    body = rows | json_values.map(lambda v: json.dumps(v).encode()) | st.binary(max_size=40)
    http = st.tuples(
        st.sampled_from(BY_URL), st.sampled_from([200, 200, 404, 500]), body, st.booleans()
    )
    # answers that begin like an HTTP/2 server's are left to Ray
    silent = st.none() | st.binary(max_size=40).filter(lambda reply: reply[3:4] != b"\4")
    raw = st.tuples(st.sampled_from(BY_URL), st.none(), silent, st.just(False))
    return {
        "dashboards": Target(http | http | raw, dashboard, cost=30),
        "heads": Target(st.tuples(st.sampled_from(BY_HEAD), silent), head, cost=30),
    }

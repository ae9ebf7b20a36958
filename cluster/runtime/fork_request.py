"""A launcher's request for an actor process.

The template reads and answers it; a fork of the template becomes the requested process
(``cluster.runtime.launcher``, ``cluster.runtime.template``).
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import socket
import sys
from dataclasses import dataclass
from typing import Any

from cluster.runtime import launcher

PATIENCE_S = 10.0
"""Timeout for reading a request; a launcher sends it at once."""


@dataclass(frozen=True)
class ForkRequest:
    """A request for a process, with its standard streams and the connection for the answer."""

    request: dict[str, Any]
    files: list[int]
    connection: socket.socket

    def answer(self, text: str) -> None:
        """Send the answer; ignore a launcher that has exited."""
        with self.connection, contextlib.suppress(OSError):
            self.connection.sendall(text.encode())

    def close_files(self) -> None:
        """Close the standard streams that came with the request; only a fork needs them."""
        for file in self.files:
            os.close(file)

    def become(self) -> None:
        """Turn this process into the one that Ray started: environment, files, program."""
        os.setpgrp()  # Ray kills an actor together with its process group
        for target, file in enumerate(self.files):
            # the standard streams that Ray gave to the launcher, from which Ray reads the log
            os.dup2(file, target)
            os.close(file)
        os.environ.clear()
        os.environ.update(self.request["environment"])
        os.chdir(self.request["directory"])
        os.setpriority(os.PRIO_PROCESS, 0, self.request["niceness"])
        with contextlib.suppress(OSError):  # not Linux, or no permission
            launcher.OOM_SCORE.write_text(self.request["oom_score"])
        sys.argv[:] = self.request["arguments"]
        runpy.run_path(sys.argv[0], run_name="__main__")


def accept(listener: socket.socket) -> ForkRequest | None:
    """Return the next request, or None if its launcher did not send all of it.

    Ray kills launchers that it no longer needs; this must not end the template.
    """
    connection, _ = listener.accept()
    connection.settimeout(PATIENCE_S)
    files: list[int] = []
    try:
        head, files, _, _ = socket.recv_fds(connection, launcher.LENGTH, 3)
        size, body = int.from_bytes(head, "big"), b""
        while len(body) < size and (more := connection.recv(size - len(body))):
            body += more
        if len(head) == launcher.LENGTH and len(body) == size:
            return ForkRequest(json.loads(body), files, connection)
    except OSError:
        pass  # the launcher was killed or sends nothing
    connection.close()
    for file in files:
        os.close(file)
    return None

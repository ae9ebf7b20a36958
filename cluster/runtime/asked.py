"""A launcher's request for a process, as the template reads and answers it, and as a fork of the
template becomes it (``cluster.runtime.launcher``, ``cluster.runtime.template``).
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
"""How long a launcher may take to send its request, which it does in one go."""


@dataclass(frozen=True)
class Asked:
    """The process that is asked for, its standard streams, and where the answer goes."""

    request: dict[str, Any]
    files: list[int]
    connection: socket.socket

    def answer(self, text: str) -> None:
        """Send it, where the launcher is still there."""
        with self.connection, contextlib.suppress(OSError):
            self.connection.sendall(text.encode())

    def close_files(self) -> None:
        """The streams are a fork's, or nobody's."""
        for file in self.files:
            os.close(file)

    def become(self) -> None:
        """This process is from now on the one that Ray started: environment, files, program."""
        os.setpgrp()  # Ray ends an actor with its whole process group
        for target, file in enumerate(self.files):
            # the standard streams of the process in whose place it is: Ray reads its log there
            os.dup2(file, target)
            os.close(file)
        os.environ.clear()
        os.environ.update(self.request["environment"])
        os.chdir(self.request["directory"])
        os.setpriority(os.PRIO_PROCESS, 0, self.request["niceness"])
        with contextlib.suppress(OSError):  # no Linux, or no right to
            launcher.OOM_SCORE.write_text(self.request["oom_score"])
        sys.argv[:] = self.request["arguments"]
        runpy.run_path(sys.argv[0], run_name="__main__")


def accept(listener: socket.socket) -> Asked | None:
    """The next request. None where its launcher did not send all of it: Ray kills those that it no
    longer needs, and the template is there for all the others.
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
            return Asked(json.loads(body), files, connection)
    except OSError:
        pass  # it was killed, or is silent
    connection.close()
    for file in files:
        os.close(file)
    return None

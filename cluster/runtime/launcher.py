"""The program that Ray starts in Python's place: it has the template fork the actor's process.

It runs without site packages, as it is there for a moment only: the standard library alone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

SOCKET = "SOL_RL_TEMPLATE"
"""Environment variable that says where the template listens."""
OOM_SCORE = Path("/proc/self/oom_score_adj")
LENGTH = 4  # bytes in front of a request


def main() -> None:
    """Have the template fork; without one be an ordinary Python process."""
    oom_score = OOM_SCORE.read_text() if OOM_SCORE.exists() else "0"
    request = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "oom_score": oom_score.strip(),
    }
    try:
        answer = os.environ[SOCKET]
        while answer.startswith("/"):  # who forks; then the process that was forked
            answer = _asked(answer, request)
        if answer:
            return
        why = "it ended, or has another Ray"
    except OSError as error:
        why = str(error)
    print(f"no fork from {os.environ[SOCKET]}: {why}; importing anew", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


def _asked(path: str, request: dict[str, Any]) -> str:
    """The answer to ``request``, sent with the standard streams; nothing where who listens ends.
    Raises OSError where nobody does.
    """
    body = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [len(body).to_bytes(LENGTH, "big")], [0, 1, 2])
        connection.sendall(body)
        return connection.recv(4096).decode()


if __name__ == "__main__":
    main()

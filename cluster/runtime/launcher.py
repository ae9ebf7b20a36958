"""The program that Ray starts instead of Python: it asks the template to fork the actor's process.

It uses the standard library alone and runs without site packages, because it must start quickly.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

SOCKET = "SOL_RL_TEMPLATE"
"""Environment variable with the path of the template's socket."""
OOM_SCORE = Path("/proc/self/oom_score_adj")
LENGTH = 4  # bytes of the length in front of a request


def main() -> None:
    """Have the template fork; without a template, become an ordinary Python process."""
    oom_score = OOM_SCORE.read_text(encoding="utf-8") if OOM_SCORE.exists() else "0"
    request = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "oom_score": oom_score.strip(),
    }
    try:
        answer = os.environ[SOCKET]
        while answer.startswith("/"):  # the socket of another template, until one answers a pid
            answer = _request(answer, request)
        if answer:
            return
        why = "it ended, or uses another version of Ray"
    except OSError as error:
        why = str(error)
    print(
        f"no fork from {os.environ[SOCKET]}: {why}; importing modules again",
        file=sys.stderr,
        flush=True,
    )
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


def _request(path: str, request: dict[str, Any]) -> str:
    """Send ``request`` with the standard streams to a socket; return the answer.

    The answer is empty if the template ends meanwhile. Raises OSError if nothing listens there.
    """
    body = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [len(body).to_bytes(LENGTH, "big")], [0, 1, 2])
        connection.sendall(body)
        return connection.recv(4096).decode()


if __name__ == "__main__":
    main()

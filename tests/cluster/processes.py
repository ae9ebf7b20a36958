"""Commands in processes of their own, as users start them, and how to wait for them and kill
them.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil


def start(*arguments: str, **pipes: Any) -> subprocess.Popen[str]:
    """Start ``sol-rl arguments`` on a Ray of its own, and return while it runs."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "cluster", *arguments]
    return subprocess.Popen(
        command, text=True, env={**environment, "RAY_USAGE_STATS_ENABLED": "0"}, **pipes
    )


def finish(process: subprocess.Popen[str], seconds: float = 240.0) -> tuple[int, str, str]:
    """Return (exit code, stdout, stderr) of a process with pipes; kill it and its children after
    ``seconds``.
    """
    try:
        out, errors = process.communicate(timeout=seconds)
    finally:
        kill_tree(process)
    return process.returncode, out, errors


def wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 240.0
) -> None:
    """Poll until ``ready``; fail if the process ends first, or after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)


@contextmanager
def meanwhile(*steps: tuple[Callable[[], bool], Callable[[], None]]) -> Iterator[None]:
    """Take one step after another in a thread: act when the step's condition holds.

    It sends signals to a command that runs in this process, in the main thread.
    """
    over = threading.Event()

    def take() -> None:
        for ready, act in steps:
            while not ready():
                if over.wait(0.02):
                    return
            act()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


def kill_tree(process: subprocess.Popen[str]) -> None:
    """Send SIGKILL to a process and its descendants; do nothing if it has ended."""
    if process.poll() is not None:
        return
    parent = psutil.Process(process.pid)
    for each in [parent, *parent.children(recursive=True)]:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(10)

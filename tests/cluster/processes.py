"""Commands as a user starts them, in processes of their own, and how they are waited for and
killed.
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
    """``sol-rl arguments`` on a Ray of its own; it is going when this returns."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "cluster", *arguments]
    return subprocess.Popen(
        command, text=True, env={**environment, "RAY_USAGE_STATS_ENABLED": "0"}, **pipes
    )


def finish(process: subprocess.Popen[str], seconds: float = 240.0) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a process with pipes; whatever it started dies with it when it
    takes too long.
    """
    try:
        out, errors = process.communicate(timeout=seconds)
    finally:
        kill_tree(process)
    return process.returncode, out, errors


def wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 240.0
) -> None:
    """Poll until ``ready``; fails when the process ends first, or after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)


@contextmanager
def meanwhile(*steps: tuple[Callable[[], bool], Callable[[], None]]) -> Iterator[None]:
    """A thread that takes one step after the other: when its condition holds, it acts. For signals
    to a command that runs in this process, in the main thread.
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
    """SIGKILL to a process and everything it started; nothing when it has ended."""
    if process.poll() is not None:
        return
    parent = psutil.Process(process.pid)
    for each in [parent, *parent.children(recursive=True)]:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(10)

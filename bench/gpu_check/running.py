"""Runs sections one after the other, each in a process of its own and within its share of the time.

Processes come from a fork server that has imported torch and has not touched CUDA: they start at
once, and an error that spoils a CUDA context ends with its process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from bench.gpu_check.findings import Outcome, from_tree
from records.errors import described

GRACE_S = 10.0
"""How long a section may go on after its time: what it measures last may end."""
DONE = b"null"


def run(names: Sequence[str], gpu: bool, seconds: float) -> Iterator[Outcome]:
    """The sections' outcomes as they come. A section's limit is its share of what is left, so what
    one does not use is there for those after it.
    """
    from bench.gpu_check.sections import SECTIONS

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.gpu_check.sections"])
    end = time.monotonic() + seconds
    for at, name in enumerate(names):
        left = end - time.monotonic()
        shares = [SECTIONS[other].share for other in names[at:]]
        limit = left * shares[0] / sum(shares)
        if limit < 1.0:
            yield Outcome(name, "cut short", "no time was left for it")
            continue
        yield _one(context, name, gpu, limit)


def _one(context: Any, name: str, gpu: bool, limit: float) -> Outcome:
    start = time.monotonic()
    until = start + limit
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_section, args=(name, gpu, until, theirs))
    process.start()
    theirs.close()
    outcome = Outcome(name)
    try:
        _collect(mine, outcome, until + GRACE_S)
    except EOFError:
        process.join(GRACE_S)
        outcome.state, outcome.why = "failed", f"its process ended with code {process.exitcode}"
    except TimeoutError:
        outcome.state = "cut short"
        outcome.why = f"it had not ended after {time.monotonic() - start:.0f} s"
    if process.is_alive():
        process.join(0.0 if outcome.state == "cut short" else GRACE_S)
        process.kill()
        process.join()
    if outcome.state == "done" and not outcome.findings:
        outcome.state = "not checkable here"
    outcome.seconds = time.monotonic() - start
    return outcome


def _collect(source: Connection, outcome: Outcome, deadline: float) -> None:
    """Raises EOFError when the process is gone, TimeoutError at the deadline."""
    while True:
        if not source.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        message = source.recv_bytes()
        if message == DONE:
            return
        tree = json.loads(message)
        if "error" in tree:
            outcome.state, outcome.why = "failed", tree["error"]
            return
        outcome.add(from_tree(tree))


def _section(name: str, gpu: bool, until: float, to: Connection) -> None:
    """What the process of a section does."""
    from bench.gpu_check.sections import SECTIONS
    from bench.gpu_check.setting import Setting
    from policy.device import allow_tf32

    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    setting = Setting(gpu, until)
    allow_tf32(setting.device, True)  # as actors do
    try:
        for item in SECTIONS[name].measure(setting):
            to.send_bytes(json.dumps(asdict(item)).encode())
    except Exception as error:
        to.send_bytes(json.dumps({"error": line_of(error)}).encode())
        return
    to.send_bytes(DONE)


def line_of(error: BaseException) -> str:
    """An error in one line, with where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.relpath(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{described(error)}{where}"

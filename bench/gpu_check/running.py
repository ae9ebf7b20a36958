"""Run sections one after the other, each in its own process and within its share of the time.

Processes are forked from a fork server that has imported torch but not initialized CUDA: they start
fast, and an error that breaks a CUDA context affects its process only.
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
from records.errors import error_summary

GRACE_S = 10.0
"""Seconds that a section may exceed its limit by, to finish its last measurement."""
DONE = b"null"


def run(names: Sequence[str], gpu: bool, seconds: float) -> Iterator[Outcome]:
    """Run sections, and yield their outcomes.

    A section's time limit is its share of the remaining time, so time that one does not use is
    available to those after it.
    """
    from bench.gpu_check.sections import SECTIONS

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.gpu_check.sections"])
    end = time.monotonic() + seconds
    for index, name in enumerate(names):
        left = end - time.monotonic()
        shares = [SECTIONS[other].share for other in names[index:]]
        limit = left * shares[0] / sum(shares)
        if limit < 1.0:
            yield Outcome(name, "cut short", "no time was left")
            continue
        yield _one(context, name, gpu, limit)


def _one(context: Any, name: str, gpu: bool, limit: float) -> Outcome:
    """Run a section in its own process for at most ``limit`` seconds plus a grace period."""
    start = time.monotonic()
    until = start + limit
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_section, args=(name, gpu, until, sender))
    process.start()
    # without this process's copy of the sender, the receiver gets EOF if the section's process dies
    sender.close()
    outcome = Outcome(name)
    try:
        _collect(receiver, outcome, until + GRACE_S)
    except EOFError:
        process.join(GRACE_S)
        outcome.state, outcome.why = "failed", f"its process ended with code {process.exitcode}"
    except TimeoutError:
        outcome.state = "cut short"
        outcome.why = f"it did not end within {time.monotonic() - start:.0f} s"
    if process.is_alive():
        process.join(0.0 if outcome.state == "cut short" else GRACE_S)
        process.kill()
        process.join()
    if outcome.state == "done" and not outcome.findings:
        outcome.state = "not checkable here"
    outcome.seconds = time.monotonic() - start
    return outcome


def _collect(source: Connection, outcome: Outcome, deadline: float) -> None:
    """Add the items that a section sends to ``outcome`` until it is done or failed.

    Raises EOFError if its process has died, TimeoutError at the deadline.
    """
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
    """Run a section and send its items; the main function of its process."""
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
    """Return an error in one line, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.relpath(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{error_summary(error)}{where}"

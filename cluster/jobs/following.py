"""Following a job from outside: its log until it has ended, over connections that break."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PAUSE_S, SILENCE_S, PATIENCE_S = 5.0, 120.0, 300.0
"""Of a log that is followed: before it is asked for again; how long it may say nothing until the
job's status is asked for; how long the dashboard may answer nothing until it is given up.
"""
OUT_OF_SIGHT = 4
"""Exit code: the dashboard answers no more, and what became of the job is not known."""
ENDED = ("SUCCEEDED", "STOPPED", "FAILED")


class Log:
    """Shows a log once, however often it is read from its beginning. ``fresh``: something was shown
    since this was last set False.
    """

    def __init__(self, show: Callable[[str], None]):
        self._show, self._shown, self._read, self.fresh = show, 0, 0, True

    def again(self) -> None:
        """It is read from its beginning."""
        self._read = 0

    def take(self, text: str) -> None:
        """The next part that was read."""
        new = text[max(0, self._shown - self._read) :]
        self._read += len(text)
        if new:
            self._shown, self.fresh = self._read, True
            self._show(new)


def follow(client: Any, job: str, show: Callable[[str], None], say: Callable[[str], None]) -> int:
    """Show a job's log until the job has ended; its exit code as ``sol-rl train`` would have given
    it.

    A stream that breaks is taken up again. OUT_OF_SIGHT when the dashboard has answered nothing for
    PATIENCE_S. ``say`` is given what is not the job's own.
    """
    log, at, silent_since = Log(show), client.get_address(), None
    while True:
        log.again()
        broken, info = asyncio.run(_read(client, job, log)), None
        try:
            info = client.get_job_info(job)
        except troubles() as error:
            broken = said(error)
        if info is not None and str(info.status) in ENDED:
            if broken is not None:
                _read_rest(client, job, log)
            return _exit_code(info)
        now = time.monotonic()
        silent_since = None if info is not None else silent_since or now
        if silent_since is not None and now - silent_since >= PATIENCE_S:
            say(
                f"{at}: no answer for {now - silent_since:.0f} s ({broken}); the job may go on: ray"
                f" job logs --address {at} --follow {job}"
            )
            return OUT_OF_SIGHT
        if log.fresh and broken != QUIET:
            say(
                f"{at}: the log broke off ({broken or 'closed by the other side'}), the job goes on"
                " as far as is known; reconnecting"
            )
            log.fresh = False
        time.sleep(PAUSE_S)


QUIET = "quiet"


async def _read(client: Any, job: str, log: Log) -> str | None:
    """Read the log until its stream ends (None), breaks (why), or has brought nothing for SILENCE_S
    (QUIET).
    """
    stream = aiter(client.tail_job_logs(job))
    while True:
        try:
            text = await asyncio.wait_for(anext(stream), SILENCE_S)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            return QUIET
        except troubles() as error:
            return said(error)
        log.take(text)  # what goes wrong in showing is no matter of the connection


def _read_rest(client: Any, job: str, log: Log) -> None:
    """What a job that has ended said after its stream broke, where it can still be had."""
    try:
        text = client.get_job_logs(job)
    except troubles():
        return
    log.again()
    log.take(text)


def troubles() -> tuple[type[Exception], ...]:
    """What a connection that breaks, or a proxy that answers in place of the dashboard, may raise."""
    import aiohttp
    from ray.exceptions import RayError

    return (aiohttp.ClientError, RayError, OSError, RuntimeError, ValueError, KeyError, TypeError)


def _exit_code(info: Any) -> int:
    status = str(info.status)
    if status == "SUCCEEDED":
        return 0
    if status == "STOPPED":
        return 130
    return info.driver_exit_code if info.driver_exit_code in (2, 3, 130) else 3


def said(error: BaseException) -> str:
    """An error's first line, or its class where it says nothing."""
    line = next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
    return line if len(line) <= 200 else f"{line[:197]}..."

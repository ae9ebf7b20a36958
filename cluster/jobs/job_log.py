"""`sol-rl submit --follow`: show a job's log until the job ends, over connections that break."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from records.errors import first_line

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

PAUSE_S = 5.0
"""Before a log that broke off is asked for again."""
SILENCE_S = 120.0
"""A log that brings nothing for this long: the job's status is asked for."""
GIVE_UP_S = 300.0
"""A dashboard that does not answer for this long is given up."""
OUT_OF_SIGHT = 4
"""Exit code: the dashboard no longer answers, and what became of the job is unknown."""
ENDED = ("SUCCEEDED", "STOPPED", "FAILED")
QUIET = "quiet"
BEGUN = "Running entrypoint for job "
"""Begins the last line that Ray writes before those of the command."""


class Log:
    """Shows every part of a log once, however often the log is read from its beginning.

    ``fresh``: whether something was shown since this was last set to False.
    """

    def __init__(self, show: Callable[[str], None]):
        self._show, self._shown, self._read, self.fresh = show, 0, 0, True

    def again(self) -> None:
        """Begin to read it from its beginning."""
        self._read = 0

    def take(self, text: str) -> None:
        """The next part that was read."""
        new = text[max(0, self._shown - self._read) :]
        self._read += len(text)
        if new:
            self._shown, self.fresh = self._read, True
            self._show(new)


def follow(
    client: JobSubmissionClient, job: str, show: Callable[[str], None], say: Callable[[str], None]
) -> int:
    """Show a job's log until the job ends; returns the exit code that `sol-rl train` ended with.

    A stream that breaks is resumed. OUT_OF_SIGHT when the dashboard has not answered for
    ``GIVE_UP_S``. ``say`` takes the lines that are not the job's own.
    """
    log, at, silent_since = Log(show), client.get_address(), None
    while True:
        log.again()
        broken, info = asyncio.run(_read(client, job, log)), None
        try:
            info = client.get_job_info(job)
        except connection_errors() as error:
            broken = short_line(error)
        if info is not None and str(info.status) in ENDED:
            if broken is not None:
                _read_rest(client, job, log)
            return _exit_code(info)
        now = time.monotonic()
        silent_since = None if info is not None else silent_since or now
        if silent_since is not None and now - silent_since >= GIVE_UP_S:
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


def output_of(
    client: JobSubmissionClient, job: str, show: Callable[[str], None], say: Callable[[str], None]
) -> int:
    """``follow``, without the lines that Ray writes before the command's own."""
    held: str | None = ""

    def own(text: str) -> None:
        nonlocal held
        if held is None:
            return show(text)
        held += text
        _, begun, rest = held.partition(BEGUN)
        if begun and "\n" in rest:
            held = None
            own(rest.partition("\n")[2])

    code = follow(client, job, own, say)
    if held:  # it did not come to the command
        show(held)
    return code


async def _read(client: JobSubmissionClient, job: str, log: Log) -> str | None:
    """Read until the stream ends (None), breaks (why), or is silent for SILENCE_S (QUIET)."""
    stream = aiter(client.tail_job_logs(job))
    while True:
        try:
            text = await asyncio.wait_for(anext(stream), SILENCE_S)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            return QUIET
        except connection_errors() as error:
            return short_line(error)
        log.take(text)  # outside of `try`: an error in showing is none of the connection


def _read_rest(client: JobSubmissionClient, job: str, log: Log) -> None:
    """Show what an ended job wrote after its stream broke, where that can still be read."""
    try:
        text = client.get_job_logs(job)
    except connection_errors():
        return
    log.again()
    log.take(text)


def connection_errors() -> tuple[type[Exception], ...]:
    """What Ray's job client raises for a broken connection, or a proxy's answer."""
    import aiohttp
    from ray.exceptions import RayError

    return (aiohttp.ClientError, RayError, OSError, RuntimeError, ValueError, KeyError, TypeError)


def _exit_code(info: JobDetails) -> int:
    status = str(info.status)
    if status == "SUCCEEDED":
        return 0
    if status == "STOPPED":
        return 130
    return info.driver_exit_code if info.driver_exit_code in (2, 3, 130) else 3


def short_line(error: BaseException) -> str:
    """An error's first line, cut to 200 characters."""
    line = first_line(error)
    return line if len(line) <= 200 else f"{line[:197]}..."

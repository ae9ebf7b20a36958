"""Follow a job's log until the job ends and reconnect if the stream breaks (`submit --follow`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from records.errors import first_line

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

PAUSE_S = 5.0
"""Pause before a broken log stream is requested again."""
SILENCE_S = 120.0
"""Check the job's status when its log stream has been silent for this long."""
GIVE_UP_S = 300.0
"""Stop following when the dashboard has not answered for this long."""
OUT_OF_SIGHT = 4
"""Exit code: the dashboard no longer answers, so the job's outcome is unknown."""
ENDED = ("SUCCEEDED", "STOPPED", "FAILED")
QUIET = "quiet"
"""Result of ``_read`` for a stream that was silent for ``SILENCE_S``."""
BEGUN = "Running entrypoint for job "
"""Start of the last line that Ray writes before the command's own output."""


class LogPrinter:
    """Shows every part of a log once, however often the log is read from its beginning.

    ``fresh`` is True if something was shown since it was last set to False.
    """

    def __init__(self, show: Callable[[str], None]):
        self._show, self._shown, self._read, self.fresh = show, 0, 0, True

    def rewind(self) -> None:
        """Start reading the log from its beginning again."""
        self._read = 0

    def take(self, text: str) -> None:
        """Take the next part of the log and show what was not shown before."""
        new = text[max(0, self._shown - self._read) :]
        self._read += len(text)
        if new:
            self._shown, self.fresh = self._read, True
            self._show(new)


def follow(
    client: JobSubmissionClient, job: str, show: Callable[[str], None], say: Callable[[str], None]
) -> int:
    """Show a job's log until the job ends; return the exit code of its `sol-rl train`.

    A stream that breaks is resumed. Returns OUT_OF_SIGHT if the dashboard has not answered for
    ``GIVE_UP_S``. ``say`` receives the lines that are not part of the job's log.
    """
    log, at, silent_since = LogPrinter(show), client.get_address(), None
    while True:
        log.rewind()
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
                f"{at}: no answer for {now - silent_since:.0f} s ({broken}); the job may still be"
                f" running: ray job logs --address {at} --follow {job}"
            )
            return OUT_OF_SIGHT
        if log.fresh and broken != QUIET:
            say(
                f"{at}: the log was interrupted ({broken or 'closed by the dashboard'}), the job"
                " is probably still running; reconnecting"
            )
            log.fresh = False
        time.sleep(PAUSE_S)


def follow_command_output(
    client: JobSubmissionClient, job: str, show: Callable[[str], None], say: Callable[[str], None]
) -> int:
    """Follow a job like ``follow``, but omit the lines that Ray writes before the command's own."""
    buffered: str | None = ""  # text before the command's own; None once that has started

    def show_own(text: str) -> None:
        nonlocal buffered
        if buffered is None:
            return show(text)
        buffered += text
        _, marker, rest = buffered.partition(BEGUN)
        if marker and "\n" in rest:
            buffered = None
            show_own(rest.partition("\n")[2])

    code = follow(client, job, show_own, say)
    if buffered:  # the job ended before the command started: Ray's lines say why
        show(buffered)
    return code


async def _read(client: JobSubmissionClient, job: str, log: LogPrinter) -> str | None:
    """Read the stream; return None if it ended, QUIET if it was silent, else why it broke."""
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
        log.take(text)  # outside of `try`: an error in `show` is not one of the connection


def _read_rest(client: JobSubmissionClient, job: str, log: LogPrinter) -> None:
    """Show what an ended job wrote after its stream broke, if the log can still be read."""
    try:
        text = client.get_job_logs(job)
    except connection_errors():
        return
    log.rewind()
    log.take(text)


def connection_errors() -> tuple[type[Exception], ...]:
    """Return what Ray's job client raises for broken connections and for answers of a proxy."""
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
    """Return an error's first line, cut to 200 characters."""
    line = first_line(error)
    return line if len(line) <= 200 else f"{line[:197]}..."

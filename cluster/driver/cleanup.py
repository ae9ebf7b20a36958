"""Cleanup at the end of a run: every step is carried out, even if others fail."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Callable, Sequence

from configs.load import ConfigError
from learner.checkpoint import CheckpointError
from records.errors import TRACEBACK_CHARACTERS, RunFailed, error_summary
from records.rundir import Event

EXPECTED = (RunFailed, ConfigError, CheckpointError)
"""Errors of Sol-RL's own, whose message says why and what to do."""
CleanupStep = tuple[str, Callable[[], object]]
"""A cleanup step: its description, and a function that does it or returns an awaitable."""


async def run_cleanup(
    ends: Sequence[CleanupStep], event: Event, note: Callable[[str], None]
) -> None:
    """Carry out all of ``ends``, one after the other.

    A failure is reported as an event and a note. It neither prevents the remaining steps nor hides
    the exception that ended the run.
    """
    for what, end in ends:
        try:
            result = end()
            if inspect.isawaitable(result):
                await result
        except Exception as error:
            with contextlib.suppress(OSError):
                event("end_failed", what=what, why=reason_of(error), **traceback_field(error))
            note(f"at the end of the run {what} failed: {reason_of(error)}")


def reason_of(error: Exception) -> str:
    """Return why something failed: the message of Sol-RL's own errors, else type and message."""
    if isinstance(error, EXPECTED):
        return str(error)
    return error_summary(error)


def traceback_field(error: Exception) -> dict[str, str]:
    """Return the field ``traceback`` of an event for an error that no code of Sol-RL expected.

    Errors that it raises itself explain themselves, unless they have such an error as their cause.
    """
    if isinstance(error, EXPECTED) and error.__cause__ is None:
        return {}
    return {"traceback": "".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS:]}

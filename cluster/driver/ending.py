"""The end of a run: all that it began is ended, whatever fails on the way."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence

from configs.load import ConfigError
from learner.checkpoint import CheckpointError
from records.errors import RunFailed, described
from records.rundir import Event

End = tuple[str, Callable[[], object]]
"""What is ended, in words, and how: a function, or one that returns something to wait for."""


async def end_all(ends: Sequence[End], event: Event, note: Callable[[str], None]) -> None:
    """Carry out all of ``ends``, one after the other. What fails is an event and a note: it neither
    keeps the rest from ending nor hides how the run itself ended.
    """
    for what, end in ends:
        try:
            ending = end()
            if inspect.isawaitable(ending):
                await ending
        except Exception as error:
            with contextlib.suppress(OSError):
                event("end_failed", what=what, why=reason_of(error))
            note(f"at the end of the run {what} failed: {reason_of(error)}")


def reason_of(error: Exception) -> str:
    """Why something failed. Our own errors say it themselves; others need their type."""
    if isinstance(error, RunFailed | ConfigError | CheckpointError):
        return str(error)
    return described(error)

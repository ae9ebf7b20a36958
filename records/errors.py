"""Exceptions of a run, and one-line descriptions of errors."""

from __future__ import annotations

RUN_FAILED = 3
"""Exit code of a command whose run failed."""
TRACEBACK_CHARACTERS = 8000
"""Number of characters of a recorded traceback, at most; the last ones are kept."""


class RunFailed(Exception):
    """The run cannot continue; the message says why and what to do. Exit code 3."""


class InputsLost(Exception):
    """Inputs of a task were lost with a node, and have to be computed again."""


class StateLost(Exception):
    """The learner died and lost its state; the run returns to the last checkpoint."""


class OutOfMemoryError(Exception):
    """A service ran out of GPU memory; a retry would fail in the same way."""


class Stopped(Exception):
    """A signal stopped the run; the message names the checkpoint. Exit code 130."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def joined_lines(error: BaseException) -> str:
    """Return an error's message on one line, or its type's name if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def error_summary(error: BaseException, most: int | None = None) -> str:
    """Return an error's type and the first line of its message, cut to ``most`` characters."""
    lines = str(error).strip().splitlines()[:1]
    return ": ".join([type(error).__name__, *(line[:most] for line in lines)])

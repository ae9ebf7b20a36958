"""How a run can fail, as exceptions, and how an error is said in a line."""

from __future__ import annotations


class RunFailed(Exception):
    """The run cannot go on; the message says why and what to do. Exit code 3."""


class InputsLost(Exception):
    """A task's inputs were lost with the node that held them, and are made again."""


class StateLost(Exception):
    """The learner died with what it learned since its checkpoint: the run goes back to that."""


class OutOfMemoryError(Exception):
    """A GPU has no memory for what a service does: trying again would end the same way."""


class Stopped(Exception):
    """A signal asked the run to stop; the message tells of a checkpoint. Exit code 130."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type's name where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def described(error: BaseException, most: int | None = None) -> str:
    """An error's type and the first line of its message, cut to ``most`` characters."""
    said = str(error).strip().splitlines()[:1]
    return ": ".join([type(error).__name__, *(line[:most] for line in said)])

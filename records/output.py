"""Output that nobody reads any more: a pipe whose reader has ended, a terminal that was closed."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable
from typing import IO, Any

UNREAD = select.POLLERR | select.POLLHUP | select.POLLNVAL
"""What ``poll`` says of such a descriptor."""


class Outliving:
    """A file that goes on when it cannot be written: ``closed`` is told why, once, and what comes
    later goes nowhere. For all else it is ``file``.
    """

    def __init__(self, file: IO[str], closed: Callable[[str], None]):
        self._file, self._closed = file, closed
        self._gone = False

    def write(self, text: str) -> int:
        """As of every file."""
        try:
            return self._file.write(text)
        except OSError as error:
            self._end(error)
            return len(text)

    def flush(self) -> None:
        """As of every file."""
        try:
            self._file.flush()
        except OSError as error:
            self._end(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _end(self, error: OSError) -> None:
        # what could not be written waits in the file's buffer, and has to go somewhere
        _to_nowhere(self._file.fileno())
        if not self._gone:
            self._gone = True
            with contextlib.suppress(OSError):  # the reason may be a full disk
                self._closed(error.strerror or str(error))


def drop_unread() -> bool:
    """Have what is still written to a standard stream that nobody reads go nowhere; whether there
    was one.
    """
    found = False
    for stream in (sys.stdout, sys.stderr):
        try:
            number = stream.fileno()
        except (OSError, ValueError, AttributeError):  # a test's, or none at all
            continue
        polled = select.poll()
        polled.register(number, 0)
        if any(what & UNREAD for _, what in polled.poll(0)):
            _to_nowhere(number)
            found = True
    return found


def _to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)

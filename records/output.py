"""Standard output that is closed, whose reader is gone, or whose encoding lacks a character.

The reader is gone if a pipe's reader ended or a terminal was closed.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Callable
from typing import IO, Any

BROKEN = select.POLLERR | select.POLLHUP | select.POLLNVAL
"""Events that ``poll`` reports for such a descriptor."""


class FaultTolerantStream:
    """Wrapper of ``file`` that survives write errors.

    After the first error ``closed`` is called with the reason, and later output is dropped.
    """

    def __init__(self, file: IO[str], closed: Callable[[str], None]):
        self._file, self._closed = file, closed
        self._gone = False

    def write(self, text: str) -> int:
        """Write ``text``, or drop it after an error."""
        try:
            return self._file.write(text)
        except OSError as error:
            self._end(error)
            return len(text)

    def flush(self) -> None:
        """Flush the file, or do nothing after an error."""
        try:
            self._file.flush()
        except OSError as error:
            self._end(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _end(self, error: OSError) -> None:
        # redirect the descriptor, as buffered output would fail again at the next flush
        _redirect_to_null(self._file.fileno())
        if not self._gone:
            self._gone = True
            with contextlib.suppress(OSError):  # the reason may be a full disk
                self._closed(error.strerror or str(error))


def open_closed_streams() -> None:
    """Open the null device in place of standard streams that this process started without.

    Otherwise the first files that are opened would take their descriptors, and receive what
    libraries print.
    """
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def replace_unencodable() -> None:
    """Print "?" for a character that the encoding of standard output lacks, such as ASCII.

    Python's own standard error is not affected: it escapes such characters.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def redirect_broken_streams() -> bool:
    """Redirect standard streams without a reader to the null device; return True if any."""
    redirected = False
    for stream in (sys.stdout, sys.stderr):
        try:
            number = stream.fileno()
        except (OSError, ValueError, AttributeError):  # replaced by a test, or missing
            continue
        polled = select.poll()
        polled.register(number, 0)
        if any(what & BROKEN for _, what in polled.poll(0)):
            _redirect_to_null(number)
            redirected = True
    return redirected


def _redirect_to_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)

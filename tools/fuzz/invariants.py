"""Checks that hold for every input: a valid result, or a one-line error of the project's own.

Other exceptions and hangs are failures.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import signal
from collections.abc import Iterator
from pathlib import Path

from cli.main import main
from tools.fuzz.seams import Reached, seams

LONGEST_S = 20
"""Seconds allowed per input, and for a command after each line that it prints; more is a hang."""


class InvariantViolation(AssertionError):
    """Raised if an input is handled in a way that the project does not promise."""


@contextlib.contextmanager
def time_limit(*streams: io.StringIO) -> Iterator[None]:
    """Raise InvariantViolation inside the block after ``LONGEST_S`` seconds.

    The time starts again as long as something was written to ``streams`` in it.
    """
    written = sum(stream.tell() for stream in streams)

    def on_alarm(*_: object) -> None:
        nonlocal written
        before, written = written, sum(stream.tell() for stream in streams)
        if written == before:
            raise InvariantViolation(f"no answer within {LONGEST_S} s")
        signal.setitimer(signal.ITIMER_REAL, LONGEST_S)

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def command(*arguments: str, codes: tuple[int, ...] = (0, 2)) -> str:
    """Run a command in this process and return its stdout.

    Raises Wrong for an exit code outside ``codes``, a failure without a message, or a traceback.
    """
    return outcome(*arguments, codes=codes)[1]


def outcome(*arguments: str, codes: tuple[int, ...] = (0, 2)) -> tuple[int | None, str]:
    """Run a command like ``command`` and return (exit code, stdout).

    The exit code is None if the command reached a point where it would start something.
    """
    out, err = io.StringIO(), io.StringIO()
    try:
        with (
            seams(),
            time_limit(out, err),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = main(list(arguments))
    except SystemExit as end:  # argparse
        code = end.code
    except Reached:
        return None, out.getvalue()
    errors = err.getvalue()
    if code not in codes:
        raise InvariantViolation(f"{arguments}: exit code {code}: {errors}")
    # doctor reports problems on stdout
    if code in (2, 3) and not (errors.strip() or (arguments[:1] == ("doctor",) and out.getvalue())):
        raise InvariantViolation(f"{arguments}: exit code {code} without a message")
    if "Traceback" in errors:
        raise InvariantViolation(f"{arguments}: {errors}")
    return code, out.getvalue()


@contextlib.contextmanager
def allowed_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Allow the block to raise errors of these types.

    Raises Wrong if the message of such an error is not one line per problem.
    """
    try:
        with time_limit():
            yield
    except kinds as error:
        lines = getattr(error, "lines", [str(error)])
        if not all(line.strip() and "\n" not in line for line in lines):
            raise InvariantViolation(f"not a line each: {lines!r}") from error


def finite(tree: object, where: str = "") -> None:
    """Raise InvariantViolation if an accepted configuration has a number that is not finite."""
    if isinstance(tree, float) and not math.isfinite(tree):
        raise InvariantViolation(f"{where} = {tree} was accepted")
    if isinstance(tree, dict):
        for key, value in tree.items():
            finite(value, f"{where}.{key}")
    elif isinstance(tree, list | tuple):
        for value in tree:
            finite(value, where)


def digest(folder: Path) -> dict[str, str]:
    """Return the type or content hash of every path below ``folder``.

    Reports and lock files are excluded.
    """
    states = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            states[str(path)] = f"-> {path.readlink()}"
        elif path.is_file() and path.name not in ("report.html", "lock"):
            states[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.is_dir():
            states[str(path)] = "directory"
    return states

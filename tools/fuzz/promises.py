"""What must hold whatever the input is: a value, or an error of the project's own in one line.

Never another exception, never a wait.
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
"""Seconds that one input may take; beyond, it counts as a hang."""


class Wrong(AssertionError):
    """An input was answered in a way that is not promised."""


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Raises Wrong in the middle of whatever takes longer than ``LONGEST_S``."""

    def ring(*_: object) -> None:
        raise Wrong(f"no answer within {LONGEST_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def command(*arguments: str, codes: tuple[int, ...] = (0, 2)) -> str:
    """Run a command in this process; its stdout. Raises Wrong for what no user should see."""
    return outcome(*arguments, codes=codes)[1]


def outcome(*arguments: str, codes: tuple[int, ...] = (0, 2)) -> tuple[int | None, str]:
    """(exit code, None where it would start something now; stdout) of ``command``."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with seams(), in_time(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(list(arguments))
    except SystemExit as end:  # argparse
        code = end.code
    except Reached:
        return None, out.getvalue()
    said = err.getvalue()
    if code not in codes:
        raise Wrong(f"{arguments}: exit code {code}: {said}")
    # a doctor's lines are its output
    if code in (2, 3) and not (said.strip() or (arguments[:1] == ("doctor",) and out.getvalue())):
        raise Wrong(f"{arguments}: exit code {code} without a word")
    if "Traceback" in said:
        raise Wrong(f"{arguments}: {said}")
    return code, out.getvalue()


@contextlib.contextmanager
def refused(*kinds: type[Exception]) -> Iterator[None]:
    """These errors are right, where they are a line each."""
    try:
        with in_time():
            yield
    except kinds as error:
        lines = getattr(error, "lines", [str(error)])
        if not all(line.strip() and "\n" not in line for line in lines):
            raise Wrong(f"not a line each: {lines!r}") from error


def finite(tree: object, where: str = "") -> None:
    """Raises Wrong for a number in a configuration that was accepted and is none."""
    if isinstance(tree, float) and not math.isfinite(tree):
        raise Wrong(f"{where} = {tree} was accepted")
    if isinstance(tree, dict):
        for key, value in tree.items():
            finite(value, f"{where}.{key}")
    elif isinstance(tree, list | tuple):
        for value in tree:
            finite(value, where)


def digest(folder: Path) -> dict[str, str]:
    """What every path below ``folder`` is, to the byte; any report and lock is left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = f"-> {path.readlink()}"
        elif path.is_file() and path.name not in ("report.html", "lock"):
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.is_dir():
            found[str(path)] = "directory"
    return found

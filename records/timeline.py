"""``timeline.jsonl``: one line per task of an actor, written by the driver.

The driver knows when it sent a task and when the answer arrived. An actor has up to ``in_flight``
tasks queued and runs them in order, so a task started when it was sent or when the actor finished
the previous one, whichever was later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from records import atomic
from records.storage import exists, retried

log = logging.getLogger(__name__)
FILE = "timeline.jsonl"
MAX_TIME_S = 1e12
"""Limit of a plausible time in seconds since the epoch; later ones are damaged."""
FLUSH_INTERVAL_S = 1.0
"""Interval at which lines are written; also at the end of an iteration."""
BLOCK_BYTES = 1 << 20
"""Number of bytes that are parsed at a time where spans of a moment are looked for."""
MAX_READ_BYTES = 64 << 20
"""Largest number of bytes to read; of a longer file only the end is read."""
MAX_FILE_BYTES, KEPT_BYTES = 128 << 20, 96 << 20
"""A file longer than the first is cut to the second, which is more than is read."""


@dataclass(frozen=True)
class Work:
    """How a kind of work is displayed: its label, and its color 1 to 9 in charts."""

    label: str
    colour: int


WORKS = {
    "explore": Work("explore", 1),
    "regenerate": Work("regenerate", 2),
    "audit": Work("regenerate", 2),
    "update": Work("update", 3),
    "export": Work("publish", 4),
    "shard": Work("publish", 4),
    "load": Work("publish", 4),
    "score": Work("score", 5),
    "encode": Work("encode", 6),
    "select": Work("select", 7),
    "begin_turn": Work("move", 9),
    "end_turn": Work("move", 9),
}
RENAMED = {"chunk": "shard"}
"""Present names of kinds of work by their names in version 0.1.0."""
OTHER = Work("evaluate, save, load", 8)


class Span(NamedTuple):
    """The time during which an actor had a task; in seconds since the epoch.

    ``work`` is the kind of work (explore, score, regenerate ...) and ``unit`` the rest of the
    task's key, such as iteration, prompt, chunk. ``version`` is the policy version of a chunk.
    ``attempt`` counts from 0. ``outcome`` is "done", "lost" (with the actor), "failed" (the method
    raised) or "stopped" (with the run).
    """

    service: str
    actor: int
    incarnation: int
    work: str
    unit: tuple[int | str, ...]
    version: int | None
    attempt: int
    started: float
    ended: float
    outcome: str

    @property
    def who(self) -> str:
        """The actor's name as in events, for example ``rollout-1``."""
        return f"{self.service}-{self.actor}"

    @property
    def display(self) -> Work:
        """How it is displayed; "load" is a checkpoint for learners, and a policy for others."""
        return (
            OTHER
            if self.service == "learner" and self.work == "load"
            else WORKS.get(self.work, OTHER)
        )


def span_of(
    service: str,
    actor: int,
    incarnation: int,
    key: object,
    attempt: int,
    started: float,
    ended: float,
    outcome: str,
) -> Span:
    """Return the span of a task with this key: (word, number ...), or a ``ChunkKey``."""
    work, *unit = _words(key)
    version = getattr(key, "version", None)
    return Span(
        service,
        actor,
        incarnation,
        str(work),
        tuple(unit),
        version,
        attempt,
        round(started, 4),
        round(ended, 4),
        outcome,
    )


def _words(key: object) -> list[int | str]:
    """Flatten a key: ``("score", ChunkKey(0, 1, 2, 0))`` gives score, explore, 0, 1, 2."""
    if isinstance(key, tuple):
        words: list[int | str] = []
        for part in key:
            words += (part,) if isinstance(part, (int, str)) else _words(part)
        return words or ["?"]
    if names := _fields(type(key)):
        return ["explore", *(getattr(key, name) for name in names)]
    return [key if isinstance(key, int | str) else str(key)]


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields except the version; empty for other types."""
    if not dataclasses.is_dataclass(kind):
        return ()
    return tuple(part.name for part in dataclasses.fields(kind) if part.name != "version")


def append(path: Path, lines: str) -> None:
    """Append lines to a timeline; of one that is too long, remove the older ones."""
    atomic.append(path, lines)
    _shorten(path)


@retried
def _shorten(path: Path) -> None:
    if path.stat().st_size <= MAX_FILE_BYTES:
        return
    with atomic.replace_file(path) as beside, path.open("rb") as file, beside.open("wb") as kept:
        file.seek(-KEPT_BYTES, os.SEEK_END)
        file.readline()  # the rest of a line
        shutil.copyfileobj(file, kept)


class Timeline:
    """Appends spans to a file about once a second.

    With a thousand actors, opening the file for every span would take the driver longer than the
    rest of a call. If the file cannot be written, the timeline ends, ``ended`` is called with the
    reason, and the run continues. ``append`` appends lines to a file.
    """

    def __init__(
        self,
        path: Path,
        ended: Callable[[str], None] = lambda why: None,
        append: Callable[[Path, str], None] = append,
    ):
        self._path, self._ended, self._append = path, ended, append
        self._held: list[Span] = []  # not written yet
        self._written = 0.0  # monotonic time of the last write
        self.problem: str | None = None

    def record(self, span: Span) -> None:
        """Append a span, now or together with later ones."""
        self._held.append(span)
        if time.monotonic() - self._written >= FLUSH_INTERVAL_S:
            self.write()

    def write(self) -> None:
        """Write all spans that have not been written."""
        held, self._held, self._written = self._held, [], time.monotonic()
        if self.problem is not None or not held:
            return
        lines = "".join(json.dumps(span._asdict()) + "\n" for span in held)
        try:
            self._append(self._path, lines)
        except OSError as error:
            self.problem = (
                f"{self._path}: {error.strerror or error}; the timeline ends here, training"
                " continues"
            )
            log.warning(self.problem)
            with contextlib.suppress(OSError):  # on a full disk the event cannot be written either
                self._ended(error.strerror or str(error))


def read_spans(path: Path, remarks: list[str] | None = None) -> list[Span]:
    """Return the spans sorted by start; skip damaged lines, and append omissions to ``remarks``."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - MAX_READ_BYTES))
            lines = (
                file.read()
                .decode("utf-8", errors="replace")
                .splitlines()[1 if size > MAX_READ_BYTES else 0 :]  # the first line is truncated
            )
    except OSError:
        return []
    if size > MAX_READ_BYTES and remarks is not None:
        remarks.append(
            f"{path.name} is {size >> 20:,} MiB long: only the last {MAX_READ_BYTES >> 20} MiB are"
            " shown"
        )
    return sorted(
        (span for line in lines if (span := _parsed(line)) is not None),
        key=lambda span: span.started,
    )


@retried
def remove_after(path: Path, moment: float) -> None:
    """Remove spans that started after ``moment``; a resumed run repeats them.

    Only the lines near the end are parsed: those of a long run take minutes.
    """
    if not exists(path):
        return
    with atomic.replace_file(path) as beside:
        shutil.copyfile(path, beside)
        with beside.open("r+b") as file:
            start = _start_of_later(file, moment)
            file.seek(start)
            lines = file.readlines()
            file.seek(start)
            file.truncate()
            file.writelines(
                line.rstrip() + b"\n"  # the last one of a killed driver may have no end
                for line in lines
                if (span := _parsed(line)) is not None and span.started <= moment
            )


def _start_of_later(file: BinaryIO, moment: float) -> int:
    """Return the position of a line before which no span ended after ``moment``.

    Lines are in the order of ends, so that the first block from the end without a later one is
    the last to look at.
    """
    end = position = file.seek(0, os.SEEK_END)
    while position > 0:
        position = max(0, position - BLOCK_BYTES)
        file.seek(position)
        if position > 0:
            file.readline()  # the rest of a line that begins in the block before
        start = file.tell()
        spans = [span for line in file.read(end - start).splitlines() if (span := _parsed(line))]
        if spans and all(span.ended <= moment for span in spans):
            return start
        end = start
    return 0


def _parsed(line: str | bytes) -> Span | None:
    try:
        row = json.loads(line)
        work = RENAMED.get(row["work"], row["work"])
        span = Span(**{**row, "work": work, "unit": tuple(row["unit"])})
        words = all(isinstance(word, str) for word in (span.service, span.work, span.outcome))
        counts = all(type(number) is int for number in (span.actor, span.incarnation, span.attempt))
        units = all(isinstance(part, int | str) for part in span.unit)
        times = type(span.started) in (int, float) and type(span.ended) in (int, float)
        if words and counts and units and times and 0 <= span.started <= span.ended <= MAX_TIME_S:
            return span if isinstance(span.version, int | None) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return None

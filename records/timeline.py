"""``timeline.jsonl``: a line per task that an actor had in hand, written by the driver, at the
latest at the end of the iteration.

The driver sees when it sends a task and when the answer comes. An actor has up to ``in_flight``
tasks sent ahead and does one after the other, so a task starts when it was sent or when the actor
was done with the one before, whichever is later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from records import atomic

log = logging.getLogger(__name__)
FILE = "timeline.jsonl"
LATEST_S = 1e12
"""Later than any clock: what says so is damaged."""
HELD_S = 1.0
"""Lines are written when the last writing was so long ago, and at the end of an iteration."""
MOST_BYTES = 64 << 20
"""Of a longer file only the end, of so many bytes, is read."""


@dataclass(frozen=True)
class Work:
    """How a kind of work is shown: in words, and by a colour 1 to 9 of charts."""

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
"""Works of version 0.1.0, by what they are called since."""
OTHER = Work("evaluate, save, load", 8)


class Span(NamedTuple):
    """A task in one actor's hands; times are seconds of the epoch, ``attempt`` counts from 0.

    ``work`` is what is done (explore, score, regenerate ...), ``unit`` which: the rest of the
    task's key, such as iteration, prompt, chunk. ``version`` is the policy version that a chunk
    names. ``outcome``: done; lost, with the actor; failed, the method raised; stopped, with the
    run.
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
        """The actor as events name it: ``rollout-1``."""
        return f"{self.service}-{self.actor}"

    @property
    def shown(self) -> Work:
        """How it is drawn; a learner loads a checkpoint, a rollout actor a published policy."""
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
    """The span of a task by its key: (word, number ...), or a chunk of exploration."""
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
    """A key in words: ``("score", ChunkKey(0, 1, 2, 0))`` is score, explore, 0, 1, 2."""
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
    """Names of a dataclass's fields, without the version; none of another type."""
    if not dataclasses.is_dataclass(kind):
        return ()
    return tuple(part.name for part in dataclasses.fields(kind) if part.name != "version")


class Timeline:
    """Appends spans to a file, those of a second together: with a thousand actors, to open the file
    for each span would take the driver longer than the rest of a call.

    Where the file cannot be written, the timeline ends, ``ended`` is told why, and the run goes on.
    """

    def __init__(self, path: Path, ended: Callable[[str], None] = lambda why: None):
        self._path, self._ended = path, ended
        self._held: list[Span] = []  # not written yet
        self._written = 0.0  # when, monotonic
        self.problem: str | None = None

    def record(self, span: Span) -> None:
        """Append one line, now or with one that comes later."""
        self._held.append(span)
        if time.monotonic() - self._written >= HELD_S:
            self.write()

    def write(self) -> None:
        """Write all that is held back."""
        held, self._held, self._written = self._held, [], time.monotonic()
        if self.problem is not None or not held:
            return
        lines = (json.dumps(span._asdict()) for span in held)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in lines)
        except OSError as error:
            self.problem = (
                f"{self._path}: {error.strerror or error}; the timeline ends here, training goes on"
            )
            log.warning(self.problem)
            with contextlib.suppress(OSError):  # a full disk has no room for an event either
                self._ended(error.strerror or str(error))


def read_spans(path: Path, remarks: list[str] | None = None) -> list[Span]:
    """Spans by their start; ``remarks`` is told what was left out. Other lines are passed over."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - MOST_BYTES))
            lines = (
                file.read()
                .decode("utf-8", errors="replace")
                .splitlines()[1 if size > MOST_BYTES else 0 :]  # the first is cut
            )
    except OSError:
        return []
    if size > MOST_BYTES and remarks is not None:
        remarks.append(
            f"{path.name} is {size >> 20:,} MiB long: only the last {MOST_BYTES >> 20} MiB are"
            " drawn"
        )
    return sorted(
        (span for line in lines if (span := _parsed(line)) is not None),
        key=lambda span: span.started,
    )


def forget_after(path: Path, moment: float) -> None:
    """Drop spans that began after ``moment``, as a resumed run does them again."""
    if not path.exists():
        return
    with (
        path.open(encoding="utf-8", errors="replace") as old,
        atomic.replacing(path) as beside,
        beside.open("w", encoding="utf-8") as new,
    ):
        new.writelines(
            line for line in old if (span := _parsed(line)) is not None and span.started <= moment
        )


def _parsed(line: str) -> Span | None:
    try:
        row = json.loads(line)
        work = RENAMED.get(row["work"], row["work"])
        span = Span(**{**row, "work": work, "unit": tuple(row["unit"])})
        words = all(isinstance(word, str) for word in (span.service, span.work, span.outcome))
        counts = all(type(number) is int for number in (span.actor, span.incarnation, span.attempt))
        units = all(isinstance(part, int | str) for part in span.unit)
        times = type(span.started) in (int, float) and type(span.ended) in (int, float)
        if words and counts and units and times and 0 <= span.started <= span.ended <= LATEST_S:
            return span if isinstance(span.version, int | None) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return None

"""What keeps a page that is open in a browser up to date while the run goes on, without a server.

The page loads itself again; a program of a few lines keeps its place and its open folds, and says
when the page is older than a run that goes on would let it become. Browsers without programs load
it again all the same.
"""

from __future__ import annotations

import base64
import hashlib
import time
from dataclasses import dataclass

from analysis.report.parts import TEMPLATES
from records.words import duration

SOONEST_S, LATEST_S = 5.0, 60.0
"""Bounds of the time between two loads."""
PER_REPORT = 4
"""Loads in the time between two reports: an evaluation has it written earlier."""
LATE = 3
"""A page is late after so many times that time."""
PROGRAM = "live.js"


@dataclass(frozen=True)
class Live:
    """``written``: seconds of the epoch; ``every_s``: until it is written again, about."""

    written: float
    every_s: float

    @property
    def reload_s(self) -> int:
        """Until the page is loaded again."""
        return round(min(max(self.every_s / PER_REPORT, SOONEST_S), LATEST_S))

    @property
    def late_s(self) -> int:
        """The age from which on the page says that nobody writes it any more."""
        return round(LATE * self.every_s + LATEST_S)

    @property
    def moment(self) -> str:
        """When it was written, for people."""
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.written))

    @property
    def line(self) -> str:
        """What the top of the page says."""
        return (
            f"Written {self.moment}, while the run was going on; it is written again about every"
            f" {duration(self.every_s)}, and this page follows by itself."
        )

    @property
    def late_line(self) -> str:
        """What it says beside its age once it is late."""
        return (
            "old: the run ended without recording its end, as a killed driver does, or the report"
            " cannot be written any more (report_failed in events.jsonl). --resume continues a run"
            " that was killed."
        )


def program() -> str:
    """The few lines, as the page holds them."""
    source, _, _ = TEMPLATES.loader.get_source(TEMPLATES, PROGRAM)  # type: ignore[union-attr]
    return source.strip()


def program_hash() -> str:
    """By which the page's policy lets that program run, and no other."""
    digest = hashlib.sha256(program().encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"

"""A page that stays up to date in a browser while the run goes on, without a server.

The page loads itself again. A script of a few lines keeps the scroll position and the open folds,
and says so when the page is older than it can be while a run goes on. A browser without scripts
loads it again all the same.
"""

from __future__ import annotations

import base64
import hashlib
import time
from dataclasses import dataclass
from importlib import resources

from records.words import duration

SOONEST_S, LATEST_S = 5.0, 60.0
"""Bounds of the time between two loads."""
PER_REPORT = 4
"""Loads in the time between two reports; an evaluation writes one in between."""
LATE = 3
"""A page is late after so many times the time between two reports."""
PROGRAM = resources.files("analysis") / "templates" / "live.js"


@dataclass(frozen=True)
class Live:
    """``written``: seconds of the epoch; ``every_s``: about the time until it is written again."""

    written: float
    every_s: float

    @property
    def reload_s(self) -> int:
        """Seconds until the page is loaded again."""
        return round(min(max(self.every_s / PER_REPORT, SOONEST_S), LATEST_S))

    @property
    def late_s(self) -> int:
        """The age in seconds from which on the page says that it is not written any more."""
        return round(LATE * self.every_s + LATEST_S)

    @property
    def moment(self) -> str:
        """When it was written, for people."""
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.written))

    @property
    def line(self) -> str:
        """The line at the top of the page."""
        return (
            f"Written {self.moment}, while the run was going on; it is written again about every"
            f" {duration(self.every_s)}, and this page follows by itself."
        )

    @property
    def late_line(self) -> str:
        """The words behind the age of a page that is late."""
        return (
            "old: the run ended without recording its end, as a killed driver does, or the report"
            " cannot be written any more (report_failed in events.jsonl). --resume continues a run"
            " that was killed."
        )


def program() -> str:
    """The script, as the page holds it."""
    return PROGRAM.read_text("utf-8").strip()


def program_hash() -> str:
    """The script's hash: the page's security policy lets no other run."""
    digest = hashlib.sha256(program().encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"

"""Report page that refreshes itself in a browser while the run continues, without a server.

A short script reloads the page, keeps the scroll position and the open folds, and shows a warning
if the page is older than it can be while a run continues. A browser without scripts reloads the
page as well.
"""

from __future__ import annotations

import base64
import hashlib
import time
from dataclasses import dataclass
from importlib import resources

from records.formatting import duration

SOONEST_S, LATEST_S = 5.0, 60.0
"""Bounds of the time between two reloads, in seconds."""
PER_REPORT = 4
"""Number of reloads per report interval; an evaluation triggers an additional report."""
LATE = 3
"""Number of report intervals after which a page is considered late."""
PROGRAM = resources.files("analysis") / "templates" / "live.js"


@dataclass(frozen=True)
class Live:
    """State of a page that refreshes itself.

    ``written`` is the time of writing in seconds since the epoch; ``every_s`` is the approximate
    time until the page is written again.
    """

    written: float
    every_s: float

    @property
    def reload_s(self) -> int:
        """Seconds until the page is reloaded."""
        return round(min(max(self.every_s / PER_REPORT, SOONEST_S), LATEST_S))

    @property
    def late_s(self) -> int:
        """Age in seconds from which the page says that it is no longer being written."""
        return round(LATE * self.every_s + LATEST_S)

    @property
    def moment(self) -> str:
        """Time of writing in a readable form."""
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.written))

    @property
    def line(self) -> str:
        """Line at the top of the page."""
        return (
            f"Written {self.moment} during the run; updated about every {duration(self.every_s)}."
            " This page reloads automatically."
        )

    @property
    def late_line(self) -> str:
        """Text that follows the age of a late page."""
        return (
            "old: the driver was killed, or the report can no longer be written (report_failed in"
            " events.jsonl). --resume continues a killed run."
        )


def program() -> str:
    """Return the script exactly as the page contains it."""
    return PROGRAM.read_text("utf-8").strip()


def program_hash() -> str:
    """Return the hash of the script; the page's Content-Security-Policy allows no other."""
    digest = hashlib.sha256(program().encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"

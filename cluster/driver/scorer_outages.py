"""Waiting for the servers of scorers that cannot be reached, such as a judge that restarts."""

from __future__ import annotations

import asyncio
import time

from records.errors import RunFailed
from records.rundir import Event

PAUSE_S = 5.0
"""Seconds between attempts; each attempt retries as well (``rewards.server``)."""


class ScorerOutages:
    """Outages of scorers, by label: when they began, and how long they may last."""

    def __init__(self, limit_s: float, event: Event):
        self._limit_s, self._event = limit_s, event
        self._began: dict[str, float] = {}

    async def wait(self, label: str, why: str) -> None:
        """Pause before the next attempt. Raises RunFailed if the outage lasts longer than allowed.

        ``why`` is the line of the scorer's error.
        """
        now = time.monotonic()
        if label not in self._began:
            self._began[label] = now
            self._event("scorer_unreachable", scorer=label, why=why, limit_s=self._limit_s)
        left = self._began[label] + self._limit_s - now
        if left <= 0:
            raise RunFailed(
                f"{why}; it could not be reached for {self._limit_s:g} s (rewards.outage_s): start"
                " it and continue with --resume"
            )
        await asyncio.sleep(min(PAUSE_S, left))

    def reached(self, label: str) -> None:
        """End the outage of a scorer, if there is one."""
        if (began := self._began.pop(label, None)) is not None:
            seconds = round(time.monotonic() - began, 1)
            self._event("scorer_reached", scorer=label, seconds=seconds)

"""Shared resources: a GPU, or the cores of a machine, on which concurrent jobs slow each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from planning.durations import speed

EPSILON = 1e-9


@dataclass
class _Job:
    left: float  # remaining seconds if it ran alone
    requested: float  # part of the capacity that it uses when it runs alone
    done: Callable[[], None]


class SharedResource:
    """A GPU (capacity 1), or ``capacity`` cores.

    Concurrent jobs together get at most the capacity, each in proportion to its demand.
    ``together`` is the speed of a core while all are busy, relative to one that is busy alone, as
    cores share caches and memory bandwidth.
    """

    def __init__(self, name: str, capacity: float = 1.0, together: float = 1.0):
        self.name, self.capacity, self.together = name, capacity, together
        self._used_s = 0.0
        self._jobs: list[_Job] = []
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def run(self, seconds: float, requested: float, done: Callable[[], None]) -> None:
        """Start a job that takes ``seconds`` alone on ``requested``; call ``done`` at its end."""
        self._pass()
        self._jobs.append(_Job(seconds, requested, done))
        self._schedule()

    def used(self) -> float:
        """Return the seconds until now in which at least one job was running."""
        self._pass()
        return self._used_s

    def speed(self) -> float:
        """Return the current speed of each job, relative to running alone."""
        return speed(sum(job.requested for job in self._jobs), self.capacity, self.together)

    def _pass(self) -> None:
        """Account for the work done since the last update, at the speed of the jobs until now.

        Must be called before the set of jobs changes, as that changes their speed.
        """
        now = asyncio.get_running_loop().time()
        passed, self._at = now - self._at, now
        if self._jobs and passed > 0:
            self._used_s += passed
            done = passed * self.speed()
            for job in self._jobs:
                job.left -= done

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._jobs:
            wait = max(0.0, min(job.left for job in self._jobs)) / self.speed()
            self._timer = asyncio.get_running_loop().call_later(wait, self._ended)

    def _ended(self) -> None:
        self._timer = None
        self._pass()
        # less than the clock's resolution counts as finished
        finished = [job for job in self._jobs if job.left <= EPSILON * max(1.0, self._at)]
        self._jobs = [job for job in self._jobs if job not in finished]
        self._schedule()
        for job in finished:
            job.done()

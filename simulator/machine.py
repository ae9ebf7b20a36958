"""What actors share: a GPU, or the cores of a machine. Users at the same time slow each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from planning.durations import speed

EPSILON = 1e-9


@dataclass
class _Job:
    left: float  # seconds, were it alone
    wanted: float  # of the capacity
    done: Callable[[], None]


class Shared:
    """A GPU (capacity 1), or so many cores.

    Jobs together get no more than the capacity, each in proportion to what it wants. ``together``:
    the speed of a core while all are busy, compared with one that is busy alone; cores share caches
    and memory.
    """

    def __init__(self, name: str, capacity: float = 1.0, together: float = 1.0):
        self.name, self.capacity, self.together = name, capacity, together
        self._used_s = 0.0
        self._jobs: list[_Job] = []
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def run(self, seconds: float, wanted: float, done: Callable[[], None]) -> None:
        """Call ``done`` when a job is through that takes ``seconds`` with all that it wants."""
        self._pass()
        self._jobs.append(_Job(seconds, wanted, done))
        self._schedule()

    def used(self) -> float:
        """Seconds until now in which somebody used it."""
        self._pass()
        return self._used_s

    def speed(self) -> float:
        """Of each job now, compared with being alone."""
        return speed(sum(job.wanted for job in self._jobs), self.capacity, self.together)

    def _pass(self) -> None:
        """What has been done since the last look."""
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
        # below the clock's resolution nothing is left
        through = [job for job in self._jobs if job.left <= EPSILON * max(1.0, self._at)]
        self._jobs = [job for job in self._jobs if job not in through]
        self._schedule()
        for job in through:
            job.done()

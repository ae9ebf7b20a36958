"""The places of a pool and the actors that fill them: started, replaced, benched, added and let go.
What they work on is the pool's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import ray

from cluster.runtime.starting import Spawn, start_actor
from cluster.runtime.tasks import all_or_none
from cluster.runtime.worker import Worker
from configs.services import Service
from records.errors import RunFailed

START_DEADLINE_S = 600.0
Event = Callable[..., None]


class Roster:
    """Workers of one kind. ``serve(worker)`` is what each of an actor's ``in_flight`` slots runs;
    ``over(failure)`` is told when nobody is left; ``released`` is told the name of an actor that
    leaves for good; ``admits`` says what is wrong with a newcomer.
    """

    def __init__(
        self,
        kind: str,
        spawn: Spawn,
        service: Service,
        event: Event,
        serve: Callable[[Worker], Coroutine[Any, Any, None]],
        over: Callable[[RunFailed], None],
        start_deadline_s: float,
        released: Callable[[str], None],
        admits: Callable[[dict[str, Any]], str | None],
    ):
        self.kind, self._spawn, self._service, self._event, self._serve = (
            kind,
            spawn,
            service,
            event,
            serve,
        )
        self._over, self._start_deadline_s, self._released, self._admits = (
            over,
            start_deadline_s,
            released,
            admits,
        )
        self.workers = [Worker(index) for index in range(service.count)]
        self.starting = self.lost = 0
        self._next_index = service.count
        self._worked_by_gone = 0.0

    async def start(self) -> None:
        """Create every actor, wait until all answer, and open their slots."""
        await asyncio.gather(*(self._fill(worker) for worker in self.workers))
        for worker in self.workers:
            self._open(worker)

    async def stop(self) -> None:
        """Close the slots and kill the actors."""
        slots = [slot for worker in self.workers for slot in worker.slots]
        for slot in slots:
            slot.cancel()
        await asyncio.gather(*slots, return_exceptions=True)
        for worker in self.workers:
            if worker.handle is not None:
                ray.kill(worker.handle, no_restart=True)
                worker.handle = None

    @property
    def alive(self) -> int:
        """Actors in service now."""
        return sum(worker.serving for worker in self.workers)

    @property
    def worked_s(self) -> float:
        """Seconds in which actors had units in hand, summed over all actors that ever were."""
        return self._worked_by_gone + sum(worker.worked_s for worker in self.workers)

    # ---- size

    def next_actors(self, count: int) -> list[str]:
        """Names that the next ``count`` new actors will have."""
        return [f"{self.kind}-{self._next_index + i}" for i in range(count)]

    async def resize(self, size: int) -> None:
        """Grow or shrink to ``size`` actors in service; one call at a time. Units in hand are
        finished, none is lost.

        Raises RunFailed when a new actor does not start; those that did stay.
        """
        if size > self.alive:
            await self._grow(size - self.alive)
        else:
            leaving = [worker for worker in self.workers if worker.serving][size:]
            await asyncio.gather(*(self._retire(worker) for worker in leaving))

    async def _grow(self, count: int) -> None:
        workers = [Worker(self._next_index + i) for i in range(count)]
        self._next_index += count
        self.starting = count

        async def join(worker: Worker) -> None:
            try:
                await self._fill(worker, joins=True)
            except BaseException:
                self._released(f"{self.kind}-{worker.index}")
                raise
            finally:
                self.starting -= 1
            self.workers.append(worker)
            self._open(worker)

        outcomes = await asyncio.gather(
            *(join(worker) for worker in workers), return_exceptions=True
        )
        self.workers.sort(key=lambda worker: worker.index)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                self._perhaps_over(str(outcome))
                raise outcome

    async def _retire(self, worker: Worker) -> None:
        worker.leaving = True
        for slot in worker.idle_slots():
            slot.cancel()  # it waits for a unit, so it holds none
        if worker.refill is not None:
            worker.refill.cancel()
        await asyncio.gather(*worker.slots, return_exceptions=True)
        async with worker.lock:
            if worker.handle is not None:
                ray.kill(worker.handle, no_restart=True)
                worker.handle = None
        self.workers.remove(worker)
        self._worked_by_gone += worker.worked_s
        self._released(f"{self.kind}-{worker.index}")
        self._event(
            "actor_removed",
            kind=self.kind,
            actor=worker.index,
            incarnation=worker.incarnation,
            units=worker.answered,
        )

    # ---- who takes whose place

    async def renew(self, why: str) -> None:
        """Put a new actor in every place, all at once. Raises RunFailed when one does not start."""

        async def one(worker: Worker) -> None:
            async with worker.lock:
                if worker.handle is not None:
                    self.bury(worker, why)
                await self._fill(worker)

        await all_or_none(*(one(worker) for worker in self.workers))

    async def replace(self, worker: Worker, incarnation: int, why: str) -> None:
        """Kill what is left of the actor and put another in its place, once per incarnation."""
        async with worker.lock:
            if worker.incarnation != incarnation or worker.benched:
                return
            self.bury(worker, why)
            if worker.leaving:
                return
            worker.restarts += 1
            if worker.restarts > self._service.max_restarts:
                self._bench(worker, why)
                return
            worker.refill = asyncio.create_task(self._fill(worker))
            try:
                await worker.refill
            except RunFailed as failure:
                self._bench(worker, str(failure))
            except asyncio.CancelledError:
                if not worker.leaving:
                    raise

    def bury(self, worker: Worker, why: str) -> None:
        """Kill the actor in this place, and leave the place empty."""
        where = {key: worker.facts.get(key) for key in ("pid", "node")}
        self._event(
            "actor_died",
            kind=self.kind,
            actor=worker.index,
            incarnation=worker.incarnation,
            why=why,
            **where,
        )
        if worker.handle is not None:
            ray.kill(worker.handle, no_restart=True)
        worker.handle, worker.state = None, None
        worker.incarnation += 1
        self.lost += 1

    def _bench(self, worker: Worker, why: str) -> None:
        worker.benched = True
        self._released(f"{self.kind}-{worker.index}")
        self._event(
            "actor_benched", kind=self.kind, actor=worker.index, restarts=worker.restarts, why=why
        )
        self._perhaps_over(why)

    def _perhaps_over(self, why: str) -> None:
        """When nobody is left, and nobody will come."""
        if self.alive or self.starting:
            return
        advice = f"raise services.{self.kind}.max_restarts or mend the cause"
        self._over(
            RunFailed(
                f"no {self.kind} actor is left, last: {why}; {advice}, then continue with --resume"
            )
        )

    def _open(self, worker: Worker) -> None:
        worker.slots = [
            asyncio.create_task(self._serve(worker)) for _ in range(self._service.in_flight)
        ]

    async def _fill(self, worker: Worker, joins: bool = False) -> None:
        """Create an actor for this place and wait until it answers. Raises RunFailed with the
        constructor's own words.
        """
        who = f"{self.kind} actor {worker.index}"
        handle, facts = await start_actor(
            self._spawn,
            f"{self.kind}-{worker.index}.{worker.incarnation}",
            who,
            self._start_deadline_s,
            lambda why: self._event("actor_waits", kind=self.kind, actor=worker.index, why=why),
        )
        if (joins or worker.incarnation) and (fault := self._admits(facts)):
            ray.kill(handle, no_restart=True)
            raise RunFailed(f"{who} {fault}")
        worker.handle, worker.facts = handle, facts
        worker.last_answer = time.monotonic()
        name = (
            "actor_replaced" if worker.incarnation else "actor_added" if joins else "actor_started"
        )
        shown = {
            key: value
            for key, value in worker.facts.items()
            if isinstance(value, str | int | float)
        }
        self._event(
            name, kind=self.kind, actor=worker.index, incarnation=worker.incarnation, **shown
        )

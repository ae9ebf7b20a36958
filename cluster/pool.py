"""A group of equal actors that pull units of work, and outlive any of their members.

One way for every service: rollout, reward, selector, encoder and learner. A unit is a method call that may be repeated
(same key, same result). Each actor has ``in_flight`` slots that pull from one queue, lowest priority first. What happens
when an actor dies or hangs: it is killed and replaced, and every unit it held goes back to the queue, with a limit per unit
and per actor. Nothing is counted twice, because a unit has one future and the first answer settles it.

A pool grows and shrinks while it works: a new actor starts to pull, an actor that leaves finishes what it holds. The one service
with a state, the learner, is ``stateful``: its units are not tried again, every call fails with StateLost until it is renewed.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from cluster.errors import InputsLost, RunFailed, StateLost
from cluster.starting import Spawn, cause, start_actor
from cluster.worker import ActorLost, Unit, Worker
from configs.services import Service

START_DEADLINE_S = 600.0
Event = Callable[..., None]


class ActorPool:
    """See the module. ``prepare(worker)`` runs before every unit and must be quick when there is nothing to do."""

    def __init__(
        self,
        kind: str,
        spawn: Spawn,
        service: Service,
        event: Event,
        prepare: Callable[[Worker], Awaitable[None]] | None = None,
        *,
        stateful: bool = False,
        start_deadline_s: float = START_DEADLINE_S,
        released: Callable[[str], None] = lambda actor: None,
    ):
        """``released`` is told the name of an actor that leaves for good."""
        self.kind, self._spawn, self._service, self._event, self.prepare = kind, spawn, service, event, prepare
        self._stateful, self._start_deadline_s, self._released = stateful, start_deadline_s, released
        self.workers = [Worker(index) for index in range(service.actors)]
        self.reissued = 0
        self.starting = 0
        self.deepest = 0  # most units that waited since somebody set it back
        self._next_index = service.actors
        self._worked_by_gone = 0.0
        self._queue: asyncio.PriorityQueue[tuple[tuple[int, ...], int, Unit]] = asyncio.PriorityQueue()
        self._order = itertools.count()
        self._failure: RunFailed | StateLost | None = None

    # ---- life

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

    @property
    def waiting(self) -> int:
        """Units in the queue."""
        return self._queue.qsize()

    def _open(self, worker: Worker) -> None:
        worker.slots = [asyncio.create_task(self._serve(worker)) for _ in range(self._service.in_flight)]

    # ---- size

    def next_actors(self, count: int) -> list[str]:
        """Names that the next ``count`` new actors will have."""
        return [f"{self.kind}-{self._next_index + i}" for i in range(count)]

    async def resize(self, size: int) -> None:
        """Grow or shrink to ``size`` actors in service; one call at a time. Units in hand are finished, none is lost.

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

        outcomes = await asyncio.gather(*(join(worker) for worker in workers), return_exceptions=True)
        self.workers.sort(key=lambda worker: worker.index)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _retire(self, worker: Worker) -> None:
        worker.leaving = True
        for slot in worker.idle_slots():
            slot.cancel()  # it waits for a unit, so it holds none
        await asyncio.gather(*worker.slots, return_exceptions=True)
        async with worker.lock:
            if worker.handle is not None:
                ray.kill(worker.handle, no_restart=True)
                worker.handle = None
        self.workers.remove(worker)
        self._worked_by_gone += worker.worked_s
        self._released(f"{self.kind}-{worker.index}")
        self._event("actor_removed", kind=self.kind, actor=worker.index, incarnation=worker.incarnation, units=worker.answered)

    async def renew(self, why: str) -> None:
        """Put a new actor in every place and accept calls again. Raises RunFailed when one does not start."""
        for worker in self.workers:
            async with worker.lock:
                if worker.handle is not None:
                    self._bury(worker, worker.incarnation, why)
                await self._fill(worker)
        self._failure = None

    # ---- work

    async def call(
        self,
        key: Any,
        method: str,
        *args: Any,
        returns: int = 1,
        priority: tuple[int, ...] = (),
        accept: Callable[[Any], str | None] | None = None,
        tries: int = 1,
    ) -> Any:
        """The value of ``method(*args)`` on some actor; with ``returns`` > 1, (first value, [references of the rest]).

        ``accept`` may find fault with an answer: the unit is then tried again, on another actor where there is one, until
        it was answered ``tries`` times; the last answer is returned as it is.

        Raises:
            RunFailed: the unit failed on every allowed attempt, or no actor is left.
            StateLost: the actor of a stateful pool died.
            InputsLost: an object among ``args`` no longer exists.
        """
        if self._failure:
            raise self._failure
        unit = Unit(key, method, args, returns, priority, accept=accept, tries=tries)
        self._put(unit)
        return await unit.future

    async def each(self, do: Callable[[Worker], Awaitable[None]]) -> None:
        """Run ``do`` for every actor in service, all at once; an actor lost on the way is replaced, and prepared later."""

        async def one(worker: Worker) -> None:
            incarnation = worker.incarnation
            try:
                async with worker.lock:
                    if worker.handle is not None:
                        await do(worker)
            except ActorLost as loss:
                await self._replace(worker, incarnation, str(loss))

        await asyncio.gather(*(one(worker) for worker in self.workers if worker.serving))

    async def ask(self, worker: Worker, method: str, *args: Any) -> Any:
        """A call to one particular actor, outside the queue. Raises ActorLost when it dies or hangs."""
        return await self._answer(worker, getattr(worker.handle, method).remote(*args))

    def _put(self, unit: Unit) -> None:
        self._queue.put_nowait((unit.priority, next(self._order), unit))
        self.deepest = max(self.deepest, self.waiting)

    async def _serve(self, worker: Worker) -> None:
        while worker.serving:
            _, _, unit = await self._queue.get()
            worker.takes_unit()
            try:
                await self._handle(worker, unit)
            finally:
                worker.lays_down_unit()

    async def _handle(self, worker: Worker, unit: Unit) -> None:
        if unit.future.done():
            return
        if unit.avoid == worker.index and self.alive > 1:
            self._put(unit)
            await asyncio.sleep(0.02)
            return
        incarnation = worker.incarnation
        try:
            value = await self._attempt(worker, unit)
        except asyncio.CancelledError:
            raise
        except ActorLost as loss:
            if self._stateful:
                self._lose(worker, incarnation, unit, str(loss))
                return
            self._retry(unit, worker, str(loss))
            await self._replace(worker, incarnation, str(loss))
        except (InputsLost, RunFailed) as end:
            self._settle(unit, end)
        except RayError as error:
            self._retry(unit, worker, cause(error))
        else:
            self._answered(unit, worker, value)

    async def _attempt(self, worker: Worker, unit: Unit) -> Any:
        async with worker.lock:
            if worker.handle is None:
                raise ActorLost("the actor is being replaced")
            if self.prepare:
                await self.prepare(worker)
            refs = getattr(worker.handle, unit.method).options(num_returns=unit.returns).remote(*unit.args)
        if unit.returns == 1:
            return await self._answer(worker, refs)
        return await self._answer(worker, refs[0]), list(refs[1:])

    async def _answer(self, worker: Worker, ref: Any) -> Any:
        """The value behind ``ref``, or ActorLost: dead, or silent for longer than the service's deadline.

        An actor that says it starts ``cold`` has ``warm_up_s`` more until it has answered its first unit.
        """
        future = asyncio.wrap_future(ref.future())
        asked = time.monotonic()
        future.add_done_callback(_seen)
        while True:
            limit = self._service.deadline_s + (self._service.warm_up_s if worker.facts.get("cold") else 0.0)
            left = max(asked, worker.last_answer) + limit - time.monotonic()
            done, _ = await asyncio.wait({future}, timeout=max(left, 0.0))
            if done:
                break
            if time.monotonic() - max(asked, worker.last_answer) >= limit:
                raise ActorLost(f"no answer for {limit:g} s")
        worker.last_answer = time.monotonic()
        try:
            return future.result()
        except RayActorError as error:
            raise ActorLost(cause(error)) from None
        except ObjectLostError as error:
            raise InputsLost(str(error).splitlines()[0]) from None
        except RayTaskError as error:
            if isinstance(error.cause, ObjectLostError):
                raise InputsLost(str(error.cause).splitlines()[0]) from None
            raise

    def _answered(self, unit: Unit, worker: Worker, value: Any) -> None:
        worker.answered += 1
        worker.facts.pop("cold", None)
        unit.tries -= 1
        fault = unit.accept(value) if unit.accept else None
        if fault and unit.tries > 0:
            unit.avoid = worker.index
            self._reissue(unit, worker, fault)
        elif not unit.future.done():
            unit.future.set_result(value)

    # ---- failures

    def _retry(self, unit: Unit, worker: Worker, why: str) -> None:
        """Back to the queue, or the end of the run when the unit has used its attempts."""
        unit.attempts += 1
        unit.avoid = worker.index
        if unit.attempts >= (1 if self._stateful else self._service.max_attempts):
            self._settle(unit, RunFailed(f"{self.kind}: {unit.key} failed {unit.attempts} times, last: {why}"))
            return
        self._reissue(unit, worker, why)

    def _reissue(self, unit: Unit, worker: Worker, why: str) -> None:
        self.reissued += 1
        self._event("chunk_reissued", kind=self.kind, unit=str(unit.key), actor=worker.index, why=why)
        self._put(unit)

    @staticmethod
    def _settle(unit: Unit, error: Exception) -> None:
        if not unit.future.done():
            unit.future.set_exception(error)

    def _lose(self, worker: Worker, incarnation: int, unit: Unit, why: str) -> None:
        """The state is gone: this unit, all that wait and all that come fail, until the pool is renewed."""
        lost = StateLost(f"the {self.kind} was lost: {why}")
        self._settle(unit, lost)
        if worker.incarnation == incarnation:
            self._bury(worker, incarnation, why)
            self._end(lost)

    async def _replace(self, worker: Worker, incarnation: int, why: str) -> None:
        """Kill what is left of the actor and put another in its place, once per incarnation."""
        async with worker.lock:
            if worker.incarnation != incarnation or worker.benched:
                return
            self._bury(worker, incarnation, why)
            if worker.leaving:
                return
            worker.restarts += 1
            if worker.restarts > self._service.max_restarts:
                self._bench(worker, why)
                return
            try:
                await self._fill(worker)
            except RunFailed as failure:
                self._bench(worker, str(failure))

    def _bury(self, worker: Worker, incarnation: int, why: str) -> None:
        pid = worker.facts.get("pid")
        self._event("actor_died", kind=self.kind, actor=worker.index, incarnation=incarnation, why=why, pid=pid)
        if worker.handle is not None:
            ray.kill(worker.handle, no_restart=True)
        worker.handle, worker.state = None, None
        worker.incarnation += 1

    def _bench(self, worker: Worker, why: str) -> None:
        worker.benched = True
        self._released(f"{self.kind}-{worker.index}")
        self._event("actor_benched", kind=self.kind, actor=worker.index, restarts=worker.restarts, why=why)
        if self.alive or self.starting:
            return
        advice = f"raise services.{self.kind}.max_restarts or mend the cause"
        self._end(RunFailed(f"no {self.kind} actor is left, last: {why}; {advice}, then continue with --resume"))

    def _end(self, failure: RunFailed | StateLost) -> None:
        self._failure = failure
        while not self._queue.empty():
            self._settle(self._queue.get_nowait()[2], failure)

    async def _fill(self, worker: Worker, joins: bool = False) -> None:
        """Create an actor for this place and wait until it answers. Raises RunFailed with the constructor's own words."""
        who = f"{self.kind} actor {worker.index}"
        worker.handle, worker.facts = await start_actor(
            self._spawn,
            f"{self.kind}-{worker.index}.{worker.incarnation}",
            who,
            self._start_deadline_s,
            lambda why: self._event("actor_waits", kind=self.kind, actor=worker.index, why=why),
        )
        worker.last_answer = time.monotonic()
        name = "actor_replaced" if worker.incarnation else "actor_added" if joins else "actor_started"
        shown = {key: value for key, value in worker.facts.items() if isinstance(value, str | int | float)}
        self._event(name, kind=self.kind, actor=worker.index, incarnation=worker.incarnation, **shown)


def _seen(future: asyncio.Future[Any]) -> None:
    """Look at how a call ended even when nobody waits for it any more, so that asyncio does not complain about it."""
    if not future.cancelled():
        future.exception()

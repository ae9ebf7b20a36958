"""A group of equal actors that pull units of work, and outlive any of their members.

One way for every service: rollout, reward, selector, encoder and learner. A unit is a method call
that may be repeated (same key, same result). Each actor has ``in_flight`` slots that pull from one
queue, lowest priority first. What happens when an actor dies or hangs: it is killed and replaced,
and every unit it held goes back to the queue, with a limit per unit and per actor. Nothing is
counted twice, because a unit has one future and the first answer settles it.

A pool grows and shrinks while it works: a new actor starts to pull, an actor that leaves finishes
what it holds. The one service with a state, the learner, is ``stateful``: its units are not tried
again, every call fails with StateLost until it is renewed.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError

from cluster.runtime.answers import answer_of
from cluster.runtime.roster import START_DEADLINE_S, Event, Roster
from cluster.runtime.starting import Spawn, cause
from cluster.runtime.worker import ActorLost, Unit, Vacant, Worker
from configs.services import Service
from records.errors import InputsLost, RunFailed, StateLost
from records.timeline import Span, span_of


class ActorPool:
    """See the module. ``prepare(worker, unit)`` runs before every unit and must be quick when there
    is nothing to do; ``admits(facts)`` says of what a later actor's ``ready`` told why it cannot be
    used beside the others.
    """

    def __init__(
        self,
        kind: str,
        spawn: Spawn,
        service: Service,
        event: Event,
        prepare: Callable[[Worker, Unit], Awaitable[None]] | None = None,
        *,
        stateful: bool = False,
        start_deadline_s: float = START_DEADLINE_S,
        released: Callable[[str], None] = lambda actor: None,
        record: Callable[[Span], None] = lambda span: None,
    ):
        """``released`` is told the name of an actor that leaves for good, ``record`` who had which
        unit in hand and when.
        """
        self.kind, self._service, self._event, self.prepare = kind, service, event, prepare
        self._stateful, self._record = stateful, record
        self.admits: Callable[[dict[str, Any]], str | None] = lambda facts: None
        self._roster = Roster(
            kind,
            spawn,
            service,
            event,
            self._serve,
            self._end,
            start_deadline_s,
            released,
            lambda facts: self.admits(facts),
        )
        self._beside: set[asyncio.Task[None]] = set()  # replacements that no slot waits for
        self.reissued = 0
        self.deepest = 0  # most units that waited since somebody set it back
        self._queue: asyncio.PriorityQueue[tuple[tuple[int, ...], int, Unit]] = (
            asyncio.PriorityQueue()
        )
        self._order = itertools.count()
        self._failure: RunFailed | StateLost | None = None

    # ---- who is there

    async def start(self) -> None:
        """Create every actor, wait until all answer, and open their slots."""
        await self._roster.start()

    async def stop(self) -> None:
        """Close the slots and kill the actors."""
        beside = tuple(self._beside)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await self._roster.stop()

    async def resize(self, size: int) -> None:
        """Grow or shrink to ``size`` actors in service; one call at a time. Units in hand are
        finished, none is lost.

        Raises RunFailed when a new actor does not start; those that did stay.
        """
        await self._roster.resize(size)

    async def renew(self, why: str) -> None:
        """Put a new actor in every place and accept calls again. Raises RunFailed when one does not
        start.
        """
        await self._roster.renew(why)
        self._failure = None

    def next_actors(self, count: int) -> list[str]:
        """Names that the next ``count`` new actors will have."""
        return self._roster.next_actors(count)

    @property
    def workers(self) -> list[Worker]:
        """The places, by rising index."""
        return self._roster.workers

    @property
    def alive(self) -> int:
        """Actors in service now."""
        return self._roster.alive

    @property
    def starting(self) -> int:
        """New actors on their way."""
        return self._roster.starting

    @property
    def lost(self) -> int:
        """Actors that died or hung since the pool was made."""
        return self._roster.lost

    @property
    def worked_s(self) -> float:
        """Seconds in which actors had units in hand, summed over all actors that ever were."""
        return self._roster.worked_s

    @property
    def waiting(self) -> int:
        """Units in the queue."""
        return self._queue.qsize()

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
        """The value of ``method(*args)`` on some actor; with ``returns`` > 1, (first value,
        [references of the rest]).

        ``accept`` may find fault with an answer: the unit is then tried again, on another actor
        where there is one, until it was answered ``tries`` times; the last answer is returned as it
        is.

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
        """Run ``do`` for every actor that is there, all at once. One that is lost on the way, or
        raises, is replaced; those that are being replaced are not waited for: they are prepared
        before their first unit.
        """

        async def one(worker: Worker) -> None:
            if worker.handle is None:
                return
            incarnation = worker.incarnation
            try:
                async with worker.lock:
                    if worker.handle is not None:
                        await do(worker)
            except (ActorLost, RayError) as loss:
                why = str(loss) if isinstance(loss, ActorLost) else cause(loss)
                beside = asyncio.create_task(self._roster.replace(worker, incarnation, why))
                self._beside.add(beside)
                beside.add_done_callback(self._beside.discard)

        await asyncio.gather(*(one(worker) for worker in self.workers if worker.serving))

    async def ask(self, worker: Worker, method: str, *args: Any) -> Any:
        """A call to one particular actor, outside the queue. Raises ActorLost when it dies or
        hangs.
        """
        return await self._answer(
            worker, (method,), 0, getattr(worker.handle, method).remote(*args)
        )

    def _put(self, unit: Unit) -> None:
        if self._failure:
            return self._settle(unit, self._failure)
        self._queue.put_nowait((unit.priority, next(self._order), unit))
        self.deepest = max(self.deepest, self.waiting)

    async def _serve(self, worker: Worker) -> None:
        while worker.serving:
            _, _, unit = await self._queue.get()
            if worker.handle is None:  # it died while this slot waited: whoever is there takes it
                self._put(unit)
                await worker.manned()
                continue
            worker.takes_unit()
            try:
                await self._handle(worker, unit)
            except (
                Exception
            ) as error:  # a full disk, a defect: nobody may wait for this unit for ever
                failure = RunFailed(f"{self.kind}: {unit.key}: {type(error).__name__}: {error}")
                self._settle(unit, failure)
                self._end(failure)
            finally:
                worker.lays_down_unit()

    async def _handle(self, worker: Worker, unit: Unit) -> None:
        if unit.future.done():
            return
        if unit.avoid == worker.index and any(
            other.handle is not None for other in self.workers if other is not worker
        ):
            self._put(unit)
            await asyncio.sleep(0.02)
            return
        try:
            value = await self._attempt(worker, unit)
        except asyncio.CancelledError:
            raise
        except ActorLost as loss:
            if self._stateful:
                self._lose(worker, unit.incarnation, unit, str(loss))
                return
            if isinstance(loss, Vacant):
                self._put(unit)
                return
            blamed = worker.blames(unit, unit.incarnation)
            unit.alone = True
            (self._retry if blamed else self._reissue)(unit, worker, str(loss))
            await self._roster.replace(worker, unit.incarnation, str(loss))
        except (InputsLost, RunFailed) as end:
            worker.done_with(unit)
            self._settle(unit, end)
        except RayError as error:
            worker.done_with(unit)
            self._retry(unit, worker, cause(error))
        else:
            self._answered(unit, worker, value)

    async def _attempt(self, worker: Worker, unit: Unit) -> Any:
        async with worker.door:
            if unit.alone:
                await worker.empty()
            refs = await self._send(worker, unit)
            if unit.alone:
                return await self._result(worker, unit, refs)
        return await self._result(worker, unit, refs)

    async def _send(self, worker: Worker, unit: Unit) -> Any:
        async with worker.lock:
            unit.incarnation = worker.incarnation
            if worker.handle is None:
                raise Vacant("the actor is being replaced")
            if self.prepare:
                await self.prepare(worker, unit)
            refs = (
                getattr(worker.handle, unit.method)
                .options(num_returns=unit.returns)
                .remote(*unit.args)
            )
            worker.sent.append(unit)
        return refs

    async def _result(self, worker: Worker, unit: Unit, refs: Any) -> Any:
        if unit.returns == 1:
            return await self._answer(worker, unit.key, unit.reissues, refs)
        return await self._answer(worker, unit.key, unit.reissues, refs[0]), list(refs[1:])

    async def _answer(self, worker: Worker, key: Any, attempt: int, ref: Any) -> Any:
        """``answer_of``, and in the timeline who had ``key`` in hand: an actor does one thing after
        the other.
        """
        sent, incarnation, outcome = time.time(), worker.incarnation, "failed"
        try:
            value = await answer_of(worker, ref, self._service)
            outcome = "done"
            return value
        except ActorLost:
            outcome = "lost"
            raise
        except asyncio.CancelledError:
            outcome = "stopped"
            raise
        finally:
            started, worker.busy_until = max(sent, worker.busy_until), time.time()
            self._record(
                span_of(
                    self.kind,
                    worker.index,
                    incarnation,
                    key,
                    attempt,
                    started,
                    worker.busy_until,
                    outcome,
                )
            )

    def _answered(self, unit: Unit, worker: Worker, value: Any) -> None:
        worker.answered += 1
        worker.done_with(unit)
        worker.facts.pop("cold", None)
        unit.tries -= 1
        fault = unit.accept(value) if unit.accept else None
        if fault and unit.tries > 0:
            unit.avoid = worker.index
            self._reissue(unit, worker, fault)
        elif not unit.future.done():
            unit.future.set_result(value)
            if unit.reissues:
                self._event(
                    "chunk_recovered",
                    kind=self.kind,
                    unit=str(unit.key),
                    actor=worker.index,
                    reissues=unit.reissues,
                )

    # ---- failures

    def _retry(self, unit: Unit, worker: Worker, why: str) -> None:
        """Back to the queue, or the end of the run when the unit has used its attempts."""
        unit.attempts += 1
        unit.avoid = worker.index
        if unit.attempts >= (1 if self._stateful else self._service.max_attempts):
            self._settle(
                unit,
                RunFailed(f"{self.kind}: {unit.key} failed {unit.attempts} times, last: {why}"),
            )
            return
        self._reissue(unit, worker, why)

    def _reissue(self, unit: Unit, worker: Worker, why: str) -> None:
        self.reissued += 1
        unit.reissues += 1
        self._event(
            "chunk_reissued", kind=self.kind, unit=str(unit.key), actor=worker.index, why=why
        )
        self._put(unit)

    @staticmethod
    def _settle(unit: Unit, error: Exception) -> None:
        if not unit.future.done():
            unit.future.set_exception(error)

    def _lose(self, worker: Worker, incarnation: int, unit: Unit, why: str) -> None:
        """The state is gone: this unit, all that wait and all that come fail, until the pool is
        renewed.
        """
        lost = StateLost(f"the {self.kind} was lost: {why}")
        self._settle(unit, lost)
        worker.sent = []
        if worker.incarnation == incarnation:
            self._roster.bury(worker, why)
            self._end(lost)

    def _end(self, failure: RunFailed | StateLost) -> None:
        self._failure = failure
        while not self._queue.empty():
            self._settle(self._queue.get_nowait()[2], failure)

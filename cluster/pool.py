"""A group of equal actors that pull units of work, and outlive any of their members.

One way for every service: rollout, reward, selector, encoder and learner. A unit is a method call that may be repeated
(same key, same result). Each actor has ``in_flight`` slots that pull from one queue, lowest priority first. What happens
when an actor dies or hangs: it is killed and replaced, and every unit it held goes back to the queue, with a limit per unit
and per actor. Nothing is counted twice, because a unit has one future and the first answer settles it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from cluster.errors import InputsLost, RunFailed
from configs.schema import Service

READY_DEADLINE_S = 600.0
Spawn = Callable[[str], Any]  # actor name -> Ray actor handle
Event = Callable[..., None]


@dataclass
class Unit:
    """A call ``method(*args)``; ``returns`` > 1 gives (value of the first, references of the others)."""

    key: Any
    method: str
    args: tuple[Any, ...]
    returns: int = 1
    priority: tuple[int, ...] = ()
    attempts: int = 0
    accept: Callable[[Any], str | None] | None = None  # says why an answer is worth another try elsewhere
    tries: int = 1  # answers that may be refused by `accept`; the last one stands
    avoid: int | None = None  # index of an actor that should not get it again, while there is another
    future: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Worker:
    """One place in the pool; ``handle`` is whoever fills it now."""

    def __init__(self, index: int):
        self.index = index
        self.incarnation = 0
        self.restarts = 0
        self.handle: Any = None
        self.facts: dict[str, Any] = {}
        self.state: Any = None  # what the pool's `prepare` remembers about this incarnation
        self.last_answer = 0.0
        self.benched = False
        self.lock = asyncio.Lock()  # replacing and preparing
        self.slots: list[asyncio.Task[None]] = []


class ActorLost(Exception):
    """The actor died or hung with this unit in hand."""


class ActorPool:
    """See the module. ``prepare(worker)`` runs before every unit and must be quick when there is nothing to do."""

    def __init__(
        self,
        kind: str,
        spawn: Spawn,
        service: Service,
        event: Event,
        prepare: Callable[[Worker], Awaitable[None]] | None = None,
    ):
        self.kind, self._spawn, self._service, self._event, self.prepare = kind, spawn, service, event, prepare
        self.workers = [Worker(index) for index in range(service.actors)]
        self.reissued = 0
        self._queue: asyncio.PriorityQueue[tuple[tuple[int, ...], int, Unit]] = asyncio.PriorityQueue()
        self._order = itertools.count()
        self._failure: RunFailed | None = None

    # ---- life

    async def start(self) -> None:
        """Create every actor, wait until all answer, and open their slots."""
        await asyncio.gather(*(self._fill(worker) for worker in self.workers))
        for worker in self.workers:
            worker.slots = [asyncio.create_task(self._serve(worker)) for _ in range(self._service.in_flight)]

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
        return sum(not worker.benched for worker in self.workers)

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
                    await do(worker)
            except ActorLost as loss:
                await self._replace(worker, incarnation, str(loss))

        await asyncio.gather(*(one(worker) for worker in self.workers if not worker.benched))

    async def ask(self, worker: Worker, method: str, *args: Any) -> Any:
        """A call to one particular actor, outside the queue. Raises ActorLost when it dies or hangs."""
        return await self._answer(worker, getattr(worker.handle, method).remote(*args))

    def _put(self, unit: Unit) -> None:
        self._queue.put_nowait((unit.priority, next(self._order), unit))

    async def _serve(self, worker: Worker) -> None:
        while not worker.benched:
            _, _, unit = await self._queue.get()
            if unit.future.done():
                continue
            if unit.avoid == worker.index and self.alive > 1:
                self._put(unit)
                await asyncio.sleep(0.02)
                continue
            incarnation = worker.incarnation
            try:
                value = await self._attempt(worker, unit)
            except asyncio.CancelledError:
                raise
            except ActorLost as loss:
                self._retry(unit, worker, str(loss))
                await self._replace(worker, incarnation, str(loss))
            except (InputsLost, RunFailed) as end:
                self._settle(unit, end)
            except RayError as error:
                self._retry(unit, worker, _cause(error))
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
            raise ActorLost(_cause(error)) from None
        except ObjectLostError as error:
            raise InputsLost(str(error).splitlines()[0]) from None
        except RayTaskError as error:
            if isinstance(error.cause, ObjectLostError):
                raise InputsLost(str(error.cause).splitlines()[0]) from None
            raise

    def _answered(self, unit: Unit, worker: Worker, value: Any) -> None:
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
        if unit.attempts >= self._service.max_attempts:
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

    async def _replace(self, worker: Worker, incarnation: int, why: str) -> None:
        """Kill what is left of the actor and put another in its place, once per incarnation."""
        async with worker.lock:
            if worker.incarnation != incarnation or worker.benched:
                return
            self._event(
                "actor_died", kind=self.kind, actor=worker.index, incarnation=incarnation, why=why, pid=worker.facts.get("pid")
            )
            if worker.handle is not None:
                ray.kill(worker.handle, no_restart=True)
            worker.handle, worker.state = None, None
            worker.incarnation += 1
            worker.restarts += 1
            if worker.restarts > self._service.max_restarts:
                self._bench(worker, why)
                return
            try:
                await self._fill(worker)
            except RunFailed as failure:
                self._bench(worker, str(failure))

    def _bench(self, worker: Worker, why: str) -> None:
        worker.benched = True
        self._event("actor_benched", kind=self.kind, actor=worker.index, restarts=worker.restarts, why=why)
        if self.alive:
            return
        advice = (
            "continue with --resume" if self.kind == "learner" else f"raise services.{self.kind}.max_restarts or mend the cause"
        )
        self._failure = RunFailed(f"no {self.kind} actor is left, last: {why}; {advice}")
        while not self._queue.empty():
            self._settle(self._queue.get_nowait()[2], self._failure)

    async def _fill(self, worker: Worker) -> None:
        """Create an actor for this place and wait until it answers. Raises RunFailed with the constructor's own words."""
        worker.handle = self._spawn(f"{self.kind}-{worker.index}.{worker.incarnation}")
        try:
            future = asyncio.wrap_future(worker.handle.ready.remote().future())
            worker.facts = await asyncio.wait_for(future, READY_DEADLINE_S)
        except TimeoutError:
            raise RunFailed(f"{self.kind} actor {worker.index} was not placed or not ready within {READY_DEADLINE_S:g} s") from None
        except RayError as error:
            raise RunFailed(f"{self.kind} actor {worker.index} did not start: {_cause(error)}") from None
        worker.last_answer = time.monotonic()
        name = "actor_replaced" if worker.incarnation else "actor_started"
        shown = {key: value for key, value in worker.facts.items() if isinstance(value, str | int | float)}
        self._event(name, kind=self.kind, actor=worker.index, incarnation=worker.incarnation, **shown)


def _seen(future: asyncio.Future[Any]) -> None:
    """Look at how a call ended even when nobody waits for it any more, so that asyncio does not complain about it."""
    if not future.cancelled():
        future.exception()


def _cause(error: BaseException) -> str:
    """The last informative line of a Ray error: the exception raised in the actor, not the frames around it."""
    cause = getattr(error, "cause", None)
    if cause is not None:
        return f"{type(cause).__name__}: {cause}".strip().splitlines()[0]
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    raised = [line for line in lines if "Error" in line.split(":")[0] and not line.startswith(("File", "ray::"))]
    return (raised or lines or [type(error).__name__])[-1][:500]

"""Transport of calls in virtual time: the driver sends, and actors run, one call at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

from ray import ObjectRef

from actors.calls import Answer, Call
from cluster.runtime.transport import Handle
from simulator.actors import Simulated, TimedAnswer
from simulator.machine import SharedResource

Value = TypeVar("Value")


@dataclass(eq=False)
class Reference:
    """Substitute for Ray's ``ObjectRef`` in a simulation."""

    future: asyncio.Future[object] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(eq=False)
class Stored(Reference):
    """Reference to a value that the driver put into the object store."""

    value: object = None


@dataclass(eq=False)
class Actor:
    """A simulated process, the resource on which it runs, and the cores (or GPUs) that it uses."""

    kind: str
    does: Simulated
    on: SharedResource
    requested: float
    waiting: deque[tuple[Call, Sequence[Reference]]] = field(
        default_factory=deque[tuple[Call, Sequence[Reference]]]
    )
    working: bool = False


class SimulatedTransport:
    """``Transport`` without processes; ``call_s`` and ``driver_s`` as in ``Durations``."""

    def __init__(self, call_s: float, driver_s: float):
        self._call_s, self._driver_s = call_s, driver_s
        self._free_at = 0.0  # when the driver will have sent all calls so far
        self.driver_busy_s = 0.0
        self.work: dict[str, float] = {}  # seconds of calls by service, as if each ran alone
        self.capacity_s = 0.0  # sum of these seconds times the cores (or GPUs) used by each call
        self._arrived: dict[object, list[Callable[[], object]]] = {}

    def send(self, handle: Handle, call: Call) -> Sequence[ObjectRef[Answer]]:
        """See ``Transport``."""
        actor = cast(Actor, handle)
        refs = [Reference() for _ in range(call.returns)]
        loop = asyncio.get_running_loop()
        self._free_at = max(loop.time(), self._free_at) + self._driver_s
        self.driver_busy_s += self._driver_s
        loop.call_at(self._free_at + self._call_s, self._arrives, actor, call, refs)
        return cast("Sequence[ObjectRef[Answer]]", refs)

    def answer(self, reference: ObjectRef[Answer]) -> asyncio.Future[Answer]:
        """See ``Transport``."""
        return cast(Reference, reference).future

    def put(self, value: Value) -> ObjectRef[Value]:
        """See ``Transport``."""
        return cast("ObjectRef[Value]", Stored(value=value))

    def kill(self, handle: Handle) -> None:
        """See ``Transport``."""

    def ended(self, handle: Handle) -> bool:
        """See ``Transport``; simulated actors do not end."""
        return False

    def _arrives(self, actor: Actor, call: Call, refs: Sequence[Reference]) -> None:
        actor.waiting.append((call, refs))
        if not actor.working:
            self._begin(actor)

    def _begin(self, actor: Actor) -> None:
        """Start the next waiting call of an idle actor, if there is one."""
        if not actor.waiting:
            return
        call, refs = actor.waiting.popleft()
        actor.working = True
        args = [arg.value if isinstance(arg, Stored) else arg for arg in call.args]
        try:
            took: TimedAnswer = getattr(actor.does, call.method)(*args, **call.named)
        except Exception as error:  # delivered as the answer, so that the pool ends the run
            self._fails(actor, refs, error)
            return
        self.work[actor.kind] = self.work.get(actor.kind, 0.0) + took.seconds
        requested = actor.requested if took.requested is None else took.requested
        self.capacity_s += took.seconds * requested
        if actor.does.replicas > 1 and took.steps:
            self._step(actor, call, refs, took, requested)
        else:
            actor.on.run(took.seconds, requested, lambda: self._answers(actor, refs, took))

    def _step(
        self,
        actor: Actor,
        call: Call,
        refs: Sequence[Reference],
        took: TimedAnswer,
        requested: float,
        index: int = 0,
    ) -> None:
        """Run the parts of a call from part ``index`` on; all replicas meet after each part."""
        if index == len(took.steps):
            self._answers(actor, refs, took)
            return
        resume = partial(self._step, actor, call, refs, took, requested, index + 1)
        on_end = partial(self._meets, call.method, actor.does.replicas, took.together, resume)
        actor.on.run(took.steps[index], requested, on_end)

    def _meets(
        self, method: str, replicas: int, together: float, resume: Callable[[], object]
    ) -> None:
        """Barrier: when the last replica arrives, all continue after ``together`` seconds."""
        waiting = self._arrived.setdefault(method, [])
        waiting.append(resume)
        if len(waiting) == replicas:
            del self._arrived[method]
            for callback in waiting:
                asyncio.get_running_loop().call_later(together, callback)

    def _fails(self, actor: Actor, refs: Sequence[Reference], error: Exception) -> None:
        for ref in refs:
            if not ref.future.done():  # cancelled by a caller that no longer waits
                ref.future.set_exception(error)
        actor.working = False
        self._begin(actor)

    def _answers(self, actor: Actor, refs: Sequence[Reference], took: TimedAnswer) -> None:
        values = cast("tuple[object, ...]", took.value) if len(refs) > 1 else (took.value,)
        for ref, value in zip(refs, values, strict=True):
            if not ref.future.done():
                ref.future.set_result(value)
        actor.working = False
        self._begin(actor)

"""GPU turns: rollout actors and the learner share GPUs by moving their weights off between turns.

If the configuration has no such setting, both stay on the GPUs (``NoGpuTurns``). With it
(``GpuTurns``) an iteration has two turns: exploring, then everything that needs the learner's
weights. A turn ends when the other side requests the GPUs and no call of this side is in progress.
Weights that leave have left before the other side arrives, so that no GPU ever holds both. Every
actor starts without the GPU, including one that replaces a lost actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal

from actors.calls import Answer, AnyTask, Call, Caller, Method, R, Task, X, Y
from actors.clients import LearnerClient
from actors.learner import LearnerActor
from actors.messages import Moved
from actors.rollout import RolloutActor
from cluster.runtime.member import Member
from cluster.runtime.pool import ActorPool
from cluster.runtime.tasks import run_together
from records.errors import RunFailed
from records.rundir import Event

Side = Literal["rollout", "learner"]
AT_ANY_TIME = {
    method.__name__
    for method in (
        LearnerActor.save,
        LearnerActor.load,
        LearnerActor.shard,
        LearnerActor.quantization,
    )
}
"""Methods of the learner that do not need its frozen weights, and therefore no turn.

A checkpoint must not wait for a turn: a run that is stopped while it explores writes one.
"""


class NoGpuTurns:
    """Turns that never wait: both sides stay on the GPUs all the time."""

    @asynccontextmanager
    async def hold(self, side: Side) -> AsyncGenerator[None, None]:
        """Hold the turn of ``side`` for the duration of the context."""
        yield

    async def ensure_on_gpu(self, member: Member) -> None:
        """Move a rollout actor to its GPU. Call it within the rollout actors' turn."""

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of moving weights since the last call."""
        return {}


class GpuTurns(NoGpuTurns):
    """Turns in which one side moves its weights off the GPUs for the other; see the module."""

    def __init__(self, rollout: ActorPool, learner: ActorPool, event: Event):
        self._rollout, self._learner, self._event = rollout, learner, event
        self.holder: Side | None = None
        self._switching = asyncio.Lock()
        self._working = 0  # contexts of the holder
        self._idle = asyncio.Event()
        self._number = 0
        self._moves = [list[Moved]()]  # one list per group of actors that moved together

    @asynccontextmanager
    async def hold(self, side: Side) -> AsyncGenerator[None, None]:
        """See ``NoGpuTurns``. Raises RunFailed, and StateLost if the learner is lost meanwhile."""
        if not self._has_gpus(side):
            async with self._switching:
                await self._switch_to(side)
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._idle.set()

    async def ensure_on_gpu(self, member: Member) -> None:
        """See ``NoGpuTurns``. Raises ActorLost and RayError as ``ActorPool.ask`` does.

        Raises RunFailed outside the rollout actors' turn, which happens only to a task whose caller
        no longer waits.
        """
        if self.holder != "rollout":
            raise RunFailed(
                "a rollout actor was called to explore in the learner's turn on the GPU"
            )
        if member.has_gpu is not True:
            member.has_gpu = None  # unknown until the actor answers
            self._moves[-1].append(await self._rollout.ask(member, RolloutActor.begin_turn))
            member.has_gpu = True

    def take_metrics(self) -> dict[str, float]:
        """See ``NoGpuTurns``. Seconds are those of the slowest actor of each group, summed up."""
        moves, self._moves = self._moves, [list[Moved]()]
        return {
            "memory/moved_s": sum(max((m.seconds for m in group), default=0.0) for group in moves),
            "memory/moved_bytes": sum(moved.nbytes for group in moves for moved in group),
        }

    def _has_gpus(self, side: Side) -> bool:
        if self.holder != side:
            return False
        # rollout actors move to their GPUs one by one, before their next task
        return side == "rollout" or all(m.has_gpu is True for m in self._learner.members)

    async def _switch_to(self, side: Side) -> None:
        if self.holder != side:
            # a loop: between the end of the last context and this wake-up another may have started
            while self._working:
                self._idle.clear()
                await self._idle.wait()
            self.holder = None  # stays None if an actor is lost while moving
            # part of the task keys, so that events and timeline distinguish the moves of each turn
            self._number += 1
            moved_off = list[Moved]()
            self._moves.append(moved_off)
            if side == "learner":
                await self._rollout.each(self._move_rollout_off)
            else:
                await self._move_replicas(False)
            self.holder = side
            self._moves.append([])
            self._event("gpu_turn", kind=side, left=sum(moved.nbytes for moved in moved_off))
        if side == "learner":
            await self._move_replicas(True)

    async def _move_rollout_off(self, member: Member) -> None:
        if member.has_gpu is not False:
            member.has_gpu = None
            self._moves[-1].append(await self._rollout.ask(member, RolloutActor.end_turn))
            member.has_gpu = False

    async def _move_replicas(self, onto_gpu: bool) -> None:
        """Move the learner's replicas onto their GPUs or off them."""
        # not ``ActorPool.each``: a learner that is lost while moving must count as state loss
        moving = [member for member in self._learner.members if member.has_gpu is not onto_gpu]
        await run_together(*(self._move_replica(member, onto_gpu) for member in moving))

    async def _move_replica(self, member: Member, onto_gpu: bool) -> None:
        member.has_gpu = None
        method = LearnerActor.begin_turn if onto_gpu else LearnerActor.end_turn
        task = Task[Moved]((method.__name__, self._number, f"replica {member.index}"))
        call = Call(method.__name__, (), {})
        self._moves[-1].append(await self._learner.perform_on(member, task, call))
        member.has_gpu = onto_gpu


@dataclass(frozen=True)
class InGpuTurn(Caller):
    """Calls of ``caller``, made in the turn of ``side`` if they need one."""

    caller: Caller
    turns: NoGpuTurns
    side: Side

    async def perform(self, task: AnyTask, call: Call) -> Answer:
        """See ``Caller``."""
        if self.side == "learner" and call.method in AT_ANY_TIME:
            return await self.caller.perform(task, call)
        async with self.turns.hold(self.side):
            return await self.caller.perform(task, call)

    async def call_each(
        self,
        task: Task[R],
        method: Method[[X, Y], R],
        messages: Callable[[int], Sequence[X]],
        shared: Y,
    ) -> R:
        """See ``Caller``."""
        async with self.turns.hold(self.side):
            return await self.caller.call_each(task, method, messages, shared)


def learner_in_turn(client: LearnerClient, turns: NoGpuTurns) -> LearnerClient:
    """Return ``client`` with all calls made in the learner's turn."""
    return replace(
        client,
        any_replica=InGpuTurn(client.any_replica, turns, "learner"),
        first=InGpuTurn(client.first, turns, "learner"),
        every_replica=InGpuTurn(client.every_replica, turns, "learner"),
    )

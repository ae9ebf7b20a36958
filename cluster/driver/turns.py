"""Who has the GPUs: rollout actors or the learner, where one of them leaves between its turns.

Without such a setting nobody waits (``AllStay``). With it (``GpuTurns``) an iteration has two
turns: all that explores, then all that needs the learner's weights. A turn ends when the other side
asks and nothing of this one is under way; what is to leave has left before the other side comes, so
that no GPU ever holds both. Every actor begins without the GPU, also one that replaces a lost one.
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
"""What a learner does without its frozen weights. A checkpoint must not wait for a turn: a run that
is stopped while it explores writes one.
"""


class AllStay:
    """Everybody is on the GPU all the time."""

    @asynccontextmanager
    async def of(self, side: Side) -> AsyncGenerator[None, None]:
        """The turn of ``side``, for as long as the context lasts."""
        yield

    async def arrive(self, member: Member) -> None:
        """Within the rollout actors' turn: this one is on its GPU when it returns."""

    def take_metrics(self) -> dict[str, float]:
        """What was moved since this was asked last, under the contract's names."""
        return {}


class GpuTurns(AllStay):
    """See the module."""

    def __init__(self, rollout: ActorPool, learner: ActorPool, event: Event):
        self._rollout, self._learner, self._event = rollout, learner, event
        self.holder: Side | None = None
        self._changing = asyncio.Lock()
        self._working = 0  # contexts of the holder
        self._idle = asyncio.Event()
        self._number = 0
        self._moves = [list[Moved]()]  # of each group of actors that moved together

    @asynccontextmanager
    async def of(self, side: Side) -> AsyncGenerator[None, None]:
        """See ``AllStay``. Raises StateLost where the learner is lost on the way, RunFailed."""
        if not self._has_gpus(side):
            async with self._changing:
                await self._give(side)
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._idle.set()

    async def arrive(self, member: Member) -> None:
        """See ``AllStay``. Raises ActorLost, RayError as ``ActorPool.ask``; RunFailed out of turn,
        which only a task that nobody waits for any more can meet.
        """
        if self.holder != "rollout":
            raise RunFailed("a rollout actor is asked to explore in the learner's turn on the GPU")
        if member.has_gpu is not True:
            member.has_gpu = None  # not known, until it says so
            self._moves[-1].append(await self._rollout.ask(member, RolloutActor.begin_turn))
            member.has_gpu = True

    def take_metrics(self) -> dict[str, float]:
        """See ``AllStay``. Seconds of the slowest actor of those that moved together, in sum."""
        moves, self._moves = self._moves, [list[Moved]()]
        return {
            "memory/moved_s": sum(max((m.seconds for m in each), default=0.0) for each in moves),
            "memory/moved_bytes": sum(moved.nbytes for each in moves for moved in each),
        }

    def _has_gpus(self, side: Side) -> bool:
        if self.holder != side:
            return False
        # rollout actors come one by one, before their next task
        return side == "rollout" or all(m.has_gpu is True for m in self._learner.members)

    async def _give(self, side: Side) -> None:
        if self.holder != side:
            # again and again: between the last one's end and this wake-up another may have begun
            while self._working:
                self._idle.clear()
                await self._idle.wait()
            self.holder = None  # also where somebody is lost on the way
            # part of the tasks' keys, so that events and timeline tell one turn's moves from
            # another's
            self._number += 1
            left = list[Moved]()
            self._moves.append(left)
            if side == "learner":
                await self._rollout.each(self._rollout_leaves)
            else:
                await self._replicas(False)
            self.holder = side
            self._moves.append([])
            self._event("gpu_turn", kind=side, left=sum(moved.nbytes for moved in left))
        if side == "learner":
            await self._replicas(True)

    async def _rollout_leaves(self, member: Member) -> None:
        if member.has_gpu is not False:
            member.has_gpu = None
            self._moves[-1].append(await self._rollout.ask(member, RolloutActor.end_turn))
            member.has_gpu = False

    async def _replicas(self, come: bool) -> None:
        """The learner's replicas come to their GPUs, or leave them."""
        # not ``ActorPool.each``: a learner that is lost on the way must be the loss of its state
        others = [member for member in self._learner.members if member.has_gpu is not come]
        await run_together(*(self._replica(member, come) for member in others))

    async def _replica(self, member: Member, come: bool) -> None:
        member.has_gpu = None
        method = LearnerActor.begin_turn if come else LearnerActor.end_turn
        task = Task[Moved]((method.__name__, self._number, f"replica {member.index}"))
        call = Call(method.__name__, (), {})
        self._moves[-1].append(await self._learner.perform_on(member, task, call))
        member.has_gpu = come


@dataclass(frozen=True)
class WithGpus(Caller):
    """Calls of ``caller`` in the turn of ``side``, where they need one."""

    caller: Caller
    turns: AllStay
    side: Side

    async def perform(self, task: AnyTask, call: Call) -> Answer:
        """See ``Caller``."""
        if self.side == "learner" and call.method in AT_ANY_TIME:
            return await self.caller.perform(task, call)
        async with self.turns.of(self.side):
            return await self.caller.perform(task, call)

    async def call_each(
        self,
        task: Task[R],
        method: Method[[X, Y], R],
        messages: Callable[[int], Sequence[X]],
        shared: Y,
    ) -> R:
        """See ``Caller``."""
        async with self.turns.of(self.side):
            return await self.caller.call_each(task, method, messages, shared)


def learner_in_turn(client: LearnerClient, turns: AllStay) -> LearnerClient:
    """The client of a learner that has turns."""
    return replace(
        client,
        any_replica=WithGpus(client.any_replica, turns, "learner"),
        first=WithGpus(client.first, turns, "learner"),
        every_replica=WithGpus(client.every_replica, turns, "learner"),
    )

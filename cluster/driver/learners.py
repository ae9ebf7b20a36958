"""The learner: one actor, or a group of replicas that train one LoRA together and live and die
together.

Replicas are equal bit by bit between two calls. So a picture is drawn by whichever is free; an
update goes to all of them, to each its own prompts; exports, checkpoints and the table of modules
are asked of the first. When one dies or hangs, or they lose each other, the state is lost as that
of a single learner is: ``renew`` puts new ones in all places, which meet and load the checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError, RayTaskError

from actors.messages import Rows, TrainingGroup
from cluster.runtime.pool import ActorPool
from cluster.runtime.starting import cause
from cluster.runtime.tasks import all_or_none
from cluster.runtime.worker import ActorLost, Unit, Worker
from learner.replicas import GroupBroken
from records.errors import InputsLost, RunFailed, StateLost

ANYONE = ("generate",)
EVERYONE = ("update", "load")
MEETINGS = 3
"""Times that replicas may be lost while they meet, one after the other."""
HINDSIGHT_S = 5.0
"""A survivor hears of a death at once, Ray tells it within two seconds: so long the survivor's word
waits for that of the death itself.
"""


class LearnerGroup(ActorPool):
    """The replicas as one pool. With one it is a pool like any other."""

    async def start(self) -> None:
        """Create every replica, and make them one group."""
        await super().start()
        await self._meet()

    async def renew(self, why: str) -> None:
        """Put new replicas in all places, and make them one group."""
        await super().renew(why)
        await self._meet()

    async def call(self, key: Any, method: str, *args: Any, **options: Any) -> Any:
        """As ``ActorPool.call``: ``generate`` of any replica, ``update`` and ``load`` of all (the
        first one's value), the rest of the first.
        """
        if len(self.workers) == 1 or method in ANYONE:
            return await super().call(key, method, *args, **options)
        if self._failure:
            raise self._failure
        if method not in EVERYONE:
            return await self._by(self.workers[0], Unit(key, method, args, **options))
        size = len(self.workers)
        sent = [share(rank, size, *args) if method == "update" else args for rank in range(size)]
        units = [
            Unit((*key, f"replica {rank}"), method, mine, **options)
            for rank, mine in enumerate(sent)
        ]
        return (await self._by_all(units))[0]

    async def _by(self, worker: Worker, unit: Unit) -> Any:
        """A unit that is one replica's own, past the queue."""
        worker.takes_unit()
        try:
            await self._handle(worker, unit)
        finally:
            worker.lays_down_unit()
        return await unit.future

    async def _by_all(self, units: Sequence[Unit]) -> list[Any]:
        """One unit for each replica. What is lost is lost at once; a failure, which all of them
        hear of, is raised when all have ended: they write down what failed.
        """
        tasks = [
            asyncio.create_task(self._by(worker, unit))
            for worker, unit in zip(self.workers, units, strict=True)
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            first = next((error for task in done if (error := task.exception())), None)
            if isinstance(first, RunFailed):
                await asyncio.wait(tasks)
            if first is not None:
                raise first
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, worker: Worker, key: Any, attempt: int, ref: Any) -> Any:
        """A replica that lost the others is lost itself; who died is to be named first."""
        try:
            return await super()._answer(worker, key, attempt, ref)
        except RayTaskError as error:
            if not isinstance(error.cause, GroupBroken):
                raise
            for _ in range(int(HINDSIGHT_S / 0.1)):
                if self._failure:
                    break
                await asyncio.sleep(0.1)
            raise ActorLost(str(error.cause)) from None

    async def _meet(self) -> None:
        """Make the replicas one group. Raises RunFailed when they do not come together."""
        if len(self.workers) == 1:
            return
        why = ""
        for _ in range(MEETINGS):
            try:
                return await self._join()
            except (ActorLost, InputsLost, StateLost) as loss:
                why = f"lost while the replicas met: {loss}"
                await super().renew(why)
            except RayError as error:
                why = cause(error)
                break
        raise RunFailed(
            f"the {len(self.workers)} replicas of the learner did not come together: {why}; their"
            " nodes must reach each other on any port, then continue with --resume"
        )

    async def _join(self) -> None:
        patience = self._service.deadline_s
        host, port = await self.ask(self.workers[0], "meeting_place", patience)
        size = len(self.workers)
        joining = (
            self.ask(worker, "join", rank, size, host, port, patience)
            for rank, worker in enumerate(self.workers)
        )
        await all_or_none(*joining)
        self._event("replicas_met", kind=self.kind, replicas=size, where=f"{host}:{port}")


def share(
    rank: int, size: int, iteration: int, groups: Sequence[TrainingGroup], conds: int, *sent: Any
) -> tuple[Any, ...]:
    """The arguments of one replica's update, of those of a whole one
    (``actors.learner.LearnerActor.update``).

    Prompts go round the replicas. The others' groups stay, for their rewards, without samples;
    conditioning and records that only they need are left out.
    """
    conditionings, records = sent[:conds], sent[conds:]
    mine = [group.prompt % size == rank for group in groups]
    needed = sorted(
        {
            part.record
            for group, own in zip(groups, mine, strict=True)
            if own
            for part in group.samples
        }
    )

    def told(group: TrainingGroup, own: bool) -> TrainingGroup:
        parts = (
            tuple(Rows(needed.index(part.record), part.rows) for part in group.samples)
            if own
            else ()
        )
        return replace(group, samples=parts)

    return (
        iteration,
        [told(group, own) for group, own in zip(groups, mine, strict=True)],
        sum(mine),
        *(conditioning for conditioning, own in zip(conditionings, mine, strict=True) if own),
        *(records[index] for index in needed),
    )

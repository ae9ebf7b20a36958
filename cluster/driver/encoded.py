"""All prompts of a run encoded at its start, so that the encoder can go and leave its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError

from actors.clients import EncoderClient
from cluster.runtime.pool import ActorPool
from configs.prompts import Prompt, prompts_of_iteration
from configs.schema import RunConfig
from policy.types import Conditioning
from records.errors import RunFailed, described

Asked = tuple[str, Path | None]
"""Of a prompt all that is encoded: its text, and the file of the image that it edits."""
AT_ONCE = 32
"""Groups of prompts in a call, which has the encoder's deadline."""
Group = tuple[Asked, ...]
Start = Callable[[], Awaitable[None]]
LOST = (ObjectLostError, TimeoutError)
"""What comes of a reference behind which there is nothing any more."""


@dataclass(frozen=True)
class EncodedOnce(EncoderClient):
    """An encoder that is asked in advance. Until it has been, it is asked as ever."""

    known: dict[Group, ObjectRef[Conditioning]] = field(
        default_factory=dict[Group, ObjectRef[Conditioning]]
    )

    async def fill_from(self, pool: ActorPool, start: Start, groups: Iterable[list[Prompt]]) -> int:
        """``fill`` by actors of ``pool`` that ``start`` starts, and that leave when it is done."""
        await start()
        count = await self.fill(groups, pool.service.max_attempts, pool.service.deadline_s)
        await pool.supervisor.resize(0)
        return count

    async def fill(self, groups: Iterable[list[Prompt]], tries: int, within_s: float) -> int:
        """Encode those of ``groups`` that are not known, as one by one they would be; how many.

        Raises RunFailed where what was encoded is lost with its node ``tries`` times, or is not
        here within ``within_s`` seconds.
        """
        asked = {asked_of(group): group for group in groups}
        new = [group for key, group in asked.items() if key not in self.known]
        for first in range(0, len(new), AT_ONCE):
            await self._fill(f"once-{first}", new[first : first + AT_ONCE], tries, within_s)
        return len(new)

    async def _fill(
        self, what: str, groups: list[list[Prompt]], tries: int, within_s: float
    ) -> None:
        why = ""
        for _ in range(tries):
            found = await super().encode(what, groups)
            try:
                async with asyncio.timeout(within_s):
                    for group, reference in zip(groups, found, strict=True):
                        # put anew from here: what an actor made would be lost with its node
                        self.known[asked_of(group)] = _put(await reference)
                return
            except LOST as error:
                why = described(error)
        raise RunFailed(
            f"prompts.encode_once: prompts were encoded {tries} times and lost before they were"
            f" here, last: {why}; continue with --resume"
        )

    async def forget_lost(self, within_s: float) -> int:
        """Forget what is no longer in the object store, such as what Ray had written to a disk
        that is gone; how many groups. Each may take ``within_s`` seconds to come.
        """
        lost: list[Group] = []
        for group, reference in self.known.items():
            try:
                async with asyncio.timeout(within_s):
                    await reference
            except LOST:
                lost.append(group)
        for group in lost:
            del self.known[group]
        return len(lost)

    async def encode(
        self, what: int | str, groups: list[list[Prompt]]
    ) -> list[ObjectRef[Conditioning]]:
        """What is known of each group. Raises RunFailed for one that was not asked in advance."""
        if not self.known:
            return await super().encode(what, groups)
        missing = [group for group in groups if asked_of(group) not in self.known]
        if missing:
            texts = [prompt.text for prompt in missing[0]]
            raise RunFailed(
                f"prompts.encode_once: {texts} was not encoded at the start: this should never"
                " happen, please report it"
            )
        return [self.known[asked_of(group)] for group in groups]


def asked_of(group: Sequence[Prompt]) -> Group:
    """What two groups that are encoded alike have in common."""
    return tuple((prompt.text, prompt.image) for prompt in group)


def _put(conditioning: Conditioning) -> ObjectRef[Conditioning]:
    return ray.put(conditioning)  # pyright: ignore[reportUnknownMemberType]


def groups_of(
    config: RunConfig, train: Sequence[Prompt], test: Sequence[Prompt]
) -> list[list[Prompt]]:
    """Every group of prompts that a run has encoded: those it trains on, one by one, and blocks of
    held-out ones. The first of all prompts is that of the identity check.
    """
    count, iterations = config.prompts.per_iteration, range(config.iterations if train else 0)
    rows = {
        row
        for index in iterations
        for row in prompts_of_iteration(len(train), count, index, config.seed)
    }
    groups = [[train[row]] for row in sorted(rows | {0})] if train else []
    return groups + [[test[p] for p in block] for block in blocks_of(config, len(test))]


def blocks_of(config: RunConfig, prompts: int) -> list[list[int]]:
    """Which of so many held-out prompts go together through encoder and learner."""
    size = max(1, config.evaluate.batch_size // config.evaluate.noises)
    return [list(range(first, min(first + size, prompts))) for first in range(0, prompts, size)]

"""Encode all prompts of a run at its start, so that the encoder can exit and free its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path

import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError

from actors.clients import EncoderClient
from cluster.runtime.pool import ActorPool
from cluster.runtime.tasks import run_together
from configs.prompts import Prompt, prompts_of_iteration
from configs.schema import RunConfig
from policy.types import Conditioning
from records.errors import RunFailed, error_summary

PromptKey = tuple[str, Path | None]
"""The parts of a prompt that are encoded: its text, and the file of the image that it edits."""
AT_ONCE = 32
"""Groups of prompts per call, and groups waited for together; the encoder's deadline applies to
each.
"""
Group = tuple[PromptKey, ...]
Start = Callable[[], Awaitable[None]]
LOST = (ObjectLostError, TimeoutError)
"""Errors raised for an object reference whose object is lost."""


@dataclass(frozen=True)
class CachedEncoderClient(EncoderClient):
    """Encoder client with a cache of conditioning that ``fill`` computes in advance.

    While the cache is empty, calls go to the encoder as in ``EncoderClient``.
    """

    known: dict[Group, ObjectRef[Conditioning]] = field(
        default_factory=dict[Group, ObjectRef[Conditioning]]
    )

    async def fill_from(self, pool: ActorPool, start: Start, groups: Iterable[list[Prompt]]) -> int:
        """Start actors of ``pool`` with ``start``, ``fill`` the cache, then remove the actors."""
        await start()
        count = await self.fill(groups, pool.service.max_attempts, pool.service.deadline_s)
        await pool.supervisor.resize(0)
        return count

    async def fill(self, groups: Iterable[list[Prompt]], tries: int, within_s: float) -> int:
        """Encode the ``groups`` that are not cached; return how many there were.

        Several groups go into a call, with the same results as if each were encoded by itself.
        Raises RunFailed if in ``tries`` attempts the results were lost with their node or did not
        arrive within ``within_s`` seconds.
        """
        groups_by_key = {group_key(group): group for group in groups}
        missing = [group for key, group in groups_by_key.items() if key not in self.known]
        for first in range(0, len(missing), AT_ONCE):
            await self._fill(f"once-{first}", missing[first : first + AT_ONCE], tries, within_s)
        return len(missing)

    async def _fill(
        self, what: str, groups: list[list[Prompt]], tries: int, within_s: float
    ) -> None:
        why = ""
        for _ in range(tries):
            references = await super().encode(what, groups)
            try:
                async with asyncio.timeout(within_s):
                    for group, reference in zip(groups, references, strict=True):
                        # put again by the driver: an object on an actor's node is lost with it
                        self.known[group_key(group)] = _put(await reference)
                return
            except LOST as error:
                why = error_summary(error)
        raise RunFailed(
            f"prompts.encode_once: encoded prompts were lost {tries} times before they arrived,"
            f" last: {why}; continue with --resume"
        )

    async def forget_lost(self, within_s: float) -> int:
        """Remove groups whose objects are lost from the cache; return how many there were.

        An object is lost, for example, if Ray spilled it to a disk that is gone. Each group has
        ``within_s`` seconds to arrive.
        """
        # several at once, as Ray may need a second for each; not all, whose tensors may not fit
        at_once = asyncio.Semaphore(AT_ONCE)

        async def forget(group: Group, reference: ObjectRef[Conditioning]) -> bool:
            try:
                async with at_once, asyncio.timeout(within_s):
                    await reference
            except LOST:
                del self.known[group]
                return True
            return False

        return sum(await run_together(*starmap(forget, list(self.known.items()))))

    async def encode(
        self, what: int | str, groups: list[list[Prompt]]
    ) -> list[ObjectRef[Conditioning]]:
        """Return the cached conditioning of each group.

        Raises RunFailed for a group that was not encoded in advance.
        """
        if not self.known:
            return await super().encode(what, groups)
        missing = [group for group in groups if group_key(group) not in self.known]
        if missing:
            texts = [prompt.text for prompt in missing[0]]
            raise RunFailed(
                f"prompts.encode_once: {texts} was not encoded at the start: this is a bug, please"
                " report it"
            )
        return [self.known[group_key(group)] for group in groups]


def group_key(group: Sequence[Prompt]) -> Group:
    """Return the cache key of a group: groups with equal keys have the same conditioning."""
    return tuple((prompt.text, prompt.image) for prompt in group)


def _put(conditioning: Conditioning) -> ObjectRef[Conditioning]:
    return ray.put(conditioning)  # pyright: ignore[reportUnknownMemberType]


def groups_of(
    config: RunConfig, train: Sequence[Prompt], test: Sequence[Prompt]
) -> list[list[Prompt]]:
    """Return every group of prompts that a run encodes.

    These are its training prompts, one per group, and the blocks of held-out prompts. The first
    training prompt is always included: the identity check uses it.
    """
    count, iterations = config.prompts.per_iteration, range(config.iterations if train else 0)
    rows = {
        row
        for index in iterations
        for row in prompts_of_iteration(len(train), count, index, config.seed)
    }
    groups = [[train[row]] for row in sorted(rows | {0})] if train else []
    return groups + [[test[p] for p in block] for block in held_out_blocks(config, len(test))]


def held_out_blocks(config: RunConfig, prompts: int) -> list[list[int]]:
    """Split the indices of ``prompts`` held-out prompts into blocks that are evaluated together."""
    size = max(1, config.evaluate.batch_size // config.evaluate.noises)
    return [list(range(first, min(first + size, prompts))) for first in range(0, prompts, size)]

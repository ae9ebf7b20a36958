"""All prompts of a run encoded at its start, so that the encoder can go and leave its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import ray
from ray import ObjectRef

from actors.clients import EncoderClient
from configs.prompts import Prompt, prompts_of_iteration
from configs.schema import RunConfig
from policy.types import Conditioning
from records.errors import RunFailed

AT_ONCE = 32
"""Groups of prompts in a call, which has the encoder's deadline."""
Texts = tuple[str, ...]


@dataclass(frozen=True)
class EncodedOnce(EncoderClient):
    """An encoder that is asked in advance. Until it has been, it is asked as ever."""

    known: dict[Texts, ObjectRef[Conditioning]] = field(
        default_factory=dict[Texts, ObjectRef[Conditioning]]
    )

    async def fill(self, groups: Iterable[Texts]) -> None:
        """Encode each of ``groups``, as one by one they would be."""
        new = [group for group in dict.fromkeys(groups) if group not in self.known]
        for first in range(0, len(new), AT_ONCE):
            some = new[first : first + AT_ONCE]
            found = await super().encode(f"once-{first}", [list(group) for group in some])
            for group, reference in zip(some, found, strict=True):
                # put anew from here: what an actor made would be lost with its node
                self.known[group] = _put(await reference)

    async def encode(
        self, what: int | str, groups: list[list[str]]
    ) -> list[ObjectRef[Conditioning]]:
        """What is known of each group. Raises RunFailed for one that was not asked in advance."""
        if not self.known:
            return await super().encode(what, groups)
        missing = [group for group in groups if tuple(group) not in self.known]
        if missing:
            raise RunFailed(
                f"prompts.encode_once: {missing[0]} was not encoded at the start: this should never"
                " happen, please report it"
            )
        return [self.known[tuple(group)] for group in groups]


def _put(conditioning: Conditioning) -> ObjectRef[Conditioning]:
    return ray.put(conditioning)  # pyright: ignore[reportUnknownMemberType]


def texts_of(config: RunConfig, train: Sequence[Prompt], test: Sequence[Prompt]) -> list[Texts]:
    """Every group of prompts that a run has encoded: those it trains on, one by one, and blocks of
    held-out ones. The first of all prompts is that of the identity check.
    """
    count, iterations = config.prompts.per_iteration, range(config.iterations if train else 0)
    rows = {
        row
        for index in iterations
        for row in prompts_of_iteration(len(train), count, index, config.seed)
    }
    groups: list[Texts] = [(train[row].text,) for row in sorted(rows | {0})] if train else []
    return groups + [tuple(test[p].text for p in block) for block in blocks_of(config, len(test))]


def blocks_of(config: RunConfig, prompts: int) -> list[list[int]]:
    """Which of so many held-out prompts go together through encoder and learner."""
    size = max(1, config.evaluate.batch_size // config.evaluate.noises)
    return [list(range(first, min(first + size, prompts))) for first in range(0, prompts, size)]

"""Distribution of an iteration's samples over the replicas of the learner: pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from actors.messages import AllRewards, Portion, SampleRows, TrainingGroup, UpdateRequest
from configs.services import Share
from records.errors import RunFailed


def share(
    iteration: int, groups: Sequence[TrainingGroup], size: int, by: Share
) -> list[UpdateRequest]:
    """Return the requests of ``size`` replicas, by rank.

    By "prompts", prompt p goes to replica p modulo ``size``. By "samples", the samples of all
    prompts in order are cut into ``size`` contiguous parts whose lengths differ by at most one.
    Raises RunFailed if a replica would get no sample.
    """
    groups = sorted(groups, key=lambda group: group.prompt)
    portions: list[list[Portion]] = [[] for _ in range(size)]
    total, first = sum(len(group.rewards) for group in groups), 0
    for group in groups:
        count = len(group.rewards)
        if by == "prompts":
            portions[group.prompt % size].append(_portion(group, range(count)))
        else:
            for rank, rows in _runs(first, count, total, size):
                portions[rank].append(_portion(group, rows))
        first += count
    if not all(portions):
        raise RunFailed(
            f"only {total} scored samples of {len(groups)} prompts are left in an iteration, too"
            f" few for {size} replicas of the learner"
        )
    return [UpdateRequest(iteration, tuple(mine)) for mine in portions]


def all_rewards(groups: Sequence[TrainingGroup]) -> AllRewards:
    """Return the rewards of all prompts, which every replica receives."""
    groups = sorted(groups, key=lambda group: group.prompt)
    prompts = tuple(group.prompt for group in groups)
    counts = tuple(len(group.rewards) for group in groups)
    return AllRewards(prompts, counts, np.concatenate([group.rewards for group in groups]))


def _runs(first: int, count: int, total: int, size: int) -> Iterator[tuple[int, range]]:
    """Yield (rank, rows) of the replicas that share a group of ``count`` samples.

    ``first`` is the group's position among all ``total`` samples. Rank r gets the samples from
    ``total r // size`` up to ``total (r + 1) // size``.
    """
    rank = first * size // total
    while rank < size and (begin := total * rank // size) < first + count:
        end = total * (rank + 1) // size
        if rows := range(max(0, begin - first), min(count, end - first)):
            yield rank, rows
        rank += 1


def _portion(group: TrainingGroup, requested: range) -> Portion:
    """Return the rows ``requested`` of the group, numbered through all of its parts."""
    parts: list[SampleRows] = []
    first = 0
    for part in group.samples:
        start, stop = (max(0, row - first) for row in (requested.start, requested.stop))
        if rows := part.rows[start:stop]:
            parts.append(SampleRows(part.samples, rows))
        first += len(part.rows)
    return Portion(group.prompt, requested, group.conditioning, tuple(parts))

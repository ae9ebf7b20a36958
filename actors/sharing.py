"""Who of the learner's replicas trains on what. Pure functions, used by the driver."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from actors.messages import Portion, SampleRows, TrainingGroup, UpdateRequest
from configs.services import Share
from records.errors import RunFailed


def share(
    iteration: int, groups: Sequence[TrainingGroup], rank: int, size: int, by: Share
) -> UpdateRequest:
    """What replica ``rank`` of ``size`` is asked to train on.

    ``by`` prompts: they go round the replicas. ``by`` samples: of all, prompt after prompt, each
    replica has a run of as many as the others, or one fewer. Raises RunFailed where one would have
    none.
    """
    groups = sorted(groups, key=lambda group: group.prompt)
    if by == "prompts":
        mine = [
            (group, range(len(group.rewards))) for group in groups if group.prompt % size == rank
        ]
    else:
        mine = _run(groups, rank, size)
    if not mine:
        raise RunFailed(f"{len(groups)} prompts cannot be shared by {size} replicas")
    return UpdateRequest(
        iteration,
        tuple(
            Portion(group.prompt, rows, group.conditioning, _rows(group.samples, rows))
            for group, rows in mine
        ),
        tuple(group.prompt for group in groups),
        tuple(len(group.rewards) for group in groups),
        np.concatenate([group.rewards for group in groups]),
    )


def _run(
    groups: Sequence[TrainingGroup], rank: int, size: int
) -> list[tuple[TrainingGroup, range]]:
    """The samples from ``rank`` to ``rank + 1`` of ``size`` equal parts of all."""
    total = sum(len(group.rewards) for group in groups)
    if total < size:
        raise RunFailed(
            f"an iteration is left with {total} scored samples, which {size} replicas cannot share"
        )
    begin, end = (total * at // size for at in (rank, rank + 1))
    found, first = [], 0
    for group in groups:
        count = len(group.rewards)
        if rows := range(max(0, begin - first), min(count, end - first)):
            found.append((group, rows))
        first += count
    return found


def _rows(samples: Sequence[SampleRows], wanted: range) -> tuple[SampleRows, ...]:
    """``wanted`` of the rows of several parts, counted through them."""
    found, first = [], 0
    for part in samples:
        start, stop = (max(0, at - first) for at in (wanted.start, wanted.stop))
        if rows := part.rows[start:stop]:
            found.append(SampleRows(part.samples, rows))
        first += len(part.rows)
    return tuple(found)

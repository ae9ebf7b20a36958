"""Selection of the K of a prompt's N explored seeds to train on: pure functions, without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Selected:
    """Selected candidate indices. Iteration yields ``indices``."""

    # K of them, ascending, so that the order of training does not depend on the rewards
    indices: tuple[int, ...]
    best: tuple[int, ...]  # the better half of the chosen, best first
    worst: tuple[int, ...]  # the worse half, worst first

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def best_worst(rewards: np.ndarray, keep: int, keys: np.ndarray) -> np.ndarray:
    """Select the keep/2 highest and the keep/2 lowest rewards (arXiv 2604.06916)."""
    if keep % 2:
        raise ValueError(
            f"rule 'best_worst' keeps equal numbers of best and worst, so keep = {keep} must be"
            " even"
        )
    order = np.argsort(-rewards, kind="stable")
    best, rest = order[: keep // 2], np.sort(order[keep // 2 :])
    worst = rest[np.argsort(rewards[rest], kind="stable")[: keep // 2]]
    return np.concatenate([best, worst])


def random(rewards: np.ndarray, keep: int, keys: np.ndarray) -> np.ndarray:
    """Select ``keep`` at random, independently of their rewards: no selection pressure."""
    return np.argsort(keys, kind="stable")[:keep]


def mean_deviation(rewards: np.ndarray, keep: int, keys: np.ndarray) -> np.ndarray:
    """Select the ``keep`` farthest from the mean reward, which have the largest advantages."""
    return np.argsort(-np.abs(rewards - rewards.mean()), kind="stable")[:keep]


RULES: dict[str, Callable[[np.ndarray, int, np.ndarray], np.ndarray]] = {
    "best_worst": best_worst,
    "random": random,
    "mean_deviation": mean_deviation,
}
"""(rewards float64 [M] in candidate order, keep, random keys uint64 [M]) -> positions [keep]; ties
go to the lower position.
"""


def select(
    rewards: Sequence[float] | np.ndarray,
    keep: int,
    rule: str = "best_worst",
    seed: int = 0,
    candidates: Sequence[int] | np.ndarray | None = None,
) -> Selected:
    """Select ``keep`` of the scored candidates of one prompt.

    ``rewards`` [M] are finite. ``candidates`` [M] are their distinct indices in the pool, in any
    order (default 0 .. M-1); M is smaller than the pool if samples were dropped. The result depends
    only on the set of (candidate, reward) pairs and on ``seed``; ties go to the lower candidate
    index. Random keys belong to candidates, so that a dropped sample does not reshuffle the others.

    Raises ValueError if M < keep, for a reward that is not finite, and for an unknown rule.
    """
    values = np.asarray(rewards, dtype=np.float64)
    indices = (
        np.arange(len(values)) if candidates is None else np.asarray(candidates, dtype=np.int64)
    )
    _check(values, indices, keep, rule)
    order = np.argsort(indices)
    values, indices = values[order], indices[order]
    keys = (
        np.array([_key(seed, int(index)) for index in indices], dtype=np.uint64)
        if rule == "random"
        else np.zeros(len(values), np.uint64)
    )
    chosen = np.sort(RULES[rule](values, keep, keys))
    ranked = chosen[np.argsort(-values[chosen], kind="stable")]
    best, rest = ranked[: (keep + 1) // 2], np.sort(ranked[(keep + 1) // 2 :])
    worst = rest[np.argsort(values[rest], kind="stable")]
    return Selected(*(tuple(indices[part].tolist()) for part in (chosen, best, worst)))


def _check(values: np.ndarray, indices: np.ndarray, keep: int, rule: str) -> None:
    """Raise the errors of ``select``."""
    if values.ndim != 1 or values.shape != indices.shape or len(np.unique(indices)) != len(indices):
        raise ValueError(
            f"rewards {list(values.shape)} and candidates {list(indices.shape)}: need one reward"
            " per distinct candidate"
        )
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(
            f"candidate {indices[at]} has reward {values[at]}: drop samples that have no finite"
            " reward before selecting"
        )
    if rule not in RULES:
        raise ValueError(f"unknown selection rule {rule!r}: use one of {', '.join(RULES)}")
    if keep < 1:
        raise ValueError(f"keep is {keep}: at least one sample must be kept")
    if len(values) < keep:
        raise ValueError(
            f"only {len(values)} samples have a reward, but selection.keep ="
            f" {keep}: fix the scorer (events.jsonl says why it failed), or lower selection.keep"
        )


def _key(seed: int, index: int) -> int:
    """Return a random 64-bit number for a candidate, equal on all platforms and versions."""
    return int.from_bytes(
        hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little"
    )

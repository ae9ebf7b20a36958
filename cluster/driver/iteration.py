"""What one iteration knows while it runs, and what it tells when it is done."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.messages import Chosen
from cluster.driver.scoring import Scored, Scoring
from configs.prompts import Prompt
from records.errors import RunFailed

Agreement = dict[str, float]


@dataclass
class Pool:
    """A prompt's explored candidates: seeds [N], scores [N], and where each one's sample is."""

    seeds: tuple[int, ...]
    scored: Scored
    records: list[Any]  # references, one per chunk
    chunk_size: int


@dataclass
class Iteration:
    """Begins when its exploration does, which may be before its turn comes.

    What belongs to a prompt is kept by the prompt's position, and summed up in that order, whoever
    was first.
    """

    index: int  # also the policy version that regenerates
    version: int  # of the policy that explores
    backend: (
        str | None
    )  # precision that explores; None where nobody explores, or explorers do not say
    prompts: list[Prompt]
    conditioning: list[Any]  # references, one per prompt
    scoring: Scoring
    exploring: list[asyncio.Task[None]] = field(default_factory=list)  # one per prompt
    began: float = field(default_factory=time.perf_counter)
    start: float = 0.0  # when it had begun and its turn had come
    explored_at: float = 0.0
    pools: dict[int, Pool] = field(default_factory=dict)
    chosen: dict[int, Chosen] = field(default_factory=dict)
    audits: dict[int, Agreement] = field(default_factory=dict)
    random_audits: dict[int, Agreement] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)  # by stage, as progress counts
    _tell: Callable[[str, int], None] | None = None

    @property
    def staleness(self) -> int:
        """Updates by which the exploring policy is behind the regenerating one."""
        return self.index - self.version

    def check_staleness(self, bound: int) -> None:
        """Raises RunFailed when the exploring policy is older than ``bound`` updates, or newer than
        the regenerating one.
        """
        if not 0 <= self.staleness <= bound:
            raise RunFailed(
                f"iteration {self.index} was explored with policy version {self.version},"
                f" explore_ahead = {bound} allows {self.index - bound} to {self.index}: this should"
                " never happen, please report it"
            )

    def takes_its_turn(self, tell: Callable[[str, int], None]) -> None:
        """From now on ``tell`` hears what is done; first what was done ahead."""
        self.start = time.perf_counter()
        for stage, count in self.done.items():
            tell(stage, count)
        self._tell = tell

    def advanced(self, stage: str, count: int) -> None:
        """``count`` more went through ``stage``."""
        self.done[stage] += count
        if self._tell:
            self._tell(stage, count)

    # ---- what it tells

    @property
    def selected(self) -> list[dict[str, Any]]:
        """Per prompt, what was selected: indices into its pool."""
        return [
            {
                "prompt": self.prompts[p].text,
                "train": list(chosen.train),
                "audit": list(chosen.audit),
            }
            for p, chosen in sorted(self.chosen.items())
        ]

    def agreement(self) -> dict[str, float]:
        """Means over prompts of the ranks' agreement, under their metric names; nothing where
        nothing could be ranked.
        """
        return _mean_of("audit/", self.audits) | _mean_of("audit/random_", self.random_audits)

    def explored(self, keep: int) -> dict[str, Any]:
        """Metrics of the exploration, from which ``keep`` were selected."""
        if not self.pools:
            return {}
        half = keep // 2
        pools = [pool.scored.rewards for _, pool in sorted(self.pools.items())]
        ranked = [np.sort(rewards[np.isfinite(rewards)]) for rewards in pools]
        best, worst = (
            float(np.mean([r.mean() for r in part]))
            for part in ([r[-half:] for r in ranked], [r[:half] for r in ranked])
        )
        return {
            "explore/version": self.version,
            **({"explore/backend": self.backend} if self.backend else {}),
            "explore/reward_mean": float(np.mean([r.mean() for r in ranked])),
            "explore/reward_best": best,
            "explore/reward_worst": worst,
            "explore/contrast": best - worst,
            "rollout/images_per_s": sum(map(len, pools)) / (self.explored_at - self.began),
        }

    def times(self, regenerated_at: float, updated_at: float, finished: float) -> dict[str, float]:
        """Seconds of its parts, which sum up to the iteration, and of exploring before the
        iteration had its turn.
        """
        explored_at = max(self.explored_at, self.start)
        return {
            "time/explore_s": explored_at - self.start,
            "time/explore_ahead_s": (
                max(0.0, min(self.explored_at, self.start) - self.began) if self.staleness else 0.0
            ),
            "time/regenerate_s": regenerated_at - explored_at,
            "time/update_s": updated_at - regenerated_at,
            "time/iteration_s": finished - self.start,
        }


def _mean_of(prefix: str, rows: Mapping[int, Agreement]) -> dict[str, float]:
    """Means over prompts, leaving out prompts that had nothing to rank."""
    found: dict[str, float] = {}
    for key in next(iter(rows.values()), {}):
        values = [row[key] for _, row in sorted(rows.items()) if np.isfinite(row[key])]
        if values:
            found[prefix + key] = float(np.mean(values))
    return found

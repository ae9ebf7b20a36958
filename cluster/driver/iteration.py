"""What one iteration knows while it runs, and what it tells when it is done."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from ray import ObjectRef

from actors.messages import Chosen, SampleRows, Samples, TrainingGroup
from cluster.driver.scoring import Scored, Scoring
from cluster.runtime import clock
from configs.prompts import Prompt
from learner.audit import agreement
from policy.types import Conditioning
from records.errors import RunFailed

Agreement = dict[str, float]
Metrics: TypeAlias = dict[str, float | str]
"""A row under the contract's names; what was counted is an int."""


@dataclass(frozen=True)
class Candidates:
    """A prompt's N explored seeds, their scores, and which of them are chosen."""

    seeds: tuple[int, ...]
    scored: Scored
    samples: list[ObjectRef[Samples]]  # one per chunk
    chunk_size: int
    chosen: Chosen

    def agreement(self, full: Mapping[int, float]) -> Agreement:
        """Of proxy rewards with ``full`` ones, by index, where there are both."""
        proxy = self.scored.rewards[list(full)]
        wanted = np.array(list(full.values()), np.float32)
        both = np.isfinite(proxy) & np.isfinite(wanted)
        return agreement(proxy[both], wanted[both])

    def training_group(self, prompt: int, conditioning: ObjectRef[Conditioning]) -> TrainingGroup:
        """The explored samples themselves, where they are trained on."""
        chunks: dict[int, list[int]] = {}
        for index in self.chosen.train:
            chunks.setdefault(index // self.chunk_size, []).append(index % self.chunk_size)
        rows = tuple(SampleRows(self.samples[c], tuple(rows)) for c, rows in chunks.items())
        rewards = self.scored.rewards[list(self.chosen.train)]
        return TrainingGroup(prompt, rewards, conditioning, rows)


@dataclass
class Iteration:
    """Begins when its exploration does, which may be before its turn comes.

    What belongs to a prompt is kept by the prompt's position, and summed up in that order: the
    order in which prompts got done must not show in any sum.
    """

    index: int  # also the policy version that regenerates
    version: int  # of the policy that explores
    backend: str | None  # precision that explores; None: nothing is explored, or it is not known
    prompts: list[Prompt]
    conditioning: list[ObjectRef[Conditioning]]  # one per prompt
    scoring: Scoring
    ahead: bool = False  # began to be explored before its turn
    exploring: Sequence[asyncio.Task[Candidates]] = ()  # one per prompt
    began: float = field(default_factory=clock.now)
    start: float = 0.0  # when it had begun and its turn had come
    explored_at: float = 0.0
    candidates: dict[int, Candidates] = field(default_factory=dict[int, Candidates])
    audits: dict[int, Agreement] = field(default_factory=dict[int, Agreement])
    random_audits: dict[int, Agreement] = field(default_factory=dict[int, Agreement])
    done: Counter[str] = field(default_factory=Counter[str])  # by stage, as progress counts
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

    def begin_turn(self, tell: Callable[[str, int], None]) -> None:
        """From now on ``tell`` hears what is done; first what was done ahead."""
        self.start = clock.now()
        for stage, count in self.done.items():
            tell(stage, count)
        self._tell = tell

    def advanced(self, stage: str, count: int) -> None:
        """``count`` more went through ``stage``."""
        self.done[stage] += count
        if self._tell:
            self._tell(stage, count)

    def explored(self, prompt: int, candidates: Candidates) -> Candidates:
        """Everything about a prompt's candidates is known."""
        self.candidates[prompt] = candidates
        self.advanced("selected", len(candidates.chosen.train))
        self.explored_at = max(self.explored_at, clock.now())
        return candidates

    # ---- what it tells

    @property
    def selected(self) -> list[dict[str, object]]:
        """Per prompt, what was selected: indices into its seeds."""
        return [
            {
                "prompt": self.prompts[p].text,
                "train": list(candidates.chosen.train),
                "audit": list(candidates.chosen.audit),
            }
            for p, candidates in sorted(self.candidates.items())
        ]

    def agreement(self) -> Agreement:
        """Means over prompts of the ranks' agreement, under their metric names; nothing where
        nothing could be ranked.
        """
        return _mean_of("audit/", self.audits) | _mean_of("audit/random_", self.random_audits)

    def metrics(self, keep: int) -> Metrics:
        """Of scoring, of exploration, from which ``keep`` per prompt were selected, and of the
        audit.
        """
        row: Metrics = {
            "policy_version": self.index,
            "staleness": self.staleness,
            "rewards/failed": self.scoring.tally.dropped,
        }
        return row | self.scoring.tally.scorer_means() | self._explored(keep) | self.agreement()

    def _explored(self, keep: int) -> Metrics:
        if not self.candidates:
            return {}
        half = keep // 2
        rewards = [found.scored.rewards for _, found in sorted(self.candidates.items())]
        ranked = [np.sort(values[np.isfinite(values)]) for values in rewards]
        best = float(np.mean([values[-half:].mean() for values in ranked]))
        worst = float(np.mean([values[:half].mean() for values in ranked]))
        return {
            "explore/version": self.version,
            **({"explore/backend": self.backend} if self.backend else {}),
            "explore/reward_mean": float(np.mean([values.mean() for values in ranked])),
            "explore/reward_best": best,
            "explore/reward_worst": worst,
            "explore/contrast": best - worst,
            "rollout/images_per_s": sum(map(len, rewards)) / (self.explored_at - self.began),
        }

    def times(self, regenerated_at: float, updated_at: float, finished: float) -> Metrics:
        """Seconds of its parts, which sum up to the iteration, and of exploring before the
        iteration had its turn.
        """
        explored_at = max(self.explored_at, self.start)
        ahead = max(0.0, min(self.explored_at, self.start) - self.began)
        return {
            "time/explore_s": explored_at - self.start,
            "time/explore_ahead_s": ahead if self.ahead else 0.0,
            "time/regenerate_s": regenerated_at - explored_at,
            "time/update_s": updated_at - regenerated_at,
            "time/iteration_s": finished - self.start,
        }


def trained_rewards(groups: Sequence[TrainingGroup]) -> Metrics:
    """Mean and standard deviation of the rewards of all samples that are trained on."""
    rewards = np.concatenate([group.rewards for group in groups])
    return {"reward/train_mean": float(rewards.mean()), "reward/train_std": float(rewards.std())}


def _mean_of(prefix: str, rows: Mapping[int, Agreement]) -> Agreement:
    """Means over prompts, leaving out prompts that had nothing to rank."""
    found: Agreement = {}
    for key in next(iter(rows.values()), Agreement()):
        values = [row[key] for _, row in sorted(rows.items()) if np.isfinite(row[key])]
        if values:
            found[prefix + key] = float(np.mean(values))
    return found

"""State of one iteration while it runs, and the metrics that it reports when it is done."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from ray import ObjectRef

from actors.messages import SampleRows, Samples, SelectedSeeds, TrainingGroup
from cluster.driver.scoring import Scored, Scoring
from cluster.runtime import clock
from configs.prompts import Prompt
from configs.schema import RunConfig
from learner.audit import agreement
from policy.types import Conditioning
from records.errors import RunFailed

Agreement = dict[str, float]
Metrics: TypeAlias = dict[str, float | str]
"""A row of metrics, by metric name; counts are ints."""


def image_counts(config: RunConfig) -> tuple[int, int, dict[str, int]]:
    """Return numbers per iteration: prompts, images to explore, and images by later stage."""
    count, keep, explore = config.prompts.per_iteration, config.selection.keep, config.plan.explore
    images = count * (explore.pool_size if explore else keep)
    regenerated = (keep + config.audit.random_seeds) * count
    later = {"selected": keep * count, "regenerated": regenerated, "updated": keep * count}
    return count, images, later


@dataclass(frozen=True)
class Candidates:
    """A prompt's N explored seeds, their scores, and the selection among them."""

    seeds: tuple[int, ...]
    scored: Scored
    samples: list[ObjectRef[Samples]]  # one per chunk
    chunk_size: int
    chosen: SelectedSeeds

    def agreement(self, full: Mapping[int, float]) -> Agreement:
        """Return the rank agreement of proxy rewards with ``full`` ones, given by seed index.

        Seeds that lack one of the two rewards are left out.
        """
        proxy = self.scored.rewards[list(full)]
        requested = np.array(list(full.values()), np.float32)
        both = np.isfinite(proxy) & np.isfinite(requested)
        return agreement(proxy[both], requested[both])

    def training_group(self, prompt: int, conditioning: ObjectRef[Conditioning]) -> TrainingGroup:
        """Return the selected explored samples as a training group, for arms that train on them."""
        chunks: dict[int, list[int]] = {}
        for index in self.chosen.train:
            chunks.setdefault(index // self.chunk_size, []).append(index % self.chunk_size)
        rows = tuple(SampleRows(self.samples[c], tuple(rows)) for c, rows in chunks.items())
        rewards = self.scored.rewards[list(self.chosen.train)]
        return TrainingGroup(prompt, rewards, conditioning, rows)


@dataclass
class Iteration:
    """State of an iteration, from the start of its exploration, possibly ahead of its turn.

    Values per prompt are stored by the prompt's position and summed in that order, so that no sum
    depends on the order in which prompts were completed.
    """

    index: int  # also the policy version that regenerates
    version: int  # of the policy that explores
    backend: str | None  # precision that explores; None: unknown, or nothing is explored
    prompts: list[Prompt]
    conditioning: list[ObjectRef[Conditioning]]  # one per prompt
    scoring: Scoring
    ahead: bool = False  # its exploration started before its turn
    exploring: Sequence[asyncio.Task[Candidates]] = ()  # one per prompt
    began: float = field(default_factory=clock.now)
    start: float = 0.0  # time when its turn began
    explored_at: float = 0.0
    candidates: dict[int, Candidates] = field(default_factory=dict[int, Candidates])
    # by prompt and chunk, see ``Explored.saturated``
    saturated: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    audits: dict[int, Agreement] = field(default_factory=dict[int, Agreement])
    random_audits: dict[int, Agreement] = field(default_factory=dict[int, Agreement])
    done: Counter[str] = field(default_factory=Counter[str])  # items by stage, for the progress
    _tell: Callable[[str, int], None] | None = None

    @property
    def staleness(self) -> int:
        """Number of updates by which the exploring policy is behind the regenerating one."""
        return self.index - self.version

    def check_staleness(self, bound: int) -> None:
        """Raise RunFailed if the exploring policy is too old or newer than the regenerating one.

        It may be up to ``bound`` updates behind.
        """
        if not 0 <= self.staleness <= bound:
            raise RunFailed(
                f"iteration {self.index} was explored with policy version {self.version},"
                f" explore_ahead = {bound} allows {self.index - bound} to {self.index}: this is a"
                " bug, please report it"
            )

    def begin_turn(self, tell: Callable[[str, int], None]) -> None:
        """Report progress to ``tell`` from now on, starting with what was done ahead."""
        self.start = clock.now()
        for stage, count in self.done.items():
            tell(stage, count)
        self._tell = tell

    def advanced(self, stage: str, count: int) -> None:
        """Count ``count`` more items through ``stage``, and report them once the turn has begun."""
        self.done[stage] += count
        if self._tell:
            self._tell(stage, count)

    def explored(self, prompt: int, candidates: Candidates) -> Candidates:
        """Record the candidates of a prompt, which is completely explored; return them."""
        self.candidates[prompt] = candidates
        self.advanced("selected", len(candidates.chosen.train))
        self.explored_at = max(self.explored_at, clock.now())
        return candidates

    # ---- results

    @property
    def selected(self) -> list[dict[str, object]]:
        """The selected seeds of each prompt, as indices into its seeds."""
        return [
            {
                "prompt": self.prompts[p].text,
                "train": list(candidates.chosen.train),
                "audit": list(candidates.chosen.audit),
            }
            for p, candidates in sorted(self.candidates.items())
        ]

    def agreement(self) -> Agreement:
        """Return the rank agreement as metrics, averaged over prompts.

        Metrics are left out if no prompt could be ranked.
        """
        return _means("audit/", self.audits) | _means("audit/random_", self.random_audits)

    @property
    def saturation(self) -> float | None:
        """Mean share of saturated activations over the chunks, None if none is known."""
        shares = [share for _, share in sorted(self.saturated.items())]
        return float(np.mean(shares)) if shares else None

    def metrics(self, keep: int) -> Metrics:
        """Return the metrics of scoring, exploration and audit.

        ``keep`` is the number of seeds selected per prompt.
        """
        row: Metrics = {
            "policy_version": self.index,
            "staleness": self.staleness,
            "rewards/failed": self.scoring.tally.dropped,
        }
        return (
            row | self.scoring.tally.scorer_means() | self._explore_metrics(keep) | self.agreement()
        )

    def _explore_metrics(self, keep: int) -> Metrics:
        if not self.candidates:
            return {}
        half, saturation = keep // 2, self.saturation
        rewards = [
            prompt_candidates.scored.rewards
            for _, prompt_candidates in sorted(self.candidates.items())
        ]
        ranked = [np.sort(values[np.isfinite(values)]) for values in rewards]
        best = float(np.mean([values[-half:].mean() for values in ranked]))
        worst = float(np.mean([values[:half].mean() for values in ranked]))
        return {
            "explore/version": self.version,
            **({"explore/backend": self.backend} if self.backend else {}),
            **({"explore/saturated": saturation} if saturation is not None else {}),
            "explore/reward_mean": float(np.mean([values.mean() for values in ranked])),
            "explore/reward_best": best,
            "explore/reward_worst": worst,
            "explore/contrast": best - worst,
            "rollout/images_per_s": sum(map(len, rewards)) / (self.explored_at - self.began),
        }

    def times(self, regenerated_at: float, updated_at: float, finished: float) -> Metrics:
        """Return the seconds of the iteration and of its parts, which add up to it.

        The seconds of exploring ahead of the iteration's turn are reported separately.
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
    """Return mean and standard deviation of the rewards of all samples that are trained on."""
    rewards = np.concatenate([group.rewards for group in groups])
    return {"reward/train_mean": float(rewards.mean()), "reward/train_std": float(rewards.std())}


def _means(prefix: str, rows: Mapping[int, Agreement]) -> Agreement:
    """Return means over prompts, leaving out prompts that had nothing to rank."""
    means: Agreement = {}
    for key in next(iter(rows.values()), Agreement()):
        values = [row[key] for _, row in sorted(rows.items()) if np.isfinite(row[key])]
        if values:
            means[prefix + key] = float(np.mean(values))
    return means

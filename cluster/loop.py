"""The ring, one iteration at a time. Reads like the paper's algorithm box (arXiv 2604.06916).

explore (quantised, few steps) -> score -> select best and worst -> regenerate (full precision, full steps) -> score again
-> update -> publish the re-quantised policy. Nothing here asks which arm, objective or model runs.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.messages import Chosen, ChunkKey, ExploreChunk, Rows, TrainingGroup
from cluster.errors import InputsLost, RunFailed
from cluster.progress import Progress
from cluster.scoring import Scored, Scoring
from cluster.services import Services
from cluster.tasks import all_or_none
from configs.prompts import Prompt, prompts_of_iteration
from configs.schema import RunConfig
from learner.audit import agreement
from policy.sampling.noise import stream_seed


@dataclass
class Pool:
    """A prompt's explored candidates: seeds [N], scores [N], and where each one's sample is."""

    seeds: tuple[int, ...]
    scored: Scored
    records: list[Any]  # references, one per chunk
    chunk_size: int


@dataclass
class Iteration:
    """What one iteration knows while it runs."""

    index: int
    version: int
    prompts: list[Prompt]
    conditioning: list[Any]  # references, one per prompt
    scoring: Scoring
    start: float = field(default_factory=time.perf_counter)
    explored_at: float = 0.0
    pools: dict[int, Pool] = field(default_factory=dict)
    chosen: dict[int, Chosen] = field(default_factory=dict)
    audits: list[dict[str, float]] = field(default_factory=list)
    random_audits: list[dict[str, float]] = field(default_factory=list)


class Ring:
    """Runs iterations on the services of a run."""

    def __init__(self, config: RunConfig, services: Services, prompts: list[Prompt], progress: Progress):
        self.config, self.services, self.prompts, self.progress = config, services, prompts, progress
        self.updating = asyncio.Lock()  # held while the learner's weights change

    async def iteration(self, index: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Run iteration ``index`` with policy version ``index``.

        Returns metrics under their contract names, and per prompt what was selected. On return the learner holds policy
        ``index + 1`` and the explorers have acknowledged it.
        """
        it = await self._begin(index)
        groups = await all_or_none(*(self._group(it, p) for p in range(len(it.prompts))))
        it.scoring.check_share()
        regenerated_at = time.perf_counter()
        async with self.updating:
            update = await self._update(it, groups)
            updated_at = time.perf_counter()
            published = await self.publish(index + 1)
        finished = time.perf_counter()
        self.progress.advanced("published", 1)
        times = {
            "time/explore_s": it.explored_at - it.start,
            "time/regenerate_s": regenerated_at - it.explored_at,
            "time/update_s": updated_at - regenerated_at,
            "time/iteration_s": finished - it.start,
        }
        selected = [
            {"prompt": it.prompts[p].text, "train": list(chosen.train), "audit": list(chosen.audit)}
            for p, chosen in sorted(it.chosen.items())
        ]
        return {**self._summary(it), **update, **published, **times}, selected

    async def publish(self, version: int) -> dict[str, float]:
        """Give the explorers ``version`` of the sampling policy; nothing where the arm explores nothing."""
        if self.config.plan.explore is None:
            return {"time/publish_s": 0.0, "weights/version": version, "weights/bytes": 0}
        return await self.services.weights.publish(version, self.services.learner, self.services.rollout)

    async def _begin(self, index: int) -> Iteration:
        rows = prompts_of_iteration(len(self.prompts), self.config.prompts.per_iteration, index, self.config.seed)
        prompts = [self.prompts[row] for row in rows]
        plan = self.config.plan
        per_prompt = plan.explore.pool_size if plan.explore else self.config.selection.keep
        trained = self.config.selection.keep * len(prompts)
        audited = self.config.audit.random_seeds * len(prompts)
        totals = {"selected": trained, "regenerated": trained + audited, "updated": trained}
        self.progress.iteration_started(index, len(prompts), per_prompt * len(prompts), totals)
        _, conditioning = await self.services.encoder.call(
            ("encode", index), "encode", [[prompt.text] for prompt in prompts], returns=1 + len(prompts)
        )
        scoring = Scoring(self.config.rewards, self.services.reward)
        return Iteration(index, index, prompts, conditioning, scoring)

    async def _group(self, it: Iteration, p: int) -> TrainingGroup:
        """One prompt's walk around the ring: from seeds to the samples that are trained on, with their rewards."""
        plan = self.config.plan
        if plan.explore is None:
            chosen_seeds = self._seeds(it, p, self.config.selection.keep)
            it.explored_at = time.perf_counter()
            return await self._regenerate(it, p, chosen_seeds, None)
        pool = await self._explore(it, p)
        chosen: Chosen = await self.services.selector.call(
            ("select", it.index, p), "choose", it.index, p, pool.scored.rewards, priority=(p,)
        )
        self.progress.advanced("selected", len(chosen.train))
        it.chosen[p] = chosen
        it.explored_at = max(it.explored_at, time.perf_counter())
        if not plan.regenerate:
            return self._as_explored(it, p, pool, chosen.train)
        group = await self._regenerate(it, p, tuple(pool.seeds[i] for i in chosen.train), chosen.train)
        if chosen.audit:
            await self._audit_random(it, p, pool, chosen.audit)
        return group

    # ---- stage 1

    def _seeds(self, it: Iteration, p: int, count: int) -> tuple[int, ...]:
        return tuple(stream_seed(self.config.seed, "explore", it.index, p, n) for n in range(count))

    async def _explore(self, it: Iteration, p: int) -> Pool:
        plan, size = self.config.plan.explore, self.config.explore.chunk_size
        assert plan is not None
        seeds = self._seeds(it, p, plan.pool_size)
        parts = [seeds[first : first + size] for first in range(0, len(seeds), size)]
        chunks = await all_or_none(*(self._explore_chunk(it, p, c, part) for c, part in enumerate(parts)))
        pool = Pool(seeds, Scored.concatenate([scored for scored, _ in chunks]), [record for _, record in chunks], size)
        usable = int(np.isfinite(pool.scored.rewards).sum())
        if usable < self.config.selection.keep:
            raise RunFailed(
                f"prompt {it.prompts[p].text!r} is left with {usable} scored pictures of {len(seeds)}, "
                f"selection.keep = {self.config.selection.keep} are needed: see events.jsonl for what its scorers said"
            )
        it.pools[p] = pool
        return pool

    async def _explore_chunk(self, it: Iteration, p: int, c: int, seeds: tuple[int, ...]) -> tuple[Scored, Any]:
        """Explore and score one chunk; pictures that were lost with their node before they were scored are made again."""
        plan = self.config.plan.explore
        assert plan is not None
        key = ChunkKey(it.index, p, c, it.version)
        request = ExploreChunk(key, seeds, plan.steps, plan.solver, return_latents=not self.config.plan.regenerate)
        for _ in range(self.config.services.rollout.max_attempts):
            _, (images, record) = await self.services.rollout.call(
                key, "explore", request, it.conditioning[p], returns=3, priority=(p, c)
            )
            self.progress.advanced("explored", len(seeds))
            try:
                scored = await it.scoring.score(key, images, [it.prompts[p]] * len(seeds), priority=(p, 0, c))
            except InputsLost:
                continue
            self.progress.advanced("scored", len(seeds))
            return scored, record
        raise RunFailed(f"{key}: its pictures were lost {self.config.services.rollout.max_attempts} times before they were scored")

    # ---- stage 2

    async def _regenerate(self, it: Iteration, p: int, seeds: tuple[int, ...], indices: tuple[int, ...] | None) -> TrainingGroup:
        """The chosen noises at full quality, scored again; the rewards that are trained on are these."""
        scored, record = await self._full_quality(it, p, seeds, "regenerate")
        if indices is not None:
            proxy = it.pools[p].scored.rewards[list(indices)]
            both = np.isfinite(proxy) & np.isfinite(scored.rewards)
            it.audits.append(agreement(proxy[both], scored.rewards[both]))
        kept = np.flatnonzero(np.isfinite(scored.rewards))
        rows = Rows(0, tuple(int(i) for i in kept))
        return TrainingGroup(p, scored.rewards[kept], (rows,), {"records": [record]})

    async def _full_quality(self, it: Iteration, p: int, seeds: tuple[int, ...], purpose: str) -> tuple[Scored, Any]:
        steps, solver = self.config.regenerate.steps, self.config.plan.solver
        _, (images, record) = await self.services.learner.call(
            (purpose, it.index, p), "generate", it.conditioning[p], seeds, steps, solver, None, returns=3, priority=(p,)
        )
        self.progress.advanced("regenerated", len(seeds))
        scored = await it.scoring.score((purpose, it.index, p), images, [it.prompts[p]] * len(seeds), priority=(p, 1, 0))
        return scored, record

    async def _audit_random(self, it: Iteration, p: int, pool: Pool, indices: tuple[int, ...]) -> None:
        scored, _ = await self._full_quality(it, p, tuple(pool.seeds[i] for i in indices), "audit")
        proxy = pool.scored.rewards[list(indices)]
        both = np.isfinite(proxy) & np.isfinite(scored.rewards)
        it.random_audits.append(agreement(proxy[both], scored.rewards[both]))

    @staticmethod
    def _as_explored(it: Iteration, p: int, pool: Pool, indices: tuple[int, ...]) -> TrainingGroup:
        """The explored samples themselves, by reference."""
        chunks = sorted({i // pool.chunk_size for i in indices})
        rows = tuple(
            Rows(chunks.index(c), tuple(i % pool.chunk_size for i in indices if i // pool.chunk_size == c)) for c in chunks
        )
        return TrainingGroup(p, pool.scored.rewards[list(indices)], rows, {"records": [pool.records[c] for c in chunks]})

    # ---- learning

    async def _update(self, it: Iteration, groups: list[TrainingGroup]) -> dict[str, float]:
        """One update on all groups, in prompt order, samples and conditioning by reference."""
        records: list[Any] = []
        sent = []
        for group in groups:
            first = len(records)
            records += group.metadata["records"]
            samples = tuple(Rows(first + part.record, part.rows) for part in group.samples)
            sent.append(TrainingGroup(group.prompt, group.rewards, samples))
        metrics = await self.services.learner.call(
            ("update", it.index), "update", it.index, sent, len(sent), *it.conditioning, *records
        )
        rewards = np.concatenate([group.rewards for group in groups])
        self.progress.advanced("updated", len(rewards))
        return {**metrics, "reward/train_mean": float(rewards.mean()), "reward/train_std": float(rewards.std())}

    def _summary(self, it: Iteration) -> dict[str, float]:
        """Metrics of exploration, audit and failures."""
        row: dict[str, float] = {"policy_version": it.version, "staleness": 0, "rewards/failed": it.scoring.dropped}
        row |= it.scoring.scorer_means()
        if it.pools:
            half = self.config.selection.keep // 2
            ranked = [np.sort(pool.scored.rewards[np.isfinite(pool.scored.rewards)]) for pool in it.pools.values()]
            best, worst = (
                float(np.mean([r.mean() for r in part])) for part in ([r[-half:] for r in ranked], [r[:half] for r in ranked])
            )
            row |= {"explore/reward_mean": float(np.mean([r.mean() for r in ranked])), "explore/reward_best": best}
            row |= {"explore/reward_worst": worst, "explore/contrast": best - worst}
            images = sum(len(pool.seeds) for pool in it.pools.values())
            row |= {"rollout/images_per_s": images / (it.explored_at - it.start), "rollout/actors": self.services.rollout.alive}
        row["rollout/reissued"] = self.services.reissued
        row |= _mean_of("audit", it.audits) | _mean_of("audit/random", it.random_audits, separator="_")
        return row


def _mean_of(prefix: str, rows: list[dict[str, float]], separator: str = "/") -> dict[str, float]:
    """Means over prompts, leaving out prompts that had nothing to rank."""
    found: dict[str, float] = {}
    for key in rows[0] if rows else ():
        values = [row[key] for row in rows if np.isfinite(row[key])]
        if values:
            found[f"{prefix}{separator}{key}"] = float(np.mean(values))
    return found

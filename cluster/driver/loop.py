"""The ring, one iteration at a time. Reads like the paper's algorithm box (arXiv 2604.06916).

explore (quantised, few steps) -> score -> select best and worst -> regenerate (full precision, full
steps) -> score again -> update -> publish the re-quantised policy. Nothing here asks which arm,
objective or model runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from actors.messages import Chosen, ChunkKey, ExploreChunk, Rows, TrainingGroup
from cluster.driver.iteration import Iteration, Pool
from cluster.driver.rank_monitor import Guard
from cluster.driver.scoring import Scored, Scoring
from cluster.driver.services import Services
from cluster.driver.weights import common_backends
from cluster.runtime.tasks import Beside, all_or_none
from configs.prompts import Prompt, prompts_of_iteration
from configs.schema import RunConfig
from learner.audit import agreement
from policy.sampling.noise import stream_seed
from records.errors import InputsLost, RunFailed
from records.progress import Progress


class Ring:
    """Runs iterations on the services of a run.

    With ``explore_ahead`` iteration i + 1 begins to be explored, with policy i, as soon as i is
    explored, while the learner works on i.
    """

    def __init__(
        self,
        config: RunConfig,
        services: Services,
        prompts: list[Prompt],
        progress: Progress,
        event: Callable[..., None] = lambda name, **fields: None,
    ):
        self.config, self.services, self.prompts, self.progress = (
            config,
            services,
            prompts,
            progress,
        )
        self.updating = asyncio.Lock()  # held while the learner's weights change
        self.guard = Guard(config.audit, config.regenerate.precision, event, progress.note)
        self._beside = Beside()
        self._ahead: asyncio.Task[Iteration] | None = (
            None  # ends when the next iteration is being explored
        )

    async def begin(self, index: int) -> None:
        """Publish what iteration ``index`` needs: policy ``index``, and the one before where that
        explores.
        """
        if self.config.explore_ahead and index > 0:
            await self.services.weights.publish(
                index - 1,
                self.services.learner,
                self.services.rollout,
                self.guard.backend_before,
                weights="previous",
            )
        await self.publish(index)

    async def iteration(self, index: int) -> tuple[dict[str, Any], Iteration]:
        """Run iteration ``index``: regenerate and train with policy version ``index``.

        Returns metrics under their contract names, and what was explored and selected. On return
        the learner holds policy ``index + 1``, and it is published.
        """
        it = await self._its_turn(index)
        if self.config.explore_ahead and index + 1 < self.config.iterations:
            self._ahead = self._beside.start(self._explore_after(it))
        groups = await all_or_none(*(self._group(it, p) for p in range(len(it.prompts))))
        it.scoring.check_share()
        regenerated_at = time.perf_counter()
        async with self.updating:
            update = await self._update(it, groups)
            updated_at = time.perf_counter()
            audit = self._judge(it)
            published = await self.publish(index + 1)
        finished = time.perf_counter()
        self.progress.advanced("published", 1)
        times = it.times(regenerated_at, updated_at, finished)
        return {**self._summary(it), **audit, **update, **published, **times}, it

    async def publish(self, version: int) -> dict[str, float]:
        """Publish ``version`` of the sampling policy for the explorers; nothing where the arm
        explores nothing.
        """
        if self.config.plan.explore is None:
            return {"time/publish_s": 0.0, "weights/version": version, "weights/bytes": 0}
        return await self.services.weights.publish(
            version, self.services.learner, self.services.rollout, self.guard.backend
        )

    async def close(self) -> None:
        """End what is explored ahead; nobody waits for it any more."""
        self._ahead = None
        await self._beside.end()

    async def _its_turn(self, index: int) -> Iteration:
        """Iteration ``index``, being explored: ahead since a while, or from now on."""
        plan, count = self.config.plan, self.config.prompts.per_iteration
        per_prompt = plan.explore.pool_size if plan.explore else self.config.selection.keep
        trained, audited = (
            self.config.selection.keep * count,
            self.config.audit.random_seeds * count,
        )
        totals = {"selected": trained, "regenerated": trained + audited, "updated": trained}
        self.progress.iteration_started(index, count, per_prompt * count, totals)
        ahead, self._ahead = self._ahead, None
        it = await (ahead or self._explored_from_now(index))
        it.check_staleness(self.config.explore_ahead)
        it.takes_its_turn(self.progress.advanced)
        return it

    async def _explore_after(self, it: Iteration) -> Iteration:
        """The next iteration, once this one is explored."""
        await asyncio.gather(*it.exploring)
        return await self._explored_from_now(it.index + 1)

    async def _explored_from_now(self, index: int) -> Iteration:
        rows = prompts_of_iteration(
            len(self.prompts), self.config.prompts.per_iteration, index, self.config.seed
        )
        prompts = [self.prompts[row] for row in rows]
        _, conditioning = await self.services.encoder.call(
            ("encode", index),
            "encode",
            [[prompt.text] for prompt in prompts],
            returns=1 + len(prompts),
        )
        scoring = Scoring(self.config.rewards, self.services.reward)
        if self.config.plan.explore is None:
            return Iteration(index, index, None, prompts, conditioning, scoring)
        version = max(index - self.config.explore_ahead, 0)
        backend = self.services.weights.held(version).backend
        it = Iteration(index, version, backend, prompts, conditioning, scoring)
        it.exploring = [self._beside.start(self._explore(it, p)) for p in range(len(prompts))]
        return it

    async def _group(self, it: Iteration, p: int) -> TrainingGroup:
        """One prompt's walk around the ring: from its explored noises to the samples that are
        trained on, with their rewards.
        """
        if self.config.plan.explore is None:
            it.explored_at = time.perf_counter()
            return (await self._regenerate(it, p, self._seeds(it, p, self.config.selection.keep)))[
                0
            ]
        await it.exploring[p]
        pool, chosen = it.pools[p], it.chosen[p]
        if not self.config.plan.regenerate:
            return self._as_explored(it, p, pool, chosen.train)
        group, full = await self._regenerate(it, p, tuple(pool.seeds[i] for i in chosen.train))
        it.audits[p] = _agreement(pool.scored.rewards[list(chosen.train)], full)
        if chosen.audit:
            await self._audit_random(
                it, p, pool, chosen.audit, dict(zip(chosen.train, full, strict=True))
            )
        return group

    # ---- stage 1

    def _seeds(self, it: Iteration, p: int, count: int) -> tuple[int, ...]:
        return tuple(stream_seed(self.config.seed, "explore", it.index, p, n) for n in range(count))

    async def _explore(self, it: Iteration, p: int) -> None:
        """A prompt's pool, explored and scored, and what of it is chosen."""
        it.pools[p] = pool = await self._pool(it, p)
        chosen: Chosen = await self.services.selector.call(
            ("select", it.index, p),
            "choose",
            it.index,
            p,
            pool.scored.rewards,
            priority=(it.index, p),
        )
        it.chosen[p] = chosen
        it.advanced("selected", len(chosen.train))
        it.explored_at = max(it.explored_at, time.perf_counter())

    async def _pool(self, it: Iteration, p: int) -> Pool:
        plan, size = self.config.plan.explore, self.config.explore.chunk_size
        assert plan is not None
        seeds = self._seeds(it, p, plan.pool_size)
        parts = [seeds[first : first + size] for first in range(0, len(seeds), size)]
        chunks = await all_or_none(
            *(self._explore_chunk(it, p, c, part) for c, part in enumerate(parts))
        )
        pool = Pool(
            seeds,
            Scored.concatenate([scored for scored, _ in chunks]),
            [record for _, record in chunks],
            size,
        )
        usable = int(np.isfinite(pool.scored.rewards).sum())
        if usable < self.config.selection.keep:
            raise RunFailed(
                f"prompt {it.prompts[p].text!r} is left with {usable} scored pictures of"
                f" {len(seeds)}, selection.keep = {self.config.selection.keep} are needed: see"
                " events.jsonl for what its scorers said"
            )
        return pool

    async def _explore_chunk(
        self, it: Iteration, p: int, c: int, seeds: tuple[int, ...]
    ) -> tuple[Scored, Any]:
        """Explore and score one chunk; pictures that were lost with their node before they were
        scored are made again.
        """
        plan = self.config.plan.explore
        assert plan is not None
        key = ChunkKey(it.index, p, c, it.version)
        request = ExploreChunk(
            key, seeds, plan.steps, plan.solver, return_latents=not self.config.plan.regenerate
        )
        for _ in range(self.config.services.rollout.max_attempts):
            _, (images, record) = await self.services.rollout.call(
                key, "explore", request, it.conditioning[p], returns=3, priority=(it.index, p, c)
            )
            it.advanced("explored", len(seeds))
            try:
                scored = await it.scoring.score(
                    key, images, [it.prompts[p]] * len(seeds), priority=(it.index, p, 0, c)
                )
            except InputsLost:
                continue
            it.advanced("scored", len(seeds))
            return scored, record
        raise RunFailed(
            f"{key}: its pictures were lost {self.config.services.rollout.max_attempts} times"
            " before they were scored"
        )

    # ---- stage 2

    async def _regenerate(
        self, it: Iteration, p: int, seeds: tuple[int, ...]
    ) -> tuple[TrainingGroup, np.ndarray]:
        """The chosen noises at full quality, scored again: the group that is trained on, without
        what has no score, and all rewards float32 [K] (NaN: none).
        """
        scored, record = await self._full_quality(it, p, seeds, "regenerate")
        kept = np.flatnonzero(np.isfinite(scored.rewards))
        if not len(kept):
            raise RunFailed(
                f"prompt {it.prompts[p].text!r} is left with none of its {len(seeds)} regenerated"
                " pictures scored: see events.jsonl for what its scorers said"
            )
        rows = Rows(0, tuple(int(i) for i in kept))
        return (
            TrainingGroup(p, scored.rewards[kept], (rows,), {"records": [record]}),
            scored.rewards,
        )

    async def _full_quality(
        self, it: Iteration, p: int, seeds: tuple[int, ...], purpose: str
    ) -> tuple[Scored, Any]:
        steps, solver = self.config.regenerate.steps, self.config.plan.solver
        _, (images, record) = await self.services.learner.call(
            (purpose, it.index, p),
            "generate",
            it.conditioning[p],
            seeds,
            steps,
            solver,
            None,
            returns=3,
            priority=(p,),
        )
        it.advanced("regenerated", len(seeds))
        scored = await it.scoring.score(
            (purpose, it.index, p),
            images,
            [it.prompts[p]] * len(seeds),
            priority=(it.index, p, 1, 0),
        )
        return scored, record

    async def _audit_random(
        self, it: Iteration, p: int, pool: Pool, indices: tuple[int, ...], full: Mapping[int, float]
    ) -> None:
        """Proxies against full rewards; ``full`` are those of the selected ones, which are there
        already.
        """
        fresh = tuple(i for i in indices if i not in full)
        if fresh:
            scored, _ = await self._full_quality(
                it, p, tuple(pool.seeds[i] for i in fresh), "audit"
            )
            full = {**full, **dict(zip(fresh, scored.rewards, strict=True))}
        it.advanced("regenerated", len(indices) - len(fresh))
        it.random_audits[p] = _agreement(
            pool.scored.rewards[list(indices)], np.array([full[i] for i in indices])
        )

    @staticmethod
    def _as_explored(it: Iteration, p: int, pool: Pool, indices: tuple[int, ...]) -> TrainingGroup:
        """The explored samples themselves, by reference."""
        chunks = sorted({i // pool.chunk_size for i in indices})
        rows = tuple(
            Rows(
                chunks.index(c),
                tuple(i % pool.chunk_size for i in indices if i // pool.chunk_size == c),
            )
            for c in chunks
        )
        return TrainingGroup(
            p,
            pool.scored.rewards[list(indices)],
            rows,
            {"records": [pool.records[c] for c in chunks]},
        )

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
        it.advanced("updated", len(rewards))
        return {
            **metrics,
            "reward/train_mean": float(rewards.mean()),
            "reward/train_std": float(rewards.std()),
        }

    def _judge(self, it: Iteration) -> dict[str, float]:
        """Hold the iteration's agreement against the thresholds, before the next version is
        published.
        """
        newest = self.services.weights.current
        if newest is None:
            return {}
        available = common_backends(self.services.rollout)
        return self.guard.judge(it.index, it.agreement(), it.backend, newest.backend, available)

    def _summary(self, it: Iteration) -> dict[str, Any]:
        """Metrics of exploration, audit and failures."""
        row: dict[str, Any] = {
            "policy_version": it.index,
            "staleness": it.staleness,
            "rewards/failed": it.scoring.dropped,
        }
        row |= it.scoring.scorer_means() | it.explored(self.config.selection.keep) | it.agreement()
        if self.config.plan.explore is not None:
            row["rollout/actors"] = self.services.rollout.alive
        return row | {"rollout/reissued": self.services.reissued, "actors/lost": self.services.lost}


def _agreement(proxy: np.ndarray, full: np.ndarray) -> dict[str, float]:
    """Of cheap and full rewards [K], where there are both."""
    both = np.isfinite(proxy) & np.isfinite(full)
    return agreement(proxy[both], full[both])

"""The ring: the training loop, one iteration at a time, after the paper's algorithm box.

explore (quantized, few steps) -> score -> select best and worst -> regenerate (full precision, full
steps) -> score again -> update -> publish the re-quantized policy (arXiv 2604.06916). Nothing in
this module depends on which arm, objective or model is used.
"""

from __future__ import annotations

import asyncio

from actors.messages import TrainingGroup
from cluster.driver.exploration import Exploration
from cluster.driver.extremes import Extremes
from cluster.driver.identity import PolicyIdentity
from cluster.driver.iteration import Iteration, Metrics, image_counts, trained_rewards
from cluster.driver.rank_monitor import RankMonitor
from cluster.driver.regeneration import Regeneration
from cluster.driver.score_tally import ConstantScores
from cluster.driver.services import ActorServices
from cluster.driver.weights import common_backends
from cluster.runtime import clock
from cluster.runtime.tasks import run_together
from configs.prompts import Prompt
from configs.schema import RunConfig
from records.progress import Progress
from records.rundir import Event


class Ring:
    """Runs iterations on the services of a run.

    With ``explore_ahead``, iteration i + 1 is explored with policy i as soon as iteration i is
    explored, while the learner works on iteration i.
    """

    def __init__(
        self,
        config: RunConfig,
        services: ActorServices,
        prompts: list[Prompt],
        progress: Progress,
        event: Event,
        extremes: Extremes | None = None,
    ):
        self.config, self.services, self.progress = config, services, progress
        self._plan = config.plan  # kept: the property recomputes it on every access
        self.updating = asyncio.Lock()  # held while the learner's weights change
        reporting = event, progress.note
        self.monitor = RankMonitor(config.audit, config.regenerate.precision, *reporting)
        self._constant = ConstantScores(*reporting)
        if config.audit.identity_every and self._plan.explore is not None:
            services.weights.identity = PolicyIdentity(
                config, services.encoder, prompts, *reporting
            )
        self._extremes = extremes
        self.exploration = Exploration(config, services, prompts, extremes)
        self._regeneration = Regeneration(config, services, extremes)

    async def begin(self, index: int) -> None:
        """Publish the policy that iteration ``index`` needs, and encode its prompts.

        With ``explore_ahead`` the version before, which explores the iteration, is published too.
        """
        # a run that was stopped after its last update continues with no further iteration
        encoded = [self.exploration.encode(index)] if index < self.config.iterations else []
        if self.config.explore_ahead and index > 0:
            await self._publish(index - 1, self.monitor.backend_before, weights="previous")
        await self.publish(index)
        await asyncio.gather(*encoded)

    async def iteration(self, index: int) -> tuple[Metrics, Iteration]:
        """Run iteration ``index``: regenerate and train with policy version ``index``.

        Returns the metrics, and the iteration with what was explored and selected. On return the
        learner holds policy version ``index + 1``, which is published.
        """
        it = await self._begin_turn(index)
        groups = await run_together(*(self._group(it, p) for p in range(len(it.prompts))))
        if self._extremes:
            self._extremes.finished(it)
        it.scoring.tally.check_share()
        self._constant.observe(index, it.scoring.tally)
        regenerated_at = clock.now()
        async with self.updating:
            update = await self.services.learner.update(index, groups)
            updated_at = clock.now()
            self.progress.advanced("updated", sum(len(group.rewards) for group in groups))
            audit = self._audit(it)  # before publishing: it may change the next precision
            published = await self.publish(index + 1)
        times = it.times(regenerated_at, updated_at, clock.now())
        self.progress.advanced("published", 1)
        metrics = it.metrics(self.config.selection.keep) | trained_rewards(groups) | self._counts()
        return metrics | audit | update | published | times, it

    async def publish(self, version: int) -> Metrics:
        """Publish ``version`` of the sampling policy."""
        return await self._publish(version, self.monitor.backend)

    async def close(self) -> None:
        """Cancel exploring ahead."""
        await self.exploration.close()

    async def _begin_turn(self, index: int) -> Iteration:
        self.progress.iteration_started(index, *image_counts(self.config))
        it = await self.exploration.begun(index)
        it.check_staleness(self.config.explore_ahead)
        it.begin_turn(self.progress.advanced)
        if self.config.explore_ahead and index + 1 < self.config.iterations:
            self.exploration.begin_after(it)
        return it

    async def _group(self, it: Iteration, p: int) -> TrainingGroup:
        """Take one prompt from its explored seeds to the samples and rewards that are trained on.

        Prompts do this independently of each other.
        """
        if self._plan.explore is None:
            it.explored_at = clock.now()
            seeds = self.exploration.new_seeds(it.index, p, self.config.selection.keep)
            group, _ = await self._regeneration.seeds(it, p, seeds, of=seeds)
            return group
        candidates = await it.exploring[p]
        if self._plan.regenerate:
            return await self._regeneration.chosen(it, p, candidates)
        return candidates.training_group(p, it.conditioning[p])

    def _audit(self, it: Iteration) -> Metrics:
        """Check the rank agreement of an iteration against the thresholds."""
        self.monitor.observe_saturation(it.index, it.saturation)
        newest = self.services.weights.current
        if newest is None:
            return {}
        runs = common_backends(self.services.rollout_pool)
        return {**self.monitor.observe(it.index, it.agreement(), it.backend, newest.backend, runs)}

    async def _publish(
        self, version: int, backend: str | None, weights: str | None = None
    ) -> Metrics:
        if self._plan.explore is None:
            return {"time/publish_s": 0.0, "weights/version": version, "weights/bytes": 0}
        pool, publish = self.services.rollout_pool, self.services.weights.publish
        return {**await publish(version, self.services.learner, pool, backend, weights)}

    def _counts(self) -> Metrics:
        services = self.services
        alive = {"rollout/actors": services.rollout_pool.alive} if self._plan.explore else {}
        counts = {"rollout/reissued": services.reissued, "actors/lost": services.lost}
        return {**alive, **counts, **services.turns.take_metrics()}

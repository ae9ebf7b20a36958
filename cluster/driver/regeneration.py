"""Stage 2: the chosen seeds at full quality, scored again, and what that says of the ranking."""

from __future__ import annotations

import numpy as np

from actors.messages import Floats, Generated, GenerateRequest, SampleRows, TrainingGroup
from cluster.driver.extremes import Extremes
from cluster.driver.iteration import Candidates, Iteration
from cluster.driver.services import ActorServices
from configs.schema import RunConfig
from records.errors import RunFailed


class Regeneration:
    """Makes the groups that are trained on, with the newest policy."""

    def __init__(
        self, config: RunConfig, services: ActorServices, extremes: Extremes | None = None
    ):
        self._config, self._services, self._extremes = config, services, extremes

    async def chosen(self, it: Iteration, p: int, candidates: Candidates) -> TrainingGroup:
        """The chosen seeds of a prompt; audits their ranking, and that of some random ones."""
        chosen, seeds = candidates.chosen, candidates.seeds
        group, rewards = await self.seeds(it, p, tuple(seeds[i] for i in chosen.train))
        full = dict(zip(chosen.train, rewards.tolist(), strict=True))
        it.audits[p] = candidates.agreement(full)
        if chosen.audit:
            fresh = tuple(i for i in chosen.audit if i not in full)
            if fresh:
                _, rewards = await self._generate(it, p, tuple(seeds[i] for i in fresh), "audit")
                full |= dict(zip(fresh, rewards.tolist(), strict=True))
            it.advanced("regenerated", len(chosen.audit) - len(fresh))
            it.random_audits[p] = candidates.agreement({i: full[i] for i in chosen.audit})
        return group

    async def seeds(
        self, it: Iteration, p: int, seeds: tuple[int, ...]
    ) -> tuple[TrainingGroup, Floats]:
        """(what is trained on: K seeds of a prompt without those that have no score; all rewards
        [K], NaN: none).
        """
        made, rewards = await self._generate(it, p, seeds, "regenerate")
        if self._extremes:
            size = len(seeds)
            self._extremes.seen(it, p, "regenerated", seeds, rewards, [made.images], size)
        kept = np.flatnonzero(np.isfinite(rewards))
        if not len(kept):
            raise RunFailed(
                f"prompt {it.prompts[p].text!r} is left with none of its {len(seeds)} regenerated"
                " images scored: see events.jsonl for what its scorers said"
            )
        rows = SampleRows(made.samples, tuple(int(i) for i in kept))
        return TrainingGroup(p, rewards[kept], it.conditioning[p], (rows,)), rewards

    async def _generate(
        self, it: Iteration, p: int, seeds: tuple[int, ...], purpose: str
    ) -> tuple[Generated, Floats]:
        key = (purpose, it.index, p)
        request = GenerateRequest(seeds, self._config.regenerate.steps, self._config.plan.solver)
        made = await self._services.learner.generate(
            key, request, it.conditioning[p], priority=(p,)
        )
        it.advanced("regenerated", len(seeds))
        prompts = [it.prompts[p]] * len(seeds)
        # before the chunks of the next iteration, which may be explored already
        scored = await it.scoring.score(key, made.images, prompts, priority=(it.index, p, 1, 0))
        return made, scored.rewards

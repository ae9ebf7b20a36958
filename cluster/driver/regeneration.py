"""Stage 2: the chosen seeds at full quality, scored again, and what that says of the ranking."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from ray import ObjectRef

from actors.messages import Floats, GenerateRequest, SampleRows, Samples, TrainingGroup
from cluster.driver.iteration import Candidates, Iteration
from cluster.driver.scoring import Scored
from cluster.driver.services import ActorServices
from cluster.runtime.tasks import run_together
from configs.schema import RunConfig
from records.errors import RunFailed


class Regeneration:
    """Makes the groups that are trained on, with the newest policy."""

    def __init__(self, config: RunConfig, services: ActorServices):
        self._config, self._services = config, services
        self._steps, self._solver = config.regenerate.steps, config.plan.solver
        self._parts = config.regenerated_parts

    async def chosen(self, it: Iteration, p: int, candidates: Candidates) -> TrainingGroup:
        """The chosen seeds of a prompt; audits their ranking, and that of some random ones."""
        chosen, seeds = candidates.chosen, candidates.seeds
        group, rewards = await self.seeds(it, p, tuple(seeds[i] for i in chosen.train))
        full = dict(zip(chosen.train, rewards.tolist(), strict=True))
        it.audits[p] = candidates.agreement(full)
        if chosen.audit:
            fresh = tuple(i for i in chosen.audit if i not in full)
            if fresh:
                audited = tuple(seeds[i] for i in fresh)
                _, scored = await self._generate(it, p, audited, ("audit", it.index, p), 0)
                full |= dict(zip(fresh, scored.rewards.tolist(), strict=True))
            it.advanced("regenerated", len(chosen.audit) - len(fresh))
            it.random_audits[p] = candidates.agreement({i: full[i] for i in chosen.audit})
        return group

    async def seeds(
        self, it: Iteration, p: int, seeds: tuple[int, ...]
    ) -> tuple[TrainingGroup, Floats]:
        """(what is trained on: K seeds of a prompt without those that have no score; all rewards
        [K], NaN: none).
        """
        parts = divided(seeds, self._parts)
        key = ("regenerate", it.index, p)
        made = await run_together(
            *(
                self._generate(it, p, part, key if len(parts) == 1 else (*key, number), number)
                for number, part in enumerate(parts)
            )
        )
        rewards = Scored.concatenate([scored for _, scored in made]).rewards
        found = np.isfinite(rewards)
        if not found.any():
            raise RunFailed(
                f"prompt {it.prompts[p].text!r} is left with none of its {len(seeds)} regenerated"
                " images scored: see events.jsonl for what its scorers said"
            )
        ends = np.cumsum([len(part) for part in parts])[:-1]
        rows = tuple(
            SampleRows(samples, tuple(np.flatnonzero(kept).tolist()))
            for (samples, _), kept in zip(made, np.split(found, ends), strict=True)
            if kept.any()
        )
        return TrainingGroup(p, rewards[found], it.conditioning[p], rows), rewards

    async def _generate(
        self, it: Iteration, p: int, seeds: tuple[int, ...], key: tuple[object, ...], part: int
    ) -> tuple[ObjectRef[Samples], Scored]:
        request = GenerateRequest(seeds, self._steps, self._solver)
        made = await self._services.learner.generate(
            key, request, it.conditioning[p], priority=(p, part)
        )
        it.advanced("regenerated", len(seeds))
        prompts = [it.prompts[p]] * len(seeds)
        # before the chunks of the next iteration, which may be explored already
        scored = await it.scoring.score(key, made.images, prompts, priority=(it.index, p, 1, part))
        return made.samples, scored


def divided(seeds: tuple[int, ...], parts: int) -> Sequence[tuple[int, ...]]:
    """Runs of seeds in order, as equal as can be, none empty."""
    parts, count = min(parts, len(seeds)), len(seeds)
    cuts = [count * part // parts for part in range(parts + 1)]
    return [seeds[first:last] for first, last in zip(cuts, cuts[1:], strict=False)]

"""Stage 2: regenerate the selected seeds at full quality, score them, and audit the ranking."""

from __future__ import annotations

import numpy as np

from actors.messages import Floats, Generated, GenerateRequest, SampleRows, TrainingGroup
from cluster.driver.extremes import Extremes
from cluster.driver.iteration import Candidates, Iteration
from cluster.driver.scoring import Scored
from cluster.driver.services import ActorServices
from cluster.runtime.tasks import run_together
from configs.schema import RunConfig
from policy.sampling.paths import shared_start
from records.errors import RunFailed


class Regeneration:
    """Generates the training groups with the newest policy."""

    def __init__(
        self, config: RunConfig, services: ActorServices, extremes: Extremes | None = None
    ):
        self._services, self._extremes, self._config = services, extremes, config
        self._steps, self._solver = config.regenerate.steps, config.plan.solver
        self._size = config.regeneration_task_size

    async def chosen(self, it: Iteration, p: int, candidates: Candidates) -> TrainingGroup:
        """Regenerate the selected seeds of a prompt, and return them as a training group.

        The rank agreement of these seeds and of the randomly drawn audit seeds is stored in ``it``.
        """
        chosen, seeds = candidates.chosen, candidates.seeds
        trained = tuple(seeds[i] for i in chosen.train)
        group, rewards = await self.seeds(it, p, trained, of=seeds)
        full = dict(zip(chosen.train, rewards.tolist(), strict=True))
        it.audits[p] = candidates.agreement(full)
        if chosen.audit:
            new = tuple(i for i in chosen.audit if i not in full)
            if new:
                audited = tuple(seeds[i] for i in new)
                _, scored = await self._generate(
                    it, p, audited, shared_start(self._config, seeds), ("audit", it.index, p), 0
                )
                full |= dict(zip(new, scored.rewards.tolist(), strict=True))
            # seeds that are trained on anyway are done, but the progress total counts all audited
            # ones
            it.advanced("regenerated", len(chosen.audit) - len(new))
            it.random_audits[p] = candidates.agreement({i: full[i] for i in chosen.audit})
        return group

    async def seeds(
        self, it: Iteration, p: int, seeds: tuple[int, ...], of: tuple[int, ...]
    ) -> tuple[TrainingGroup, Floats]:
        """Generate and score K seeds of a prompt; return (training group, rewards [K]).

        ``of`` are all seeds of the prompt, from which these were selected. Rewards are NaN for
        images without a score; the group leaves these out. Raises RunFailed if no image was scored.
        """
        size, start = self._size, shared_start(self._config, of)
        parts = [seeds[first : first + size] for first in range(0, len(seeds), size)]
        key = ("regenerate", it.index, p)
        results = await run_together(
            *(
                self._generate(
                    it, p, part, start, key if len(parts) == 1 else (*key, number), number
                )
                for number, part in enumerate(parts)
            )
        )
        images = [generated.images for generated, _ in results]
        scores, priority = [scored for _, scored in results], (it.index, p, 1)
        combined = await it.scoring.combine(key, scores, images, it.prompts[p], priority)
        rewards = combined.rewards
        if self._extremes:
            self._extremes.add(it, p, "regenerated", seeds, rewards, images, size)
        usable = np.isfinite(rewards)
        if not usable.any():
            raise RunFailed(
                f"prompt {it.prompts[p].text!r} has no score for any of its {len(seeds)}"
                " regenerated images: see events.jsonl for the errors of its scorers"
            )
        rows = tuple(
            SampleRows(generated.samples, tuple(np.flatnonzero(kept).tolist()))
            for number, (generated, _) in enumerate(results)
            if (kept := usable[number * size : (number + 1) * size]).any()
        )
        return TrainingGroup(p, rewards[usable], it.conditioning[p], rows), rewards

    async def _generate(
        self,
        it: Iteration,
        p: int,
        seeds: tuple[int, ...],
        start: int | None,
        key: tuple[object, ...],
        part: int,
    ) -> tuple[Generated, Scored]:
        request = GenerateRequest(seeds, self._steps, self._solver, start=start)
        generated = await self._services.learner.generate(
            key, request, it.conditioning[p], priority=(p, part)
        )
        it.advanced("regenerated", len(seeds))
        prompts = [it.prompts[p]] * len(seeds)
        # before the chunks of the next iteration, which may be explored already
        scored = await it.scoring.score(
            key, generated.images, prompts, priority=(it.index, p, 1, part)
        )
        return generated, scored

"""Stage 1: explore many seeds per prompt cheaply, score the images, select seeds to regenerate."""

from __future__ import annotations

import asyncio

import numpy as np
from ray import ObjectRef

from actors.messages import ChunkKey, ExploreChunk, Images, Samples
from cluster.driver.extremes import Extremes
from cluster.driver.iteration import Candidates, Iteration
from cluster.driver.scoring import Scored, Scoring
from cluster.driver.services import ActorServices
from cluster.runtime.tasks import BackgroundTasks, run_together
from configs.prompts import Prompt, prompts_of_iteration
from configs.schema import RunConfig
from policy.sampling.noise import stream_seeds
from policy.sampling.paths import shared_start
from policy.types import Conditioning
from records.errors import InputsLost, RunFailed

Encoded = tuple[list[Prompt], list[ObjectRef[Conditioning]]]
"""The prompts of an iteration, and the conditioning of each."""


class SeedLedger:
    """Record of used seeds, which detects repeated ones.

    Repeated seeds would draw the same images again, which teaches nothing new and raises no error.
    Only the first seed of every prompt and iteration is stored: the seeds of a prompt are one
    stream.
    """

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, int]] = {}

    def add(self, place: tuple[int, int], seeds: tuple[int, ...]) -> None:
        """Record the seeds of ``place`` (iteration, prompt).

        Raises RunFailed if a seed repeats, or the seeds were used at another place.
        """
        # ``setdefault``: an iteration that is repeated after a loss uses the same seeds again
        before = self._first.setdefault(seeds[0], place)
        if before == place and len(set(seeds)) == len(seeds):
            return
        where = "within itself" if before == place else f"those of iteration {before[0]}"
        raise RunFailed(
            f"the seeds of iteration {place[0]}, prompt {place[1]}, repeat {where}: its images"
            " would repeat too; this is a bug, please report it"
        )


class Exploration:
    """Explores iterations: each in its turn, or the next one ahead while the learner works."""

    def __init__(
        self,
        config: RunConfig,
        services: ActorServices,
        prompts: list[Prompt],
        extremes: Extremes | None = None,
    ):
        self._config, self._services, self._prompts = config, services, prompts
        self._plan = config.plan  # kept: the property recomputes it on every access
        self._extremes = extremes
        self._tasks = BackgroundTasks()
        # done as soon as exploring the next iteration has started
        self._ahead: asyncio.Task[Iteration] | None = None
        self._encoding: dict[int, asyncio.Task[Encoded]] = {}  # by iteration
        self._ledger = SeedLedger()

    def encode(self, index: int) -> asyncio.Task[Encoded]:
        """Start to encode the prompts of iteration ``index``, unless that was started already.

        Called before the iteration's turn, so that no GPU waits for the encoder.
        """
        if index not in self._encoding:
            self._encoding[index] = self._tasks.start(self._encode(index))
        return self._encoding[index]

    async def begun(self, index: int) -> Iteration:
        """Return iteration ``index``, whose exploration was started ahead or is started now."""
        if self._ahead is None:
            return await self._begin(index)
        ahead, self._ahead = self._ahead, None
        it = await ahead
        it.ahead = True
        return it

    def begin(self, index: int) -> None:
        """Start to explore iteration ``index`` before its turn, unless one is explored ahead."""
        if self._plan.explore is not None and self._ahead is None:
            self._ahead = self._tasks.start(self._begin(index))

    def begin_after(self, it: Iteration) -> None:
        """Start to explore the next iteration as soon as ``it`` is explored."""

        async def next_one() -> Iteration:
            # not earlier: both would share the rollout actors, and the learner waits for this one
            await asyncio.gather(*it.exploring)
            return await self._begin(it.index + 1)

        self._ahead = self._tasks.start(next_one())

    async def close(self) -> None:
        """Cancel the exploration and encoding in progress."""
        self._ahead = None
        self._encoding.clear()
        await self._tasks.end()

    def seeds(self, iteration: int, prompt: int, count: int) -> tuple[int, ...]:
        """Return the seeds of a prompt, which depend only on the run seed, iteration and prompt."""
        run_seed = self._config.seed
        return stream_seeds(count, run_seed, "explore", iteration, prompt)

    def new_seeds(self, iteration: int, prompt: int, count: int) -> tuple[int, ...]:
        """Return ``seeds``, and raise RunFailed if another prompt or iteration had them."""
        seeds = self.seeds(iteration, prompt, count)
        self._ledger.add((iteration, prompt), seeds)
        return seeds

    async def _encode(self, index: int) -> Encoded:
        config = self._config
        per_iteration = config.prompts.per_iteration
        rows = prompts_of_iteration(len(self._prompts), per_iteration, index, config.seed)
        prompts = [self._prompts[row] for row in rows]
        groups = [[prompt] for prompt in prompts]
        return prompts, await self._services.encoder.encode(index, groups)

    async def _begin(self, index: int) -> Iteration:
        config, services = self._config, self._services
        prompts, conditioning = await self.encode(index)
        self._encoding.pop(index, None)  # ``close`` may have removed it meanwhile
        # the encoder is idle now, so the next iteration need not wait for it
        if index + 1 < config.iterations:
            self.encode(index + 1)
        every = config.audit.identity_every
        recheck = every > 0 and index % every == 0
        scoring = Scoring(config.rewards, services.reward, recheck=recheck)
        if self._plan.explore is None:
            return Iteration(index, index, None, prompts, conditioning, scoring)
        # a function of the iteration, not of the versions published so far: results must not
        # depend on timing
        version = max(index - config.explore_ahead, 0)
        backend = services.weights.held(version).backend
        it = Iteration(index, version, backend, prompts, conditioning, scoring)
        it.exploring = [self._tasks.start(self._explore(it, p)) for p in range(len(prompts))]
        return it

    async def _explore(self, it: Iteration, p: int) -> Candidates:
        """Explore and score a prompt's candidates, and select among them."""
        plan, size = self._plan.explore, self._config.explore.chunk_size
        assert plan is not None
        seeds = self.new_seeds(it.index, p, plan.pool_size)
        start = shared_start(self._config, seeds)
        scored, samples, images = await self._explore_and_score(it, p, seeds, start)
        usable, keep = int(np.isfinite(scored.rewards).sum()), self._config.selection.keep
        if usable < keep:
            raise RunFailed(
                f"prompt {it.prompts[p].text!r} has only {usable} scored images of {len(seeds)},"
                f" but selection.keep = {keep}; last failure: {it.scoring.tally.last_failure}"
            )
        chosen = await self._services.selector.select(it.index, p, scored.rewards)
        if self._extremes and images:
            self._extremes.add(it, p, "explored", seeds, scored.rewards, images, size)
        return it.explored(p, Candidates(seeds, scored, samples, size, chosen))

    async def _explore_and_score(
        self, it: Iteration, p: int, seeds: tuple[int, ...], start: int | None
    ) -> tuple[Scored, list[ObjectRef[Samples]], list[ObjectRef[Images]]]:
        """Return a prompt's scores, and its samples and images, one reference per chunk each.

        Images are returned only if they are needed again (see ``_explore_chunk``). If images are
        lost before they were compared, all chunks are explored again.
        """
        size, tries = self._config.explore.chunk_size, self._config.services.rollout.max_attempts
        for _ in range(tries):
            chunks = await run_together(
                *(
                    self._explore_chunk(it, p, number, seeds[first : first + size], start)
                    for number, first in enumerate(range(0, len(seeds), size))
                )
            )
            images = [reference for *_, reference in chunks if reference is not None]
            parts = [scored for scored, _, _ in chunks]
            key, priority = ("explore", it.index, p, it.version), (it.index, p, 0)
            try:
                scored = await it.scoring.combine(key, parts, images, it.prompts[p], priority)
            except InputsLost:
                continue
            return scored, [reference for _, reference, _ in chunks], images
        raise RunFailed(
            f"iteration {it.index}, prompt {p}: its images were lost {tries} times before they were"
            " compared"
        )

    async def _explore_chunk(
        self, it: Iteration, p: int, number: int, seeds: tuple[int, ...], start: int | None
    ) -> tuple[Scored, ObjectRef[Samples], ObjectRef[Images] | None]:
        """Explore and score one chunk; explore it again if its images are lost before scoring."""
        plan, tries = self._plan.explore, self._config.services.rollout.max_attempts
        assert plan is not None
        key = ChunkKey(it.index, p, number, it.version)
        # latents are kept only if they are trained on: an arm that regenerates draws new samples
        trained_on = not self._plan.regenerate
        request = ExploreChunk(key, seeds, plan.steps, plan.solver, trained_on, start)
        prompts = [it.prompts[p]] * len(seeds)
        for _ in range(tries):
            # priority by prompt: the first ones are regenerated while the last are explored
            explored = await self._services.rollout.explore(
                request, it.conditioning[p], priority=(it.index, p, number)
            )
            it.advanced("explored", len(seeds))
            try:
                scored = await it.scoring.score(
                    key, explored.images, prompts, priority=(it.index, p, 0, number)
                )
            except InputsLost:
                continue
            it.advanced("scored", len(seeds))
            if explored.saturated is not None:
                it.saturated[p, number] = explored.saturated
            # a reference pins memory on some node: return it only if the images are needed again
            shown = self._extremes is not None and self._extremes.wants(p)
            needed = shown or it.scoring.compares
            return scored, explored.samples, explored.images if needed else None
        raise RunFailed(f"{key}: its images were lost {tries} times before they were scored")

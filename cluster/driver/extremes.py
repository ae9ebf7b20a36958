"""Save the best and the worst images of every iteration, in the background.

The ring does not wait for it, and a failure is only an event: no result depends on these images.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ray import ObjectRef

from actors.messages import Floats, Images
from cluster.driver.iteration import Iteration
from cluster.runtime.tasks import BackgroundTasks
from configs.schema import RunConfig
from records.errors import error_summary
from records.extremes import ENDS, Extreme, Stage, downscaled, save_extremes
from records.rundir import Event, RunDirectory

MOST_OPEN = 4
"""Iterations whose images may be in progress; beyond that, images of new ones are skipped."""
LAST_S = 20.0
"""Seconds that the end of a run waits for the images of its last iteration."""


@dataclass(frozen=True)
class StageExtremes:
    """One stage of a prompt: its seeds, their rewards, and the best and worst image, downscaled."""

    seeds: tuple[int, ...]
    rewards: Floats
    images: Mapping[int, np.ndarray]  # by index among the seeds: the best and the worst

    def reward_of(self, seed: int) -> float | None:
        """Return the reward of ``seed``, or None if it is not among the seeds or has no score."""
        if seed not in self.seeds:
            return None
        value = float(self.rewards[self.seeds.index(seed)])
        return value if np.isfinite(value) else None


Found = dict[tuple[int, Stage], asyncio.Task[StageExtremes]]


class Extremes:
    """Collects images of the first ``logging.image_prompts`` prompts of each iteration."""

    def __init__(
        self,
        config: RunConfig,
        rundir: RunDirectory,
        event: Event,
        note: Callable[[str], None],
        show: Callable[[int, Sequence[Extreme]], None],
    ):
        """``show`` is called with the images that were written, in another thread."""
        self._settings, self._rundir = config.logging, rundir
        self._fps = config.model.frames_per_second
        self._event, self._note, self._show = event, note, show
        self._open: dict[int, Found] = {}  # by iteration
        self._tasks = BackgroundTasks()
        self._keeping: set[asyncio.Task[None]] = set()
        self._last_failure = ""

    def wants(self, prompt: int) -> bool:
        """Return True if images of the prompt with this index in its iteration are kept."""
        return prompt < self._settings.image_prompts

    def add(
        self,
        it: Iteration,
        prompt: int,
        stage: Stage,
        seeds: tuple[int, ...],
        rewards: Floats,
        batches: Sequence[ObjectRef[Images]],
        size: int,
    ) -> None:
        """Start to fetch the best and the worst image of a prompt whose images are all scored.

        ``rewards`` [N] are NaN for images without a score. ``batches`` hold N images in all, in
        batches of ``size``; the last one may be smaller.
        """
        busy = len(self._open) + len(self._keeping) >= MOST_OPEN
        if not self.wants(prompt) or (busy and it.index not in self._open):
            return
        fetching = self._tasks.start(_fetch(seeds, rewards, batches, size))
        self._open.setdefault(it.index, {})[prompt, stage] = fetching

    def finished(self, it: Iteration) -> None:
        """Write the images of an iteration, all of which were seen; drop older iterations."""
        fetches = self._open.pop(it.index, {})
        self._open = {index: tasks for index, tasks in self._open.items() if index > it.index}
        if fetches:
            texts = [prompt.text for prompt in it.prompts]
            task = self._tasks.start(self._keep(it.index, texts, fetches))
            self._keeping.add(task)
            task.add_done_callback(self._keeping.discard)

    async def close(self) -> None:
        """Wait up to ``LAST_S`` seconds for images being written, and cancel the rest."""
        if self._keeping:
            await asyncio.wait(self._keeping, timeout=LAST_S)
        await self._tasks.end()

    async def _keep(self, index: int, texts: Sequence[str], fetches: Found) -> None:
        try:
            ends = {key: await task for key, task in sorted(fetches.items())}
            await asyncio.to_thread(self._write, index, extremes(texts, ends))
        except Exception as error:  # lost with a node, no room on the disk: only images are missing
            why = error_summary(error)
            self._event("images_missed", iteration=index, why=why)
            if why != self._last_failure:
                self._note(f"iteration {index}: its best and worst images were not saved ({why})")
            self._last_failure = why

    def _write(self, index: int, shown: Sequence[Extreme]) -> None:
        limit = self._settings.image_iterations
        save_extremes(self._rundir.images, index, shown, limit, self._fps)
        self._show(index, shown)


def extremes(
    texts: Sequence[str], ends: Mapping[tuple[int, Stage], StageExtremes]
) -> list[Extreme]:
    """Return the best and the worst image of every stage of every prompt.

    Seeds are numbered in the order of exploration, or of generation if nothing was explored.
    """
    shown: list[Extreme] = []
    for (prompt, stage), own in ends.items():
        explored = ends.get((prompt, "explored"), own)
        others = [
            stage_ends for key, stage_ends in ends.items() if key[0] == prompt and key[1] != stage
        ]
        # not strict: there is neither if nothing was scored
        for end, place in zip(ENDS, best_and_worst(own.rewards), strict=False):
            seed = own.seeds[place]
            other = others[0].reward_of(seed) if others else None
            number, reward = explored.seeds.index(seed), float(own.rewards[place])
            image = own.images[place]
            text = texts[prompt]
            shown.append(Extreme(prompt, text, stage, end, number, reward, image, other))
    return shown


def best_and_worst(rewards: Floats) -> tuple[int, ...]:
    """Return the indices of the highest and the lowest reward, or () if there is no score.

    Of equal rewards the first counts.
    """
    if not np.isfinite(rewards).any():
        return ()
    return int(np.nanargmax(rewards)), int(np.nanargmin(rewards))


async def _fetch(
    seeds: tuple[int, ...], rewards: Floats, batches: Sequence[ObjectRef[Images]], size: int
) -> StageExtremes:
    """Fetch only the batches that hold the best and the worst image, and downscale these two."""
    images: dict[int, np.ndarray] = {}
    for place in best_and_worst(rewards):
        batch = await batches[place // size]
        images[place] = await asyncio.to_thread(downscaled, batch[place % size])
    return StageExtremes(seeds, rewards, images)

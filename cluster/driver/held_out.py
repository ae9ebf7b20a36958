"""The evaluations of one run: what they leave in its directory, and their gain over the one before
training.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from cluster.driver.evaluation import evaluate
from cluster.driver.iteration import Metrics
from cluster.driver.services import ActorServices
from configs.prompts import Prompt
from configs.schema import RunConfig
from records.errors import RunFailed, described
from records.rundir import RunDirectory, write_json


class HeldOut:
    """Scores the held-out prompts at the iterations it is asked to."""

    def __init__(self, config: RunConfig, rundir: RunDirectory, prompts: list[Prompt]):
        self._config, self._rundir, self._prompts = config, rundir, prompts

    def due(self, iteration: int, last: bool = False) -> bool:
        """Whether the prompts are to be scored after so many iterations, and have not been yet, in
        this session or before a resume.

        ``last``: training is over, and what it came to is saved; before that the last evaluation is
        not due.
        """
        every = self._config.evaluate.every
        between = iteration < self._config.iterations and (
            iteration == 0 or (every > 0 and iteration % every == 0)
        )
        return (last or between) and not self._done(iteration)

    async def evaluate(self, services: ActorServices, iteration: int, seconds: float) -> Metrics:
        """Score the prompts, paired with the evaluation before training; keep scores and images,
        return the row of metrics.
        """
        weights = self._config.evaluate.weights
        result = await evaluate(self._config, services, self._prompts, weights)
        before = self.before() if iteration else None
        row: Metrics = {
            "kind": "evaluation",
            "iteration": iteration,
            "seconds": seconds,
            "weights": weights,
        }
        row |= result.row(before)
        # images, then the file, and the row last, by the caller: ``_done`` asks for row and file
        result.save_images(self._rundir.images, iteration, self._prompts, self._config.model)
        self._file(iteration).parent.mkdir(exist_ok=True)
        write_json(self._file(iteration), {"weights": weights, **result.table()})
        return row

    def _done(self, iteration: int) -> bool:
        """By its row, which comes last: a kill may leave the file alone, and going back to a
        checkpoint takes the row only.
        """
        rows = (row for row in self._rundir.metrics() if row.get("kind") == "evaluation")
        there = any(row.get("iteration") == iteration for row in rows)
        return there and self._file(iteration).exists()

    def before(self) -> np.ndarray | None:
        """Rewards [P, S] of the evaluation before training, NaN where there is none; None: there
        was no such evaluation. Raises RunFailed where its file is not what was written.
        """
        file, wanted = self._file(0), (len(self._prompts), self._config.evaluate.noises)
        try:
            if not file.exists():
                return None
            rewards = np.array(json.loads(file.read_bytes())["rewards"], dtype=float)
            if rewards.shape != wanted:
                raise ValueError(f"rewards of shape {rewards.shape}, not {wanted}")
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise RunFailed(
                f"{file} cannot be read ({described(error, 200)}), so no gain can be told: put it"
                " back, or remove it and the gain is left out"
            ) from None
        return rewards

    def _file(self, iteration: int) -> Path:
        return self._rundir.path / "evaluations" / f"step_{iteration:06d}.json"

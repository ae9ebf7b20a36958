"""Evaluations of a run on the held-out prompts, with their files in the run directory.

Their gain is measured against the evaluation before training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cluster.driver.evaluation import evaluate
from cluster.driver.iteration import Metrics
from cluster.driver.services import ActorServices
from configs.prompts import Prompt
from configs.schema import RunConfig
from records.errors import RunFailed, error_summary
from records.rundir import RunDirectory, write_json
from records.storage import exists, read_bytes, retried


class HeldOut:
    """Scores the held-out prompts when an evaluation is due, and records the results."""

    def __init__(self, config: RunConfig, rundir: RunDirectory, prompts: list[Prompt]):
        self._config, self._rundir, self._prompts = config, rundir, prompts

    def due(self, iteration: int, last: bool = False) -> bool:
        """Return True if an evaluation is due after ``iteration`` iterations and not yet done.

        One that was done before a resume counts as done. ``last`` means that training is over and
        its last checkpoint is written; the last evaluation is not due before that.
        """
        every = self._config.evaluate.every
        between = iteration < self._config.iterations and (
            iteration == 0 or (every > 0 and iteration % every == 0)
        )
        return (last or between) and not self._done(iteration)

    async def evaluate(self, services: ActorServices, iteration: int, seconds: float) -> Metrics:
        """Score the prompts, write scores and images, and return the row of metrics.

        The gain is paired with the evaluation before training.
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
        # order: images, then the file, and the row last, by the caller: ``_done`` checks row and
        # file
        result.save_images(self._rundir.images, iteration, self._prompts, self._config.model)
        self._write(iteration, {"weights": weights, **result.table()})
        return row

    @retried
    def _write(self, iteration: int, table: Mapping[str, object]) -> None:
        self._file(iteration).parent.mkdir(exist_ok=True)
        write_json(self._file(iteration), table)

    def _done(self, iteration: int) -> bool:
        """Return True if the evaluation has both its row of metrics and its file.

        A kill may leave the file without the row, which is written last, and returning to a
        checkpoint removes only the row.
        """
        rows = (row for row in self._rundir.metrics() if row.get("kind") == "evaluation")
        has_row = any(row.get("iteration") == iteration for row in rows)
        return has_row and exists(self._file(iteration))

    def before(self) -> np.ndarray | None:
        """Return the rewards [P, S] before training, or None if they were not evaluated.

        Images without a reward are NaN. Raises RunFailed if the evaluation's file is damaged.
        """
        file, shape = self._file(0), (len(self._prompts), self._config.evaluate.noises)
        try:
            if not exists(file):
                return None
            rewards = np.array(json.loads(read_bytes(file))["rewards"], dtype=float)
            if rewards.shape != shape:
                raise ValueError(f"rewards of shape {rewards.shape}, not {shape}")
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise RunFailed(
                f"{file} cannot be read ({error_summary(error, 200)}), so the gain cannot be"
                " computed: restore the file, or delete it to leave out the gain"
            ) from None
        return rewards

    def _file(self, iteration: int) -> Path:
        return self._rundir.path / "evaluations" / f"step_{iteration:06d}.json"

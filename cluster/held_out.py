"""The evaluations of one run: what they leave in its directory, and their gain over the one before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from cluster.evaluation import evaluate
from cluster.pictures import save_pictures
from cluster.rundir import RunDirectory, write_json
from cluster.services import Services
from configs.prompts import Prompt
from configs.schema import RunConfig


class HeldOut:
    """Scores the held-out prompts at the iterations it is asked to."""

    def __init__(self, config: RunConfig, rundir: RunDirectory, prompts: list[Prompt]):
        self._config, self._rundir, self._prompts = config, rundir, prompts

    def done(self, iteration: int) -> bool:
        """Whether the prompts were scored after so many iterations, now or before a resume."""
        return self._file(iteration).exists()

    async def evaluate(self, services: Services, iteration: int, seconds: float) -> dict[str, Any]:
        """Score the prompts, paired with the evaluation before training; keep scores and pictures, return the row of metrics."""
        weights = self._config.evaluate.weights
        result = await evaluate(self._config, services, self._prompts, weights)
        before = json.loads(self._file(0).read_text())["rewards"] if iteration and self.done(0) else None
        row = {"kind": "evaluation", "iteration": iteration, "seconds": seconds, "weights": weights}
        row |= result.row(np.array(before, dtype=float) if before is not None else None)
        save_pictures(self._rundir.images, iteration, [prompt.text for prompt in self._prompts], result.pictures)
        self._file(iteration).parent.mkdir(exist_ok=True)
        write_json(self._file(iteration), {"weights": weights, **result.table()})
        return row

    def _file(self, iteration: int) -> Path:
        return self._rundir.path / "evaluations" / f"step_{iteration:06d}.json"

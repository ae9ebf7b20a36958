"""Held-out prompts at fixed noises: the same pictures' places before and after, so that gains are
paired.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ray.exceptions import ObjectLostError

from cluster.driver.scoring import Scored, Scoring
from cluster.driver.services import Services
from cluster.runtime.tasks import all_or_none
from configs.prompts import Prompt
from configs.schema import RunConfig
from policy.sampling.noise import stream_seed
from records.errors import InputsLost, RunFailed


@dataclass(frozen=True)
class Evaluation:
    """Rewards [P, S] and raw scores per scorer [P, S] (NaN: scoring failed), and pictures of the
    first prompts.

    ``values`` has the held-out scorers too; ``rewards`` combine the required ones that are trained
    on, without normalisation.
    """

    rewards: np.ndarray
    values: dict[str, np.ndarray]
    pictures: np.ndarray  # uint8 [G, S, 3, H, W], G <= P
    speeds: dict[str, float] = field(
        default_factory=dict
    )  # pictures per second of each scorer, by the metric's name

    def row(self, before: np.ndarray | None = None) -> dict[str, Any]:
        """Metrics: means, and with the rewards [P, S] of ``before`` the paired gain.

        Standard errors are clustered by prompt: over the P prompt means, because noises of one
        prompt are not independent.
        """
        row: dict[str, Any] = dict(self.speeds)
        for label, values in self.values.items():
            known = values[np.isfinite(values)]
            row[f"reward/eval/{label}"] = float(known.mean()) if len(known) else float("nan")
            if len(known) < values.size:
                row[f"eval/unscored/{label}"] = int(values.size - len(known))
        row |= {
            "reward/eval_mean": float(np.nanmean(self.rewards)),
            "eval/stderr": clustered_error(self.rewards),
        }
        if before is not None:
            gain = self.rewards - before
            row |= {"eval/gain": float(np.nanmean(gain)), "eval/gain_stderr": clustered_error(gain)}
        return row

    def table(self) -> dict[str, Any]:
        """What ``evaluations/step_<i>.json`` keeps: the rewards, and every scorer's raw scores."""
        return {
            "rewards": self.rewards.tolist(),
            "scores": {label: values.tolist() for label, values in self.values.items()},
        }


def clustered_error(values: np.ndarray) -> float:
    """Standard error of the mean of float [P, S], clustered by row; NaN entries are left out. NaN
    for P < 2.
    """
    means = np.array([row[np.isfinite(row)].mean() for row in values if np.isfinite(row).any()])
    return float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else float("nan")


async def evaluate(
    config: RunConfig, services: Services, prompts: list[Prompt], weights: str
) -> Evaluation:
    """Score ``prompts`` with the adapter ``weights`` (current, old, ema, base) on the learner.

    Noise n of prompt p comes from the run seed's evaluation stream, disjoint from every training
    stream.

    Raises:
        RunFailed: more samples failed to be scored than ``rewards.max_failed_share`` allows.
    """
    settings = config.evaluate
    per_block = max(1, settings.batch_size // settings.noises)
    blocks = [
        list(range(first, min(first + per_block, len(prompts))))
        for first in range(0, len(prompts), per_block)
    ]
    _, conditioning = await services.encoder.call(
        ("encode", "evaluation"),
        "encode",
        [[prompts[p].text for p in block] for block in blocks],
        returns=1 + len(blocks),
    )
    scoring = Scoring(config.rewards, services.reward, evaluation=True)

    async def run(number: int, block: list[int]) -> tuple[Scored, Any]:
        seeds = tuple(
            stream_seed(config.seed, "evaluate", p, n)
            for p in block
            for n in range(settings.noises)
        )
        _, (images, _latents) = await services.learner.call(
            ("evaluate", weights, number),
            "generate",
            conditioning[number],
            seeds,
            settings.steps,
            settings.solver,
            weights,
            returns=3,
            priority=(number,),
        )
        owners = [prompts[p] for p in block for _ in range(settings.noises)]
        return (
            await scoring.score(("evaluate", weights, number), images, owners, priority=(number,)),
            images,
        )

    results = await all_or_none(*(run(number, block) for number, block in enumerate(blocks)))
    scoring.check_share()
    scored = Scored.concatenate([scored for scored, _ in results])
    if not np.isfinite(scored.rewards).any():
        raise RunFailed(
            "no held-out picture could be scored: see events.jsonl for what the scorers said"
        )
    shape = (len(prompts), settings.noises)
    return Evaluation(
        scored.rewards.reshape(shape),
        {label: values.reshape(shape) for label, values in scored.values.items()},
        await _pictures(config, [images for _, images in results]),
        scoring.speeds(),
    )


async def _pictures(config: RunConfig, blocks: list[Any]) -> np.ndarray:
    """The first ``logging.grid_prompts`` prompts' pictures; the only pixels the driver ever
    fetches. Raises InputsLost when they went with their node.
    """
    wanted, noises = config.logging.grid_prompts, config.evaluate.noises
    found: list[np.ndarray] = []
    for reference in blocks:
        if sum(len(images) for images in found) >= wanted * noises:
            break
        try:
            found.append(await reference)
        except ObjectLostError as error:
            raise InputsLost(f"held-out pictures: {str(error).splitlines()[0]}") from None
    images = np.concatenate(found)[: wanted * noises]
    return images.reshape(-1, noises, *images.shape[1:])

"""Evaluation on held-out prompts at fixed seeds.

Gains are paired: the difference to the same prompt and seed before training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from ray import ObjectRef
from ray.exceptions import ObjectLostError

from actors.messages import Floats, GenerateRequest, Images
from cluster.driver.conditioning_cache import held_out_blocks
from cluster.driver.iteration import Metrics
from cluster.driver.scoring import Scored, Scoring
from cluster.driver.services import ActorServices
from cluster.runtime.tasks import run_together
from configs.prompts import Prompt
from configs.schema import RunConfig
from configs.sections import Model
from policy.sampling.noise import stream_seed
from records.errors import InputsLost, RunFailed, first_line
from records.images import save_images


@dataclass(frozen=True)
class Evaluation:
    """Rewards and raw scores of P prompts at S seeds (NaN: scoring failed), and some images.

    ``values`` includes the held-out scorers; ``rewards`` combines the required scorers that are
    trained on, without normalization.
    """

    rewards: Floats  # [P, S]
    values: dict[str, Floats]  # label -> [P, S]
    images: Images  # of the first prompts: [G, S, 3, H, W], clips [G, S, F, 3, H, W], G <= P
    # images per second of each scorer, by metric name
    speeds: dict[str, float] = field(default_factory=dict[str, float])

    def row(self, before: np.ndarray | None = None) -> Metrics:
        """Return the metrics: means, and the paired gain over the rewards ``before`` [P, S].

        Standard errors are clustered by prompt, that is computed over the P prompt means, because
        the seeds of one prompt are not independent.
        """
        row: Metrics = {**self.speeds}
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

    def table(self) -> dict[str, object]:
        """Return rewards and raw scores of every scorer, for ``evaluations/step_<i>.json``."""
        return {
            "rewards": self.rewards.tolist(),
            "scores": {label: values.tolist() for label, values in self.values.items()},
        }

    def save_images(self, folder: Path, step: int, prompts: Sequence[Prompt], model: Model) -> None:
        """Write the images into ``folder``, with all P prompts and the images' source images."""
        texts = [prompt.text for prompt in prompts]
        sources = [prompt.source(model) for prompt in prompts[: len(self.images)]]
        save_images(folder, step, texts, self.images, model.frames_per_second, sources)


def clustered_error(values: np.ndarray) -> float:
    """Return the standard error of the mean of ``values`` [P, S], clustered by row.

    NaN entries are left out, and so are rows of nothing else. NaN for fewer than two rows.
    """
    means = np.array([row[np.isfinite(row)].mean() for row in values if np.isfinite(row).any()])
    return float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else float("nan")


async def evaluate(
    config: RunConfig, services: ActorServices, prompts: list[Prompt], weights: str
) -> Evaluation:
    """Score ``prompts`` with the adapter ``weights`` (current, old, ema, base) on the learner.

    Seed n of prompt p comes from the run seed's evaluation stream, which is disjoint from every
    training stream.

    Raises:
        RunFailed: Scoring failed for more images than ``rewards.max_failed_share`` allows, or for
            all of them.
    """
    settings, blocks = config.evaluate, held_out_blocks(config, len(prompts))
    conditioning = await services.encoder.encode(
        "evaluation", [[prompts[p] for p in block] for block in blocks]
    )
    scoring = Scoring(config.rewards, services.reward, evaluation=True)

    async def score_block(number: int, block: list[int]) -> tuple[Scored, ObjectRef[Images]]:
        places = [(p, n) for p in block for n in range(settings.noises)]
        seeds = tuple(stream_seed(config.seed, "evaluate", p, n) for p, n in places)
        request = GenerateRequest(
            seeds, settings.steps, settings.solver, weights, config.guidance.evaluate
        )
        key, priority = ("evaluate", weights, number), (number,)
        images = (
            await services.learner.generate(key, request, conditioning[number], priority)
        ).images
        owners = [prompts[p] for p, _ in places]
        return await scoring.score(key, images, owners, priority), images

    results = await run_together(
        *(score_block(number, block) for number, block in enumerate(blocks))
    )
    scoring.tally.check_share()
    scored = Scored.concatenate([scored for scored, _ in results])
    if not np.isfinite(scored.rewards).any():
        raise RunFailed(
            "no held-out image could be scored: see events.jsonl for the errors of the scorers"
        )
    shape = (len(prompts), settings.noises)
    return Evaluation(
        scored.rewards.reshape(shape),
        {label: values.reshape(shape) for label, values in scored.values.items()},
        await _first_images(config, [images for _, images in results]),
        scoring.tally.speeds(),
    )


async def _first_images(config: RunConfig, blocks: Sequence[ObjectRef[Images]]) -> Images:
    """Fetch the images of the first ``logging.grid_prompts`` prompts, and no others.

    Raises InputsLost if they were lost with their node.
    """
    requested, noises = config.logging.grid_prompts, config.evaluate.noises
    fetched: list[Images] = []
    for reference in blocks:
        if sum(len(images) for images in fetched) >= requested * noises:
            break
        try:
            fetched.append(await reference)
        except ObjectLostError as error:
            raise InputsLost(f"held-out images: {first_line(error)}") from None
    images = np.concatenate(fetched)[: requested * noises]
    return images.reshape(-1, noises, *images.shape[1:])

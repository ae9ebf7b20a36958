"""Seconds that scorers take, from the operations and bytes per image that their classes state."""

from __future__ import annotations

from collections.abc import Sequence

from configs.rewards import Scorer
from configs.schema import RunConfig
from configs.sections import Model
from planning.assumptions import ACCELERATORS, Device
from planning.placement import kinds_of
from rewards import effort
from rewards.clips import scored_frames


def score_seconds(
    config: RunConfig, drawn: Sequence[tuple[int, Model]], device: Device
) -> dict[str, float]:
    """Return the scoring seconds by service, for the scorers that are trained on.

    ``drawn`` has pairs of a number of images or clips and the model settings they are drawn with.
    """
    totals: dict[str, float] = {}
    for kind in kinds_of(config):
        for scorer in config.rewards.scorers:
            if scorer.label in config.scorers_of(kind):
                for count, model in drawn:
                    seconds = count * _seconds(scorer, config, model, device)
                    totals[kind] = totals.get(kind, 0.0) + seconds
    return totals


def scored(config: RunConfig, model: Model) -> int:
    """Return the images that a scorer processes per image drawn: the scored frames of a clip."""
    return len(scored_frames(model.frames or 1, config.rewards.frames))


def _seconds(scorer: Scorer, config: RunConfig, model: Model, device: Device) -> float:
    """Return the seconds of one scorer for one image or clip."""
    cost, known = effort(scorer, model.height, model.width), ACCELERATORS.get(device.name)
    # torch does not compute FP32 products in TF32 by default
    dtype_share = known.fp32 / known.bf16 if known and cost.dtype == "fp32" else 1.0
    frames, flops_per_s = scored(config, model), 1e12 * (device.plain * dtype_share)
    return frames * cost.flops / flops_per_s + frames * cost.bytes / (1e12 * device.bandwidth)

"""Seconds that scorers take, by what their classes say of an image."""

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
    """By service that scores, of the scorers that are trained on; ``drawn``: numbers of images or
    clips, and what draws them.
    """
    found: dict[str, float] = {}
    for kind in kinds_of(config):
        for scorer in config.rewards.scorers:
            if scorer.label in config.scorers_of(kind):
                for count, model in drawn:
                    seconds = count * _seconds(scorer, config, model, device)
                    found[kind] = found.get(kind, 0.0) + seconds
    return found


def scored(config: RunConfig, model: Model) -> int:
    """Images that a scorer looks at per drawn one: a clip counts by its scored frames."""
    return len(scored_frames(model.frames or 1, config.rewards.frames))


def _seconds(scorer: Scorer, config: RunConfig, model: Model, device: Device) -> float:
    """Of one drawn image or clip."""
    each, known = effort(scorer, model.height, model.width), ACCELERATORS.get(device.name)
    # torch does not run products of FP32 in TF32 unless told
    slower = known.fp32 / known.bf16 if known and each.dtype == "fp32" else 1.0
    frames, reached = scored(config, model), 1e12 * (device.plain * slower)
    return frames * each.flops / reached + frames * each.bytes / (1e12 * device.bandwidth)

"""Seconds that scorers with a published model take."""

from __future__ import annotations

from collections.abc import Sequence

from configs.rewards import Scorer
from configs.schema import RunConfig
from configs.sections import Model
from planning.assumptions import ACCELERATORS, Device
from planning.placement import kinds_of
from rewards import model_bytes
from rewards.clips import scored_frames

TOWERS = {
    "clipscore": (1024, 24, 257),
    "pickscore": (1280, 32, 257),
    "hpsv2": (1280, 32, 257),
    "imagereward": (1024, 24, 197),
}
"""Width, layers and tokens of the image encoders of published reward models. Their text encoders,
with less than 5 % of the operations, are left out.
"""
ASKED = 230
"""Tokens of UnifiedReward's question."""
WRITTEN = {"axes": 80, "elements": 80, "final": 8}
"""And of its answers; of ``elements`` with a prompt that names eight. Not measured."""


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
    frames = scored(config, model)
    if scorer.name == "unifiedreward":
        return frames * _speaking(scorer, model, device)
    return frames * _image_flops(scorer) / (1e12 * _reached(device, scorer, "fp32"))


def _reached(device: Device, scorer: Scorer, usual: str) -> float:
    """TFLOP/s; torch does not run products of FP32 in TF32 unless told."""
    known = ACCELERATORS.get(device.name)
    full = scorer.settings.get("dtype", usual) == "fp32"
    return device.plain * (known.fp32 / known.bf16 if known and full else 1.0)


def _image_flops(scorer: Scorer) -> float:
    """Operations to score one image; 0 where the scorer has no model, or it is not known which."""
    known = TOWERS.get(scorer.name)
    small = str(scorer.settings.get("checkpoint", "")).startswith("shapes/")
    if known is None or small or scorer.settings.get("architecture"):
        return 0.0
    width, layers, tokens = known
    return float(layers * tokens * (24 * width**2 + 4 * tokens * width))


def _speaking(scorer: Scorer, model: Model, device: Device) -> float:
    """Two operations per parameter and token that it reads; per token that a batch writes, its
    weights once through the memory. 0 where its size is not known.
    """
    from rewards.unifiedreward import SIDE, UnifiedReward

    held = model_bytes(scorer) or 0
    told = UnifiedReward.told(scorer.settings)
    width = 4 if told["dtype"] == "fp32" else 2
    pixels = min(model.height * model.width, told["max_pixels"] or float("inf"))
    flops = 2 * held / width * (ASKED + pixels / SIDE**2)
    passes = WRITTEN[told["form"]] / told["batch_size"]
    reading = flops / (1e12 * _reached(device, scorer, "bf16"))
    return reading + passes * held / (1e12 * device.bandwidth)

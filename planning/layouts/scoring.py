"""Operations of the reward models, from the widths of their published architectures."""

from __future__ import annotations

from configs.rewards import Scorer

TOWERS = {
    "clipscore": (1024, 24, 257),
    "pickscore": (1280, 32, 257),
    "hpsv2": (1280, 32, 257),
    "imagereward": (1024, 24, 197),
}
"""Width, layers and tokens of what looks at an image. The text's part is left out: below 5 %."""


def image_flops(scorer: Scorer) -> float:
    """Operations to score one image; 0 where the scorer has no model, or it is not known which."""
    known = TOWERS.get(scorer.name)
    small = str(scorer.settings.get("checkpoint", "")).startswith("shapes/")
    if known is None or small or scorer.settings.get("architecture"):
        return 0.0
    width, layers, tokens = known
    return float(layers * tokens * (24 * width**2 + 4 * tokens * width))


def in_fp32(scorer: Scorer) -> bool:
    """Whether its products are FP32, which torch does not run in TF32 unless told."""
    return scorer.settings.get("dtype", "fp32") == "fp32"

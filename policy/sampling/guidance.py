"""Classifier-free guidance (arXiv 2207.12598) with the velocity of a negative prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.sections import Guidance, Stage
from policy.families.base import Family
from policy.types import Conditioning


@dataclass(frozen=True)
class Guided:
    """Guidance settings of a stage.

    ``scale`` is the guidance scale. ``one_pass`` computes both velocities in one pass of twice the
    batch. ``low_noise`` is the scale at low noise levels, for models with a separate transformer
    for them.
    """

    scale: float
    one_pass: bool
    low_noise: float | None = None

    @staticmethod
    def of(settings: Guidance, stage: Stage) -> Guided | None:
        """Return the guidance of a stage, or None if it has none (one velocity is enough)."""
        return Guided.at(settings, settings.scale(stage))

    @staticmethod
    def at(settings: Guidance, scale: float) -> Guided | None:
        """Return guidance at this scale, or None for 1 (one velocity is enough)."""
        return Guided(scale, settings.one_pass, settings.low_noise) if scale != 1 else None


def velocity(
    family: Family,
    transformer: nn.Module,
    x: Tensor,
    sigma: Tensor,
    cond: Conditioning,
    guided: Guided | None,
) -> Tensor:
    """Return the velocity [B, *latent] of ``Family.velocity``, with guidance if ``guided`` is set.

    Gradients flow through both velocities. Raises ValueError for guidance without a negative
    prompt in ``cond``.
    """
    if guided is None:
        return family.velocity(transformer, x, sigma, cond)
    positive, negative = cond.split_negative()
    if guided.one_pass:
        both = family.velocity(
            transformer,
            torch.cat([x, x]),
            torch.cat([sigma, sigma]) if sigma.ndim else sigma,
            # the negative prompt first, as in diffusers' pipelines
            Conditioning.cat([negative, positive]),
        )
        negative_velocity, positive_velocity = both.chunk(2)
    else:
        positive_velocity = family.velocity(transformer, x, sigma, positive)
        negative_velocity = family.velocity(transformer, x, sigma, negative)
    scale = family.guidance_scale(sigma.to(x.device), guided.scale, guided.low_noise)
    return family.guided(positive_velocity, negative_velocity, scale)

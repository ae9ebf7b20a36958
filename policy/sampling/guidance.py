"""Classifier-free guidance (arXiv 2207.12598): a second velocity, of a negative prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.sections import Guidance, Stage
from policy.families.base import Family
from policy.types import Conditioning


@dataclass(frozen=True)
class Guided:
    """A scale, whether both velocities come of one pass of twice the batch, and the scale at low
    noise levels, where a model has a transformer of their own.
    """

    scale: float
    one_pass: bool
    low_noise: float | None = None

    @staticmethod
    def of(settings: Guidance, stage: Stage) -> Guided | None:
        """Guidance of a stage; None where there is none, and one velocity is enough."""
        return Guided.at(settings, settings.scale(stage))

    @staticmethod
    def at(settings: Guidance, scale: float) -> Guided | None:
        """Guidance at this scale; None for 1, where one velocity is enough."""
        return Guided(scale, settings.one_pass, settings.low_noise) if scale != 1 else None


def velocity(
    family: Family,
    transformer: nn.Module,
    x: Tensor,
    sigma: Tensor,
    cond: Conditioning,
    guided: Guided | None,
) -> Tensor:
    """The family's velocity [B, *latent] as ``Family.velocity`` gives it, guided where asked for.

    Gradients go through both velocities.
    """
    if guided is None:
        return family.velocity(transformer, x, sigma, cond)
    positive, negative = cond.parted()
    if guided.one_pass:
        both = family.velocity(
            transformer,
            torch.cat([x, x]),
            torch.cat([sigma, sigma]) if sigma.ndim else sigma,
            # the negative prompt first, as diffusers' pipelines stack them
            Conditioning.cat([negative, positive]),
        )
        against, along = both.chunk(2)
    else:
        along = family.velocity(transformer, x, sigma, positive)
        against = family.velocity(transformer, x, sigma, negative)
    scale = family.guidance_scale(sigma.to(x.device), guided.scale, guided.low_noise)
    return family.guided(along, against, scale)

"""Sampling of latents from seeds and conditioning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from policy.families.base import Family
from policy.sampling.guidance import Guided, velocity
from policy.sampling.noise import noise_for
from policy.sampling.ode import SOLVERS
from policy.types import Conditioning


@torch.no_grad()
def sample(
    family: Family,
    transformer: nn.Module,
    cond: Conditioning,
    seeds: Sequence[int],
    steps: int,
    solver: str,
    batch_size: int | None = None,
    guided: Guided | None = None,
    full: Family | None = None,
    stop_after: int | None = None,
) -> Tensor:
    """Sample latents at sigma 0, float32 [B, *latent] on the CPU, one per seed and row of ``cond``.

    ``batch_size`` images go through the transformer at a time; None means all. ``full`` is the same
    model at a larger size; if it is given, its initial noises are reduced to this size. With
    ``stop_after`` sampling stops after that many of the steps, the last of which returns the clean
    sample predicted by the denoiser. Raises ValueError if the numbers of rows and seeds differ.
    """
    if len(cond) != len(seeds):
        raise ValueError(
            f"{len(seeds)} seeds but conditioning of {len(cond)} rows: repeat the prompt's row once"
            " per seed"
        )
    if not seeds:
        return torch.empty((0, *family.latent_shape))
    parameter = next(transformer.parameters())
    sigmas = family.sigmas(steps)
    if stop_after is not None:
        # the last step of every solver returns x - sigma v, the predicted clean sample
        sigmas = torch.cat([sigmas[:stop_after], sigmas[-1:]])
    if full is None:
        noise = noise_for(seeds, family.latent_shape)
    else:
        noise = full.smaller_noise(noise_for(seeds, full.latent_shape), family)
    size = batch_size or len(seeds)
    latents = []
    for start in range(0, len(seeds), size):
        rows = slice(start, start + size)
        part = cond.rows(rows).to(parameter.device, parameter.dtype)
        latents.append(
            SOLVERS[solver](
                lambda x, sigma, part=part: velocity(family, transformer, x, sigma, part, guided),
                noise[rows].to(parameter.device),
                sigmas,
            ).cpu()
        )
    return torch.cat(latents)

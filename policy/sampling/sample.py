"""From seeds and conditioning to latents."""

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
    upto: int | None = None,
) -> Tensor:
    """Latents at sigma 0, float32 [B, *latent] on the CPU: row i of seed i and of row i of cond.

    ``batch_size`` images go through the transformer at a time; None means all. With ``full``, the
    same model at a larger size, the initial noises are its own, cut down to this size. ``upto``:
    after so many of the steps it ends with the clean sample that the denoiser predicts there.
    Raises ValueError when rows and seeds differ.
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
    if upto is not None:
        # the last step of every solver goes to x - sigma v itself
        sigmas = torch.cat([sigmas[:upto], sigmas[-1:]])
    if full is None:
        noise = noise_for(seeds, family.latent_shape)
    else:
        noise = full.smaller_noise(noise_for(seeds, full.latent_shape), family)
    size = batch_size or len(seeds)
    done = []
    for start in range(0, len(seeds), size):
        rows = slice(start, start + size)
        part = cond.rows(rows).to(parameter.device, parameter.dtype)
        done.append(
            SOLVERS[solver](
                lambda x, sigma, part=part: velocity(family, transformer, x, sigma, part, guided),
                noise[rows].to(parameter.device),
                sigmas,
            ).cpu()
        )
    return torch.cat(done)

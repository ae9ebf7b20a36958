"""A flow with known marginals: data N(m, SPREAD^2) in each latent dimension, and its exact
denoiser.

x at sigma is N(alpha m, alpha^2 SPREAD^2 + sigma^2) with alpha = 1 - sigma. The weight of the
denoiser's only linear layer is m, so a LoRA on it moves the distribution, and the best m for a
reward has a closed form.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from policy.types import Conditioning

MEAN, SPREAD = 0.7, 0.4


def velocity(x: Tensor, sigma: Tensor, mean: Tensor | float = MEAN) -> Tensor:
    """Return E[eps - x0 | x] in the dtype of x; sigma is 0-dim or [B]."""
    now = sigma.to(x).reshape(-1, *[1] * (x.ndim - 1))
    alpha = 1 - now
    variance = (alpha * SPREAD) ** 2 + now**2
    centred = x - alpha * mean
    return now / variance * centred - (mean + alpha * SPREAD**2 / variance * centred)


def marginal(sigma: float) -> tuple[float, float]:
    """Return the mean and the variance of x at sigma."""
    return (1 - sigma) * MEAN, ((1 - sigma) * SPREAD) ** 2 + sigma**2


class Denoiser(nn.Module):
    """Denoiser whose weight [D, 1] is the mean of the data."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.mean = nn.Linear(1, dimensions, bias=False)
        nn.init.constant_(self.mean.weight, MEAN)
        self.requires_grad_(False)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        return velocity(x, sigma, self.mean(x.new_ones(len(x), 1)).reshape(x.shape))


class GaussianFamily:
    """The parts of a ``Family`` that sampling and training use.

    ``batches`` records the size of every forward pass.
    """

    lora_targets = ("mean",)
    modules_to_not_convert = ()

    def __init__(self, latent_shape: tuple[int, ...] = (4, 8)) -> None:
        self.latent_shape = latent_shape
        self.batches: list[int] = []

    def sigmas(self, steps: int) -> Tensor:
        return torch.linspace(1.0, 0.0, steps + 1)

    def velocity(
        self, transformer: nn.Module, x: Tensor, sigma: Tensor, cond: Conditioning
    ) -> Tensor:
        self.batches.append(len(x))
        return transformer(x, sigma)

    def decode(self, vae: nn.Module, latents: Tensor, batch_size: int | None = None) -> Tensor:
        return torch.zeros(len(latents), 3, 2, 2, dtype=torch.uint8)

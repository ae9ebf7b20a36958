"""Rectified flow training shared by the tiny models: times, losses, learning rates, averages.

x_t = (1 - t) x0 + t eps, target eps - x0 (Liu et al. 2022; Esser et al. 2024). Once the share
``TrainingSchedule.fp4_from`` of the time has passed, every second step runs in NVFP4, with an
additional loss
that pulls its velocity towards that of the unquantized model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from shapes.budget import Budget
from shapes.fp4 import in_four_bits
from shapes.muon import Muon
from shapes.state import load_state, save_state

MATRIX_LR, OTHER_LR, DECAY = 0.02, 2e-3, 0.02
CELL_WEIGHT = 0.1
AGREE_WEIGHT = 3.0
EMA = 0.998
Learner = TypeVar("Learner", bound=nn.Module)


class Losses(NamedTuple):
    """Losses of one batch.

    ``agree`` is the mean squared difference between the velocities in NVFP4 and unquantized, or 0
    for an unquantized step.
    """

    velocity: torch.Tensor
    cells: torch.Tensor
    agree: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        """Weighted sum of the losses."""
        return self.velocity + CELL_WEIGHT * self.cells + AGREE_WEIGHT * self.agree


class Batch(NamedTuple):
    """Pairs of clean latents ``x0`` and noise ``eps``, at times ``t``.

    ``text`` is the input of the text encoders; ``cells`` labels the content of each cell.
    """

    x0: torch.Tensor
    eps: torch.Tensor
    t: torch.Tensor
    text: tuple[torch.Tensor, ...]
    cells: torch.Tensor | None = None


def draw_times(generator: torch.Generator, count: int, mean: float, std: float) -> torch.Tensor:
    """Return stratified logit-normal times [count] in (0, 1); one in ten is uniform instead."""
    u = (
        torch.randperm(count, generator=generator) + torch.rand(count, generator=generator)
    ) / count
    t = torch.sigmoid(mean + std * math.sqrt(2) * torch.erfinv(2 * u.clamp(1e-4, 1 - 1e-4) - 1))
    flat = torch.rand(count, generator=generator)
    return torch.where(torch.rand(count, generator=generator) < 0.1, flat, t)


def backward(learner: nn.Module, batch: Batch, four_bits: bool) -> Losses:
    """Compute the losses of a batch and accumulate their gradients.

    With ``four_bits``, these are the losses of the model in NVFP4. The learner must have a
    ``transformer`` and return (velocity, logits of each cell's content).
    """
    transformer = learner.get_submodule("transformer")
    shaped = batch.t.view(-1, *[1] * (batch.x0.ndim - 1))
    inputs = ((1 - shaped) * batch.x0 + shaped * batch.eps, batch.t, *batch.text)
    unquantized = None
    if four_bits:
        with torch.no_grad():
            unquantized, _ = learner(*inputs)
    with in_four_bits(transformer) if four_bits else nullcontext():
        velocity, logits = learner(*inputs)
        agree = F.mse_loss(velocity, unquantized) if unquantized is not None else torch.zeros(())
        losses = Losses(
            F.mse_loss(velocity, batch.eps - batch.x0),
            torch.zeros(())
            if batch.cells is None
            else F.cross_entropy(logits.flatten(0, 1), batch.cells.flatten()),
            agree,
        )
        losses.total.backward()
    return losses


def matrices_apart(learner: nn.Module) -> Muon:
    """Return Muon for attention and feed-forward matrices with AdamW for the other parameters."""
    split: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for name, p in learner.named_parameters():
        split[p.ndim == 2 and "blocks." in name and "norm1" not in name].append(p)
    return Muon(split[True], split[False], MATRIX_LR, OTHER_LR, DECAY)


@torch.no_grad()  # otherwise autograd would keep the graph of every step
def update_average(average: nn.Module, learner: nn.Module, step: int) -> None:
    """Update the moving average of the weights after ``step``, counted from 0."""
    keep = min(EMA, (2 + step) / (21 + step))
    torch._foreach_lerp_(list(average.parameters()), list(learner.parameters()), 1 - keep)


@dataclass(frozen=True)
class TrainingSchedule:
    """Duration and learning rate schedule of a training.

    Learning rates are ``rate`` times the full ones for the share ``flat`` of the time, then fall
    linearly to zero.
    """

    minutes: float
    flat: float = 0.35
    rate: float = 1.0
    fp4_from: float = 0.6


def train(
    make: Callable[[], Learner],
    batches: Callable[[torch.Generator, float], Batch],
    course: TrainingSchedule,
    work: Path,
    log: Callable[[str], None],
    snapshot: Callable[[Learner], None],
) -> Learner:
    """Train the model that ``make()`` returns, and return its averaged weights.

    ``batches(generator, done)`` returns a batch; ``done`` is the share of the time that has passed.
    ``snapshot(average)`` is called every minute.
    """
    learner, average = make(), make().requires_grad_(False)
    optimizer = matrices_apart(learner)

    def save_average() -> None:
        save_state(work / "average", average, None, {"step": budget.step})
        snapshot(average)

    budget = Budget(work / "denoiser", learner, optimizer, course.minutes, save_average)
    average.load_state_dict(learner.state_dict())
    load_state(work / "average", average, None)
    generator = torch.Generator().manual_seed(1000 + budget.step)
    mean = 0.0
    for done in budget:
        step = budget.step
        falling = max(0.0, (1 - done) / (1 - course.flat))
        for group in optimizer.param_groups:
            group["lr"] = course.rate * group["peak"] * min(1.0, (step + 1) / 60, falling)
        optimizer.zero_grad(set_to_none=True)
        four_bits = done > course.fp4_from and step % 2 == 1
        losses = backward(learner, batches(generator, done), four_bits)
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        update_average(average, learner, step)
        mean += (losses.velocity.item() - mean) / min(step + 1 - budget.first, 100)
        if step % 50 == 49:
            log(
                f"denoiser {budget.where} loss {mean:.4f} cells {losses.cells.item():.4f}"
                f" NVFP4 {losses.agree.item():.5f}"
            )
    return average.eval()

"""Training by rectified flow that the tiny models share: times, losses, learning rates, averages.

x_t = (1 - t) x0 + t eps, target eps - x0 (Liu et al. 2022; Esser et al. 2024). From ``FP4_FROM`` of
the time on every second step runs in NVFP4, and is drawn towards what the unquantized model says.
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
    """Of one batch; ``agree`` is the mean squared difference between the NVFP4 and the full
    velocity, 0 where all was full.
    """

    velocity: torch.Tensor
    cells: torch.Tensor
    agree: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        return self.velocity + CELL_WEIGHT * self.cells + AGREE_WEIGHT * self.agree


class Batch(NamedTuple):
    """Pairs of a clean x0 and a noise, with ids of captions and what lies in each cell."""

    x0: torch.Tensor
    eps: torch.Tensor
    t: torch.Tensor
    text: tuple[torch.Tensor, ...]
    cells: torch.Tensor | None = None


def draw_times(generator: torch.Generator, count: int, mean: float, std: float) -> torch.Tensor:
    """Stratified logit-normal times [count] in (0, 1), one in ten uniform."""
    u = (
        torch.randperm(count, generator=generator) + torch.rand(count, generator=generator)
    ) / count
    t = torch.sigmoid(mean + std * math.sqrt(2) * torch.erfinv(2 * u.clamp(1e-4, 1 - 1e-4) - 1))
    flat = torch.rand(count, generator=generator)
    return torch.where(torch.rand(count, generator=generator) < 0.1, flat, t)


def backward(learner: nn.Module, batch: Batch, four_bits: bool) -> Losses:
    """Losses of a batch, and their gradients; with ``four_bits`` those of the model in NVFP4.

    A learner has a ``transformer``, and gives (velocity, logits of what lies in each cell).
    """
    transformer = learner.get_submodule("transformer")
    shaped = batch.t.view(-1, *[1] * (batch.x0.ndim - 1))
    inputs = ((1 - shaped) * batch.x0 + shaped * batch.eps, batch.t, *batch.text)
    full = None
    if four_bits:
        with torch.no_grad():
            full, _ = learner(*inputs)
    with in_four_bits(transformer) if four_bits else nullcontext():
        velocity, logits = learner(*inputs)
        agree = F.mse_loss(velocity, full) if full is not None else torch.zeros(())
        found = Losses(
            F.mse_loss(velocity, batch.eps - batch.x0),
            torch.zeros(())
            if batch.cells is None
            else F.cross_entropy(logits.flatten(0, 1), batch.cells.flatten()),
            agree,
        )
        found.total.backward()
    return found


def matrices_apart(learner: nn.Module) -> Muon:
    """Muon on attention and feed-forward matrices, AdamW on the rest."""
    split: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for name, p in learner.named_parameters():
        split[p.ndim == 2 and "blocks." in name and "norm1" not in name].append(p)
    return Muon(split[True], split[False], MATRIX_LR, OTHER_LR, DECAY)


@torch.no_grad()  # or autograd would keep every step
def follow(average: nn.Module, learner: nn.Module, step: int) -> None:
    """Move the average towards the learner after ``step``, counted from 0."""
    keep = min(EMA, (2 + step) / (21 + step))
    torch._foreach_lerp_(list(average.parameters()), list(learner.parameters()), 1 - keep)


@dataclass(frozen=True)
class Course:
    """How long and how fast: ``flat`` of the time at ``rate`` of the full learning rates, then
    linear to zero.
    """

    minutes: float
    flat: float = 0.35
    rate: float = 1.0
    fp4_from: float = 0.6


def train(
    make: Callable[[], Learner],
    batches: Callable[[torch.Generator, float], Batch],
    course: Course,
    work: Path,
    log: Callable[[str], None],
    snapshot: Callable[[Learner], None],
) -> Learner:
    """Train what ``make()`` makes on ``batches(generator, done)``; returns the averaged weights.
    ``snapshot(average)`` each minute.
    """
    learner, average = make(), make().requires_grad_(False)
    optimizer = matrices_apart(learner)

    def also() -> None:
        save_state(work / "average", average, None, {"step": budget.step})
        snapshot(average)

    budget = Budget(work / "denoiser", learner, optimizer, course.minutes, also)
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
        found = backward(learner, batches(generator, done), four_bits)
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        follow(average, learner, step)
        mean += (found.velocity.item() - mean) / min(step + 1 - budget.first, 100)
        if step % 50 == 49:
            log(
                f"denoiser {budget.where} loss {mean:.4f} cells {found.cells.item():.4f}"
                f" NVFP4 {found.agree.item():.5f}"
            )
    return average.eval()

"""Train the tiny CLIP from nothing: ``python -m shapes.clip_build --minutes 25 --threads 2 --out
shapes/clip``.

Stopping it and starting it again with the same ``--work`` goes on where it was. Everything is FP32,
on the CPU. At the end it prints how often the right caption wins over near misses, on images of
the train and of the tune split; the test split is not looked at.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from shapes.budget import Budget
from shapes.building import HERE, add_work, log, log_written, parser, replacing
from shapes.clip import MOST_SCALE, batches, build_clip, loss_of, near_misses, save_clip, to_pixels
from shapes.grammar import KINDS, Scene, scenes_of
from shapes.render import render
from shapes.state import load_state, save_state
from shapes.text import caption_ids
from shapes.training import follow

if TYPE_CHECKING:
    import open_clip

PEAK_LR, DECAY, WARM_UP = 1e-3, 0.05, 100


def train_clip(
    minutes: float, work: Path, log: Callable[[str], None], most_steps: float = math.inf
) -> open_clip.CLIP:
    """Train for ``minutes`` (counted over resumed runs), or ``most_steps``; returns the averaged
    weights.

    AdamW, the rate falling to zero along a cosine of the share of the time that is gone.
    """
    model, average = build_clip(), build_clip().requires_grad_(False)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98))

    def also() -> None:
        save_state(work / "clip-average", average, None, {"step": budget.step})

    budget = Budget(work / "clip", model, optimizer, minutes, also, most_steps)
    average.load_state_dict(model.state_dict())
    load_state(work / "clip-average", average, None)
    examples, mean = batches(2000 + budget.step), 0.0
    for gone in budget:
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * _rate(budget.step, gone)
        loss = loss_of(model, next(examples))
        _learn(model, optimizer, loss)
        follow(average, model, budget.step)
        mean += (loss.item() - mean) / min(budget.step + 1 - budget.first, 100)
        if budget.step % 50 == 49:
            scale = model.logit_scale.exp().item()
            log(f"clip {budget.where} loss {mean:.4f} scale {scale:.1f}")
    return average.eval()


def _learn(model: open_clip.CLIP, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """One step of the optimizer."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(max=MOST_SCALE)


def _rate(step: int, gone: float) -> float:
    """Share of the peak rate after ``step`` steps, when so much of the time is ``gone``."""
    return min((step + 1) / WARM_UP, (1 + math.cos(math.pi * gone)) / 2)


@torch.no_grad()
def accuracy(model: open_clip.CLIP, split: str) -> dict[str, float]:
    """By kind of scene: the share of clean images whose own caption scores higher than every near
    miss of it.
    """
    found = {}
    splits = tuple(dict.fromkeys(("train", split)))
    for kind in KINDS:
        scenes = scenes_of(split, kind)[::7] if split == "train" else scenes_of(split, kind)
        pairs = [(scene, near_misses(scene, splits)) for scene in scenes]
        pairs = [(scene, near) for scene, near in pairs if near]
        if not pairs:
            continue
        image = model.encode_image(
            to_pixels(render([scene for scene, _ in pairs], np.random.default_rng(1))),
            normalize=True,
        )
        wins = [_wins(model, image[row], [scene, *near]) for row, (scene, near) in enumerate(pairs)]
        found[kind] = float(np.mean(wins))
    return found


def _wins(model: open_clip.CLIP, image: torch.Tensor, captions: list[Scene]) -> bool:
    ids = caption_ids([scene.caption for scene in captions])
    return int((model.encode_text(ids, normalize=True) @ image).argmax()) == 0


def arguments() -> argparse.Namespace:
    """The command line."""
    found = parser("shapes.clip_build", __doc__, 25.0, "", HERE / "clip")
    add_work(found)
    found.add_argument("--steps", type=int, default=math.inf, help="stop after so many steps")
    return found.parse_args()


def main() -> None:
    """Run the training."""
    args = arguments()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    model = train_clip(args.minutes, args.work, log, args.steps)
    with replacing(args.out) as fresh:
        save_clip(model, fresh)
    for split in ("train", "tune"):
        log(f"right caption before all near misses, {split}: {accuracy(model, split)}")
    log_written(args.out)


if __name__ == "__main__":
    main()

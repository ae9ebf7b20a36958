"""Train the tiny CLIP from scratch.

    python -m shapes.clip_build --minutes 25 --threads 2 --out shapes/clip

A run that was stopped continues when it is started again with the same ``--work``. Everything
is FP32, on the CPU. At the end it prints how often the correct caption scores higher than all near
misses, for images of the train and the tune split; the test split is not used.
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
from shapes.training import update_average

if TYPE_CHECKING:
    import open_clip

PEAK_LR, DECAY, WARM_UP = 1e-3, 0.05, 100


def train_clip(
    minutes: float, work: Path, log: Callable[[str], None], most_steps: float = math.inf
) -> open_clip.CLIP:
    """Train for ``minutes`` (counted over resumed runs) or ``most_steps``; return averaged weights.

    Uses AdamW; the learning rate falls to zero along a cosine of the share of the time that has
    passed.
    """
    model, average = build_clip(), build_clip().requires_grad_(False)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98))

    def save_average() -> None:
        save_state(work / "clip-average", average, None, {"step": budget.step})

    budget = Budget(work / "clip", model, optimizer, minutes, save_average, most_steps)
    average.load_state_dict(model.state_dict())
    load_state(work / "clip-average", average, None)
    examples, mean = batches(2000 + budget.step), 0.0
    for gone in budget:
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * _rate(budget.step, gone)
        loss = loss_of(model, next(examples))
        _learn(model, optimizer, loss)
        update_average(average, model, budget.step)
        mean += (loss.item() - mean) / min(budget.step + 1 - budget.first, 100)
        if budget.step % 50 == 49:
            scale = model.logit_scale.exp().item()
            log(f"clip {budget.where} loss {mean:.4f} scale {scale:.1f}")
    return average.eval()


def _learn(model: open_clip.CLIP, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Take one optimizer step."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(max=MOST_SCALE)


def _rate(step: int, gone: float) -> float:
    """Return the learning rate at ``step`` as a share of its peak.

    ``gone`` is the share of the time that has passed.
    """
    return min((step + 1) / WARM_UP, (1 + math.cos(math.pi * gone)) / 2)


@torch.no_grad()
def accuracy(model: open_clip.CLIP, split: str) -> dict[str, float]:
    """Return, by kind of scene, the share of images whose own caption beats all near misses.

    The images are rendered without noise. Of the train split, every seventh scene is used.
    """
    shares = {}
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
        shares[kind] = float(np.mean(wins))
    return shares


def _wins(model: open_clip.CLIP, image: torch.Tensor, captions: list[Scene]) -> bool:
    """Return True if the first caption has the highest score."""
    ids = caption_ids([scene.caption for scene in captions])
    return int((model.encode_text(ids, normalize=True) @ image).argmax()) == 0


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    arg_parser = parser("shapes.clip_build", __doc__, 25.0, "", HERE / "clip")
    add_work(arg_parser)
    arg_parser.add_argument("--steps", type=int, default=math.inf, help="stop after so many steps")
    return arg_parser.parse_args()


def main() -> None:
    """Run the training."""
    args = arguments()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    model = train_clip(args.minutes, args.work, log, args.steps)
    with replacing(args.out) as fresh:
        save_clip(model, fresh)
    for split in ("train", "tune"):
        log(f"right caption ranked before all near misses, {split}: {accuracy(model, split)}")
    log_written(args.out)


if __name__ == "__main__":
    main()

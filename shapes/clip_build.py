"""Train the tiny CLIP from nothing: ``python -m shapes.clip_build --minutes 25 --threads 2 --out
shapes/clip``.

Stopping it and starting it again with the same ``--work`` goes on where it was. Everything is FP32,
on the CPU. At the end it prints how often the right caption wins over near misses, on images of
the train and of the tune split; the test split is not looked at.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from shapes.building import HERE, add_work, log, log_written, parser, replacing
from shapes.clip import MOST_SCALE, batches, build_clip, loss_of, near_misses, save_clip, to_pixels
from shapes.grammar import KINDS, Scene, scenes_of
from shapes.render import render
from shapes.state import load_state, save_state
from shapes.text import TOKENS, clip_tokenizer

if TYPE_CHECKING:
    import open_clip

PEAK_LR, DECAY, WARM_UP, EMA = 1e-3, 0.05, 100, 0.998


def train_clip(
    minutes: float, work: Path, log: Callable[[str], None], most_steps: int | None = None
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
    state = load_state(work / "clip", model, optimizer)
    average.load_state_dict(model.state_dict())
    load_state(work / "clip-average", average, None)
    step, spent = int(state.get("step", 0)), float(state.get("spent", 0.0))
    begin, saved, mean, first = time.monotonic() - spent, time.monotonic(), 0.0, step
    examples = batches(2000 + step)

    def save() -> None:
        save_state(work / "clip", model, optimizer, {"spent": spent, "step": step})
        save_state(work / "clip-average", average, None, {"step": step})

    while spent < minutes * 60 and (most_steps is None or step < most_steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * _rate(step, spent / (minutes * 60))
        loss = loss_of(model, next(examples))
        _learn(model, optimizer, loss)
        step, spent = step + 1, time.monotonic() - begin
        with torch.no_grad():  # or autograd would keep every step
            torch._foreach_lerp_(
                list(average.parameters()),
                list(model.parameters()),
                1 - min(EMA, (1 + step) / (20 + step)),
            )
        mean += (loss.item() - mean) / min(step - first, 100)
        if step % 50 == 0:
            log(
                f"clip step {step} {spent:.0f}s loss {mean:.4f} scale"
                f" {model.logit_scale.exp().item():.1f}"
            )
        if time.monotonic() - saved > 60:
            save()
            saved = time.monotonic()
    save()
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
    return min((step + 1) / WARM_UP, (1 + math.cos(math.pi * min(1.0, gone))) / 2)


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
    texts = [scene.caption for scene in captions]
    ids = clip_tokenizer()(
        texts, padding="max_length", max_length=TOKENS, return_tensors="pt"
    ).input_ids
    return int((model.encode_text(ids, normalize=True) @ image).argmax()) == 0


def arguments() -> argparse.Namespace:
    """The command line."""
    found = parser("shapes.clip_build", __doc__, 25.0, "", HERE / "clip")
    add_work(found)
    found.add_argument("--steps", type=int, default=None, help="stop after so many steps")
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

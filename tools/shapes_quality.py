"""Measure how well the tiny model draws its captions, with stock diffusers.

    python tools/shapes_quality.py --split tune --noises 4 --steps 10 --grid grid.png

Generates images for a whole prompt file with fixed noises, and prints the graded reward, its parts
and the standard error over prompts. Choose settings on ``tune``; ``test`` is for reported numbers.

``--halved`` also scores the images scaled down to half the side. This is an upper bound on what
previews of that size can tell about the full images: it assumes that they show the same pictures.
``--clip shapes/clip`` also ranks the images of each prompt by that CLIP, and prints how far its
order agrees with that of the rule-based reward.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.utils import logging
from PIL import Image

from configs.rewards import Scorer
from learner.audit import agreement
from rewards import build
from rewards.shapes import ShapesScorer
from shapes.half import halved

SHAPES = Path(__file__).resolve().parent.parent / "shapes"
BATCH = 32


def generate(model: Path, prompts: list[str], steps: int, seed: int = 77) -> np.ndarray:
    """Generate one image per prompt, uint8 [B, 3, 32, 32]."""
    pipe = StableDiffusion3Pipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for start in range(0, len(prompts), BATCH):
        out: Any = pipe(
            prompts[start : start + BATCH],
            num_inference_steps=steps,
            sigmas=list(np.linspace(1, 1 / steps, steps)),
            guidance_scale=1.0,
            max_sequence_length=1,
            height=32,
            width=32,
            generator=generator,
            output_type="np",
        )
        parts.append((out.images * 255).round().astype(np.uint8).transpose(0, 3, 1, 2))
    return np.concatenate(parts)


def grid(images: np.ndarray, path: Path, columns: int = 12, scale: int = 3) -> None:
    """Save a sheet of images, ``columns`` wide."""
    rows = -(-len(images) // columns)
    sheet = np.zeros((rows * columns, 34, 34, 3), dtype=np.uint8)
    sheet[: len(images), 1:33, 1:33] = images.transpose(0, 2, 3, 1)
    sheet = (
        sheet.reshape(rows, columns, 34, 34, 3).swapaxes(1, 2).reshape(rows * 34, columns * 34, 3)
    )
    Image.fromarray(sheet).resize(
        (sheet.shape[1] * scale, sheet.shape[0] * scale), Image.Resampling.NEAREST
    ).save(path)


def ranked(
    clip: str, images: np.ndarray, prompts: list[str], rules: np.ndarray, noises: int
) -> str:
    """Return a line that compares how ``clip`` and the rule-based reward rank a prompt's images.

    Agreement is averaged over prompts. Prompts whose rewards are all equal are left out of it.
    """
    scores = build(Scorer(name="clipscore", settings={"checkpoint": clip}), device="cpu")(
        images, prompts, [{}] * len(prompts)
    )
    groups = list(zip(scores.reshape(-1, noises), rules.reshape(-1, noises), strict=True))
    results = [agreement(cosines, rewards) for cosines, rewards in groups if np.ptp(rewards) > 0]
    means = ", ".join(
        f"{name} {np.nanmean([item[name] for item in results]):.3f}" for name in results[0]
    )
    half = noises // 2
    half_means = [
        (rewards[np.argsort(cosines)[-half:]].mean(), rewards[np.argsort(cosines)[:half]].mean())
        for cosines, rewards in groups
    ]
    best, worst = np.mean(half_means, 0)
    return (
        f"{clip} within a prompt: {means}; rule-based reward of its better half {best:.3f}, of its"
        f" worse half {worst:.3f}"
    )


def halved_rank(
    images: np.ndarray,
    prompts: list[str],
    rows: list[dict[str, Any]],
    rules: np.ndarray,
    noises: int,
) -> str:
    """Return a line that compares the rewards of full-size images and of the same images halved.

    Reports the mean over prompts of Kendall's tau within a prompt, and its standard error.
    """
    small = ShapesScorer()(halved(images), prompts, rows)
    groups = zip(small.reshape(-1, noises), rules.reshape(-1, noises), strict=True)
    taus = [agreement(halved_rewards, rewards)["kendall_tau"] for halved_rewards, rewards in groups]
    error = np.nanstd(taus, ddof=1) / np.sqrt(np.isfinite(taus).sum())
    return f"half the side: graded {small.mean():.3f}, tau {np.nanmean(taus):.3f} +- {error:.3f}"


def main() -> None:
    """Generate the images, score them and print the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=SHAPES / "model")
    parser.add_argument("--split", choices=("train", "tune", "test"), default="tune")
    parser.add_argument("--noises", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--grid", type=Path)
    parser.add_argument("--halved", action="store_true")
    parser.add_argument("--clip", help="a CLIP checkpoint directory, as for clipscore")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    lines = (SHAPES / "prompts" / f"{args.split}.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) for _ in range(args.noises)]
    prompts = [row["prompt"] for row in rows]
    images = generate(args.model, prompts, args.steps)
    scorer = ShapesScorer()
    reward = scorer(images, prompts, rows)
    groups = reward.reshape(-1, args.noises)
    error = groups.mean(1).std(ddof=1) / np.sqrt(len(groups))
    print(f"{args.split}: {len(groups)} prompts x {args.noises} noises, {args.steps} steps")
    print(
        f"graded {reward.mean():.3f} +- {error:.3f}, within a prompt std {groups.std(1).mean():.3f}"
    )
    print("parts", {name: round(float(part.mean()), 3) for name, part in scorer.parts.items()})
    for kind in ("two", "relation", "count"):
        chosen = [index for index, row in enumerate(rows) if row["kind"] == kind]
        print(
            f"{kind}: graded {reward[chosen].mean():.3f}, strict"
            f" {scorer.parts['strict'][chosen].mean():.3f}"
        )
    if args.halved:
        print(halved_rank(images, prompts, rows, reward, args.noises))
    if args.clip:
        print(ranked(args.clip, images, prompts, reward, args.noises))
    if args.grid:
        grid(images[:96], args.grid)


if __name__ == "__main__":
    main()

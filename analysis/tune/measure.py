"""Measure rewards and seconds of previews and of full generation, and seconds of a gradient."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from analysis.measuring import (
    Generate,
    Say,
    ScoredSeeds,
    explore_images,
    load_explorer,
    load_trainer,
    regenerate_images,
)
from configs.prompts import Prompt
from configs.schema import RunConfig
from learner.batch import Group
from learner.gradient_signal import gradient
from learner.trainer import Trainer
from policy.precision.backends import Backend

Size = tuple[int, int] | None
Kind = tuple[str, int, Size, int | None]
"""(backend, steps, size, number of steps after which a preview ends, or None for all steps)."""


@dataclass
class Measurements:
    """Measured rewards, float32 [P, N], seconds per image, and seconds of training per sample.

    ``truth`` and ``truth_s`` are those of regenerated images.
    """

    truth: np.ndarray
    rewards: dict[Kind, np.ndarray] = field(default_factory=dict)
    seconds: dict[Kind, float] = field(default_factory=dict)
    truth_s: float = 0.0
    update_s: float = 0.0


def measure(
    config: RunConfig,
    prompts: Sequence[Prompt],
    seeds: int,
    backends: Mapping[str, Backend],
    sizes: Mapping[Size, RunConfig],
    kinds: set[Kind],
    say: Say,
) -> Measurements:
    """Generate and score the images of P prompts x N ``seeds``: the truth and all ``kinds``.

    ``sizes`` maps each size of previews to a configuration with that size.
    """
    scored = ScoredSeeds(config, prompts, seeds)

    def rewards(title: str, generate: Generate) -> tuple[np.ndarray, float]:
        values, seconds = scored.rewards(generate)
        say(f"{title}: {values.size} images, {seconds * 1e3:.1f} ms each")
        return values, seconds

    trainer = load_trainer(config)
    truth, seconds = rewards("truth", partial(regenerate_images, trainer))
    measured = Measurements(truth, truth_s=seconds, update_s=_update_seconds(scored, trainer))
    for size, sized in sizes.items():
        for name, backend in backends.items():
            explorer = load_explorer(sized, trainer, backend)
            explorer_kinds = [kind for kind in kinds if (kind[0], kind[2]) == (name, size)]
            for kind in sorted(explorer_kinds, key=lambda kind: (kind[1], kind[3] or kind[1])):
                _, steps, _, stop_after = kind
                title = f"{name}, {stop_after or steps} of {steps} steps"
                title += f", {size[0]} x {size[1]}" if size else ""
                generate = partial(
                    explore_images, explorer, sized, steps=steps, stop_after=stop_after
                )
                measured.rewards[kind], measured.seconds[kind] = rewards(title, generate)
    return measured


def _update_seconds(scored: ScoredSeeds, trainer: Trainer) -> float:
    """Return the seconds of the forward and backward passes per sample, measured on one prompt."""
    cond, seeds = scored.conditioning[0], scored.seeds[0][: scored.config.selection.keep]
    samples, _ = trainer.generator.generate(cond, seeds)
    rewards = np.linspace(0.0, 1.0, len(seeds), dtype=np.float32)
    start = time.perf_counter()
    gradient(trainer, 0, [Group(0, cond, samples, rewards)])
    return (time.perf_counter() - start) / len(seeds)

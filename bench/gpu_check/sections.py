"""The sections of the check, in order of execution, and their shares of the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.gpu_check import (
    compiled_training,
    gpu_tests,
    gradients,
    iteration,
    kernels,
    passes,
    peaks,
    shapes,
    steps,
    turns,
    weights,
)
from bench.gpu_check.findings import Item
from bench.gpu_check.setting import Setting


@dataclass(frozen=True)
class Section:
    """One section. ``share`` is its weight in the time budget; unused time goes to later ones."""

    title: str
    share: float
    measure: Callable[[Setting], Iterator[Item]]


SECTIONS = {
    "kernels": Section("Packing kernels", 1, kernels.measure),
    "shapes": Section("Layers of the published models, without data", 1, shapes.measure),
    "steps": Section("A step in every backend", 7, steps.measure),
    "decode": Section("Decoding", 1.5, passes.decode),
    "lora": Section("Passes of a learner", 3, passes.lora),
    "compiled": Section("Compiled training", 4, compiled_training.measure),
    "weights": Section("A version of the size of FLUX.1", 2, weights.measure),
    "turns": Section("Weights that leave a GPU between turns", 1.5, turns.measure),
    "memory": Section("Memory against the plan", 3, peaks.measure),
    "iteration": Section("One iteration of each family", 6, iteration.measure),
    "gradients": Section("Gradients in BF16", 2, gradients.measure),
    "tests": Section("Tests on the GPU", 3, gpu_tests.measure),
}

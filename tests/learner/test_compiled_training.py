"""Training with compiled passes: their results, and that a failing compiler never leads to eager
passes.
"""

import shutil
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from learner.gradient_signal import gradient
from learner.trainer import Trainer
from policy.lora import adapter_state, load_adapter_state
from policy.precision.compiling import CompileFailed
from tests.learner.tiny import identical, tiny_groups, tiny_trainer, training_state

U = 2.0**-8
"""Unit roundoff of bfloat16."""


def trainer_of(model, precision: str, compile: bool) -> Trainer:
    """Return a trainer that recomputes one of its two blocks and whose adapter "old" has its own
    weights.
    """
    return tiny_trainer(
        model,
        regenerate={"steps": 4, "precision": precision},
        optimizer={"lr": 1e-2, "gradient_checkpointing": 0.5, "compile": compile},
    )


def gradient_of(trainer: Trainer) -> torch.Tensor:
    return gradient(trainer, 0, tiny_groups(1)).double()


def test_compiled_training_without_a_compiler_is_refused_in_one_line(tiny_sd3_dir, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError, match=r"^optimizer.compile: .* C\+\+ .*: install it or set optimizer.compile ="
    ):
        trainer_of(tiny_sd3_dir, "fp32", True)


def test_failing_compiler_ends_the_update_and_changes_nothing(tiny_sd3_dir, monkeypatch):
    def broken(graph, inputs, **options):
        raise RuntimeError("no code for this")

    monkeypatch.setenv("CXX", sys.executable)  # any existing program; it is never called
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    trainer = trainer_of(tiny_sd3_dir, "fp32", True)
    before = training_state(trainer)
    with pytest.raises(
        CompileFailed,
        match="^optimizer.compile: torch.compile failed .*no code for this.*: fix it, or set",
    ):
        trainer.update(0, tiny_groups(1))
    assert identical(training_state(trainer), before)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_gradients_are_as_accurate_as_eager_ones(tiny_sd3_dir):
    """After n successive roundings with independent signs, the relative error is near U sqrt(n). A
    block rounds about 20 times in each direction, forward and backward, and there are two blocks.
    """
    trainers = [trainer_of(tiny_sd3_dir, "bf16", compile) for compile in (False, True)]
    reference = trainer_of(tiny_sd3_dir, "fp32", False)
    bfloat16_weights = dict(trainers[0].transformer.named_parameters())
    with torch.no_grad():
        for name, parameter in reference.transformer.named_parameters():
            parameter.copy_(bfloat16_weights[name])
    counters.clear()
    eager, compiled = map(gradient_of, trainers)
    assert counters["stats"]["unique_graphs"]
    exact = gradient_of(reference)

    def relative_distance(one: torch.Tensor, two: torch.Tensor) -> float:
        return float((one - two).norm() / exact.norm())

    assert relative_distance(compiled, eager) < U * (2 * 2 * 20) ** 0.5
    assert relative_distance(compiled, exact) < 1.25 * relative_distance(eager, exact)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_graphs_with_and_without_gradients_give_equal_velocities(tiny_sd3_dir):
    """Equal weights give equal velocities with and without gradients, if each graph rounds as eager
    passes do. A single omitted rounding would be visible as a difference of U.
    """
    trainer = trainer_of(tiny_sd3_dir, "bf16", True)
    load_adapter_state(trainer.transformer, "old", adapter_state(trainer.transformer, "current"))
    updater, group = trainer.updater, tiny_groups(1)[0]
    points = trainer.objective.points(
        {"latents": torch.from_numpy(group.samples["latents"])},
        trainer.sigmas,
        np.random.default_rng(0),
    )
    rows = group.cond.repeat(len(points))
    current = updater._velocity(updater._denoiser, points, rows, "current")
    with torch.no_grad():
        old = updater._velocity(updater._denoiser, points, rows, "old")
    assert current.requires_grad
    assert float((current.detach() - old).norm() / old.norm()) < U / 100

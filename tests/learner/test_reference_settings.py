"""Settings of the public codes that differ from the defaults: schedules, averages, statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from configs.load import ConfigError, load
from configs.rewards import Advantages
from configs.training import Ema
from learner.advantages import advantages
from learner.nonfinite import NonFiniteTraining
from learner.objectives import build_objective
from learner.objectives.awm import AWMSettings
from learner.schedules import ema_decay
from policy.families.schedule import flow_match_sigmas
from policy.lora import adapter_state, blend
from policy.precision.swap import quantize_plan
from tests.gaussian_flow import GaussianFamily
from tests.learner.tiny import identical, tiny_groups, tiny_trainer, training_state

SHIFT_3 = {"num_train_timesteps": 1000, "shift": 3.0}


def test_scheduler_spacing_matches_the_reference_for_sd3():
    """t = linspace(1, t_min, 6) with t_min = 3 / 1002, shifted once by the table of the scheduler.
    Then all values are shifted again: 3 t / (1 + 2 t). The manual calculation is in float64, and
    the scheduler uses float32.
    """
    result = flow_match_sigmas(SHIFT_3, 6, None, schedule="scheduler").double().numpy()
    t = np.linspace(1, 3 * 0.001 / (1 + 2 * 0.001), 6)
    np.testing.assert_allclose(result, [*(3 * t / (1 + 2 * t)), 0], rtol=0, atol=1e-6)
    assert [round(x, 3) for x in result] == [1, 0.923, 0.819, 0.668, 0.432, 0.009, 0]
    default_schedule = flow_match_sigmas(SHIFT_3, 6, None)
    np.testing.assert_allclose(
        default_schedule, [1, 0.9375, 6 / 7, 0.75, 0.6, 0.375, 0], rtol=0, atol=1e-6
    )


def test_uniform_schedule_has_no_shift():
    result = flow_match_sigmas(SHIFT_3, 4, None, schedule="uniform")
    assert torch.equal(result, torch.tensor([1, 0.75, 0.5, 0.25, 0]))
    with pytest.raises(ConfigError) as error:
        load("quickstart", ["model.schedule=uniform", "model.shift=3.0"])
    assert "shift = 3 with schedule = 'uniform', which is not shifted" in error.value.lines[0]


def test_average_with_warmup_forgets_the_base_faster():
    """The decay (1 + s) / (10 + s) reaches 0.9 at s = 80. The remaining share of the base after ten
    iterations is the product 2/11 3/12 ... 11/20 = 10! 11! / 20! = 6.0e-5. With a constant decay it
    is 0.9^10 = 0.35.
    """
    warm, flat = Ema(warmup=True), Ema()
    assert [ema_decay(warm, s) for s in (1, 2, 79, 80, 200)] == [2 / 11, 3 / 12, 80 / 89, 0.9, 0.9]
    assert np.prod([ema_decay(warm, s) for s in range(1, 11)]) == pytest.approx(5.954e-5, rel=1e-3)
    assert [ema_decay(flat, s) for s in (1, 100)] == [0.9, 0.9]


def test_unbiased_standard_deviations():
    """The values (0, 2, 4) have the population variance 8/3 and the unbiased variance 4. Both
    groups together have the values 0 2 4 1 1 1.
    """
    groups = [np.array([0.0, 2, 4]), np.array([1.0, 1, 1])]
    (result, flat), _ = advantages(groups, Advantages(std="group", eps=1e-8, unbiased=True))
    np.testing.assert_allclose(result, [-1, 0, 1], rtol=1e-6)
    assert not flat.any()
    (result, _), _ = advantages(groups, Advantages(std="global", eps=1e-8, unbiased=True))
    np.testing.assert_allclose(result, np.array([-2, 0, 2]) / np.sqrt(9.5 / 5), rtol=1e-6)
    (alone,), metrics = advantages(
        [np.array([3.0])], Advantages(std="group", eps=1.0, unbiased=True)
    )
    assert alone.tolist() == [0.0] and metrics["zero_std_ratio"] == 1.0


def test_awm_can_train_on_the_first_time():
    grid, samples = torch.linspace(1, 0, 11), {"latents": torch.zeros(50, 2)}
    for first, times in ((False, set(range(1, 9))), (True, set(range(9)))):
        objective = build_objective(AWMSettings(first_step=first))
        times_of_points = objective.points(samples, grid, np.random.default_rng(0)).sigma
        assert set(times_of_points.tolist()) == {grid[j].item() for j in times}


# ---- averages that follow every optimizer step


def per_step(model, **more):
    optimizer = {"lr": 1e-2, "steps_per_iteration": 2, "averages": "step"}
    return tiny_trainer(model, optimizer=optimizer, **more)


def test_averages_are_updated_after_every_optimizer_step(tiny_sd3_dir, monkeypatch):
    """The EMA follows steps 1 and 2 with the decays of s = 1 and 2, and those of the next iteration
    with s = 3 and 4. The old policy moves once per iteration, with s = 2 and 4.
    """
    trainer = per_step(tiny_sd3_dir, ema={"warmup": True}, old_policy={"slope": 0.1})
    calls: list[tuple[str, float]] = []

    def record_blend(transformer, name, source, decay) -> None:
        calls.append((name, decay))
        blend(transformer, name, source, decay)

    monkeypatch.setattr("learner.averages.blend", record_blend)
    for iteration in (0, 1):
        trainer.update(iteration, tiny_groups())
    expected = [("ema", 2 / 11), ("ema", 3 / 12), ("old", 0.2)]
    expected += [("ema", 4 / 13), ("ema", 5 / 14), ("old", 0.4)]
    assert calls == expected


def test_failed_second_step_undoes_the_averages(tiny_sd3_dir):
    trainer = per_step(tiny_sd3_dir, objective={"name": "awm", "times_per_sample": 2})
    before, loss, calls = training_state(trainer), trainer.objective.loss, []

    def failing(points, velocities, values):
        calls.append(adapter_state(trainer.transformer, "ema"))
        total, metrics = loss(points, velocities, values)
        return total * (float("nan") if len(calls) > 1 else 1), metrics

    trainer.objective.loss = failing
    with pytest.raises(NonFiniteTraining):
        trainer.update(0, tiny_groups())
    assert not identical(*calls)  # the average had changed
    assert identical(before, training_state(trainer))


# ---- layers that stay unquantized


class Modules(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.Linear(64, 64)
        self.norm1 = torch.nn.ModuleDict({"linear": torch.nn.Linear(64, 384)})
        self.embed = torch.nn.Linear(16, 64)
        self.pointwise = torch.nn.Conv2d(64, 32, 1)


class PartlyUnquantizedFamily(GaussianFamily):
    modules_to_not_convert = ("norm1.*", "embed")


def quantized(*patterns: str) -> set[str]:
    return {
        row.name
        for row in quantize_plan(Modules(), PartlyUnquantizedFamily(), patterns)
        if row.quantized
    }


def test_patterns_include_layers_again_and_exclude_small_layers():
    assert quantized() == {"attn", "pointwise"}
    assert quantized("!norm1.*") == {"attn", "pointwise", "norm1.linear"}
    assert quantized("!*", "dim<33") == {"attn", "norm1.linear"}
    assert quantized("dim<64", "!embed") == {"attn", "embed"}  # the last matching pattern decides
    rows = {
        row.name: row.why
        for row in quantize_plan(Modules(), PartlyUnquantizedFamily(), ("dim<64",))
    }
    assert rows["pointwise"] == "left unquantized by explore.modules_to_not_convert: dim<64"
    for pattern in ("!nothing", "dim<16"):
        with pytest.raises(ValueError, match="matches no module"):
            quantized(pattern)

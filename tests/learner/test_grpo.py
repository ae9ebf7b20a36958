"""FlowGRPO and DanceGRPO: a manual calculation of one step, finite differences, and which steps of
a path are used for training.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.objectives import build_objective
from learner.objectives.base import Points
from learner.objectives.dance_grpo import DanceGRPOSettings
from learner.objectives.flow_grpo import FlowGRPOSettings
from tests.learner.tiny import in_float64

GRID = torch.linspace(1, 0, 11)


def column(value: float) -> torch.Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def one_step(x_next: float, stored: float = 0.0) -> Points:
    """Return a step from x = 2 at sigma 1/2 to x_next at sigma 1/4."""
    extras = {
        "x_next": column(x_next),
        "sigma_next": torch.tensor([0.25]),
        "log_prob": torch.tensor([stored]),
    }
    return Points(column(2.0), torch.tensor([0.5]), torch.tensor([0]), extras)


@pytest.mark.parametrize(
    ("advantage", "policy"),
    [(2.0, -2 * math.exp(-0.65625)), (-2.0, 2 * 0.9), (70.0, -5 * math.exp(-0.65625))],
)
def test_flow_grpo_step_matches_a_manual_calculation(advantage, policy):
    """With eta 1, g = 1, std = 1/2 and mean = 3/4 x - 3/8 v = 3/2 - 3/8 v. The velocities 3, 2, 1
    give the means 3/8, 3/4, 9/8. For x_next = 1, z = 5/4 and 1/2, so log p - log p_old = -(25/16 -
    1/4) / 2 = -0.65625, and the ratio 0.519 is below 1 - e = 0.9. KL = (3/4)^2 / (2 g^2) = 0.28125.
    Advantages are clipped to 5. The stored log-probability differs by 1/4.
    """
    objective = build_objective(FlowGRPOSettings(eta=1.0, kl=0.5, ratio_clip=0.1))
    old = -0.5 * 0.25 + math.log(2) - 0.5 * math.log(2 * math.pi)
    velocities = {"current": column(3.0), "old": column(2.0), "ref": column(1.0)}
    loss, metrics = objective.loss(
        one_step(1.0, stored=old + 0.25), velocities, torch.tensor([advantage])
    )
    actual = {name: value.item() for name, value in metrics.items()}
    expected = {
        "loss/policy": policy,
        "loss/ratio": math.exp(-0.65625),
        "loss/clip_share": 1.0,
        "loss/kl": 0.28125,
    }
    # the stored log-probability is float32
    assert actual == pytest.approx(expected | {"loss/log_prob_drift": 0.25}, rel=1e-6)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(policy + 0.5 * 0.28125, rel=1e-12)


def test_dance_grpo_step_matches_a_manual_calculation():
    """With eta 1/2, g^2 = 1/4, std = 1/4 and mean = 2 (1 - 1/16) - (1 + 1/8) / 4 v = 1.875 -
    0.28125 v. The velocities 3 and 2 give the means 1.03125 and 1.3125. For x_next = 1.3125, z =
    1.125 and 0, so the ratio is exp(-0.6328125). It is within e = 0.9, so nothing is clipped.
    """
    objective = build_objective(DanceGRPOSettings(eta=0.5, ratio_clip=0.9))
    assert objective.policies == ("current", "old")
    loss, metrics = objective.loss(
        one_step(1.3125), {"current": column(3.0), "old": column(2.0)}, torch.tensor([3.0])
    )
    assert loss.item() == pytest.approx(-3 * math.exp(-0.6328125), rel=1e-12)
    assert metrics["loss/clip_share"].item() == 0 and "loss/kl" not in metrics


def path_samples(count: int, steps: int = 10, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    states = torch.from_numpy(rng.standard_normal((count, steps + 1, 2, 3), np.float32))
    return {
        "latents": states[:, -1],
        "states": states,
        "log_probs": torch.from_numpy(rng.standard_normal((count, steps), np.float32)),
    }


@pytest.mark.parametrize(
    "settings", [FlowGRPOSettings(ratio_clip=0.99, kl=0.3), DanceGRPOSettings(ratio_clip=0.99)]
)
def test_gradient_matches_finite_differences(settings):
    """With h = 1e-5 in float64, the truncation error h^2 f''' / 6 and the rounding error 1e-16 /
    1e-5 are below 1e-9 of the loss, which is about 10.
    """
    objective, rng = build_objective(settings), np.random.default_rng(1)
    points = in_float64(objective.points(path_samples(1), GRID, rng)).rows(slice(2, 5))
    base = rng.standard_normal((3, 2, 3))
    velocities = {
        name: torch.from_numpy(base + 0.01 * rng.standard_normal(base.shape))
        for name in objective.policies
    }
    advantages = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    current = velocities["current"].clone().requires_grad_(True)
    loss, metrics = objective.loss(points, velocities | {"current": current}, advantages)
    assert metrics["loss/clip_share"].item() == 0  # away from the kink of the clip
    loss.backward()
    for index in np.ndindex(3, 2, 3):
        losses = []
        for sign in (1, -1):
            moved = velocities["current"].clone()
            moved[index] += sign * 1e-5
            losses.append(
                objective.loss(points, velocities | {"current": moved}, advantages)[0].item()
            )
        assert current.grad[index].item() == pytest.approx(
            (losses[0] - losses[1]) / 2e-5, rel=1e-6, abs=1e-7
        )


@pytest.mark.parametrize("settings", [FlowGRPOSettings(kl=0.0), DanceGRPOSettings()])
def test_gradient_at_the_sampling_weights_is_the_policy_gradient(settings):
    """The ratio is exactly 1, so the clip at 1e-4 has no effect. d loss / dv = -A d log p / dv / P
    with d log p / d mean = (x_next - mean) / (std^2 n).
    """
    objective, rng = build_objective(settings), np.random.default_rng(1)
    points = in_float64(objective.points(path_samples(1), GRID, rng)).rows(slice(0, 4))
    v = torch.from_numpy(rng.standard_normal((4, 2, 3))).requires_grad_(True)
    advantages = torch.tensor([1.0, -2.0, 3.0, 9.0], dtype=torch.float64)
    loss, metrics = objective.loss(points, {"current": v, "old": v.detach()}, advantages)
    loss.backward()
    assert metrics["loss/ratio"].item() == 1.0 and metrics["loss/clip_share"].item() == 0.0
    step = objective.path_solver.step(
        points.x_t, v.detach(), points.sigma, points.extras["sigma_next"]
    )
    now, after = (s.double().reshape(-1, 1, 1) for s in (points.sigma, points.extras["sigma_next"]))
    square = step.std**2 / (now - after)
    mean_by_velocity = -(1 + square * (1 - now) / (2 * now)) * (now - after)
    score = (points.extras["x_next"] - step.mean) / (step.std**2 * 6)
    expected = -advantages.clamp(-5, 5).reshape(-1, 1, 1) * score * mean_by_velocity / 4
    torch.testing.assert_close(v.grad, expected, rtol=1e-9, atol=1e-12)


def test_flow_grpo_uses_all_steps_but_the_last():
    samples = path_samples(3)
    points = build_objective(FlowGRPOSettings()).points(samples, GRID, np.random.default_rng(0))
    assert points.sample_index.tolist() == [i for i in range(3) for _ in range(9)]
    assert torch.equal(points.sigma, GRID[:9].repeat(3))
    assert torch.equal(points.extras["sigma_next"], GRID[1:10].repeat(3))
    assert torch.equal(points.x_t, samples["states"][:, :9].flatten(0, 1))
    assert torch.equal(points.extras["x_next"], samples["states"][:, 1:10].flatten(0, 1))
    assert torch.equal(points.extras["log_prob"], samples["log_probs"][:, :9].flatten())
    assert (
        len(
            build_objective(FlowGRPOSettings(step_fraction=1.0)).points(
                samples, GRID, np.random.default_rng(0)
            )
        )
        == 30
    )


def test_dance_grpo_draws_sixty_percent_of_the_steps_without_the_last():
    """floor(0.6 * 9) = 5 of the steps 0 to 8 are drawn, separately for every sample."""
    points = build_objective(DanceGRPOSettings()).points(
        path_samples(60), GRID, np.random.default_rng(0)
    )
    rows = points.sigma.reshape(60, 5)
    assert all(len(set(row.tolist())) == 5 for row in rows)
    assert set(rows.flatten().tolist()) == set(GRID[:9].tolist())
    assert len({tuple(row.tolist()) for row in rows}) > 30
    short = build_objective(DanceGRPOSettings()).points(
        path_samples(1, 2), torch.tensor([1.0, 0.5, 0.0]), np.random.default_rng(0)
    )
    assert short.sigma.tolist() == [1.0]  # at least one


def test_path_of_another_schedule_is_refused():
    with pytest.raises(ValueError, match="paths of 10 steps, the schedule has 4"):
        build_objective(FlowGRPOSettings()).points(
            path_samples(1), torch.linspace(1, 0, 5), np.random.default_rng(0)
        )


def test_objectives_determine_solver_policies_and_averages():
    flow = build_objective(FlowGRPOSettings())
    dance = build_objective(DanceGRPOSettings(shared_noise=True))
    assert (flow.path_solver.name, flow.path_solver.eta) == ("flow_sde", 0.7)
    assert (dance.path_solver.name, dance.path_solver.eta) == ("dance_sde", 0.3)
    assert flow.policies == ("current", "old", "ref") and flow.averages == {}
    assert build_objective(FlowGRPOSettings(kl=0)).policies == ("current", "old")
    assert build_objective(DanceGRPOSettings(), measure_kl=True).policies == (
        "current",
        "old",
        "ref",
    )

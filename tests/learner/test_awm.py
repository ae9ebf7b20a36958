"""AWM is compared with a manual calculation, with finite differences and with the closed form of
its gradient.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.objectives import build_objective
from learner.objectives.awm import AWMSettings
from learner.objectives.base import Points
from tests.learner.tiny import in_float64

GRID = torch.tensor([1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.0])


def one_point(t: float = 0.5) -> Points:
    """Return one point with x0 = (0, 1) and eps = (1, 1). The target velocity of the loss is (1,
    0).
    """
    x0, eps = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 1.0]])
    return Points(
        (1 - t) * x0 + t * eps, torch.tensor([t]), torch.tensor([0]), {"x0": x0, "eps": eps}
    )


def velocities() -> dict[str, torch.Tensor]:
    """Return velocities with e = mean(1, 0) = 1/2 for the current policy and mean(0, 4) = 2 for the
    old one. The distance is 1 from the reference and 2 from the anchor.
    """
    rows = {"current": (2.0, 0.0), "old": (1.0, 2.0), "ref": (1.0, 1.0), "anchor": (2.0, 2.0)}
    return {name: torch.tensor([row]) for name, row in rows.items()}


def ghuber(e: float, power: float = 0.25) -> float:
    return 0.5 * ((e + 1e-10) ** power - 1e-10**power) / power


@pytest.mark.parametrize(
    ("weighting", "current", "old"),
    [
        ("uniform", 0.5, 2.0),
        ("t", 0.25, 1.0),
        ("t2", 0.125, 0.5),
        ("huber", 0.5 * (math.sqrt(0.5 + 1e-10) - 1e-5), 0.5 * (math.sqrt(2 + 1e-10) - 1e-5)),
        ("ghuber", ghuber(0.5), ghuber(2.0)),
    ],
)
def test_loss_matches_a_manual_calculation(weighting, current, old):
    """With log p = -w, the ratio is exp(w_old - w). For A = 5/2 and c = 5, A' = 1/2. The ratio
    stays below the clip at 1 + 10, so the loss is -ratio / 2 + 1/4 * 1 + 1/2 * 2.
    """
    objective = build_objective(AWMSettings(weighting=weighting, ratio_clip=10.0, kl=0.25, ema=0.5))
    loss, metrics = objective.loss(one_point(), velocities(), torch.tensor([2.5]))
    ratio = math.exp(old - current)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(-0.5 * ratio + 0.25 + 1.0, rel=1e-12)
    actual = {name: value.item() for name, value in metrics.items()}
    expected = {
        "loss/policy": -0.5 * ratio,
        "loss/ratio": ratio,
        "loss/clip_share": 0.0,
        "loss/kl": 1.0,
        "loss/ema": 2.0,
    }
    assert actual == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("advantage", "policy"),
    [(2.5, -0.5 * 1.2), (-2.5, 0.5 * math.exp(0.375)), (70.0, -1.2), (-70.0, math.exp(0.375))],
)
def test_ratio_and_advantage_are_clipped(advantage, policy):
    """The ratio is exp(3/8) = 1.45 (weighting t2) and e = 0.2. A good sample gains at most 1.2, and
    a bad one loses the whole ratio.
    """
    objective = build_objective(AWMSettings(weighting="t2", ratio_clip=0.2))
    _, metrics = objective.loss(one_point(), velocities(), torch.tensor([advantage]))
    assert metrics["loss/policy"].item() == pytest.approx(policy, rel=1e-12)
    assert metrics["loss/clip_share"].item() == 1.0


def random_case(count: int = 4) -> tuple[Points, dict[str, torch.Tensor], torch.Tensor]:
    """Return points in float64, velocities close to each other, so that ratios are about 1, and
    advantages of both signs.
    """
    rng = np.random.default_rng(2)
    samples = {"latents": torch.from_numpy(rng.standard_normal((count, 2, 3), np.float32))}
    points = in_float64(build_objective(AWMSettings(times_per_sample=1)).points(samples, GRID, rng))
    base = rng.standard_normal((count, 2, 3))
    names = ("current", "old", "ref", "anchor")
    velocities_by_policy = {
        name: torch.from_numpy(base + 0.1 * rng.standard_normal(base.shape)) for name in names
    }
    return points, velocities_by_policy, torch.tensor([1.0, -2.0, 4.0, -0.5], dtype=torch.float64)


def gradient(objective, points, velocities_by_policy, advantages) -> torch.Tensor:
    current = velocities_by_policy["current"].clone().requires_grad_(True)
    others = {
        name: v.clone().requires_grad_(True)
        for name, v in velocities_by_policy.items()
        if name != "current"
    }
    objective.loss(points, {"current": current, **others}, advantages)[0].backward()
    # old, reference and anchor are not trained
    assert all(v.grad is None for v in others.values())
    return current.grad


@pytest.mark.parametrize("weighting", ["uniform", "t", "t2", "huber", "ghuber"])
def test_gradient_matches_finite_differences(weighting):
    """The central differences use h = 1e-5. Their truncation error h^2 f''' / 6 is below 1e-9 for
    terms of size 1, and their rounding error is 1e-16 / 1e-5 = 1e-11. e = 10 keeps every ratio away
    from the clip, where the loss is not differentiable.
    """
    points, velocities_by_policy, advantages = random_case()
    objective = build_objective(AWMSettings(weighting=weighting, ratio_clip=10.0, kl=0.3, ema=0.7))
    result = gradient(objective, points, velocities_by_policy, advantages)
    for index in np.ndindex(4, 2, 3):
        losses = []
        for sign in (1, -1):
            moved = velocities_by_policy["current"].clone()
            moved[index] += sign * 1e-5
            losses.append(
                objective.loss(points, velocities_by_policy | {"current": moved}, advantages)[
                    0
                ].item()
            )
        assert result[index].item() == pytest.approx((losses[0] - losses[1]) / 2e-5, abs=1e-8)


def test_gradient_at_the_sampling_weights_is_that_of_the_weighted_matching_loss():
    """At v = v_old the ratio is exactly 1, so d loss / dv = A' dw/dv / P. With w = e this is A' 2
    (v - (eps - x0)) / (n P).
    """
    points, velocities_by_policy, advantages = random_case()
    velocities_by_policy["old"] = velocities_by_policy["current"]
    objective = build_objective(AWMSettings(weighting="uniform", kl=0.0, ema=0.0))
    assert objective.loss(points, velocities_by_policy, advantages)[1]["loss/ratio"].item() == 1.0
    target = points.extras["eps"] - points.extras["x0"]
    expected = (
        (advantages / 5).reshape(-1, 1, 1)
        * 2
        * (velocities_by_policy["current"] - target)
        / (6 * 4)
    )
    torch.testing.assert_close(
        gradient(objective, points, velocities_by_policy, advantages),
        expected,
        rtol=1e-12,
        atol=1e-14,
    )


def test_one_time_is_drawn_from_each_part_of_the_usable_steps():
    """The steps 1 to 8 of 10 are divided into six parts: {1} {2} {3, 4} {5} {6} {7, 8}."""
    samples = {"latents": torch.zeros(200, 1, 2, 2)}
    points = build_objective(AWMSettings()).points(samples, GRID, np.random.default_rng(0))
    times = points.sigma.reshape(200, 6)
    parts = [{1}, {2}, {3, 4}, {5}, {6}, {7, 8}]
    for column, part in zip(times.T, parts, strict=True):
        assert set(column.tolist()) == {GRID[step].item() for step in part}
    assert points.sample_index.tolist() == [i for i in range(200) for _ in range(6)]
    t = points.sigma.reshape(-1, 1, 1, 1)
    assert torch.equal(points.x_t, (1 - t) * points.extras["x0"] + t * points.extras["eps"])


def test_more_times_than_usable_steps_repeat_the_steps_evenly():
    """Steps 1 and 2 of 4 are usable (0.9 * 4 = 3.6). For six times, each is used three times."""
    grid = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
    points = build_objective(AWMSettings()).points(
        {"latents": torch.zeros(1, 2)}, grid, np.random.default_rng(0)
    )
    assert points.sigma.tolist() == [0.75] * 3 + [0.5] * 3


def test_settings_determine_policies_and_averages():
    full = build_objective(AWMSettings())
    assert full.policies == ("current", "old", "ref", "anchor") and full.path_solver is None
    assert [full.averages["anchor"](s) for s in (1, 100, 400)] == [0.001, 0.1, 0.3]
    minimal = build_objective(AWMSettings(kl=0, ema=0))
    assert minimal.policies == ("current", "old") and minimal.averages == {}
    assert build_objective(AWMSettings(kl=0, ema=0), measure_kl=True).policies == (
        "current",
        "old",
        "ref",
    )

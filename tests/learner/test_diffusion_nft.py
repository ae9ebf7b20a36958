"""DiffusionNFT is compared with a manual calculation, with finite differences and with the closed
form of its gradient.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.objectives import build_objective
from learner.objectives.base import Points, draw_times
from learner.objectives.diffusion_nft import DiffusionNFTSettings
from tests.learner.tiny import in_float64


def one_point(x_t, t, x0) -> Points:
    x_t, x0 = torch.tensor([x_t]), torch.tensor([x0])
    return Points(
        x_t, torch.tensor([t]), torch.tensor([0]), {"x0": x0, "eps": torch.zeros_like(x0)}
    )


def random_points(count: int = 6, latent: tuple[int, ...] = (2, 3), seed: int = 0) -> Points:
    rng = np.random.default_rng(seed)
    samples = torch.from_numpy(rng.standard_normal((count, *latent), np.float32))
    objective = build_objective(DiffusionNFTSettings(times_per_sample=1))
    return objective.points({"latents": samples}, torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0]), rng)


def test_loss_matches_a_manual_calculation():
    """The inputs are x_t = (1, 2), x0 = (0, 1), t = 1/2, v = (2, 0), old = (0, 2), ref = (1, 1), b
    = 1/2, c = 2, A = 1 and kl = 1/4.

    v+ = (v + old)/2 = (1, 1). Its residual x_t - v+/2 - x0 is (1/2, 1/2), with mean square 1/4 and
    weight 1/2, so L+ = 1/2. v- = 3/2 old - v/2 = (-1, 3). Its residual is (3/2, -1/2), with mean
    square 5/4 and weight 1, so L- = 5/4. r = clip(1/2)/2 + 1/2 = 3/4. The policy loss is 2 (3/4 *
    1/2 + 1/4 * 5/4) / (1/2) = 2.75, kl = mean(1, 1) = 1, and the loss is 3.
    """
    objective = build_objective(DiffusionNFTSettings(beta=0.5, kl=0.25, advantage_clip=2.0))
    velocities = {
        "current": torch.tensor([[2.0, 0.0]]),
        "old": torch.tensor([[0.0, 2.0]]),
        "ref": torch.tensor([[1.0, 1.0]]),
    }
    loss, metrics = objective.loss(
        one_point([1.0, 2.0], 0.5, [0.0, 1.0]), velocities, torch.tensor([1.0])
    )
    assert loss.item() == 3.0
    assert {name: value.item() for name, value in metrics.items()} == {
        "loss/policy": 2.75,
        "loss/kl": 1.0,
    }
    assert loss.dtype == torch.float64


def test_weight_has_a_minimum():
    """The residual is 1e-6 everywhere. Its mean square 1e-12 is divided by the minimum 1e-5 and not
    by 1e-6. With c = 5, b = 1 and A = 5, the loss is 5 L+.
    """
    objective = build_objective(DiffusionNFTSettings(kl=0.0))
    velocities = {name: torch.zeros(1, 2) for name in ("current", "old")}
    loss, _ = objective.loss(
        one_point([1e-6, 1e-6], 1.0, [0.0, 0.0]), velocities, torch.tensor([5.0])
    )
    assert loss.item() == pytest.approx(5e-7, rel=1e-6)  # 1e-6 is rounded to float32


def test_advantages_are_clipped():
    objective = build_objective(DiffusionNFTSettings(kl=0.0))
    points, rng = random_points(2), np.random.default_rng(1)
    velocities = {
        name: torch.from_numpy(rng.standard_normal((2, 2, 3), np.float32))
        for name in ("current", "old")
    }
    extreme, _ = objective.loss(points, velocities, torch.tensor([70.0, -70.0]))
    limit, _ = objective.loss(points, velocities, torch.tensor([5.0, -5.0]))
    inside, _ = objective.loss(points, velocities, torch.tensor([4.0, -4.0]))
    assert extreme.item() == limit.item() != inside.item()


def gradient(
    objective, points: Points, current: torch.Tensor, others: dict, advantages: torch.Tensor
) -> torch.Tensor:
    current = current.clone().requires_grad_(True)
    objective.loss(points, {"current": current, **others}, advantages)[0].backward()
    return current.grad


def test_gradient_at_the_old_policy_matches_the_closed_form():
    """At v = v_old, v+ = v- = v. So d loss / dv = c (2 r - 1) dL/dv = A dL/dv with |A| <= c,
    whatever beta is. dL/dv = -2 t (x_t - t v - x0) / (n w), divided by the number of points. Sums
    in float32 have an error of 1e-5 of the largest entry.
    """
    points = random_points()
    v = torch.from_numpy(np.random.default_rng(3).standard_normal((6, 2, 3), np.float32))
    advantages = torch.tensor([0.5, -1.0, 2.0, -9.0, 0.0, 7.0])
    t = points.sigma.reshape(-1, 1, 1).double()
    residual = points.x_t.double() - t * v.double() - points.extras["x0"].double()
    weight = residual.abs().mean((1, 2), keepdim=True)
    expected = (
        advantages.clamp(-5, 5).reshape(-1, 1, 1).double() * (-2 * t * residual / (6 * weight)) / 6
    )
    for beta in (0.3, 1.0, 2.0):
        objective = build_objective(DiffusionNFTSettings(beta=beta, kl=0.0))
        actual = gradient(objective, points, v, {"old": v}, advantages).double()
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item()
        )


def test_gradient_matches_finite_differences_with_frozen_weights():
    """Central differences of a float64 loss of degree 2 in v (with weights frozen at v) are exact
    up to rounding: 1e-16 / 1e-3 = 1e-13.

    The weight is a stop-gradient, so the reference freezes it. The test computes the loss
    independently of the code.
    """
    beta, clip, kl = 0.7, 5.0, 0.3
    rng = np.random.default_rng(5)
    points = random_points(3)
    points = in_float64(points)
    v, old, ref = (torch.from_numpy(rng.standard_normal((3, 2, 3))) for _ in range(3))
    advantages = torch.tensor([2.0, -3.0, 11.0], dtype=torch.float64)
    t = points.sigma.reshape(-1, 1, 1)

    def residuals(u):
        plus, minus = beta * u + (1 - beta) * old, (1 + beta) * old - beta * u
        return (
            points.x_t - t * plus - points.extras["x0"],
            points.x_t - t * minus - points.extras["x0"],
        )

    weights = [r.abs().mean((1, 2)) for r in residuals(v)]

    def loss(u):
        r = (advantages / clip).clamp(-1, 1) / 2 + 0.5
        plus, minus = ((x**2).mean((1, 2)) / w for x, w in zip(residuals(u), weights, strict=True))
        return (
            clip * (r * plus / beta + (1 - r) * minus / beta).mean() + kl * ((u - ref) ** 2).mean()
        )

    result = gradient(
        build_objective(DiffusionNFTSettings(beta=beta, kl=kl)),
        points,
        v,
        {"old": old, "ref": ref},
        advantages,
    )
    for index in np.ndindex(3, 2, 3):
        step = torch.zeros_like(v)
        step[index] = 1e-3
        assert result[index].item() == pytest.approx(
            (loss(v + step) - loss(v - step)).item() / 2e-3, abs=1e-11
        )


def test_no_gradient_reaches_old_and_reference():
    points, v = random_points(2), torch.ones(2, 2, 3)
    old, ref = torch.zeros(2, 2, 3, requires_grad=True), torch.zeros(2, 2, 3, requires_grad=True)
    gradient(
        build_objective(DiffusionNFTSettings()), points, v, {"old": old, "ref": ref}, torch.ones(2)
    )
    assert old.grad is None and ref.grad is None


def test_batch_loss_is_the_mean_over_its_points():
    objective, points = build_objective(DiffusionNFTSettings()), random_points(6)
    rng = np.random.default_rng(8)
    velocities = {
        name: torch.from_numpy(rng.standard_normal((6, 2, 3), np.float32))
        for name in objective.policies
    }
    advantages = torch.from_numpy(rng.standard_normal(6, np.float32))
    whole = objective.loss(points, velocities, advantages)[0]
    parts = [slice(0, 1), slice(1, 4), slice(4, 6)]
    losses = [
        objective.loss(points.rows(p), {n: v[p] for n, v in velocities.items()}, advantages[p])[0]
        * len(points.rows(p))
        for p in parts
    ]
    # the sums of the KL term are in float32
    assert sum(losses).item() / 6 == pytest.approx(whole.item(), rel=1e-7)


def test_reference_is_computed_only_if_it_is_used():
    assert build_objective(DiffusionNFTSettings()).policies == ("current", "old", "ref")
    assert build_objective(DiffusionNFTSettings(kl=0)).policies == ("current", "old")
    assert build_objective(DiffusionNFTSettings(kl=0), measure_kl=True).policies == (
        "current",
        "old",
        "ref",
    )
    assert build_objective(DiffusionNFTSettings()).sampling_adapter == "old"


def test_points_are_on_the_path_at_times_of_the_schedule():
    sigmas = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.0])
    samples = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 4, 2, 2), np.float32))
    points = build_objective(DiffusionNFTSettings(times_per_sample=3)).points(
        {"latents": samples}, sigmas, np.random.default_rng(1)
    )
    assert len(points) == 15
    assert points.sample_index.tolist() == [i for i in range(5) for _ in range(3)]
    assert torch.equal(points.extras["x0"], samples[points.sample_index])
    t = points.sigma.reshape(-1, 1, 1, 1)
    assert torch.equal(points.x_t, (1 - t) * points.extras["x0"] + t * points.extras["eps"])
    assert set(points.sigma.tolist()) <= set(sigmas[:-1].tolist())  # never 0
    assert all(len(set(row)) == 3 for row in points.sigma.reshape(5, 3).tolist())
    # 240 normals: the standard error of the std is 0.046
    assert points.extras["eps"].std() == pytest.approx(1, abs=0.15)
    again = build_objective(DiffusionNFTSettings(times_per_sample=3)).points(
        {"latents": samples}, sigmas, np.random.default_rng(1)
    )
    assert torch.equal(again.extras["eps"], points.extras["eps"])
    assert torch.equal(again.sigma, points.sigma)


def test_more_times_than_in_the_schedule_are_repeated_evenly():
    times = draw_times(torch.tensor([1.0, 0.5, 0.0]), 4, 5, np.random.default_rng(0))
    assert times.shape == (4, 5) and all(2 <= row.count(1.0) <= 3 for row in times.tolist())

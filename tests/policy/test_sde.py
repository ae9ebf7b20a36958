"""Stochastic solvers: manual calculations of one step, marginals of a closed-form flow, densities,
and independence of batching.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from policy.sampling.noise import noise_for
from policy.sampling.paths import sample_paths
from policy.sampling.sde import TRANSITIONS, PathSolver
from policy.types import Conditioning
from tests.gaussian_flow import SPREAD, Denoiser, GaussianFamily, marginal, velocity

FIRST = 0.9  # the first sigma of schedules that avoid sigma = 1


def moments_after(name: str, eta: float, steps: int, last: float = 0.0) -> tuple[float, float]:
    """Return mean and variance after ``steps`` equal steps from FIRST to ``last``, without
    sampling.

    The velocity is affine, so a step is x' = a x + b + std z. The values at x = 0 and x = 1 give a
    and b, and the moments follow exactly.
    """
    mean, variance = marginal(FIRST)
    sigmas = torch.linspace(FIRST, last, steps + 1, dtype=torch.float64)
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for now, after in zip(sigmas[:-1], sigmas[1:], strict=True):
        step = TRANSITIONS[name](x, velocity(x, now), now.expand(2), after.expand(2), eta)
        b, a = step.mean[0].item(), (step.mean[1] - step.mean[0]).item()
        mean, variance = a * mean + b, a**2 * variance + step.std[0].item() ** 2
    return mean, variance


def column(*values: float) -> torch.Tensor:
    return torch.tensor([[value] for value in values], dtype=torch.float64)


def sigmas(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_flow_sde_step_matches_a_manual_calculation():
    """The step goes from sigma 1/2 to 1/4 with eta 1: g^2 = (1/2) / (1/2) = 1 and dsigma = -1/4.
    With x = 2 and v = 3, mean = 2 (1 - 1/4) + 3 (1 + 1/2) (-1/4) = 1.5 - 1.125 = 0.375, and std =
    sqrt(1/4).
    """
    step = TRANSITIONS["flow_sde"](column(2.0), column(3.0), sigmas(0.5), sigmas(0.25), 1.0)
    assert (step.mean.item(), step.std.item(), step.length.item()) == (0.375, 0.5, 0.25)


def test_flow_sde_step_from_sigma_1_uses_the_next_sigma():
    """The step goes from sigma 1 to 3/4 with eta 1: g^2 = 1 / (1 - 3/4) = 4. With x = 2 and v = 3,
    mean = 2 (1 - 4/2/4) - 3/4 = 1 - 0.75, and std = sqrt(4/4). Schedules on 1000 training timesteps
    may start at 0.9997. They must give nearly the same step, and not a factor of 3333 / 4.
    """
    step = TRANSITIONS["flow_sde"](column(2.0), column(3.0), sigmas(1.0), sigmas(0.75), 1.0)
    assert (step.mean.item(), step.std.item()) == (0.25, 1.0)
    near = TRANSITIONS["flow_sde"](column(2.0), column(3.0), sigmas(0.9997), sigmas(0.75), 1.0)
    assert near.mean.item() == pytest.approx(0.25, abs=0.01)
    assert near.std.item() == pytest.approx(1.0, abs=0.01)
    exact = TRANSITIONS["flow_sde"](column(2.0), column(3.0), sigmas(0.95), sigmas(0.75), 1.0)
    assert exact.std.item() == pytest.approx(math.sqrt(0.95 / 0.05 * 0.2))


def test_dance_sde_step_matches_a_manual_calculation():
    """The step has the form of the paper, from sigma 1/2 to 1/4 with eta 1/2, x = 2 and v = 3:
    x0_hat = 2 - 3/2 = 1/2, s = -(2 - 1/4) / (1/4) = -7, mean = 2 - 3/4 - 1/2 (1/4) (-7) (-1/4) =
    1.25 - 0.21875, std = 1/2 sqrt(1/4).
    """
    step = TRANSITIONS["dance_sde"](column(2.0), column(3.0), sigmas(0.5), sigmas(0.25), 0.5)
    assert (step.mean.item(), step.std.item()) == (1.03125, 0.25)


@pytest.mark.parametrize("name", TRANSITIONS)
def test_step_without_noise_is_an_euler_step(name):
    step = TRANSITIONS[name](column(2.0), column(3.0), sigmas(0.5), sigmas(0.25), 1e-9)
    assert step.mean.item() == pytest.approx(2 - 0.75, abs=1e-12)


def test_density_is_normal_and_averaged_over_dimensions():
    """With std 1/2 and x' - mean = (1/2, -1), the log density is the mean of -1/2 and -2, minus
    log(1/2), minus log(2 pi) / 2.
    """
    x, v = column(2.0).expand(1, 2), column(3.0).expand(1, 2)
    step = TRANSITIONS["flow_sde"](x, v, sigmas(0.5), sigmas(0.25), 1.0)
    result = step.log_prob(step.mean + torch.tensor([[0.5, -1.0]], dtype=torch.float64))
    assert result.shape == (1,)
    assert result.item() == pytest.approx(
        -1.25 + math.log(2) - math.log(2 * math.pi) / 2, rel=1e-12
    )


@pytest.mark.parametrize(
    ("name", "eta"), [("flow_sde", 0.7), ("dance_sde", 0.3), ("dance_sde", 1.0)]
)
@pytest.mark.parametrize("last", [0.0, 0.3])
def test_moments_converge_to_those_of_the_flow_with_order_one(name, eta, last):
    """Euler-Maruyama has weak order 1: the error is c / n + O(1 / n^2), so four times the steps
    leave a quarter of the error. At n = 200, the next order is smaller by a factor of n divided by
    a few units, so the test allows 3 %. The mean follows a straight line, on which Euler's steps
    are exact.
    """
    mean, variance = marginal(last)
    result = {steps: moments_after(name, eta, steps, last) for steps in (200, 800)}
    assert all(abs(result[steps][0] - mean) < 1e-12 for steps in result)
    coarse, fine = (result[steps][1] - variance for steps in (200, 800))
    assert abs(coarse) < 0.01 and coarse / fine == pytest.approx(4, rel=0.03)


def test_wrong_drift_would_change_the_variance():
    """If the drift correction had the other sign, the variance would be wrong by much more than the
    0.01 of the test above.
    """
    mean, variance = marginal(FIRST)
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    grid = torch.linspace(FIRST, 0.0, 201, dtype=torch.float64)
    for now, after in zip(grid[:-1], grid[1:], strict=True):
        v = velocity(x, now)
        right = TRANSITIONS["flow_sde"](x, v, now.expand(2), after.expand(2), 0.7)
        wrong = 2 * (x + v * (after - now)) - right.mean
        a = (wrong[1] - wrong[0]).item()
        mean, variance = a * mean + wrong[0].item(), a**2 * variance + right.std[0].item() ** 2
    assert abs(variance - SPREAD**2) > 0.1


# ---- complete paths


def make_paths(seeds, streams, steps=10, solver=("flow_sde", 0.7), batch_size=None, family=None):
    cond = Conditioning({"c": torch.zeros(len(seeds), 1)})
    return sample_paths(
        family or GaussianFamily(),
        Denoiser(32),
        cond,
        seeds,
        streams,
        steps,
        PathSolver(*solver),
        batch_size,
    )


@pytest.mark.parametrize("solver", [("flow_sde", 0.7), ("dance_sde", 0.3)])
def test_sampled_moments_match_the_propagated_ones(solver):
    """With 500 paths of 32 independent dimensions, n = 16,000. The standard error of the mean is
    std / 126, and the relative standard error of the variance is sqrt(2 / n) = 1.1 %. The test
    allows 4 of them. The paths start from N(0, 1), so the recursion starts there too.
    """
    paths = make_paths(list(range(500)), list(range(1000, 1500)), 20, solver)
    mean, variance, x = 0.0, 1.0, torch.tensor([[0.0], [1.0]])
    grid = GaussianFamily().sigmas(20)
    for now, after in zip(grid[:-1], grid[1:], strict=True):
        step = PathSolver(*solver).step(x, velocity(x, now), now.expand(2), after.expand(2))
        a = (step.mean[1] - step.mean[0]).item()
        mean, variance = a * mean + step.mean[0].item(), a**2 * variance + step.std[0].item() ** 2
    end = paths.states[:, -1].double()
    assert end.mean().item() == pytest.approx(mean, abs=4 * math.sqrt(variance / 16000))
    assert end.var().item() == pytest.approx(variance, rel=4 * math.sqrt(2 / 16000))


def test_path_has_the_right_shapes_and_starts_at_its_noise():
    paths = make_paths([5, 2**63 + 1, 7], [1, 2, 3])
    assert paths.states.shape == (3, 11, 4, 8) and paths.log_probs.shape == (3, 10)
    assert paths.states.dtype == paths.log_probs.dtype == torch.float32
    assert torch.equal(paths.states[:, 0], noise_for([5, 2**63 + 1, 7], (4, 8)))


def test_dance_sde_decodes_the_clean_sample_predicted_at_the_last_step():
    """With sigma 1/2, x = 2 and v = 3, the predicted clean sample is 2 - 3/2. The end of the path
    itself is still recorded with its noise. flow_sde decodes this end.
    """
    end = column(7.0)
    assert (
        PathSolver("dance_sde", 0.3).decoded(column(2.0), column(3.0), sigmas(0.5), end).item()
        == 0.5
    )
    assert PathSolver("flow_sde", 0.7).decoded(column(2.0), column(3.0), sigmas(0.5), end) is end
    grid = GaussianFamily().sigmas(10)
    dance, flow = (
        make_paths([5, 6, 7], [1, 2, 3], solver=("dance_sde", 0.3)),
        make_paths([5, 6, 7], [1, 2, 3]),
    )
    last = dance.states[:, -2]
    assert torch.equal(dance.latents, last - grid[-2] * velocity(last, grid[-2].expand(3)))
    # 0.3 sqrt(sigma), plus a small correction of the step
    noise = (dance.states[:, -1] - dance.latents).std().item()
    assert noise == pytest.approx(0.3 * math.sqrt(grid[-2].item()), rel=0.25)
    assert torch.equal(flow.latents, flow.states[:, -1])


def test_path_depends_only_on_its_own_seeds():
    """The velocity of this test is elementwise and therefore equal in every batch, so paths are
    equal bit for bit however they are batched.
    """
    whole, family = make_paths([5, 6, 7], [1, 2, 3]), GaussianFamily()
    parts = make_paths([5, 6, 7], [1, 2, 3], batch_size=2, family=family)
    assert family.batches == [2] * 10 + [1] * 10
    alone = make_paths([6], [2])
    for other, rows in ((parts, slice(None)), (alone, slice(1, 2))):
        assert torch.equal(other.states, whole.states[rows])
        assert torch.equal(other.log_probs, whole.log_probs[rows])
    same_start = make_paths([5, 5], [1, 2])
    assert torch.equal(same_start.states[0, 0], same_start.states[1, 0])
    assert not torch.equal(same_start.states[0, 1], same_start.states[1, 1])


@pytest.mark.parametrize("solver", [("flow_sde", 0.7), ("dance_sde", 0.3)])
def test_stored_density_matches_the_stored_step(solver):
    """The densities are recomputed from the stored states, one step at a time and all steps at
    once. One step at a time they are equal bit for bit, because the arithmetic is elementwise and
    sums run over one row.
    """
    family, paths = GaussianFamily(), make_paths([5, 6, 7], [1, 2, 3], solver=solver)
    grid, chosen = family.sigmas(10), PathSolver(*solver)
    for j in range(10):
        x, now, after = paths.states[:, j], grid[j].expand(3), grid[j + 1].expand(3)
        again = chosen.step(x, velocity(x, now), now, after).log_prob(paths.states[:, j + 1])
        assert torch.equal(again, paths.log_probs[:, j])
    x, now, after = paths.states[:, :-1].flatten(0, 1), grid[:-1].repeat(3), grid[1:].repeat(3)
    step = chosen.step(x, velocity(x, now), now, after)
    torch.testing.assert_close(
        step.log_prob(paths.states[:, 1:].flatten(0, 1)).reshape(3, 10),
        paths.log_probs,
        rtol=0,
        atol=1e-6,
    )
    # samples of a Gaussian have the log density -1/2 - log std - log(2 pi)/2 on average, with a
    # standard error of 1 / sqrt(2 * 32 * 30) = 0.023; the test allows 4 of them
    expected = (-0.5 - step.std.flatten().log() - 0.5 * math.log(2 * math.pi)).mean()
    assert paths.log_probs.mean().item() == pytest.approx(expected.item(), abs=0.1)


def test_numbers_of_rows_and_seeds_must_agree():
    with pytest.raises(ValueError, match="2 noise seeds, 1 path seeds and conditioning of 2 rows"):
        make_paths([1, 2], [1])
    assert make_paths([], []).states.shape == (0, 11, 4, 8)


def test_paths_have_golden_values():
    """The paths have these golden values. The results of a run depend on them."""
    paths = make_paths([1], [2], steps=2)
    result = np.array(
        [
            paths.states[0, 2, 0, 0].item(),
            paths.log_probs[0, 0].item(),
            paths.log_probs[0, 1].item(),
        ]
    )
    np.testing.assert_allclose(result, GOLDEN, rtol=0, atol=2e-6)


GOLDEN = [0.2757234, -1.1727393, -0.8452396]


@pytest.mark.parametrize(
    ("steps", "euler", "flow", "dance"),
    [
        (10, (-0.121, -0.308), (-0.035, -0.164), (-0.112, -0.254)),
        (20, (-0.062, -0.162), (-0.011, -0.095), (-0.058, -0.137)),
        (40, (-0.032, -0.084), (-0.000, -0.050), (-0.029, -0.071)),
    ],
)
def test_relative_spread_of_samples_matches_the_methods_table(
    steps, euler, flow, dance, monkeypatch
):
    """The test computes the table in docs/methods.md without sampling: the smallest and the largest
    relative error of the standard deviation, for data with a standard deviation of 0.4 to 1, with
    and without shift 3. The table gives three digits.
    """
    for (name, eta), expected in (
        (("flow_sde", 1e-9), euler),
        (("flow_sde", 0.7), flow),
        (("dance_sde", 0.3), dance),
    ):
        actual = []
        for spread in (0.4, 0.5, 0.7, 1.0):
            monkeypatch.setattr("tests.gaussian_flow.SPREAD", spread)
            for shift in (1, 3):
                even = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
                grid = shift * even / (1 + (shift - 1) * even)
                actual.append(_final_std(PathSolver(name, eta), grid) / spread - 1)
        assert (max(actual), min(actual)) == pytest.approx(expected, abs=6e-4)


def _final_std(solver: PathSolver, grid: torch.Tensor) -> float:
    variance, x = 1.0, torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for now, after in zip(grid[:-1], grid[1:], strict=True):
        step = solver.step(x, velocity(x, now), now.expand(2), after.expand(2))
        slope = (step.mean[1] - step.mean[0]).item()
        variance = slope**2 * variance + step.std[0].item() ** 2
    return math.sqrt(variance)

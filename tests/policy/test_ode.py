"""Solvers are compared with closed forms, and dpmpp_2m and unipc also with those of diffusers."""

import numpy as np
import pytest
import torch

from policy.sampling.ode import SOLVERS, dpmpp_2m, euler, unipc

MEAN, SPREAD = 0.7, 0.4


def gaussian_velocity(x, sigma):
    """E[eps - x0 | x] for x0 ~ N(MEAN, SPREAD^2), in float64."""
    alpha = 1 - sigma.double()
    variance = (alpha * SPREAD) ** 2 + sigma.double() ** 2
    centered = x - alpha * MEAN
    return sigma.double() / variance * centered - (MEAN + alpha * SPREAD**2 / variance * centered)


def gaussian_end(x):
    """Return the exact end of the flow. The flow keeps (x - alpha MEAN) / std(sigma), so it maps
    N(0, 1) at sigma 1 to N(MEAN, SPREAD^2) at sigma 0.
    """
    return MEAN + SPREAD * x


def schedule(steps, first=1.0):
    return torch.cat(
        [
            torch.linspace(first, first / steps, steps, dtype=torch.float64),
            torch.zeros(1, dtype=torch.float64),
        ]
    )


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_solvers_are_exact_if_x0_is_one_point(name, steps):
    """If all data is at one point m, then v = (x - m) / sigma and x0 = m. The path is straight, and
    any number of steps ends at m, up to rounding.
    """
    point = torch.tensor([[0.25, -1.5]], dtype=torch.float64)
    end = SOLVERS[name](
        lambda x, sigma: (x - point) / sigma,
        torch.tensor([[1.0, 2.0]], dtype=torch.float64),
        schedule(steps),
    )
    torch.testing.assert_close(end, point, rtol=0, atol=steps * 8 * 2.0**-52)


def test_euler_is_exact_on_a_constant_velocity():
    """Increments and velocity are binary fractions, so float32 does not round."""
    x, v = torch.tensor([[1.5, -3.0]]), torch.tensor([[0.5, 2.0]])
    sigmas = torch.tensor([1.0, 0.75, 0.25, 0.0])
    assert torch.equal(euler(lambda _x, _s: v, x, sigmas), x - v)


def test_velocity_is_evaluated_at_every_sigma_but_the_last():
    for name, solver in SOLVERS.items():
        visited = []
        solver(
            lambda x, sigma, visited=visited: visited.append(sigma.item()) or x * 0,
            torch.ones(1, 2),
            schedule(4),
        )
        assert visited == [1.0, 0.75, 0.5, 0.25], name


def error(solver, steps):
    x = torch.tensor([[-2.0, -0.3, 0.4, 1.7]], dtype=torch.float64)
    return (solver(gaussian_velocity, x, schedule(steps)) - gaussian_end(x)).abs().max().item()


def test_euler_has_order_one():
    """The error is c / n, so four times the steps give a quarter of the error. The next order
    changes this by a few times 1 / n = 0.6 %.
    """
    assert error(euler, 160) / error(euler, 640) == pytest.approx(4, rel=0.05)


def test_dpmpp_2m_has_order_two():
    """The error is (a + b log n) / n^2. The logarithm comes from sigma = 0 and 1, where lambda is
    infinite. So n^2 times the error grows by the same amount, b log 4, whenever n grows by a factor
    of 4. At order 1 it would grow fourfold, and at a pure order 2 not at all.
    """
    scaled = [n * n * error(dpmpp_2m, n) for n in (160, 640, 2560)]
    assert scaled[2] - scaled[1] == pytest.approx(scaled[1] - scaled[0], rel=0.05)
    assert scaled[2] < 2 * scaled[0]


def test_dpmpp_2m_is_more_accurate_than_euler_at_ten_steps():
    assert error(dpmpp_2m, 10) < error(euler, 10) / 2


START = torch.tensor([[-1.2, 0.1, 2.3]], dtype=torch.float32)


def run_scheduler(scheduler, sigmas):
    """Return where a scheduler of diffusers ends on these sigmas, from START, in float32."""
    steps = len(sigmas) - 1
    scheduler.set_timesteps(steps)
    scheduler.sigmas = sigmas
    scheduler.timesteps = torch.arange(steps, 0, -1)
    x = START
    for i, timestep in enumerate(scheduler.timesteps):
        x = scheduler.step(gaussian_velocity(x, sigmas[i]).float(), timestep, x, return_dict=False)[
            0
        ]
    return x


@pytest.mark.parametrize(("steps", "first"), [(1, 0.96), (2, 0.96), (6, 0.96), (20, 0.9)])
def test_dpmpp_2m_equals_diffusers_multistep_solver(steps, first):
    """The schedule starts below sigma = 1, where lambda is finite and the second step of the
    diffusers solver is of second order too.
    """
    from diffusers import DPMSolverMultistepScheduler

    sigmas = schedule(steps, first).float()
    scheduler = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        algorithm_type="dpmsolver++",
        solver_order=2,
        final_sigmas_type="zero",
    )
    x = run_scheduler(scheduler, sigmas)
    ours = dpmpp_2m(lambda y, sigma: gaussian_velocity(y, sigma).float(), START, sigmas)
    # diffusers has float32 coefficients and we have float64: a few units in the last place per
    # step, for values up to 3
    np.testing.assert_allclose(ours, x, rtol=0, atol=steps * 4 * 3 * 2.0**-23)


@pytest.mark.parametrize(
    ("steps", "first"), [(1, 0.96), (2, 0.96), (3, 0.96), (6, 0.999), (20, 0.9)]
)
def test_unipc_equals_diffusers_scheduler(steps, first):
    from diffusers import UniPCMultistepScheduler

    sigmas = schedule(steps, first).float()
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        solver_order=2,
        solver_type="bh2",
        final_sigmas_type="zero",
    )
    x = run_scheduler(scheduler, sigmas)
    ours = unipc(lambda y, sigma: gaussian_velocity(y, sigma).float(), START, sigmas)
    # as above; in diffusers, b_1 and b_2 are differences of float32 numbers up to 1 / h = 20
    np.testing.assert_allclose(ours, x, rtol=0, atol=steps * 20 * 3 * 2.0**-23)
    assert steps < 3 or np.abs(ours - dpmpp_2m(gaussian_velocity, START, sigmas)).max() > 1e-3


def test_unipc_corrector_matches_a_manual_calculation():
    """The steps go from 0.8 over 0.4 to 0 with v = x, so that x0 = (1 - sigma) x. Both steps are of
    first order. The corrector uses the mean of both clean samples in the first step.
    """
    predicted = 0.5 + (0.6 - 0.4 * 0.2 / 0.8) * 0.2  # of x = 1, x0 = 0.2
    corrected = 0.5 + 0.5 * (0.2 + 0.6 * predicted) / 2
    start, two = torch.ones(1, 1).double(), torch.tensor([0.8, 0.4, 0.0], dtype=torch.float64)
    assert unipc(lambda x, _: x, start, two).item() == pytest.approx(0.6 * predicted, rel=1e-12)
    three = torch.tensor([0.8, 0.4, 0.2, 0.0], dtype=torch.float64)
    # the second step starts at the corrected value; its D is x0 + (x0 - x0 before) / (2 r)
    x0, ratio = 0.6 * predicted, np.log(4 / 1.5) / np.log(1.5 * 4)
    aim = x0 + ratio / 2 * (x0 - 0.2)
    second = 0.5 * corrected + (0.8 - 0.2 * 0.6 / 0.4) * aim
    end = unipc(lambda x, _: x, start, three)
    assert end.item() == pytest.approx(0.8 * second, rel=1e-12)


def test_unipc_is_more_accurate_than_dpmpp_2m():
    """unipc needs no additional call of the model. Its corrector raises the order of the inner
    steps.
    """
    for steps in (6, 10, 20):
        assert error(unipc, steps) < error(dpmpp_2m, steps)

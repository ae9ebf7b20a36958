"""Windows of stochastic steps and weights of steps: places, equal bits, closed forms, and refused
settings.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.load import ConfigError, load
from configs.objective import Window
from learner.objectives import build_objective
from learner.objectives.base import Points
from learner.objectives.dance_grpo import DanceGRPOSettings
from learner.objectives.flow_grpo import FlowGRPOSettings
from policy.sampling.ode import euler
from policy.sampling.paths import fewer_steps, sample_paths
from policy.sampling.sde import PathSolver
from policy.types import Conditioning
from tests.gaussian_flow import Denoiser, GaussianFamily, velocity
from tests.learner.test_grpo import GRID, column, one_step, path_samples
from tests.learner.test_paths import on_policy
from tests.learner.tiny import identical, tiny_groups

SOLVERS = [("flow_sde", 0.7), ("dance_sde", 0.3)]


def window_starts(window: Window, limit: int, iterations: int) -> list[int]:
    return [window.place(limit, done, 0).start for done in range(iterations)]


@pytest.mark.parametrize(
    ("settings", "starts"),
    [
        ({"schedule": "frozen", "start": 2}, [2] * 9),
        ({"schedule": "progressive", "every": 2}, [0, 0, 1, 1, 2, 2, 3, 3, 3]),
        ({"schedule": "progressive", "every": 2, "stride": 2}, [0, 0, 2, 2, 3, 3, 3, 3, 3]),
        ({"schedule": "progressive", "every": 2, "wrap": True}, [0, 0, 1, 1, 2, 2, 3, 3, 0]),
        # the window stays for int(8 - 6 at / 6) iterations at each place: 8, 7, 6, 5
        ({"schedule": "linear_decay", "every": 8}, [0] * 8 + [1] * 7 + [2] * 6 + [3] * 9),
    ],
)
def test_window_moves_by_its_schedule(settings, starts):
    assert window_starts(Window(size=3, **settings), 6, len(starts)) == starts


def test_exponential_decay_matches_mixgrpo():
    """The window stays for ceil(5 exp(-0.1 relu(at - 13))) iterations: 5 at step 13, then 5, 5, 4,
    4, 4 (5 e^-0.1 = 4.52, e^-0.2: 4.09, e^-0.3: 3.70, e^-0.4: 3.35, e^-0.5: 3.03).
    """
    window = Window(size=4, start=13, schedule="exponential_decay", every=5)
    starts = window_starts(window, 25, 27)
    assert [starts.count(at) for at in range(13, 19)] == [5, 5, 5, 4, 4, 4]


def test_random_window_depends_only_on_seed_and_iteration():
    window = Window(size=3, schedule="random")
    starts = window_starts(window, 9, 200)
    assert starts == window_starts(window, 9, 200) and set(starts) == set(range(7))
    assert starts != [window.place(9, done, 1).start for done in range(200)]


@pytest.mark.parametrize(
    ("steps", "window", "taken"),
    [
        # the last 7 steps become 3: they end after 2 1/3, 4 2/3 and 7 steps
        (6, range(3), [0, 1, 2, 3, 5, 8, 10]),
        (4, range(3), [0, 1, 2, 3, 10]),
        (6, range(2, 4), [0, 1, 2, 3, 4, 7, 10]),
        (10, range(3), list(range(11))),
        (10, None, list(range(11))),
    ],
)
def test_explored_paths_keep_all_steps_to_the_end_of_the_window(steps, window, taken):
    assert fewer_steps(10, steps, window) == taken


@pytest.mark.parametrize(("steps", "window"), [(3, range(3)), (11, range(3)), (9, None)])
def test_too_few_steps_to_explore_a_path_are_refused(steps, window):
    least = 9 if window is None else 3
    with pytest.raises(ValueError, match=f"use more than {least}, up to 10"):
        fewer_steps(10, steps, window)


@given(
    st.integers(1, 60).flatmap(
        lambda full: st.tuples(st.just(full), st.integers(0, full - 1), st.integers(1, full))
    )
)
def test_explored_paths_begin_and_end_like_the_complete_paths(case):
    full, stop, steps = case
    steps = min(max(steps, stop + 1), full)
    taken = fewer_steps(full, steps, range(stop))
    assert taken[: stop + 1] == list(range(stop + 1)) and taken[-1] == full
    assert len(taken) == steps + 1 and taken == sorted(set(taken))
    gaps = np.diff(taken[stop:])
    assert gaps.max() - gaps.min() <= 1


def make_paths(solver, window=None):
    return sample_paths(
        GaussianFamily(),
        Denoiser(32),
        Conditioning({"c": torch.zeros(3, 1)}),
        [5, 6, 7],
        [1, 2, 3],
        10,
        PathSolver(*solver),
        window=window,
    )


@pytest.mark.parametrize("solver", SOLVERS)
def test_window_over_all_steps_equals_no_window_bit_for_bit(solver):
    whole, windowed = make_paths(solver), make_paths(solver, range(10))
    for name in ("states", "log_probs", "latents", "stochastic"):
        assert torch.equal(getattr(whole, name), getattr(windowed, name))
    assert whole.stochastic.min() == 1


@pytest.mark.parametrize("solver", SOLVERS)
def test_path_outside_the_window_is_that_of_euler(solver):
    """Before the window, the path equals that of euler from the noise, and after it that of euler
    from the end of the window, bit for bit. Inside the window it has the noise of a path without a
    window.
    """
    paths, whole, grid = (
        make_paths(solver, range(2, 4)),
        make_paths(solver),
        GaussianFamily().sigmas(10),
    )
    assert torch.equal(paths.stochastic[0], torch.tensor([0, 0, 1, 1, 0, 0, 0, 0, 0, 0.0]))
    x = paths.states[:, 0]
    for j in range(2):
        x = x + (grid[j + 1] - grid[j]).item() * velocity(x, grid[j])
    assert torch.equal(paths.states[:, 2], x)
    assert torch.equal(paths.latents, euler(velocity, paths.states[:, 4], grid[4:]))
    assert torch.equal(paths.log_probs == 0, paths.stochastic == 0)

    def noise(of_paths, j):
        x, now, after = of_paths.states[:, j], grid[j].expand(3), grid[j + 1].expand(3)
        step = PathSolver(*solver).step(x, velocity(x, now), now, after)
        return (of_paths.states[:, j + 1] - step.mean) / step.std

    # the same noise: the rounding of states below 3, divided by std, is 1e-6 / 0.1
    for j in (2, 3):
        torch.testing.assert_close(noise(paths, j), noise(whole, j), rtol=0, atol=2e-5)


def test_training_uses_the_stochastic_steps_of_each_paper():
    samples = path_samples(2) | {"stochastic": torch.zeros(2, 10)}
    samples["stochastic"][:, 7:10] = 1
    points = build_objective(FlowGRPOSettings()).points(samples, GRID, np.random.default_rng(0))
    # the last step is never used for training
    assert torch.equal(points.sigma, GRID[7:9].repeat(2))
    dance = build_objective(DanceGRPOSettings(step_fraction=1.0))
    points = dance.points(samples, GRID, np.random.default_rng(0))
    assert torch.equal(points.sigma, GRID[7:9].repeat(2))
    everywhere = path_samples(2) | {"stochastic": torch.ones(2, 10)}
    for settings in (FlowGRPOSettings(), DanceGRPOSettings()):
        objective = build_objective(settings)
        plain = objective.points(path_samples(2), GRID, np.random.default_rng(3))
        all_stochastic = objective.points(everywhere, GRID, np.random.default_rng(3))
        assert torch.equal(plain.x_t, all_stochastic.x_t) and torch.equal(
            plain.sigma, all_stochastic.sigma
        )


def test_noise_weights_match_a_manual_calculation():
    """For Dance-SDE with eta 0.3 and equal steps of 0.1, all standard deviations are equal, so all
    weights are 1. For Flow-SDE with eta 1, std^2 = 0.1 sigma / (1 - sigma). At sigma 0.8 and 0.5
    with p = 2 this gives 4 and 1, divided by their mean 2.5.
    """
    flat = build_objective(DanceGRPOSettings(noise_weight=3.0))
    points = flat.points(path_samples(1), GRID, np.random.default_rng(0))
    torch.testing.assert_close(points.extras["weight"], torch.ones(5), rtol=1e-6, atol=0)
    objective = build_objective(FlowGRPOSettings(eta=1.0, noise_weight=2.0, kl=0.0))
    samples = path_samples(1) | {"stochastic": torch.zeros(1, 10)}
    samples["stochastic"][:, [2, 5]] = 1
    points = objective.points(samples, GRID, np.random.default_rng(0))
    torch.testing.assert_close(points.extras["weight"], torch.tensor([1.6, 0.4]), rtol=1e-6, atol=0)
    velocities = {name: torch.zeros(2, 2, 3) for name in ("current", "old")}
    loss, _ = objective.loss(points, velocities, torch.tensor([1.0, -2.0]))
    assert loss.item() == pytest.approx(-(1.6 * 1 - 0.4 * 2) / 2, rel=1e-6)  # ratios are 1


def test_normed_ratio_matches_a_manual_calculation():
    """As in test_flow_grpo_step_matches_a_manual_calculation, the means are 3/8 and 3/4, std is 1/2
    and x_next is 1. The log ratio is -0.65625 and the drift (3/8)^2 / (2 / 4) = 0.28125. Their sum
    times std is -0.1875. The loss is divided by -dsigma = 1/4.
    """
    objective = build_objective(FlowGRPOSettings(eta=1.0, kl=0.0, ratio_clip=0.9, ratio_norm=True))
    velocities = {"current": column(3.0), "old": column(2.0)}
    loss, metrics = objective.loss(one_step(1.0), velocities, torch.tensor([2.0]))
    assert metrics["loss/ratio"].item() == pytest.approx(math.exp(-0.1875), rel=1e-12)
    assert loss.item() == pytest.approx(-2 * 4 * math.exp(-0.1875), rel=1e-12)


def test_normed_log_ratio_has_no_drift():
    """For x_next ~ N(mean_old, std^2), the plain log ratio has the mean -d^2 / (2 std^2) =
    -0.28125. The normed log ratio has the mean 0 and the standard deviation d = 3/8. With 40,000
    draws, 4 standard errors are 0.0075.
    """
    objective = build_objective(FlowGRPOSettings(eta=1.0, kl=0.0, ratio_norm=True))
    count = 40_000
    z = torch.from_numpy(np.random.default_rng(0).standard_normal((count, 1)))
    half, quarter = torch.tensor([0.5]).expand(count), torch.tensor([0.25]).expand(count)
    x = torch.full((count, 1), 2.0, dtype=torch.float64)
    steps = {
        name: objective.path_solver.step(x, torch.full_like(x, v), half, quarter)
        for name, v in (("current", 3.0), ("old", 2.0))
    }
    x_next = steps["old"].mean + steps["old"].std * z
    plain = steps["current"].log_prob(x_next) - steps["old"].log_prob(x_next)
    result = objective._normed(plain, steps)
    assert plain.mean().item() == pytest.approx(-0.28125, abs=0.015)
    assert result.mean().item() == pytest.approx(0.0, abs=0.0075)
    assert result.std().item() == pytest.approx(3 / 8, rel=4 / math.sqrt(2 * count))


def test_normed_ratio_at_the_sampling_weights_is_exactly_1():
    objective = build_objective(DanceGRPOSettings(ratio_norm=True))
    points: Points = objective.points(path_samples(4), GRID, np.random.default_rng(0))
    v = torch.from_numpy(np.random.default_rng(1).standard_normal((20, 2, 3), np.float32))
    _, metrics = objective.loss(points, {"current": v, "old": v}, torch.ones(20))
    assert metrics["loss/ratio"].item() == 1.0 and metrics["loss/clip_share"].item() == 0.0


def test_trainer_moves_its_window_and_trains_on_it(tiny_sd3_dir):
    window = {"size": 2, "schedule": "progressive", "every": 1}
    trainer = on_policy(tiny_sd3_dir, {"name": "flow_grpo", "window": window})
    groups = tiny_groups(1)
    for done, inside in ((0, [1, 1, 0, 0]), (1, [0, 1, 1, 0])):
        samples, _ = trainer.generator.generate(groups[0].cond, [3, 4, 5])
        assert samples["stochastic"].tolist() == [inside] * 3
        groups[0].samples.clear()
        groups[0].samples.update(samples)
        metrics = trainer.update(done, groups)
        assert metrics["optimizer/points"] == 6 and metrics["grad_norm"] > 0


def test_training_with_a_window_of_all_steps_gives_the_same_bits(tiny_sd3_dir):
    states = []
    for window in (None, {"size": 4}):
        trainer = on_policy(tiny_sd3_dir, {"name": "flow_grpo", "window": window})
        groups = tiny_groups(1)
        groups[0].samples.update(trainer.generator.generate(groups[0].cond, [3, 4, 5])[0])
        trainer.update(0, groups)
        states.append(trainer.updater.trained.state())
    assert identical(*states)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["objective.name=flow_grpo", "objective.window.size=4", "objective.window.start=7"],
            "objective.window: 4 steps from step 7 on, but regenerate.steps is 10",
        ),
        (
            ["objective.name=dance_grpo", "objective.window.size=0"],
            "objective.window.size = 0: Input should be greater than or equal to 1",
        ),
        (
            ["objective.name=flow_grpo", "objective.window.size=2", "objective.window.every=-1"],
            "objective.window.every = -1: Input should be greater than or equal to 1",
        ),
        (["objective.window.size=2"], "objective.window: no such key"),
        (
            ["objective.name=flow_grpo", "objective.window.size=2", "objective.window.speed=2"],
            "objective.window.speed: no such key",
        ),
    ],
)
def test_invalid_windows_are_refused_in_one_line(overrides, message):
    with pytest.raises(ConfigError) as error:
        load("quickstart", overrides)
    (line,) = error.value.lines
    assert line.startswith(message)

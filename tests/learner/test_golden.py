"""Our results are compared with the results of the formulas of the public codes on the same tensors
(``tests/golden``). The relative tolerance is 1e-12 in float64. Where our code uses float32, the
last bits may differ.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.rewards import Advantages
from configs.training import Ema, OldPolicy
from learner.advantages import advantages
from learner.objectives import build_objective
from learner.objectives.base import Points
from learner.objectives.dance_grpo import DanceGRPOSettings
from learner.objectives.diffusion_nft import DiffusionNFTSettings
from learner.objectives.flow_grpo import FlowGRPOSettings
from learner.schedules import ema_decay, old_policy_decay
from learner.selection import select
from policy.families.schedule import flow_match_sigmas
from policy.sampling.ode import SOLVERS
from tests.golden.make import FILE

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))
ADAPTERS = ("current", "old", "ref")


def double(value: object) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def assert_close(actual: object, expected: object, rtol: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol)


def test_selection_matches_the_golden_values():
    golden = GOLDEN["selection"]
    assert list(select(golden["rewards"], 24)) == golden["chosen"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("global", Advantages(std="global", eps=1e-4)),
        ("group", Advantages(std="group", eps=1e-4)),
        ("group_unbiased", Advantages(std="group", eps=1e-8, unbiased=True)),
    ],
)
def test_advantages_match_the_golden_values(name, settings):
    """Advantages are float32, and half of the last bit is 6e-8."""
    golden = GOLDEN["advantages"]
    result, _ = advantages([np.array(row) for row in golden["rewards"]], settings)
    assert_close(np.stack(result), golden[name], 1.2e-7)


@pytest.mark.parametrize("row", [0, 1])
def test_diffusion_nft_matches_the_golden_values(row):
    golden = GOLDEN["diffusion_nft"][row]
    objective = build_objective(DiffusionNFTSettings(beta=golden["beta"], kl=golden["kl"]))
    x0, eps, t = (double(golden[name]) for name in ("x0", "eps", "t"))
    column = t.reshape(-1, 1, 1)
    x_t = (1 - column) * x0 + column * eps
    points = Points(x_t, t, torch.arange(4), {"x0": x0, "eps": eps})
    velocities = {name: double(golden[name]) for name in ADAPTERS}
    current = velocities["current"].requires_grad_(True)
    loss, _ = objective.loss(points, velocities, double(golden["advantages"]))
    loss.backward()
    assert_close(loss.item(), golden["loss"])
    assert_close(current.grad, golden["gradient"])


@pytest.mark.parametrize("name", ["flow_grpo", "dance_grpo"])
def test_path_objectives_match_the_golden_values(name):
    """One of the four ratios is clipped, so its gradient is 0."""
    golden = GOLDEN[name]
    settings = (
        FlowGRPOSettings(eta=golden["eta"], ratio_clip=golden["clip"], kl=golden["kl"])
        if name == "flow_grpo"
        else DanceGRPOSettings(eta=golden["eta"], ratio_clip=golden["clip"])
    )
    objective = build_objective(settings)
    x, x_next, now, after = (double(golden[n]) for n in ("x", "x_next", "sigma", "sigma_next"))
    velocities = {policy: double(golden[policy]) for policy in ADAPTERS}
    current = velocities["current"].requires_grad_(True)
    log_prob = objective.path_solver.step(x, current, now, after).log_prob(x_next)
    assert_close(log_prob.detach(), golden["log_prob"])
    stored = {"x_next": x_next, "sigma_next": after, "log_prob": log_prob.detach()}
    points = Points(x, now, torch.arange(4), stored)
    loss, metrics = objective.loss(points, velocities, double(golden["advantages"]))
    loss.backward()
    assert_close(metrics["loss/ratio"].item(), np.mean(golden["ratio"]))
    assert_close(loss.item(), golden["loss"])
    assert_close(current.grad, golden["gradient"], 1e-11)  # 1 / std^2 is up to 100


def test_decay_schedules_match_the_golden_values():
    golden = GOLDEN["schedules"]
    for name in ("linear_cap", "delayed_linear_cap"):
        options = {"slope": 0.0075, "cap": 0.999} if name == "delayed_linear_cap" else {}
        settings = OldPolicy(schedule=name, **options)
        assert_close([old_policy_decay(settings, s) for s in golden["s"]], golden[name], 1e-15)
    warm = Ema(warmup=True)
    assert_close([ema_decay(warm, s) for s in golden["s"]], golden["ema"], 1e-15)
    assert_close(np.prod([ema_decay(warm, s) for s in range(1, 11)]), golden["base_left"])


@pytest.mark.parametrize("spacing", ["own", "scheduler"])
def test_spacing_and_solvers_match_the_golden_values(spacing):
    """diffusers works in float32, so the schedules agree to 1e-6. From the same float32 schedule,
    dpmpp_2m agrees to 1e-12. euler uses differences of sigmas in float32, whose relative error is
    about 1e-8.
    """
    shift = {"num_train_timesteps": 1000, "shift": 3.0}
    actual = flow_match_sigmas(shift, 6, None, schedule=spacing)
    expected = GOLDEN["spacing"][spacing]
    assert_close(actual, expected, 1e-6)
    golden = GOLDEN["solver"]
    matrix, bias, start = (double(golden[name]) for name in ("matrix", "bias", "start"))
    grid = torch.tensor(expected, dtype=torch.float32)
    for name in ("dpmpp_2m", "euler"):  # the solvers of the reference
        end = SOLVERS[name](lambda x, s: x @ matrix.T + s.double() * bias, start[None], grid)
        assert_close(end[0], golden[spacing][name], 1e-12 if name == "dpmpp_2m" else 1e-7)

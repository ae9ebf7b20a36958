"""Against numbers that the formulas of the public codes give on the same tensors
(``tests/golden``): in float64 to 1e-12 of their size, where float32 is part of the product to its
last bits.
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


def close(found: object, expected: object, rtol: float = 1e-12) -> None:
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)


def test_selection():
    given = GOLDEN["selection"]
    assert list(select(given["rewards"], 24)) == given["chosen"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("global", Advantages(std="global", eps=1e-4)),
        ("group", Advantages(std="group", eps=1e-4)),
        ("group_unbiased", Advantages(std="group", eps=1e-8, unbiased=True)),
    ],
)
def test_advantages(name, settings):
    """They are handed on in float32: half of its last bit is 6e-8."""
    given = GOLDEN["advantages"]
    found, _ = advantages([np.array(row) for row in given["rewards"]], settings)
    close(np.stack(found), given[name], 1.2e-7)


@pytest.mark.parametrize("row", [0, 1])
def test_diffusion_nft(row):
    given = GOLDEN["diffusion_nft"][row]
    objective = build_objective(DiffusionNFTSettings(beta=given["beta"], kl=given["kl"]))
    x0, eps, t = (double(given[name]) for name in ("x0", "eps", "t"))
    column = t.reshape(-1, 1, 1)
    x_t = (1 - column) * x0 + column * eps
    points = Points(x_t, t, torch.arange(4), {"x0": x0, "eps": eps})
    velocities = {name: double(given[name]) for name in ADAPTERS}
    current = velocities["current"].requires_grad_(True)
    loss, _ = objective.loss(points, velocities, double(given["advantages"]))
    loss.backward()
    close(loss.item(), given["loss"])
    close(current.grad, given["gradient"])


@pytest.mark.parametrize("name", ["flow_grpo", "dance_grpo"])
def test_path_objectives(name):
    """One of the four ratios is held by the clip: its gradient is 0."""
    given = GOLDEN[name]
    settings = (
        FlowGRPOSettings(eta=given["eta"], ratio_clip=given["clip"], kl=given["kl"])
        if name == "flow_grpo"
        else DanceGRPOSettings(eta=given["eta"], ratio_clip=given["clip"])
    )
    objective = build_objective(settings)
    x, x_next, now, after = (double(given[n]) for n in ("x", "x_next", "sigma", "sigma_next"))
    velocities = {policy: double(given[policy]) for policy in ADAPTERS}
    current = velocities["current"].requires_grad_(True)
    log_prob = objective.path_solver.step(x, current, now, after).log_prob(x_next)
    close(log_prob.detach(), given["log_prob"])
    stored = {"x_next": x_next, "sigma_next": after, "log_prob": log_prob.detach()}
    points = Points(x, now, torch.arange(4), stored)
    loss, metrics = objective.loss(points, velocities, double(given["advantages"]))
    loss.backward()
    close(metrics["loss/ratio"].item(), np.mean(given["ratio"]))
    close(loss.item(), given["loss"])
    close(current.grad, given["gradient"], 1e-11)  # 1 / std^2 is up to 100


def test_decay_schedules():
    given = GOLDEN["schedules"]
    for name in ("linear_cap", "delayed_linear_cap"):
        own = {"slope": 0.0075, "cap": 0.999} if name == "delayed_linear_cap" else {}
        settings = OldPolicy(schedule=name, **own)
        close([old_policy_decay(settings, s) for s in given["s"]], given[name], 1e-15)
    warm = Ema(warmup=True)
    close([ema_decay(warm, s) for s in given["s"]], given["ema"], 1e-15)
    close(np.prod([ema_decay(warm, s) for s in range(1, 11)]), given["base_left"])


@pytest.mark.parametrize("spacing", ["own", "scheduler"])
def test_spacing_and_solvers(spacing):
    """diffusers works in float32: 1e-6. From the same float32 schedule dpmpp_2m agrees to 1e-12;
    euler takes the differences of sigmas in float32, whose last bits are 1e-8 of them.
    """
    shift = {"num_train_timesteps": 1000, "shift": 3.0}
    found = flow_match_sigmas(shift, 6, None, schedule=spacing)
    expected = GOLDEN["spacing"][spacing]
    close(found, expected, 1e-6)
    given = GOLDEN["solver"]
    matrix, bias, start = (double(given[name]) for name in ("matrix", "bias", "start"))
    grid = torch.tensor(expected, dtype=torch.float32)
    for name in ("dpmpp_2m", "euler"):  # those of the reference
        end = SOLVERS[name](lambda x, s: x @ matrix.T + s.double() * bias, start[None], grid)
        close(end[0], given[spacing][name], 1e-12 if name == "dpmpp_2m" else 1e-7)

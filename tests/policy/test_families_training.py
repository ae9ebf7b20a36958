"""Training with every family: one update changes only LoRA weights, the gradient matches that of
the loss, and gradient checkpointing changes no gradient.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner.objectives import diffusion_nft
from learner.trainer import Group, Trainer
from policy.families import family_for
from policy.lora import adapter_state, load_adapter_state, use_adapter
from policy.sharding import blocks_of
from policy.types import Conditioning
from tests.learner.tiny import tiny_config
from tests.tiny_families import encode, one_of_twins, tiny_model

UNREACHED = dict.fromkeys(("sd3", "qwen_image", "qwen_image_edit"), ("add_q_proj",))
"""Linear layers of the last block whose output is not used."""
SLOPE = {"z_image": 5e-4}
"""Z-Image rotates queries and keys in float32 in all its blocks and refiners."""
PROMPTS = ["a red circle", "two blue crosses above a green square"]


def trainer_of(name: str, directory: Path, **more: Any) -> Trainer:
    """Return a trainer whose adapters current, old and ema have different weights A and B, so that
    all four policies differ.
    """
    config = tiny_config(
        directory, objective={"times_per_sample": 2, "kl": 0.3, "beta": 0.7}, **more
    )
    trainer = Trainer(config.model_copy(update={"model": tiny_model(name, directory)}))
    for number, adapter in enumerate(trainer.adapters):
        rng = np.random.default_rng(100 + number)
        state = adapter_state(trainer.transformer, adapter)
        noise = {
            key: torch.from_numpy(0.1 * rng.standard_normal(tuple(t.shape), np.float32))
            for key, t in state.items()
        }
        load_adapter_state(
            trainer.transformer, adapter, {key: state[key] + noise[key] for key in state}
        )
    return trainer


@functools.cache
def encoded(name: str, directory: str) -> Conditioning:
    """Return the conditioning of PROMPTS, one row for each."""
    family = family_for(tiny_model(name, Path(directory)))
    return encode(family, PROMPTS)


def groups_of(trainer: Trainer) -> list[Group]:
    rng = np.random.default_rng(5)
    cond = encoded(trainer.family.name, trainer.family.directory)
    return [
        Group(
            prompt_index=index,
            cond=cond.rows(index),
            samples={"latents": rng.standard_normal((2, *trainer.family.latent_shape), np.float32)},
            rewards=rng.standard_normal(2).astype(np.float32),
        )
        for index in range(len(PROMPTS))
    ]


def test_update_changes_only_lora_weights(name, directory):
    trainer = trainer_of(name, directory)
    base = {
        key: p.detach().clone()
        for key, p in trainer.transformer.named_parameters()
        if "lora_" not in key
    }
    before = {adapter: adapter_state(trainer.transformer, adapter) for adapter in trainer.adapters}
    trainer.update(1, groups_of(trainer))
    after = adapter_state(trainer.transformer, "current")
    changed = {
        key for key, tensor in after.items() if not torch.equal(tensor, before["current"][key])
    }
    # weight decay changes every weight, also those that no gradient reaches
    assert changed == set(after)
    state = trainer.updater.trained.state()
    unused = {
        key.removeprefix("exp_avg/").rsplit(".lora_")[0]
        for key, t in state.items()
        if key.startswith("exp_avg/") and not t.any()
    }
    assert unused == {f"transformer_blocks.1.attn.{part}" for part in UNREACHED.get(name, ())}
    now = {key: p for key, p in trainer.transformer.named_parameters() if "lora_" not in key}
    assert now.keys() == base.keys()
    assert all(torch.equal(base[key], p) and not p.requires_grad for key, p in now.items())


class FrozenWeightsLoss:
    """The residual loss with its stop-gradient weights frozen at the values of the first
    evaluation. Finite differences need this.
    """

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.calls = 0

    def __call__(self, points, velocity):
        t = points.sigma.double().reshape(-1, *[1] * (points.x_t.ndim - 1))
        residual = points.x_t.double() - t * velocity - points.extras["x0"].double()
        if self.calls < 2:  # L(v+) and L(v-)
            self.weights.append(residual.detach().abs().flatten(1).mean(1))
        loss = (residual**2).flatten(1).mean(1) / self.weights[self.calls % 2]
        self.calls += 1
        return loss


@pytest.mark.parametrize("name", one_of_twins(True))
def test_gradients_match_finite_differences(name, directory, monkeypatch):
    """The gradient of the loss is compared in float64 with a fourth-order central difference along
    directions that change every LoRA matrix at once. diffusers computes some norms and rotations in
    float32 whatever the dtype of the model. So a loss of order 10 has a relative error of about
    1e-7, and the difference over h = 0.02 has a relative error of 1e-4 for a slope of order 1.
    """
    trainer = trainer_of(name, directory)
    trainer.transformer.double()
    generator, rng = torch.Generator().manual_seed(3), np.random.default_rng(7)
    groups = groups_of(trainer)
    points_by_group = [
        trainer.objective.points(
            {"latents": torch.from_numpy(g.samples["latents"])}, trainer.sigmas, rng
        )
        for g in groups
    ]
    points = type(points_by_group[0]).cat(points_by_group)
    rows = type(groups[0].cond).cat(
        [g.cond.repeat(len(p)) for g, p in zip(groups, points_by_group, strict=True)]
    )
    weights = torch.from_numpy(rng.standard_normal(len(points)).astype(np.float32)) * 3
    parameters = list(trainer.updater.trained.parameters.values())

    def loss() -> torch.Tensor:
        velocities = {}
        for policy in trainer.objective.policies:
            with use_adapter(trainer.transformer, None if policy == "ref" else policy):
                velocities[policy] = trainer.family.velocity(
                    trainer.transformer, points.x_t, points.sigma, rows
                )
        assert not torch.equal(velocities["current"], velocities["old"])
        assert not torch.equal(velocities["current"], velocities["ref"])
        return trainer.objective.loss(points, velocities, weights)[0]

    start = loss()
    gradient = torch.autograd.grad(start, parameters)
    monkeypatch.setattr(diffusion_nft, "_residual_loss", FrozenWeightsLoss())
    base = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def loss_at(step: float, direction: list[torch.Tensor]) -> float:
        for parameter, origin, d in zip(parameters, base, direction, strict=True):
            parameter.copy_(origin + step * d)
        return loss().item()

    norm = float(torch.stack([g.norm() for g in gradient]).norm())
    assert loss_at(0.0, base) == pytest.approx(start.item(), rel=1e-6)
    h = 0.02
    for _ in range(2):
        noise = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in parameters]
        length = float(torch.stack([n.norm() for n in noise]).norm())
        direction = [g / norm + n / length for g, n in zip(gradient, noise, strict=True)]
        actual = (
            8 * (loss_at(h, direction) - loss_at(-h, direction))
            - (loss_at(2 * h, direction) - loss_at(-2 * h, direction))
        ) / (12 * h)
        expected = sum(float((g * d).sum()) for g, d in zip(gradient, direction, strict=True))
        assert actual == pytest.approx(expected, rel=SLOPE.get(name, 1e-4))


@pytest.mark.parametrize("name", one_of_twins(False))
def test_gradient_checkpointing_gives_the_same_gradients(name, directory):
    """The recomputation in the backward pass uses the adapter "current", although "old" and the
    reference ran in between.

    The recomputation runs the same operations, so first moments (0.1 of the gradient) are equal bit
    for bit. Either all blocks run twice, or every second block.
    """
    moments, passes = [], []
    for checkpointing in (False, 0.5, True):
        trainer = trainer_of(
            name,
            directory,
            optimizer={"lr": 1e-2, "gradient_checkpointing": checkpointing, "batch_size": 3},
        )
        calls: list[bool] = []
        blocks = list(blocks_of(trainer.transformer))
        for block in blocks:
            block.register_forward_pre_hook(
                lambda *_, calls=calls: calls.append(torch.is_grad_enabled())
            )
        trainer.update(1, groups_of(trainer))
        moments.append(
            {
                key: t
                for key, t in trainer.updater.trained.state().items()
                if key.startswith("exp_avg/")
            }
        )
        passes.append(sum(calls) / len(blocks))
    assert passes[2] == 2 * passes[0] > 0
    assert passes[1] == passes[0] * (1 + len(blocks) // 2 / len(blocks))
    for key, tensor in moments[0].items():
        assert torch.equal(moments[1][key], tensor) and torch.equal(moments[2][key], tensor), key

"""The update is compared with one plain batch and with the formula of AdamW. Invalid groups are
refused.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.advantages import advantages
from policy.lora import adapter_state, use_adapter
from policy.sampling.noise import stream_seed
from tests.learner.tiny import identical, tiny_groups, tiny_trainer, training_state


def one_sample(group, position: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(rows[position : position + 1])
        for name, rows in group.samples.items()
    }


def plain_gradients(trainer, iteration: int, groups) -> tuple[dict[str, torch.Tensor], float]:
    """Return gradients and loss of all points in one batch, computed without the updater."""
    values, _ = advantages([group.rewards for group in groups], trainer.config.resolved_advantages)
    x_t, sigma, cond, points, weights = [], [], [], [], []
    for group, advantage in zip(groups, values, strict=True):
        for position in range(len(group.rewards)):
            rng = np.random.Generator(
                np.random.Philox(
                    key=stream_seed(11, "train", iteration, group.prompt_index, position)
                )
            )
            new_points = trainer.objective.points(one_sample(group, position), trainer.sigmas, rng)
            points.append(new_points)
            x_t.append(new_points.x_t)
            sigma.append(new_points.sigma)
            cond.append(group.cond.repeat(len(new_points)))
            weights += [float(advantage[position])] * len(new_points)
    batch, rows = type(points[0]).cat(points), type(cond[0]).cat(cond)
    velocities = {}
    for policy in trainer.objective.policies:
        with use_adapter(trainer.transformer, None if policy == "ref" else policy):
            velocities[policy] = trainer.family.velocity(
                trainer.transformer, torch.cat(x_t), torch.cat(sigma), rows
            )
    loss, _ = trainer.objective.loss(batch, velocities, torch.tensor(weights))
    parameters = trainer.updater.trained.parameters
    grads = torch.autograd.grad(loss, list(parameters.values()))
    return dict(zip(parameters, grads, strict=True)), loss.item()


# there are 18 points, and the points of a sample start at multiples of 3
@pytest.mark.parametrize("batch_size", [1, 4, 7, 100])
def test_accumulated_gradients_equal_those_of_one_batch(tiny_sd3_dir, batch_size):
    """After the first step, the first moment of AdamW is 0.1 g. Float32 sums over 18 points in
    another order differ by 1e-5 of the norm.
    """
    optimizer = {"lr": 1e-3, "batch_size": batch_size, "max_grad_norm": 1e9}
    trainer = tiny_trainer(
        tiny_sd3_dir, optimizer=optimizer, objective={"times_per_sample": 3, "kl": 0.5}
    )
    groups = tiny_groups()
    expected, loss = plain_gradients(trainer, 1, groups)
    metrics = trainer.update(1, groups)
    moments = trainer.updater.trained.state()
    norm = float(torch.stack([g.double().norm() for g in expected.values()]).norm())
    unused = {name.rsplit(".lora_")[0] for name, g in expected.items() if not g.any()}
    # the text queries of the last block are not used; all others get gradients
    assert unused == {"transformer_blocks.1.attn.add_q_proj"}
    for name, gradient in expected.items():
        torch.testing.assert_close(
            moments[f"exp_avg/{name}"], 0.1 * gradient, rtol=0, atol=1e-6 * norm
        )
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["loss/policy"] + 0.5 * metrics["loss/kl"] == pytest.approx(loss, rel=1e-5)
    assert metrics["loss/kl"] > 0 and metrics["optimizer/points"] == 18


def test_step_is_adamw_with_clipped_gradients(tiny_sd3_dir):
    """The first step of AdamW is w (1 - lr wd) - lr g / (|g| + eps), with g scaled to norm 0.01.
    The tolerance 1e-6 is lr times the float32 rounding of the ratio.
    """
    optimizer = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5, "max_grad_norm": 0.01}
    trainer = tiny_trainer(tiny_sd3_dir, optimizer=optimizer)
    before = {name: p.detach().clone() for name, p in trainer.updater.trained.parameters.items()}
    trainer.update(1, tiny_groups())
    state = trainer.updater.trained.state()
    clipped = {name: state[f"exp_avg/{name}"].double() / 0.1 for name in before}
    # torch divides by norm + 1e-6
    assert float(torch.stack([g.norm() for g in clipped.values()]).norm()) == pytest.approx(
        0.01, rel=1e-4
    )
    for name, old in before.items():
        g = clipped[name]
        expected = old.double() * (1 - 1e-2 * 0.1) - 1e-2 * g / (g.abs() + 1e-5)
        torch.testing.assert_close(state[f"weight/{name}"].double(), expected, rtol=0, atol=1e-6)


def test_update_changes_only_adapters_and_averages(tiny_sd3_dir):
    trainer = tiny_trainer(
        tiny_sd3_dir,
        old_policy={"schedule": "linear_cap", "slope": 0.25, "cap": 0.6},
        ema={"decay": 0.75},
    )
    base = {
        name: p.detach().clone()
        for name, p in trainer.transformer.named_parameters()
        if "lora_" not in name
    }
    for s, decay in ((1, 0.25), (2, 0.5), (3, 0.6)):
        before = {name: adapter_state(trainer.transformer, name) for name in trainer.adapters}
        metrics = trainer.update(s, tiny_groups(seed=s))
        after = {name: adapter_state(trainer.transformer, name) for name in trainer.adapters}
        assert metrics["old_policy/decay"] == decay
        assert all(
            not torch.equal(before["current"][key], after["current"][key])
            for key in before["current"]
        )
        for name, d in (("old", decay), ("ema", 0.75)):
            # weights are below 1: float32 rounding of two products is below 2e-7
            for key, new in after["current"].items():
                torch.testing.assert_close(
                    after[name][key], d * before[name][key] + (1 - d) * new, rtol=0, atol=2e-7
                )
    frozen = {name: p for name, p in trainer.transformer.named_parameters() if "lora_" not in name}
    assert identical(base, {name: p.detach() for name, p in frozen.items()})
    assert all(not p.requires_grad for p in frozen.values())


@pytest.mark.parametrize(("deal", "steps"), [("random", 4), ("even", 3)])
def test_several_steps_use_every_sample_once(tiny_sd3_dir, deal, steps):
    trainer = tiny_trainer(
        tiny_sd3_dir,
        optimizer={"lr": 1e-3, "steps_per_iteration": steps, "batch_size": 3, "deal": deal},
    )
    parts: list[list[int]] = []
    original = trainer.updater._step

    def record_part(samples, part, sigmas, sums):
        parts.append(part.tolist())
        return original(samples, part, sigmas, sums)

    trainer.updater._step = record_part
    trainer.update(1, tiny_groups(2, 3))
    assert sorted(map(len, parts)) == {"random": [1, 1, 2, 2], "even": [2, 2, 2]}[deal]
    assert sorted(i for part in parts for i in part) == list(range(6))
    assert parts != [list(part) for part in np.array_split(np.arange(6), steps)]  # shuffled
    if deal == "even":  # each step has a sample of each prompt
        assert all(first < 3 <= second for first, second in parts)
    state = trainer.updater.trained.state()
    assert {t.item() for name, t in state.items() if name.startswith("step/")} == {float(steps)}


def test_update_ignores_group_order_and_global_random_state(tiny_sd3_dir):
    results = []
    for seed, flip in ((1, False), (2, True)):
        torch.manual_seed(seed)
        np.random.seed(seed)
        trainer = tiny_trainer(tiny_sd3_dir, optimizer={"lr": 1e-2, "steps_per_iteration": 2})
        groups = tiny_groups()
        trainer.update(1, groups[::-1] if flip else groups)
        results.append(training_state(trainer))
    assert identical(*results)


def test_reference_runs_only_if_the_kl_is_used(tiny_sd3_dir):
    """The forward passes per batch are those of the current and the old policy, and that of the
    reference if there is a KL weight or a KL limit.
    """
    for objective, stop, passes in (
        ({"kl": 0.0}, {}, 2),
        ({"kl": 0.1}, {}, 3),
        ({"kl": 0.0}, {"max_kl": 9.0}, 3),
    ):
        trainer = tiny_trainer(
            tiny_sd3_dir,
            objective={**objective, "times_per_sample": 3},
            stop=stop,
            optimizer={"batch_size": 100},
        )
        calls = []
        trainer.transformer.register_forward_hook(
            lambda *_, calls=calls: calls.append(torch.is_grad_enabled())
        )
        metrics = trainer.update(1, tiny_groups())
        assert len(calls) == passes and sum(calls) == 1
        assert ("loss/kl" in metrics) == (passes == 3)


def test_training_approaches_good_samples_and_not_bad_ones(tiny_sd3_dir):
    """After forty steps on one good and one bad sample, the predicted x0 of the good sample is
    nearer to it than at the start, and that of the bad sample is not.
    """
    trainer = tiny_trainer(
        tiny_sd3_dir,
        perturb=False,
        optimizer={"lr": 1e-2},
        old_policy={"schedule": "constant", "value": 0.9},
    )
    group = tiny_groups(1, 2)[0]
    group.rewards[:] = [1.0, -1.0]

    def distance() -> np.ndarray:
        rng = np.random.default_rng(0)
        points = trainer.objective.points(
            {"latents": torch.from_numpy(group.samples["latents"])}, trainer.sigmas, rng
        )
        with torch.no_grad(), use_adapter(trainer.transformer, "current"):
            v = trainer.family.velocity(
                trainer.transformer, points.x_t, points.sigma, group.cond.repeat(len(points))
            )
        error = (
            (points.x_t - points.sigma.reshape(-1, 1, 1, 1) * v - points.extras["x0"])
            .pow(2)
            .mean((1, 2, 3))
        )
        return error.reshape(2, -1).mean(1).numpy()

    start = distance()
    for s in range(1, 41):
        trainer.update(s, [group])
    good, bad = distance() - start
    assert good < -0.01 * start[0] and bad > 0


def test_half_precision_base_trains_float32_adapters(tiny_sd3_dir):
    trainer = tiny_trainer(tiny_sd3_dir, regenerate={"steps": 4, "precision": "bf16"})
    kinds = {("lora_" in name, p.dtype) for name, p in trainer.transformer.named_parameters()}
    assert (True, torch.float32) in kinds
    assert (True, torch.bfloat16) not in kinds
    assert (False, torch.bfloat16) in kinds
    before = adapter_state(trainer.transformer, "current")
    metrics = trainer.update(1, tiny_groups())
    assert np.isfinite(metrics["grad_norm"])
    assert not identical(before, adapter_state(trainer.transformer, "current"))


def test_missing_rewards_and_invalid_groups_are_refused(tiny_sd3_dir):
    trainer = tiny_trainer(tiny_sd3_dir)
    groups = tiny_groups()
    with pytest.raises(ValueError, match="each prompt may occur only once"):
        trainer.update(1, [groups[0], groups[0]])
    groups[1].rewards[0] = np.nan
    with pytest.raises(ValueError, match="group 1 has rewards"):
        trainer.update(1, groups)
    short = tiny_groups(1)[0]
    with pytest.raises(ValueError, match=r"latents \[2, 4, 8, 8\].*expected \[3, 4, 8, 8\]"):
        trainer.update(
            1,
            [type(short)(0, short.cond, {"latents": short.samples["latents"][:2]}, short.rewards)],
        )
    trainer.update(1, tiny_groups())
    with pytest.raises(ValueError, match="iteration 1 was already trained on"):
        trainer.update(1, tiny_groups())

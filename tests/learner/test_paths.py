"""The trainer with objectives other than DiffusionNFT: which paths are recorded, how they are used
for training, and which data is saved after a failure.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from safetensors import safe_open

from analysis.measuring import load_explorer
from learner.nonfinite import NonFiniteTraining
from learner.publish import NonFiniteWeights
from learner.trainer import Group
from policy.lora import adapter_state, load_adapter_state, use_adapter
from policy.precision.backends import resolve_backend
from policy.sampling.noise import noise_for, stream_seed
from policy.sampling.paths import explored_paths, shared_start
from tests.learner.tiny import identical, tiny_groups, tiny_trainer, training_state

SEEDS = [3, 2**63 + 5, 7]
PATHS = {"flow_grpo": {"name": "flow_grpo"}, "dance_grpo": {"name": "dance_grpo"}}


def on_policy(model, objective, **more):
    """Return a trainer with a non-trivial LoRA whose sampling policy equals the trained policy, as
    after any iteration.
    """
    trainer = tiny_trainer(model, objective=objective, **more)
    load_adapter_state(trainer.transformer, "old", adapter_state(trainer.transformer, "current"))
    return trainer


def groups_of(trainer, count: int = 2) -> list[Group]:
    """Return ``count`` prompts with three regenerated samples and random rewards each."""
    groups = []
    for group in tiny_groups(count):
        seeds = [stream_seed(1, "test", group.prompt_index, n) for n in range(3)]
        groups.append(
            Group(
                group.prompt_index,
                group.cond,
                trainer.generator.generate(group.cond, seeds)[0],
                group.rewards,
            )
        )
    return groups


@pytest.mark.parametrize("objective", PATHS.values(), ids=PATHS)
def test_regeneration_records_the_path(tiny_sd3_dir, objective):
    trainer, cond = on_policy(tiny_sd3_dir, objective), tiny_groups(1)[0].cond
    samples, images = trainer.generator.generate(cond, SEEDS)
    assert {name: rows.shape for name, rows in samples.items()} == {
        "latents": (3, 4, 8, 8),
        "states": (3, 5, 4, 8, 8),
        "log_probs": (3, 4),
    }
    assert all(rows.dtype == np.float32 and np.isfinite(rows).all() for rows in samples.values())
    assert np.array_equal(samples["states"][:, -1], samples["latents"]) == (
        objective["name"] == "flow_grpo"
    )
    assert np.array_equal(samples["states"][:, 0], noise_for(SEEDS, (4, 8, 8)).numpy())
    decoded = trainer.family.decode(trainer.vae, torch.from_numpy(samples["latents"]), batch_size=8)
    assert np.array_equal(images, decoded.numpy())
    # evaluation stays deterministic and records only latents
    assert trainer.generator.generate(cond, SEEDS, weights="ema", solver="dpmpp_2m")[0].keys() == {
        "latents"
    }


@pytest.mark.parametrize("objective", PATHS.values(), ids=PATHS)
def test_stored_log_probability_matches_weights_and_step(tiny_sd3_dir, objective):
    """The same weights and batch give the same bits. Other weights give another density."""
    trainer, cond = on_policy(tiny_sd3_dir, objective), tiny_groups(1)[0].cond
    samples, _ = trainer.generator.generate(cond, SEEDS)
    states = torch.from_numpy(samples["states"])

    def recompute(policy: str, j: int) -> np.ndarray:
        now, after = trainer.sigmas[j].expand(3), trainer.sigmas[j + 1].expand(3)
        with torch.no_grad(), use_adapter(trainer.transformer, policy):
            v = trainer.family.velocity(trainer.transformer, states[:, j], now, cond.repeat(3))
        return (
            trainer.objective.path_solver.step(states[:, j], v, now, after)
            .log_prob(states[:, j + 1])
            .numpy()
        )

    for j in range(4):
        assert np.array_equal(recompute("old", j), samples["log_probs"][:, j])
        assert np.array_equal(recompute("current", j), samples["log_probs"][:, j])
        assert np.abs(recompute("ema", j) - samples["log_probs"][:, j]).max() > 1e-4


def test_sample_does_not_depend_on_other_samples(tiny_sd3_dir):
    """The noise depends only on the sample. Another batch shape changes only the rounding, by 1e-6
    through 4 steps. The test allows 1e-4.
    """
    trainer, cond = on_policy(tiny_sd3_dir, PATHS["flow_grpo"]), tiny_groups(1)[0].cond
    whole, _ = trainer.generator.generate(cond, SEEDS)
    alone, _ = trainer.generator.generate(cond, SEEDS[1:2])
    np.testing.assert_allclose(alone["states"], whole["states"][1:2], rtol=0, atol=1e-4)
    np.testing.assert_allclose(alone["log_probs"], whole["log_probs"][1:2], rtol=0, atol=1e-4)
    other = on_policy(tiny_sd3_dir, PATHS["flow_grpo"], seed=12).generator.generate(cond, SEEDS)[0][
        "states"
    ]
    assert np.array_equal(other[:, 0], whole["states"][:, 0])
    assert not np.array_equal(other[:, 1], whole["states"][:, 1])


def test_group_can_share_its_initial_noise(tiny_sd3_dir):
    objective = {"name": "dance_grpo", "shared_noise": True}
    trainer, cond = on_policy(tiny_sd3_dir, objective, arm="diffusionnft"), tiny_groups(1)[0].cond
    assert shared_start(trainer.config, SEEDS) == SEEDS[0]
    states = trainer.generator.generate(cond, SEEDS, start=SEEDS[0])[0]["states"]
    assert np.array_equal(
        states[:, 0], np.repeat(noise_for(SEEDS[:1], (4, 8, 8)).numpy(), 3, axis=0)
    )
    assert len({row.tobytes() for row in states[:, 1]}) == 3
    latents = trainer.generator.generate(cond, SEEDS, weights="ema", solver="dpmpp_2m")[0][
        "latents"
    ]
    assert len({row.tobytes() for row in latents}) == 3  # held-out images have separate noise
    assert shared_start(tiny_trainer(tiny_sd3_dir, objective={"name": "awm"}).config, SEEDS) is None


@pytest.mark.parametrize("start", [None, 99])
@pytest.mark.parametrize("name", ["flow_grpo", "dance_grpo"])
def test_explored_paths_match_the_regenerated_paths(tiny_sd3_dir, name, start):
    """In FP32 and with the same number of steps, the explored latents equal the regenerated ones up
    to the rounding of merged weights, 1e-6 through 4 steps. The test allows 1e-4. With one step
    less, only the part after the window differs.
    """
    objective = {"name": name, "window": {"size": 2}, "shared_noise": start is not None}
    explore = {"pool_size": 8, "backend": "fp32", "paths": True, "steps": 3}
    trainer = on_policy(tiny_sd3_dir, objective, explore=explore)
    config, cond = trainer.config, tiny_groups(1)[0].cond
    plan = config.plan.explore
    assert plan is not None and plan.solver == trainer.objective.path_solver.name
    path = explored_paths(config, plan.solver, 0)
    assert path is not None and path.window == range(2)
    truth = trainer.generator.generate(cond, SEEDS, start=start)[0]
    explorer = load_explorer(config, trainer, resolve_backend("fp32", "cpu")[0])
    whole, few = (
        explorer.explore(cond, SEEDS, steps, plan.solver, None, None, path, start)[1]
        for steps in (4, 3)
    )
    np.testing.assert_allclose(whole, truth["latents"], rtol=0, atol=1e-4)
    x, sigma = torch.from_numpy(truth["states"][:, 2]), trainer.sigmas
    with torch.no_grad(), use_adapter(trainer.transformer, "old"):
        v = trainer.family.velocity(trainer.transformer, x, sigma[2].expand(3), cond.repeat(3))
    expected = x + (sigma[4] - sigma[2]) * v  # one Euler step from the end of the window
    np.testing.assert_allclose(few, expected.numpy(), rtol=0, atol=1e-4)
    assert np.abs(few - whole).max() > 1e-2
    alone = explorer.explore(cond, SEEDS, 4, "euler")[1]  # without the paths' noise
    assert np.abs(alone - whole).max() > 1e-1


def test_exploring_uses_the_current_place_of_a_moving_window(tiny_sd3_dir):
    """After three iterations at one place, the window moves by one step, for exploring and for
    regenerating.
    """
    window = {"size": 1, "schedule": "progressive", "every": 3}
    objective = {"name": "flow_grpo", "window": window}
    trainer = on_policy(tiny_sd3_dir, objective, explore={"paths": True, "steps": 4})
    places = []
    for done in (2, 3):
        trainer.generator.updates = done
        stochastic = trainer.generator.generate(tiny_groups(1)[0].cond, SEEDS)[0]["stochastic"][0]
        path = explored_paths(trainer.config, "flow_sde", done)
        assert path is not None and path.window is not None
        assert np.flatnonzero(stochastic).tolist() == list(path.window)
        places.append(path.window.start)
    assert places == [0, 1]


@pytest.mark.parametrize("shortcut", [True, False])
@pytest.mark.parametrize("name", ["flow_grpo", "dance_grpo", "awm"])
def test_ratio_at_the_sampling_weights_is_exactly_1(tiny_sd3_dir, name, shortcut):
    """The micro-batches have 4 points and so differ from the batches of sampling. The test also
    covers a separate pass with the old adapter.
    """
    objective = {"name": name, "times_per_sample": 3} if name == "awm" else {"name": name}
    trainer = on_policy(tiny_sd3_dir, objective, optimizer={"lr": 1e-2, "batch_size": 4})
    if not shortcut:
        trainer.updater._like_current = frozenset
    metrics = trainer.update(1, groups_of(trainer))
    assert metrics["loss/ratio"] == 1.0
    assert metrics["loss/clip_share"] == 0.0
    assert metrics["grad_norm"] > 0
    # the stored and the recomputed value differ only by the rounding of another batch shape
    if name != "awm":
        assert metrics["loss/log_prob_drift"] < 1e-5
    assert metrics["old_policy/decay"] == 0.0
    assert identical(
        adapter_state(trainer.transformer, "old"), adapter_state(trainer.transformer, "current")
    )


def test_path_of_other_weights_is_visible_as_drift(tiny_sd3_dir):
    trainer = on_policy(tiny_sd3_dir, PATHS["flow_grpo"])
    groups = groups_of(trainer)
    for name in ("current", "old"):
        load_adapter_state(trainer.transformer, name, adapter_state(trainer.transformer, "ema"))
    assert trainer.update(1, groups)["loss/log_prob_drift"] > 1e-4


@pytest.mark.parametrize(
    "objective", [*PATHS.values(), {"name": "awm", "times_per_sample": 3}], ids=[*PATHS, "awm"]
)
def test_later_steps_of_an_iteration_are_compared_with_the_sampling_weights(
    tiny_sd3_dir, objective
):
    """The test counts the passes per micro-batch. In the first step the old policy equals the
    current one and needs no pass. Later it needs one. The old weights do not change before the end
    of the iteration.
    """
    optimizer = {"lr": 1e-2, "steps_per_iteration": 2, "batch_size": 100}
    trainer = on_policy(
        tiny_sd3_dir,
        {**objective, **({"kl": 0.0} if "dance" not in objective["name"] else {})},
        optimizer=optimizer,
    )
    groups, passes, ratios = groups_of(trainer), [], []
    before = adapter_state(trainer.transformer, "old")
    trainer.transformer.register_forward_hook(lambda *_: passes.append(1))
    loss = trainer.objective.loss

    def record_loss(points, velocities, advantages):
        total, metrics = loss(points, velocities, advantages)
        ratios.append(
            (
                len(passes),
                metrics["loss/ratio"].item(),
                identical(before, adapter_state(trainer.transformer, "old")),
            )
        )
        return total, metrics

    trainer.objective.loss = record_loss
    metrics = trainer.update(1, groups)
    # one pass more for the anchor, which is not the current adapter
    extra = 1 if objective["name"] == "awm" else 0
    assert [count for count, _, _ in ratios] == [1 + extra, 3 + 2 * extra]
    assert all(same for _, _, same in ratios)
    assert ratios[0][1] == 1.0 and ratios[1][1] != 1.0
    assert metrics["loss/ratio"] == pytest.approx(
        np.mean([ratio for _, ratio, _ in ratios]), rel=1e-6
    )
    assert not identical(before, adapter_state(trainer.transformer, "old"))


def test_awm_has_a_separate_average(tiny_sd3_dir, tmp_path):
    """The anchor has the decay min(0.25 s, 0.3), and the evaluated average has 0.9. Both are in the
    checkpoint.
    """
    objective = {"name": "awm", "times_per_sample": 2, "ema_slope": 0.25}
    trainer = on_policy(tiny_sd3_dir, objective)
    assert trainer.adapters == ("current", "anchor", "ema", "old")
    for s, decay in ((1, 0.25), (2, 0.3)):
        before = {name: adapter_state(trainer.transformer, name) for name in ("anchor", "ema")}
        metrics = trainer.update(s, groups_of(trainer))
        current = adapter_state(trainer.transformer, "current")
        for name, d in (("anchor", decay), ("ema", 0.9)):
            # float32 rounding of weights below 1
            for key, new in adapter_state(trainer.transformer, name).items():
                torch.testing.assert_close(
                    new, d * before[name][key] + (1 - d) * current[key], rtol=0, atol=2e-7
                )
    assert {"loss/policy", "loss/kl", "loss/ema"} <= metrics.keys()
    trainer.save(tmp_path / "step_000002", {})
    resumed = tiny_trainer(tiny_sd3_dir, perturb=False, objective=objective)
    resumed.load(tmp_path / "step_000002")
    assert identical(training_state(trainer), training_state(resumed))


@pytest.mark.parametrize(
    # both GRPO objectives have the same kind of paths, and tests above cover their ratios
    "name",
    ["awm", "flow_grpo", pytest.param("dance_grpo", marks=pytest.mark.slow)],
)
def test_resumed_path_training_equals_uninterrupted_training_bit_for_bit(
    tiny_sd3_dir, tmp_path, name
):
    """There are two optimizer steps per iteration, and training resumes from a checkpoint."""
    settings = {
        "objective": {"name": name},
        "optimizer": {"lr": 1e-2, "steps_per_iteration": 2, "batch_size": 16},
    }
    uninterrupted = on_policy(tiny_sd3_dir, **settings)
    for s in range(2):
        uninterrupted.update(s, groups_of(uninterrupted))
    uninterrupted.save(tmp_path / "step_000002", {})
    resumed = tiny_trainer(tiny_sd3_dir, perturb=False, **settings)
    resumed.load(tmp_path / "step_000002")
    for trainer in (uninterrupted, resumed):
        trainer.update(2, groups_of(trainer))
    assert identical(training_state(uninterrupted), training_state(resumed))


def test_samples_without_a_path_are_refused(tiny_sd3_dir):
    trainer = on_policy(tiny_sd3_dir, PATHS["flow_grpo"])
    with pytest.raises(
        ValueError, match="prompt 0: no log_probs and no states: .*regenerate with that solver"
    ):
        trainer.update(1, tiny_groups())
    groups = groups_of(trainer)
    groups[1].samples["log_probs"] = groups[1].samples["log_probs"][:2]
    with pytest.raises(ValueError, match="prompt 1: .*all other arrays need 3 rows"):
        trainer.update(1, groups)
    groups = groups_of(trainer)
    for group in groups:
        group.samples["states"] = group.samples["states"][:, 1:]
    before = training_state(trainer)
    with pytest.raises(ValueError, match="paths of 3 steps, the schedule has 4"):
        trainer.update(1, groups)
    assert identical(before, training_state(trainer)) and trainer.done == 0


# ---- saved data of failures


def test_failed_update_saves_the_paths(tiny_sd3_dir, tmp_path):
    trainer = on_policy(tiny_sd3_dir, PATHS["dance_grpo"], failure_dir=tmp_path)
    groups = groups_of(trainer)
    groups[1].samples["states"][0, 1, 0, 0, 0] = np.nan
    with pytest.raises(
        NonFiniteTraining,
        match="the regenerated states of prompt 1 are not finite; weights are as before",
    ) as caught:
        trainer.update(4, groups)
    with safe_open(tmp_path / "iteration_000004.safetensors", "pt") as saved:
        for group in groups:
            for name, rows in group.samples.items():
                np.testing.assert_array_equal(
                    saved.get_tensor(f"prompt_{group.prompt_index:04d}/{name}").numpy(), rows
                )
    again = pickle.loads(pickle.dumps(caught.value))  # as Ray sends it from an actor
    assert str(again) == str(caught.value)
    assert again.module is None
    assert again.what == caught.value.what


def test_non_finite_merged_weights_save_the_previous_iteration(tiny_sd3_dir, tmp_path):
    """Adapters that are finite may overflow when they are merged. The update cannot detect this,
    but the export does.
    """
    trainer = tiny_trainer(tiny_sd3_dir, tmp_path)
    trainer.export(0)
    groups = tiny_groups()
    trainer.update(0, groups)
    layer = dict(trainer.transformer.named_modules())["transformer_blocks.0.attn.to_v"]
    for part in (layer.lora_A["old"], layer.lora_B["old"]):
        part.weight.data.fill_(3e38)
    with pytest.raises(
        NonFiniteWeights,
        match=(
            "'transformer_blocks.0.attn.to_v' are not finite.*as after iteration 0, its data are in"
        ),
    ) as caught:
        trainer.export(1)
    assert caught.value.module == "transformer_blocks.0.attn.to_v" and "\n" not in str(caught.value)
    with safe_open(tmp_path / "iteration_000000.safetensors", "pt") as saved:
        assert "not finite" in saved.metadata()["reason"]
        np.testing.assert_array_equal(
            saved.get_tensor("prompt_0001/latents").numpy(), groups[1].samples["latents"]
        )
        assert (
            saved.get_tensor("adapter/old/transformer_blocks.0.attn.to_v.lora_A.weight")[0, 0]
            == 3e38
        )
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.module == caught.value.module

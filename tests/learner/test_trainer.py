"""Regeneration with the requested weights, and export of the sampling policy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from policy.explorer import Explorer
from policy.lora import adapter_state, load_adapter_state
from policy.precision.backends import BACKENDS
from policy.sampling.noise import noise_for
from policy.sampling.sample import sample
from tests.learner.tiny import tiny_groups, tiny_trainer

SEEDS = [3, 2**63 + 5, 7]


def test_base_weights_equal_the_transformer_without_adapters(tiny_sd3_dir):
    trainer, cond = tiny_trainer(tiny_sd3_dir), tiny_groups(1)[0].cond
    without_adapters = trainer.family.load_transformer("cpu", torch.float32)
    expected = sample(
        trainer.family, without_adapters, cond.repeat(3), SEEDS, 4, "dpmpp_2m", batch_size=8
    )
    samples, images = trainer.generator.generate(cond, SEEDS, weights="base")
    latents = samples["latents"]
    assert samples.keys() == {"latents"}
    assert latents.dtype == np.float32
    assert np.array_equal(latents, expected.numpy())
    assert images.dtype == np.uint8 and images.shape == (3, 3, 16, 16)
    assert np.array_equal(
        images, trainer.family.decode(trainer.vae, expected, batch_size=8).numpy()
    )


def test_each_choice_of_weights_uses_its_adapter_and_the_default_is_old(tiny_sd3_dir):
    trainer, cond = tiny_trainer(tiny_sd3_dir), tiny_groups(1)[0].cond
    latents_by_weights = {
        weights: trainer.generator.generate(cond, SEEDS, weights=weights)[0]["latents"]
        for weights in ("current", "old", "ema", "base")
    }
    assert len({latents.tobytes() for latents in latents_by_weights.values()}) == 4
    assert np.array_equal(
        trainer.generator.generate(cond, SEEDS)[0]["latents"], latents_by_weights["old"]
    )
    load_adapter_state(trainer.transformer, "current", adapter_state(trainer.transformer, "ema"))
    assert np.array_equal(
        trainer.generator.generate(cond, SEEDS, weights="current")[0]["latents"],
        latents_by_weights["ema"],
    )
    with pytest.raises(
        ValueError, match="unknown weights 'best': use one of current, ema, old, base"
    ):
        trainer.generator.generate(cond, SEEDS, weights="best")


def test_evaluation_settings_are_passed_to_the_solver(tiny_sd3_dir):
    """One Euler step from sigma 1 to 0 gives x0 = eps - v. If the conditioning has a row per seed,
    it is used unchanged.
    """
    trainer = tiny_trainer(tiny_sd3_dir)
    cond = type(tiny_groups(1)[0].cond).cat([group.cond for group in tiny_groups(3)])
    samples, _ = trainer.generator.generate(
        cond, SEEDS, steps=1, weights="base", solver="euler", batch_size=3
    )
    noise = noise_for(SEEDS, trainer.family.latent_shape)
    with torch.no_grad():
        without_adapters = trainer.family.load_transformer("cpu", torch.float32)
        v = trainer.family.velocity(without_adapters, noise, torch.tensor(1.0), cond)
    np.testing.assert_array_equal(samples["latents"], (noise + (-1.0) * v).numpy())


def test_regeneration_does_not_change_the_trainer(tiny_sd3_dir):
    """Regeneration gives the same result after sampling with other weights, and an update after it
    equals an update without it.
    """
    cond = tiny_groups(1)[0].cond
    with_sampling, without = tiny_trainer(tiny_sd3_dir), tiny_trainer(tiny_sd3_dir)
    first = with_sampling.generator.generate(cond, SEEDS)[0]["latents"]
    with_sampling.generator.generate(cond, SEEDS, weights="base")
    assert np.array_equal(with_sampling.generator.generate(cond, SEEDS)[0]["latents"], first)
    metrics = [
        {k: v for k, v in t.update(0, tiny_groups()).items() if not k.startswith("time/")}
        for t in (with_sampling, without)
    ]
    assert metrics[0] == metrics[1]
    names = {"loss/policy", "loss/kl", "grad_norm", "zero_std_ratio"}
    assert names <= metrics[0].keys()
    # the driver reports these, because it knows all rewards and the total time
    assert not {"reward/train_mean", "reward/train_std", "time/update_s"} & metrics[0].keys()


def test_adapters_start_equal_and_depend_on_the_seed(tiny_sd3_dir):
    one, same, other = (
        tiny_trainer(tiny_sd3_dir, perturb=False, seed=seed) for seed in (11, 11, 12)
    )
    states = [adapter_state(one.transformer, name) for name in one.adapters] + [
        adapter_state(same.transformer, "current")
    ]
    assert all(torch.equal(states[0][key], state[key]) for state in states for key in states[0])
    changed = adapter_state(other.transformer, "current")
    assert any(not torch.equal(states[0][key], changed[key]) for key in changed)
    assert one.trainable_parameters == sum(t.numel() for t in states[0].values())


def test_exported_weights_are_the_sampling_policy(tiny_sd3_dir):
    """An explorer in full precision generates the same latents as the learner, bit for bit, because
    both use the merged weights. Other adapters differ by more than 1e-2.
    """
    trainer, cond = tiny_trainer(tiny_sd3_dir), tiny_groups(1)[0].cond
    manifest, chunks, statistics = trainer.export(7)
    assert manifest.version == 7 and statistics == {}
    explorer = Explorer(trainer.family, BACKENDS["fp32"])
    assert explorer.load(manifest, chunks) == (7, manifest.checksum)
    _, explored = explorer.explore(cond, SEEDS, 4, "dpmpp_2m")
    np.testing.assert_array_equal(
        explored, trainer.generator.generate(cond, SEEDS, weights="old")[0]["latents"]
    )
    for other in ("current", "ema", "base"):
        assert (
            np.abs(
                explored - trainer.generator.generate(cond, SEEDS, weights=other)[0]["latents"]
            ).max()
            > 1e-2
        )


def test_exports_report_changed_codes_and_quantized_layers(tiny_sd3_dir):
    trainer = tiny_trainer(
        tiny_sd3_dir,
        explore={
            "pool_size": 8,
            "backend": "emulated_nvfp4",
            "modules_to_not_convert": ["*.to_out.0"],
        },
    )
    rows = {row["name"]: row for row in trainer.exporter.table}
    assert rows["transformer_blocks.0.attn.to_q"]["quantized"]
    assert not rows["transformer_blocks.0.attn.to_out.0"]["quantized"]
    assert "explore.modules_to_not_convert" in rows["transformer_blocks.0.attn.to_out.0"]["why"]
    first, chunks, _ = trainer.export(0)
    assert first.format == "nvfp4"
    same, again, statistics = trainer.export(1)
    assert statistics["weights/codes_changed"] == 0
    assert all(np.array_equal(a, b) for a, b in zip(chunks, again, strict=True))
    trainer.update(0, tiny_groups())
    _, _, statistics = trainer.export(2)
    assert 0 < statistics["weights/codes_changed"] <= 1
    assert 0 < statistics["weights/delta_cosine"] <= 1
    assert same.checksum != first.checksum  # the checksum includes the version


def test_arm_without_exploring_exports_nothing(tiny_sd3_dir):
    trainer = tiny_trainer(tiny_sd3_dir, arm="diffusionnft")
    assert trainer.exporter.table == []
    with pytest.raises(ValueError, match="'diffusionnft' explores nothing"):
        trainer.export(0)


def test_naive_scaling_explores_in_the_precision_of_regeneration(tiny_sd3_dir):
    trainer = tiny_trainer(
        tiny_sd3_dir, arm="naive_scaling", explore={"pool_size": 8, "backend": "emulated_nvfp4"}
    )
    assert trainer.export(0)[0].format == "fp32"

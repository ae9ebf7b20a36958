"""What the learner packs for explorers whose device is not its own, and what of it is compiled."""

import shutil

import numpy as np
import pytest
import torch

from learner import generator
from learner.distance import relative_distance
from learner.identity import SAFETY, _nudged
from policy.decoders import decoder_on
from policy.explorer import Explorer
from policy.lora import adapted_modules, adapter_state, load_adapter_state
from policy.precision.backends import BACKENDS
from tests.learner.test_paths import PATHS, groups_of
from tests.learner.tiny import tiny_groups, tiny_trainer


def test_the_rollout_actors_determine_the_backend(tiny_sd3_dir):
    """With "auto" this process would take its own device's; a run on other GPUs tells it theirs, at
    every export.
    """
    trainer = tiny_trainer(tiny_sd3_dir, explore={"pool_size": 8, "backend": "auto"})
    assert trainer.export(0)[0].format == "nvfp4"
    manifest, chunks, statistics = trainer.export(1, "fp8")
    assert manifest.format == "fp8" and statistics == {}
    Explorer(trainer.family, BACKENDS["fp8"]).load(manifest, chunks)
    assert trainer.export(2, "fp8")[2] == {"weights/codes_changed": 0.0}
    assert {row["why"] for row in trainer.exporter.table if row["quantized"]} == {
        "a linear layer of the blocks"
    }
    assert any(row["fused"] for row in trainer.exporter.table) == bool(trainer.family.fuse)


def test_a_learner_without_the_explorers_gpu_packs_for_it(tiny_sd3_dir):
    trainer = tiny_trainer(tiny_sd3_dir, explore={"pool_size": 8, "backend": "te_nvfp4"})
    assert trainer.export(0)[0].format == "nvfp4"


def regenerating(model, **more):
    """Trainers that regenerate eagerly and compiled, otherwise alike."""
    settings = {"steps": 4, "precision": "fp32", "batch_size": 8}
    return [
        tiny_trainer(model, regenerate=settings | {"compile": compile}, **more)
        for compile in (False, True)
    ]


def latents(trainer, weights=None, **more):
    return trainer.generator.generate(tiny_groups(1)[0].cond, [1, 2], weights=weights, **more)[0]


def test_regenerating_and_evaluating_are_compiled_and_training_is_not(tiny_sd3_dir, graphs):
    """Once for all weights, those of later updates too; with the bits of eager passes, as nothing
    is fused here.
    """
    eager, trainer = regenerating(tiny_sd3_dir)
    for _ in range(2):
        for weights in ("old", "ema", "base"):
            expected, found = (latents(t, weights)["latents"] for t in (eager, trainer))
            np.testing.assert_array_equal(found, expected)
        assert len(graphs) == 2
        for each in (eager, trainer):
            each.update(each.done, tiny_groups(1))
        assert len(graphs) == 2
    assert trainer.checksum() == eager.checksum()


def test_on_a_gpu_regenerated_images_are_decoded_by_a_graph(tiny_sd3_dir, graphs, monkeypatch):
    """With a CPU in the GPU's place: the denoiser's two graphs, and one more."""
    there = torch.device("cuda")
    monkeypatch.setattr(generator, "decoder_on", lambda _, *what: decoder_on(there, *what))
    eager, trainer = regenerating(tiny_sd3_dir)
    cond = tiny_groups(1)[0].cond
    expected, found = (each.generator.generate(cond, [1, 2])[1] for each in (eager, trainer))
    np.testing.assert_array_equal(found, expected)
    assert len(graphs) == 3


def test_paths_are_compiled_without_merging(tiny_sd3_dir, graphs):
    """Adapters are not merged for them; their density is the policy's that is trained."""
    eager, trainer = regenerating(tiny_sd3_dir, objective=PATHS["flow_grpo"])
    expected, found = latents(eager), latents(trainer)
    assert all(np.array_equal(found[name], rows) for name, rows in expected.items())
    beside = list(graphs)
    latents(trainer, solver="euler")
    merged = graphs[len(beside) :]
    assert len(merged) == len(beside) == 2 and min(beside) > max(merged)
    drifts = [t.update(0, groups_of(t, 1))["loss/log_prob_drift"] for t in (eager, trainer)]
    assert drifts[0] == drifts[1] < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_images_equal_eager_ones_up_to_rounding(tiny_sd3_dir):
    """The compiler fuses elementwise work and may sum in another order: the bound is the one that
    the policy identity check has for other kernels. New weights are the ones that are used.
    """
    eager, trainer = regenerating(tiny_sd3_dir)
    before = []
    for weights in ("old", "old", "base"):
        expected, found = (latents(t, weights)["latents"] for t in (eager, trainer))
        (group,) = tiny_groups(1)
        nudged = _nudged(group.cond, torch.finfo(torch.float32).eps)
        moved = eager.generator.generate(nudged, [1, 2], weights=weights)[0]["latents"]
        roundings = 4 * len(adapted_modules(trainer.transformer))
        bound = SAFETY * roundings**0.5 * relative_distance(moved, expected)
        assert 0 < relative_distance(found, expected) <= bound
        assert all(relative_distance(found, other) > 100 * bound for other in before)
        before.append(found)
        for each in (eager, trainer):
            state = adapter_state(each.transformer, "old")
            load_adapter_state(each.transformer, "old", {k: 2 * t for k, t in state.items()})


def test_a_regenerator_that_cannot_be_compiled_is_one_line(tiny_sd3_dir, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"^regenerate.compile: torch.compile needs a C\+\+"):
        tiny_trainer(tiny_sd3_dir, regenerate={"precision": "fp32", "compile": True})

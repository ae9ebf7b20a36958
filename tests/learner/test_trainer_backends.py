"""How the learner packs weights for explorers on other devices, and which of its passes are
compiled.
"""

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


def test_export_uses_the_backend_that_explorers_report(tiny_sd3_dir):
    """With "auto", the learner would select the backend of its own device. Explorers on other GPUs
    report their backend, and each export uses it.
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


def test_learner_without_the_gpu_of_the_explorer_packs_for_it(tiny_sd3_dir):
    trainer = tiny_trainer(tiny_sd3_dir, explore={"pool_size": 8, "backend": "te_nvfp4"})
    assert trainer.export(0)[0].format == "nvfp4"


def eager_and_compiled(model, **more):
    """Return two equal trainers. One regenerates eagerly and the other is compiled."""
    settings = {"steps": 4, "precision": "fp32", "batch_size": 8}
    return [
        tiny_trainer(model, regenerate=settings | {"compile": compile}, **more)
        for compile in (False, True)
    ]


def latents(trainer, weights=None, **more):
    return trainer.generator.generate(tiny_groups(1)[0].cond, [1, 2], weights=weights, **more)[0]


def test_regeneration_and_evaluation_are_compiled_and_training_is_not(tiny_sd3_dir, graphs):
    """Graphs are made once for all weights, including those of later updates. Results equal eager
    passes bit for bit, because the test compiler fuses nothing.
    """
    eager, trainer = eager_and_compiled(tiny_sd3_dir)
    for _ in range(2):
        for weights in ("old", "ema", "base"):
            expected, actual = (latents(t, weights)["latents"] for t in (eager, trainer))
            np.testing.assert_array_equal(actual, expected)
        assert len(graphs) == 2
        for each in (eager, trainer):
            each.update(each.done, tiny_groups(1))
        assert len(graphs) == 2
    assert trainer.checksum() == eager.checksum()


def test_decoding_of_regenerated_images_is_compiled_on_a_gpu(tiny_sd3_dir, graphs, monkeypatch):
    """A CPU replaces the GPU. There are the two graphs of the denoiser and one more for the
    decoder.
    """
    cuda = torch.device("cuda")
    monkeypatch.setattr(generator, "decoder_on", lambda _, *what: decoder_on(cuda, *what))
    eager, trainer = eager_and_compiled(tiny_sd3_dir)
    cond = tiny_groups(1)[0].cond
    expected, actual = (each.generator.generate(cond, [1, 2])[1] for each in (eager, trainer))
    np.testing.assert_array_equal(actual, expected)
    assert len(graphs) == 3


def test_paths_are_compiled_with_separate_adapters(tiny_sd3_dir, graphs):
    """Paths are generated with adapters that are not merged, so that their density is that of the
    trained policy.
    """
    eager, trainer = eager_and_compiled(tiny_sd3_dir, objective=PATHS["flow_grpo"])
    expected, actual = latents(eager), latents(trainer)
    assert all(np.array_equal(actual[name], rows) for name, rows in expected.items())
    separate = list(graphs)
    latents(trainer, solver="euler")
    merged = graphs[len(separate) :]
    assert len(merged) == len(separate) == 2 and min(separate) > max(merged)
    drifts = [t.update(0, groups_of(t, 1))["loss/log_prob_drift"] for t in (eager, trainer)]
    assert drifts[0] == drifts[1] < 1e-5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_regeneration_matches_the_eager_one_up_to_rounding(tiny_sd3_dir):
    """The compiler fuses elementwise operations and may change the order of sums. The bound is the
    one that the policy identity check uses for other kernels. New weights take effect.
    """
    eager, trainer = eager_and_compiled(tiny_sd3_dir)
    before = []
    for weights in ("old", "old", "base"):
        expected, actual = (latents(t, weights)["latents"] for t in (eager, trainer))
        (group,) = tiny_groups(1)
        nudged = _nudged(group.cond, torch.finfo(torch.float32).eps)
        moved = eager.generator.generate(nudged, [1, 2], weights=weights)[0]["latents"]
        roundings = 4 * len(adapted_modules(trainer.transformer))
        bound = SAFETY * roundings**0.5 * relative_distance(moved, expected)
        assert 0 < relative_distance(actual, expected) <= bound
        assert all(relative_distance(actual, other) > 100 * bound for other in before)
        before.append(actual)
        for each in (eager, trainer):
            state = adapter_state(each.transformer, "old")
            load_adapter_state(each.transformer, "old", {k: 2 * t for k, t in state.items()})


def test_regeneration_without_a_compiler_is_refused_in_one_line(tiny_sd3_dir, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"^regenerate.compile: torch.compile needs a C\+\+"):
        tiny_trainer(tiny_sd3_dir, regenerate={"precision": "fp32", "compile": True})

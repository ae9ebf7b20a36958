"""What the learner packs for explorers whose device is not its own, and what of it is compiled."""

import numpy as np
import pytest
from torch import nn

import learner.generating as module
from policy.explorer import Explorer
from policy.precision.backends import BACKENDS
from tests.learner.tiny import tiny_groups, tiny_trainer


def test_explorers_know_better_which_backend_they_run(tiny_sd3_dir):
    """With "auto" this process would take its own device's; a run on other GPUs tells it theirs, at
    every export.
    """
    trainer = tiny_trainer(tiny_sd3_dir, explore={"pool_size": 8, "backend": "auto"})
    assert trainer.export(0)[0].format == "nvfp4"
    manifest, chunks, statistics = trainer.export(1, "fp8")
    assert manifest.format == "fp8" and statistics == {}
    Explorer(trainer.family, BACKENDS["fp8"]).load(manifest, chunks)
    assert trainer.export(2, "fp8")[2] == {"weights/codes_changed": 0.0}
    assert {row["why"] for row in trainer.exporter.table if row["quantised"]} == {
        "a linear of the blocks"
    }
    assert any(row["fused"] for row in trainer.exporter.table) == bool(trainer.family.fuse)


def test_a_learner_without_the_explorers_gpu_packs_for_it(tiny_sd3_dir):
    trainer = tiny_trainer(tiny_sd3_dir, explore={"pool_size": 8, "backend": "te_nvfp4"})
    assert trainer.export(0)[0].format == "nvfp4"


def test_only_regeneration_is_compiled(tiny_sd3_dir, monkeypatch):
    """A stand-in for the compiler counts calls: images go through it, training does not, and both
    have the same weights.
    """
    calls = []

    class Compiled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def __getattr__(self, name: str):
            return (
                super().__getattr__(name)
                if name == "inner" or name.startswith("_")
                else getattr(self.inner, name)
            )

        def forward(self, *args, **named):
            calls.append(1)
            return self.inner(*args, **named)

    monkeypatch.setattr(module, "compiled", lambda transformer, device: Compiled(transformer))
    settings = {"steps": 4, "precision": "fp32", "batch_size": 8}
    eager = tiny_trainer(tiny_sd3_dir, regenerate=settings)
    trainer = tiny_trainer(tiny_sd3_dir, regenerate=settings | {"compile": True})
    groups = tiny_groups(1)
    for weights in ("old", "base"):
        found, wanted = (
            t.generator.generate(groups[0].cond, [1, 2], weights=weights)[0]["latents"]
            for t in (trainer, eager)
        )
        np.testing.assert_array_equal(found, wanted)
    assert len(calls) == 8
    trainer.update(0, groups)
    assert len(calls) == 8


def test_a_regenerator_that_cannot_be_compiled_is_one_line(tiny_sd3_dir, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"^compile: torch.compile needs a C\+\+ compiler"):
        tiny_trainer(tiny_sd3_dir, regenerate={"precision": "fp32", "compile": True})

"""Packing choices of the configuration reach the proxies that `sol-rl fidelity` measures."""

import pytest
import torch

from analysis.fidelity import measure
from analysis.fidelity.results import Measurement
from configs.load import ConfigError
from learner.trainer import Trainer
from policy.precision.backends import BACKENDS
from policy.precision.nvfp4 import quantise
from tests.cluster.runs import tiny_config

NAME = "transformer_blocks.0.attn.to_q"


@pytest.mark.parametrize("chosen", [False, True])
def test_packing_choices_are_measured_as_configured(tiny_sd3_dir, tmp_path, chosen):
    settings = {
        "explore__scale_search": not chosen,
        "explore__frozen_amax": chosen,
        "explore__activation_amax": "exact" if chosen else "power_of_two",
    }
    config = tiny_config(tiny_sd3_dir, tmp_path, "options", **settings)
    trainer = Trainer(config)
    explorer = measure.explorer_of(config, trainer, BACKENDS["emulated_nvfp4"])
    layer = explorer.transformer.get_submodule(NAME)
    weight = trainer.transformer.get_submodule(NAME).base_layer.weight  # the adapter is zero yet
    amax = weight.abs().max() * (2 if chosen else 1)
    assert layer.amax == amax and layer.workspace.exact == chosen
    assert torch.equal(layer.codes, quantise(weight, search=not chosen, amax=amax).codes)


def test_without_a_compiler_it_does_not_begin(tiny_sd3_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = tiny_config(tiny_sd3_dir, tmp_path, "compiled", explore__compile=True)
    with pytest.raises(ConfigError, match="no 'no-such-compiler'"):
        measure.run(config, Measurement(2, 24, (2,), ("fp32",)), tmp_path / "out", print)
    assert not (tmp_path / "out").exists()

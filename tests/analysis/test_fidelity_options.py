"""Packing settings of the configuration apply to the proxies of `sol-rl fidelity`."""

import itertools

import pytest
import torch

from analysis.fidelity import measure
from analysis.fidelity.results import Measurement, Weights
from analysis.measuring import encode_prompts
from configs.load import ConfigError
from configs.prompts import Prompt
from learner.trainer import Trainer
from policy.lora import adapted_modules, matrices
from policy.precision.backends import BACKENDS
from policy.precision.nvfp4 import quantize
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
    explorer = measure.load_explorer(config, trainer, BACKENDS["emulated_nvfp4"])
    layer = explorer.transformer.get_submodule(NAME)
    weight = trainer.transformer.get_submodule(NAME).base_layer.weight  # the adapter is still zero
    amax = weight.abs().max() * (2 if chosen else 1)
    assert layer.amax == amax and layer.workspace.exact == chosen
    assert torch.equal(layer.codes, quantize(weight, search=not chosen, amax=amax).codes)


def test_without_a_compiler_fidelity_does_not_start(tiny_sd3_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = tiny_config(tiny_sd3_dir, tmp_path, "compiled", explore__compile=True)
    with pytest.raises(ConfigError, match="no 'no-such-compiler'"):
        measure.run(config, Measurement(2, 24, (2,), ("fp32",)), tmp_path / "out", print)
    assert not (tmp_path / "out").exists()


def test_proxies_use_the_requested_weights(tiny_sd3_dir, tmp_path):
    """An adapter beside an unquantized base gives the images of merged weights, up to rounding.

    The base alone gives those of an untrained policy; packed weights differ from both.
    """
    config = tiny_config(tiny_sd3_dir, tmp_path, "forms")
    trainer, untrained = Trainer(config), Trainer(config)
    for module, layer in adapted_modules(trainer.transformer):
        _, up = matrices(layer, trainer.objective.sampling_adapter)
        torch.nn.init.normal_(up, std=0.05, generator=torch.Generator().manual_seed(len(module)))
    cond = encode_prompts(config, [Prompt("red circle")])[0]

    def drawn(backend: str, weights: Weights, policy: Trainer = trainer) -> torch.Tensor:
        explorer = measure.published(config, policy, BACKENDS[backend], weights)
        return explorer.latents(cond, range(4), 2, config.explore.solver)

    merged, beside, base = (drawn("fp32", form) for form in ("merged", "beside", "base"))
    assert torch.equal(base, drawn("fp32", "merged", untrained))
    moved = (merged - base).abs().max()
    assert moved > 0.01 and (merged - beside).abs().max() < 1e-3 * moved
    packed = [drawn("emulated_nvfp4", form) for form in ("merged", "beside", "base")]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(packed, 2))

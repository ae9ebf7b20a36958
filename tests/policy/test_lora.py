"""Adapters: without one, the model equals the base model exactly, and merging adds the product to
the weights.
"""

import pytest
import torch

from policy.lora import (
    adapted_modules,
    adapter_state,
    add_adapters,
    blend,
    load_adapter_state,
    target_modules,
    trainable,
    use_adapter,
)
from policy.merging import merged_weights
from policy.sampling.noise import noise_for
from tests.policy.conftest import LORA, latents


def test_disabled_adapters_give_the_base_model_bit_for_bit(family, adapted, cond, randomise):
    base = latents(family, family.load_transformer("cpu", torch.float32), cond)
    randomise(adapted, "current", 0)
    with use_adapter(adapted, None):
        assert torch.equal(latents(family, adapted, cond), base)
    with use_adapter(adapted, "old"):  # B = 0: adds zeros
        assert torch.equal(latents(family, adapted, cond), base)
    assert (latents(family, adapted, cond) - base).abs().max() > 0.01


def test_initial_adapters_are_equal_gaussian_and_seeded(family, adapted):
    states = [adapter_state(adapted, name) for name in ("current", "old", "ema")]
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]) and torch.equal(value, states[2][key])
        assert value.dtype == torch.float32
        assert ("lora_A" in key) == bool(value.any())
    downs = torch.cat([value.flatten() for key, value in states[0].items() if "lora_A" in key])
    # 15 modules x 4 x 32 = 1920 values with standard deviation 1/4. The standard error of the
    # deviation is 1 / (4 sqrt(2 * 1920)) = 0.004. The test allows five of them.
    assert abs(downs.std() - 0.25) < 0.02
    other = family.load_transformer("cpu", torch.float32)
    add_adapters(other, LORA, family, seed=1)
    assert all(torch.equal(v, states[0][k]) for k, v in adapter_state(other, "current").items())
    third = family.load_transformer("cpu", torch.float32)
    add_adapters(third, LORA, family, seed=2)
    assert not torch.equal(
        next(iter(adapter_state(third, "current").values())), next(iter(states[0].values()))
    )


def test_adding_adapters_ignores_the_global_random_state(family, transformer):
    before = torch.get_rng_state()
    add_adapters(transformer, LORA, family, seed=1)
    with torch.random.fork_rng():
        torch.set_rng_state(before)
        expected = adapter_state(transformer, "current")
    torch.manual_seed(123)
    again = family.load_transformer("cpu", torch.float32)
    add_adapters(again, LORA, family, seed=1)
    assert all(torch.equal(v, expected[k]) for k, v in adapter_state(again, "current").items())


def test_only_current_is_trainable_whichever_adapter_is_active(adapted):
    expected = {id(parameter) for _, parameter in trainable(adapted)}
    assert len(expected) == 30
    for name in ("current", "old", "ema", None):
        with use_adapter(adapted, name):
            assert {id(p) for p in adapted.parameters() if p.requires_grad} == expected
    assert {id(p) for p in adapted.parameters() if p.requires_grad} == expected


def test_gradients_are_correct_after_using_other_adapters(family, adapted, cond):
    x, sigma = noise_for([4], family.latent_shape), torch.tensor(0.5)
    velocity = family.velocity(adapted, x, sigma, cond.rows(0))
    with use_adapter(adapted, "old"), torch.no_grad():
        family.velocity(adapted, x, sigma, cond.rows(0))
    with use_adapter(adapted, None), torch.no_grad():
        family.velocity(adapted, x, sigma, cond.rows(0))
    velocity.square().sum().backward()
    # A's gradient is a multiple of B, which is 0; the last block does not use the text's queries
    unused = "transformer_blocks.1.attn.add_q_proj.lora_B.weight"
    for key, parameter in trainable(adapted):
        assert parameter.grad is not None, key
        assert bool(parameter.grad.any()) == ("lora_B" in key and key != unused), key


def test_use_adapter_can_be_nested_and_refuses_unknown_names(adapted):
    def active():
        return {
            (tuple(layer.active_adapters), layer.disable_adapters)
            for _, layer in adapted_modules(adapted)
        }

    with use_adapter(adapted, "old"):
        with use_adapter(adapted, None):
            assert {disabled for _, disabled in active()} == {True}
            with use_adapter(adapted, "ema"):
                assert active() == {(("ema",), False)}
        assert active() == {(("old",), False)}
    assert active() == {(("current",), False)}
    with (
        pytest.raises(
            KeyError, match="adapter 'best' does not exist; available: current, old, ema"
        ),
        use_adapter(adapted, "best"),
    ):
        pass


def test_merged_weights_match_the_forward_pass_with_the_adapter(adapted, randomise):
    """Each module is compared with its merged weight. Both computations round at most (K + r + 4)
    times, each by at most 2^-24 of the sum of absolute products.
    """
    randomise(adapted, "ema", 3)
    merged = dict(merged_weights(adapted, "ema"))
    assert set(merged) == {name for name, _ in adapted_modules(adapted)} and len(merged) == 15
    for name, layer in adapted_modules(adapted):
        x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(0))
        with use_adapter(adapted, "ema"):
            y = layer(x).detach()
        weight, bias = merged[name], layer.base_layer.bias
        down, up = layer.lora_A["ema"].weight.abs(), layer.lora_B["ema"].weight.abs()
        size = (
            x.abs() @ (layer.base_layer.weight.abs() + layer.scaling["ema"] * up @ down).t()
            + bias.abs()
        )
        assert (
            (y - (x @ weight.t() + bias)).abs() <= 2 * (layer.in_features + 8) * 2.0**-24 * size
        ).all()
        assert not torch.equal(weight, layer.base_layer.weight)
    for name, weight in merged_weights(adapted, None):
        assert torch.equal(weight, adapted.get_submodule(name).base_layer.weight)


def test_bfloat16_base_keeps_float32_adapters(family):
    transformer = family.load_transformer("cpu", torch.bfloat16)
    add_adapters(transformer, LORA, family, seed=1)
    assert {p.dtype for _, p in trainable(transformer)} == {torch.float32}
    assert transformer.transformer_blocks[0].attn.to_q.base_layer.weight.dtype == torch.bfloat16


def test_blend_matches_the_closed_form(adapted, randomise):
    current, old = randomise(adapted, "current", 1), randomise(adapted, "old", 2)
    blend(adapted, "old", "current", 0.75)
    for key, value in adapter_state(adapted, "old").items():
        torch.testing.assert_close(
            value, 0.75 * old[key] + 0.25 * current[key], rtol=0, atol=4 * 2.0**-24
        )
    blend(adapted, "old", "current", 0.0)
    assert all(
        torch.equal(value, current[key]) for key, value in adapter_state(adapted, "old").items()
    )
    blend(adapted, "ema", "current", 1.0)
    assert not torch.equal(adapter_state(adapted, "ema")[key], current[key])
    assert all(
        torch.equal(value, current[key]) for key, value in adapter_state(adapted, "current").items()
    )
    with pytest.raises(ValueError, match=r"decay 1.5 is outside \[0, 1\]"):
        blend(adapted, "old", "current", 1.5)


def test_adapter_states_are_copies_and_are_validated(adapted):
    state = adapter_state(adapted, "current")
    key = "transformer_blocks.0.attn.to_q.lora_A.weight"
    state[key] += 1
    assert not torch.equal(adapter_state(adapted, "current")[key], state[key])
    with pytest.raises(ValueError, match=f"adapter 'old': {key} is "):
        load_adapter_state(adapted, "old", {**state, key: torch.zeros(4, 3)})
    with pytest.raises(
        ValueError, match="1 keys do not belong to the model, such as 'proj_out.lora_A.weight'"
    ):
        load_adapter_state(adapted, "old", {**state, "proj_out.lora_A.weight": torch.zeros(1)})


def test_targets_match_path_suffixes_with_wildcards(family):
    transformer = family.load_transformer("cpu", torch.float32)
    assert target_modules(transformer, ["attn.to_q"]) == [
        f"transformer_blocks.{i}.attn.to_q" for i in (0, 1)
    ]
    assert target_modules(transformer, ["transformer_blocks.1.*.to_q", "proj_out"]) == [
        "transformer_blocks.1.attn.to_q",
        "proj_out",
    ]
    with pytest.raises(ValueError, match="ends in 'attn.to_out.1'"):
        # one of the targets matches no layer
        target_modules(transformer, ["to_q", "attn.to_out.1"])
    # a part of a name, a block, and a layer that is not linear
    for targets in (["o_q"], ["transformer_blocks.0"], ["norm1"]):
        with pytest.raises(
            ValueError, match=("no linear layer of the transformer has a name that ends in")
        ):
            target_modules(transformer, targets)

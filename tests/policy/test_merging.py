"""Merging for a while: the weights inside are the merged ones, and the base comes back."""

import pytest
import torch

from planning import sizes
from policy.lora import adapted_modules, add_adapters, use_adapter
from policy.merging import exact_products, merged, merged_weight, merged_weights
from policy.sampling.noise import noise_for
from tests.policy.conftest import LORA


def bits(transformer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in transformer.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_merged_within_the_context_only(family, randomise, dtype):
    transformer = family.load_transformer("cpu", dtype)
    add_adapters(transformer, LORA, family, seed=1)
    randomise(transformer, "ema", 3)
    before, expected = bits(transformer), dict(merged_weights(transformer, "ema"))
    pointers = {name: p.data_ptr() for name, p in transformer.named_parameters()}
    with merged(transformer, "ema"):
        for name, layer in adapted_modules(transformer):
            weight = layer.base_layer.weight
            assert torch.equal(weight, expected[name].to(dtype)) and layer.disable_adapters
            assert not torch.equal(weight, before[f"{name}.base_layer.weight"])
    after = bits(transformer)
    assert all(torch.equal(after[name], before[name]) for name in before)
    # not a copy of the base: the very tensors, so what was derived from them stays true
    assert pointers == {name: p.data_ptr() for name, p in transformer.named_parameters()}
    assert not any(layer.disable_adapters for _, layer in adapted_modules(transformer))


def test_the_base_is_restored_after_an_error(family, adapted, randomise):
    randomise(adapted, "old", 3)
    before = bits(adapted)
    with pytest.raises(RuntimeError, match="inside"), merged(adapted, "old"):
        raise RuntimeError("inside")
    with pytest.raises(KeyError, match="adapter 'best' does not exist"), merged(adapted, "best"):
        pass
    with merged(adapted, None):
        assert all(torch.equal(tensor, before[name]) for name, tensor in bits(adapted).items())
        assert all(layer.disable_adapters for _, layer in adapted_modules(adapted))
    assert all(torch.equal(tensor, before[name]) for name, tensor in bits(adapted).items())


def test_merged_passes_agree_with_unmerged_adapters(family, adapted, cond, randomise):
    """Two roundings of sums of 32 and 4 terms per product, through 2 blocks: 1e-5 allowed of
    velocities of size 1; the base differs by more than 0.01.
    """
    randomise(adapted, "old", 3)
    x, sigma, rows = noise_for([4], family.latent_shape), torch.tensor(0.5), cond.rows(0)
    found = {}
    with torch.no_grad():
        for name, context in (("merged", merged), ("beside", use_adapter)):
            with context(adapted, "old"):
                found[name] = family.velocity(adapted, x, sigma, rows)
        with use_adapter(adapted, None):
            base = family.velocity(adapted, x, sigma, rows)
        randomise(adapted, "old", 5)
        with merged(adapted, "old"):  # what was merged before is not kept
            assert (family.velocity(adapted, x, sigma, rows) - found["merged"]).abs().max() > 0.01
    assert not torch.equal(found["merged"], found["beside"])
    torch.testing.assert_close(found["merged"], found["beside"], rtol=0, atol=1e-5)
    assert (found["merged"] - base).abs().max() > 0.01


def test_merging_uses_float32_products_regardless_of_tf32(adapted, monkeypatch):
    seen, matmul = [], torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor,
        "__matmul__",
        lambda *args: seen.append(torch.get_float32_matmul_precision()) or matmul(*args),
    )
    try:
        torch.set_float32_matmul_precision("high")
        merged_weight(adapted_modules(adapted)[0][1], "old")
        assert seen == ["highest"] and torch.get_float32_matmul_precision() == "high"
        with pytest.raises(KeyError), exact_products():
            raise KeyError
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_only_adapted_weights_are_held_twice(family, adapted):
    assert sizes.adapted_bytes(adapted) == sum(
        4 * layer.base_layer.weight.numel() for _, layer in adapted_modules(adapted)
    )

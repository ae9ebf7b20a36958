"""Temporary merging: inside the context the model has the merged weights, and afterwards the base
weights.
"""

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
def test_merging_is_active_inside_the_context_and_undone_after_it(family, randomise, dtype):
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
    # the restored weights are the same tensors and not copies, so references to them stay valid
    assert pointers == {name: p.data_ptr() for name, p in transformer.named_parameters()}
    assert not any(layer.disable_adapters for _, layer in adapted_modules(transformer))


def test_base_is_restored_after_an_error_and_none_merges_nothing(family, adapted, randomise):
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


def test_merged_forward_pass_matches_the_separate_adapter(family, adapted, cond, randomise):
    """The product with merged weights and the separate adapter products round sums of 32 and 4
    terms differently, through 2 blocks. The test allows 1e-5 for velocities of size 1. The base
    model differs by more than 0.01.
    """
    randomise(adapted, "old", 3)
    x, sigma, rows = noise_for([4], family.latent_shape), torch.tensor(0.5), cond.rows(0)
    velocities = {}
    with torch.no_grad():
        for name, context in (("merged", merged), ("separate", use_adapter)):
            with context(adapted, "old"):
                velocities[name] = family.velocity(adapted, x, sigma, rows)
        with use_adapter(adapted, None):
            base = family.velocity(adapted, x, sigma, rows)
        randomise(adapted, "old", 5)
        with merged(adapted, "old"):  # the previous merged weights are not cached
            assert (
                family.velocity(adapted, x, sigma, rows) - velocities["merged"]
            ).abs().max() > 0.01
    assert not torch.equal(velocities["merged"], velocities["separate"])
    torch.testing.assert_close(velocities["merged"], velocities["separate"], rtol=0, atol=1e-5)
    assert (velocities["merged"] - base).abs().max() > 0.01


def test_merging_uses_full_float32_products_even_if_tf32_is_allowed(adapted, monkeypatch):
    precisions, matmul = [], torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor,
        "__matmul__",
        lambda *args: precisions.append(torch.get_float32_matmul_precision()) or matmul(*args),
    )
    try:
        torch.set_float32_matmul_precision("high")
        merged_weight(adapted_modules(adapted)[0][1], "old")
        assert precisions == ["highest"] and torch.get_float32_matmul_precision() == "high"
        with pytest.raises(KeyError), exact_products():
            raise KeyError
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_adapted_bytes_count_the_base_weights_of_adapted_modules(family, adapted):
    assert sizes.adapted_bytes(adapted) == sum(
        4 * layer.base_layer.weight.numel() for _, layer in adapted_modules(adapted)
    )

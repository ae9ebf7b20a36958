"""LoRA files: diffusers reads exported files, and a run can start from files that
diffusers wrote.
"""

import json

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from configs.training import Lora
from policy.families import family_for
from policy.lora import adapted_modules, adapter_state, add_adapters, use_adapter
from policy.lora_files import FILE, load_diffusers_lora, save_diffusers_lora
from policy.merging import merged_weights
from policy.sampling.noise import noise_for
from policy.sampling.sample import sample
from tests.policy.conftest import LORA, SEEDS, latents
from tests.tiny_families import SOLVER, encode, one_of_twins, stock_call, stock_pipeline, tiny_model
from tests.tiny_sd3 import TINY_SEQUENCE


def test_exported_lora_generates_the_same_latents_in_diffusers(
    family, adapted, cond, randomise, tiny_sd3_dir, tmp_path
):
    state = randomise(adapted, "ema", 5)
    (file,) = save_diffusers_lora(tmp_path / "lora", state, LORA)
    assert [path.name for path in (tmp_path / "lora").iterdir()] == [FILE]
    with safe_open(tmp_path / "lora" / file, "pt") as opened:
        metadata = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert metadata["transformer.r"] == metadata["transformer.lora_alpha"] == LORA.rank == 4
    pipe = StableDiffusion3Pipeline.from_pretrained(tiny_sd3_dir)
    pipe.set_progress_bar_config(disable=True)

    def stock():
        return pipe(
            "a red circle",
            num_images_per_prompt=3,
            height=16,
            width=16,
            num_inference_steps=3,
            sigmas=np.linspace(1, 1 / 3, 3).tolist(),
            guidance_scale=1.0,
            max_sequence_length=TINY_SEQUENCE,
            latents=noise_for(SEEDS, family.latent_shape),
            output_type="latent",
        ).images

    base = stock()
    pipe.load_lora_weights(str(tmp_path / "lora"))
    with use_adapter(adapted, "ema"):
        ours = latents(family, adapted, cond)
    # both use the same PEFT layers in the same order, but sums may be grouped differently
    torch.testing.assert_close(stock(), ours, rtol=0, atol=1e-5)
    assert (ours - base).abs().max() > 0.01


@pytest.mark.parametrize("alpha", [8.0, 3.0, 4.0])
def test_a_file_has_the_full_strength_without_its_metadata(tmp_path, alpha):
    """Programs such as ComfyUI add B A, whatever alpha the metadata has."""
    down, up = torch.randn(4, 6), torch.randn(5, 4)
    state = {"to_q.lora_A.weight": down, "to_q.lora_B.weight": up}
    save_diffusers_lora(tmp_path, state, Lora(rank=4, alpha=alpha))
    saved = load_file(tmp_path / FILE)
    product = saved["transformer.to_q.lora_B.weight"] @ saved["transformer.to_q.lora_A.weight"]
    # alpha / rank rounds each element of B once more, if it is no power of two
    torch.testing.assert_close(product, alpha / 4 * up @ down, rtol=2**-20, atol=2**-20)
    assert torch.equal(saved["transformer.to_q.lora_A.weight"], down)


@pytest.mark.parametrize("name", one_of_twins(False)[1:])
def test_exported_lora_of_other_families_generates_the_same_in_diffusers(
    name, request, randomise, tmp_path
):
    """This is the test above for the other families, with the solver of each family and the
    tolerance of its parity test.
    """
    directory = request.getfixturevalue(f"tiny_{name}_dir")
    family = family_for(tiny_model(name, directory))
    transformer = family.load_transformer("cpu", torch.float32)
    add_adapters(transformer, LORA, family, seed=1)
    save_diffusers_lora(tmp_path / "lora", randomise(transformer, "ema", 5), LORA)
    rows = encode(family, ["a red circle"]).repeat(3)
    with use_adapter(transformer, "ema"):
        ours = sample(family, transformer, rows, SEEDS, 3, SOLVER[name])
    pipe, noise = stock_pipeline(name, directory), noise_for(SEEDS, family.latent_shape)
    base = stock_call(pipe, family.model, "a red circle", noise, 3, "latent")
    pipe.load_lora_weights(str(tmp_path / "lora"))
    theirs = stock_call(pipe, family.model, "a red circle", noise, 3, "latent")
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5 * float(ours.abs().max()))
    assert (theirs - base).abs().max() > 0.01
    wrapped = {module for module, _ in adapted_modules(pipe.transformer)}
    assert wrapped == {module for module, _ in adapted_modules(transformer)}


@pytest.mark.parametrize("name", one_of_twins(True)[1:])
def test_other_families_start_from_their_own_export(name, request, randomise, tmp_path):
    family = family_for(tiny_model(name, request.getfixturevalue(f"tiny_{name}_dir")))
    transformer, fresh = (family.load_transformer("cpu", torch.float32) for _ in range(2))
    # the targets include a 1x1 convolution
    targets = (*family.lora_targets, "ff.conv_point") if name == "sana" else ()
    lora = Lora(rank=4, alpha=8, targets=targets)
    add_adapters(transformer, lora, family, seed=1)
    save_diffusers_lora(tmp_path, randomise(transformer, "current", 6), lora)
    add_adapters(
        fresh, Lora(rank=6, alpha=3, targets=targets, init_from=str(tmp_path)), family, seed=9
    )
    expected = dict(merged_weights(transformer, "current"))
    actual = dict(merged_weights(fresh, "old"))
    assert actual.keys() == expected.keys()
    for module, weight in actual.items():
        torch.testing.assert_close(weight, expected[module], rtol=1e-5, atol=1e-6)
        assert not torch.equal(weight, dict(merged_weights(fresh, None))[module])


@pytest.mark.parametrize(("rank", "alpha"), [(4, 8), (6, 3), (4, 32)])
def test_run_starts_from_an_existing_lora(
    family, adapted, transformer, randomise, tmp_path, rank, alpha
):
    """The product s B A is the same in every module, at the same or a larger rank and for any
    alpha.
    """
    state = randomise(adapted, "current", 6)
    save_diffusers_lora(tmp_path, state, LORA)
    expected = dict(merged_weights(adapted, "current"))
    fresh = family.load_transformer("cpu", torch.float32)
    add_adapters(fresh, Lora(rank=rank, alpha=alpha, init_from=str(tmp_path)), family, seed=9)
    for name in ("current", "old", "ema"):
        for module, weight in merged_weights(fresh, name):
            torch.testing.assert_close(weight, expected[module], rtol=1e-5, atol=1e-6)
    downs = adapter_state(fresh, "current")["transformer_blocks.0.attn.to_q.lora_A.weight"]
    assert (downs.abs().sum(1) > 0).all()  # added rows can learn


def test_unusable_initial_lora_is_refused(family, adapted, tmp_path, randomise):
    save_diffusers_lora(tmp_path, randomise(adapted, "current", 6), LORA)
    cases = [
        (
            Lora(rank=4, init_from=str(tmp_path / "none")),
            FileNotFoundError,
            "lora.init_from: pytorch_lora_weights.* not found in",
        ),
        (
            Lora(rank=2, init_from=str(tmp_path)),
            ValueError,
            "is 32x32 of rank 4, but 32x32 of rank 2 is expected: raise lora.rank",
        ),
        (
            Lora(rank=4, targets=("attn.to_q",), init_from=str(tmp_path)),
            ValueError,
            "which is not in lora.targets",
        ),
        (
            Lora(rank=4, targets=("attn.query",)),
            ValueError,
            "lora.targets: no linear layer of the transformer has a name that ends in 'attn.query'",
        ),
        (
            Lora(rank=4, targets=("attn.to_q", "to_w")),
            ValueError,
            "ends in 'to_w'; existing names are such as 'transformer_blocks",
        ),
    ]
    for lora, error, message in cases:
        with pytest.raises(error, match=message):
            add_adapters(family.load_transformer("cpu", torch.float32), lora, family)
    (tmp_path / FILE).write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00not json")
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        add_adapters(
            family.load_transformer("cpu", torch.float32),
            Lora(rank=4, init_from=str(tmp_path)),
            family,
        )


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("[]", "is not a JSON object"),
        ("1" * 5000, "not a readable safetensors file"),
        ("[" * 100_000, "not a readable safetensors file"),
        ('{"transformer.lora_alpha": "8"}', "lora_alpha is '8', not a number above 0"),
        ('{"transformer.lora_alpha": 0}', "lora_alpha is '0', not a number above 0"),
        ('{"transformer.lora_alpha": Infinity}', "lora_alpha is 'inf', not a number above 0"),
    ],
)
def test_invalid_alpha_in_a_lora_file_is_refused(tmp_path, metadata, message):
    weights = {"transformer.a.lora_A.weight": torch.zeros(2, 3)}
    save_file(weights, tmp_path / FILE, metadata={"lora_adapter_metadata": metadata})
    with pytest.raises(ValueError, match=message):
        load_diffusers_lora(tmp_path)

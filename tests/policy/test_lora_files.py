"""Exported LoRA files: diffusers reads them, and a run can start from them."""

import json
import re

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors import safe_open
from safetensors.torch import load_file

from configs.training import Lora
from policy.families import family_for
from policy.lora import adapted_modules, add_adapters, use_adapter
from policy.lora_files import FILE, save_diffusers_lora
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
    state = randomise(transformer, "ema", 5)
    save_diffusers_lora(tmp_path / "lora", state, LORA, family.rename_lora)
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
    state = randomise(transformer, "current", 6)
    save_diffusers_lora(tmp_path, state, lora, family.rename_lora)
    add_adapters(
        fresh, Lora(rank=6, alpha=3, targets=targets, init_from=str(tmp_path)), family, seed=9
    )
    expected = dict(merged_weights(transformer, "current"))
    actual = dict(merged_weights(fresh, "old"))
    assert actual.keys() == expected.keys()
    for module, weight in actual.items():
        torch.testing.assert_close(weight, expected[module], rtol=1e-5, atol=1e-6)
        assert not torch.equal(weight, dict(merged_weights(fresh, None))[module])


LINEARS = {
    "blocks.1.attn1.to_q": "blocks.1.self_attn.q",
    "blocks.0.attn1.to_k": "blocks.0.self_attn.k",
    "blocks.0.attn1.to_v": "blocks.0.self_attn.v",
    "blocks.0.attn1.to_out.0": "blocks.0.self_attn.o",
    "blocks.0.attn2.to_q": "blocks.0.cross_attn.q",
    "blocks.0.attn2.to_k": "blocks.0.cross_attn.k",
    "blocks.0.attn2.to_v": "blocks.0.cross_attn.v",
    "blocks.0.attn2.to_out.0": "blocks.0.cross_attn.o",
    "blocks.0.ffn.net.0.proj": "blocks.0.ffn.0",
    "blocks.0.ffn.net.2": "blocks.0.ffn.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "proj_out": "head.head",
}


def test_wan_is_exported_with_the_names_of_its_original_code(tiny_wan_dir):
    """ComfyUI knows no others. diffusers knows how to read them, for every linear."""
    family = family_for(tiny_model("wan", tiny_wan_dir))
    linears = {
        name
        for name, module in family.skeleton().named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert {re.sub(r"blocks.\d", "blocks.0", name) for name in linears} == {
        re.sub(r"blocks.\d", "blocks.0", name) for name in LINEARS
    }
    names = family.rename_lora(list(LINEARS))
    assert names == {ours: f"diffusion_model.{original}" for ours, original in LINEARS.items()}
    tensors = {}
    for name in names.values():
        tensors |= {f"{name}.lora_{part}.weight": torch.ones(1, 1) for part in "AB"}
    read = family.stock.lora_state_dict(tensors)
    assert {key.split(".lora_")[0] for key in read} == {f"transformer.{key}" for key in LINEARS}


def test_wan_without_a_block_is_exported_with_the_names_of_diffusers(tiny_wan_dir):
    family = family_for(tiny_model("wan", tiny_wan_dir))
    assert family.rename_lora(["proj_out"]) == {"proj_out": "transformer.proj_out"}

"""Properties that only SD3 has, and sampling with it. test_families_parity.py compares its latents
and images with the pipeline of diffusers.
"""

import shutil

import numpy as np
import pytest
import torch

from configs.sections import Model
from configs.training import Lora
from learner.publish import export_policy
from policy.explorer import Explorer
from policy.families import family_for, model_directory
from policy.lora import add_adapters
from policy.precision.backends import BACKENDS
from policy.precision.swap import quantize_plan
from policy.sampling.noise import noise_for
from policy.sampling.sample import sample
from policy.types import Conditioning
from tests.tiny_families import SEEDS, Tiny
from tests.tiny_sd3 import make_tiny_sd3


def test_decoding_in_batches_changes_at_most_one_gray_level(family):
    latents = noise_for(range(5), family.latent_shape)
    vae = family.load_vae("cpu", torch.float32)
    all_at_once, parts = family.decode(vae, latents), family.decode(vae, latents, batch_size=2)
    assert (all_at_once.int() - parts.int()).abs().max() <= 1


@pytest.mark.parametrize(("steps", "shift"), [(1, 3.0), (6, 3.0), (10, 3.0), (10, 1.0), (10, 1.5)])
def test_sigmas_match_the_closed_form(tiny_model, steps, shift):
    """The sigmas are shift t / (1 + (shift - 1) t) at t = 1, ..., 1/n, then 0, in float32."""
    family = family_for(tiny_model.model_copy(update={"shift": None if shift == 3.0 else shift}))
    t = np.linspace(1, 1 / steps, steps)
    expected = np.append(shift * t / (1 + (shift - 1) * t), 0.0)
    sigmas = family.sigmas(steps)
    assert sigmas.dtype == torch.float32 and sigmas[0] == 1 and sigmas[-1] == 0
    np.testing.assert_allclose(sigmas, expected, rtol=4 * 2.0**-24)
    assert (sigmas[1:] < sigmas[:-1]).all()


def test_velocity_scales_time_and_broadcasts(family, transformer, cond):
    x = noise_for([1, 2], family.latent_shape)
    one = family.velocity(transformer, x, torch.tensor(0.25), cond)
    assert torch.equal(one, family.velocity(transformer, x, torch.tensor([0.25, 0.25]), cond))
    theirs = transformer(
        hidden_states=x,
        timestep=torch.tensor([250.0, 250.0]),
        encoder_hidden_states=cond.tensors["prompt_embeds"],
        pooled_projections=cond.tensors["pooled_prompt_embeds"],
    ).sample
    assert torch.equal(one, theirs)
    assert not torch.equal(one, family.velocity(transformer, x, torch.tensor([0.25, 0.75]), cond))


def test_second_attention_of_sd35_medium_is_supported(tmp_path):
    """SD3.5 Medium has a second attention in some blocks. The latents equal those of the diffusers
    pipeline bit for bit. The linear layers of the second attention are quantized and fused,
    separately from those of the first.
    """
    tiny = Tiny("sd3", make_tiny_sd3(tmp_path, dual=(0,)))
    assert torch.equal(tiny.ours(4, "euler"), tiny.stock(4, "latent"))
    plan = {row.name: row for row in quantize_plan(tiny.denoiser, tiny.family, (), BACKENDS["fp8"])}
    names = {name for name in plan if ".attn2." in name}
    assert names == {
        f"transformer_blocks.0.attn2.{part}" for part in ("to_q", "to_k", "to_v", "to_out.0")
    }
    assert all(plan[name].quantized for name in names)
    assert [plan[f"transformer_blocks.0.attn2.to_{part}"].fused for part in "qkv"] == [
        "transformer_blocks.0.attn2.to_q"
    ] * 3
    assert plan["transformer_blocks.0.attn.to_v"].fused == "transformer_blocks.0.attn.to_q"
    exact = tiny.family.decode(
        tiny.family.load_vae("cpu", torch.float32), tiny.ours(4, "euler")
    ).numpy()
    add_adapters(tiny.denoiser, Lora(rank=2, alpha=2), tiny.family)
    explorer = Explorer(tiny.family, BACKENDS["fp8"])
    explorer.load(*export_policy(tiny.denoiser, "current", explorer.plan, BACKENDS["fp8"], 0, 4096))
    images, _ = explorer.explore(tiny.encoded.rows(0), SEEDS, 4, "euler")
    # out of 255 levels: the attention is computed, with quantization errors
    assert 0 < np.abs(images.astype(int) - exact).mean() < 3


def test_sampling_does_not_depend_on_batches_and_order(family, transformer, cond):
    """Noise does not depend on the position of a row. With another batch size, sums may differ in
    the last digits.
    """
    rows = cond.rows(0).repeat(3)
    all_at_once = sample(family, transformer, rows, SEEDS, 4, "dpmpp_2m")
    parts = sample(family, transformer, rows, SEEDS[::-1], 4, "dpmpp_2m", batch_size=2)
    torch.testing.assert_close(parts.flip(0), all_at_once, rtol=1e-4, atol=1e-4)
    assert torch.equal(all_at_once, sample(family, transformer, rows, SEEDS, 4, "dpmpp_2m"))
    with pytest.raises(ValueError, match="3 seeds but conditioning of 1 rows"):
        sample(family, transformer, cond.rows(0), SEEDS, 4, "dpmpp_2m")


def test_conditioning_rows_are_selected_and_repeated():
    cond = Conditioning({"a": torch.arange(6.0).view(3, 2), "b": torch.arange(3.0)})
    assert cond.repeat(2).tensors["b"].tolist() == [0, 0, 1, 1, 2, 2]
    assert cond.rows(-1).tensors["a"].tolist() == [[4, 5]]
    assert cond.rows(slice(1)).repeat(2).tensors["a"].tolist() == [[0, 1], [0, 1]]
    assert Conditioning.cat([cond.rows([2, 0]), cond.rows(1)]).tensors["b"].tolist() == [2, 0, 1]
    with pytest.raises(IndexError, match="row 3 of a conditioning with 3 rows"):
        cond.rows(3)
    with pytest.raises(ValueError, match="the same number of rows"):
        Conditioning({"a": torch.zeros(2), "b": torch.zeros(3)})


def test_missing_directory_is_refused_with_advice(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"model.path: no directory .*nothing.*: give a diffusers pipeline"
    ):
        model_directory(Model(path=str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match="has no model_index.json"):
        model_directory(Model(path=str(tmp_path)))
    assert model_directory(Model(path="owner/some-model")) == "owner/some-model"


def test_missing_weights_are_named(tiny_sd3_dir, tmp_path):
    shutil.copytree(tiny_sd3_dir, tmp_path / "model")
    (tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model.path: cannot load 'vae' of "):
        family_for(Model(path=str(tmp_path / "model"), height=16, width=16)).load_vae(
            "cpu", torch.float32
        )


@pytest.mark.parametrize(
    ("height", "width", "message"),
    [(1024, 16, "height: 1024 pixels; .* up to 32"), (16, 40, "width: 40")],
)
def test_sizes_that_the_model_cannot_generate_are_refused(tiny_model, height, width, message):
    family = family_for(tiny_model.model_copy(update={"height": height, "width": width}))
    with pytest.raises(ValueError, match=f"model.{message}"):
        _ = family.latent_shape

"""The SANA family against diffusers' own pipeline."""

import json
import shutil

import numpy as np
import pytest
import torch

from policy.families import family_for
from policy.sampling.noise import noise_for
from policy.sampling.sample import sample
from tests.tiny_families import as_array, stock_call, stock_pipeline, tiny_model
from tests.tiny_sana import SANA_LATENT, make_tiny_sana

SEEDS = [11, 2**40 + 3, 7]
PROMPTS = ["a red circle", "two blue crosses above a green square"]


@pytest.fixture(scope="module")
def pipe(tiny_sana_dir):
    return stock_pipeline("sana", tiny_sana_dir)


@pytest.fixture(scope="module")
def sana(tiny_sana_dir):
    return family_for(tiny_model("sana", tiny_sana_dir))


@pytest.fixture(scope="module")
def denoiser(sana):
    return sana.load_transformer("cpu", torch.float32)


@pytest.fixture(scope="module")
def encoded(sana):
    return sana.load_text("cpu", torch.float32).encode(PROMPTS)


@pytest.fixture(scope="module")
def euler_dir(tmp_path_factory):
    """The same weights with the Euler scheduler."""
    return make_tiny_sana(tmp_path_factory.mktemp("sana_euler"), euler=True)


@pytest.mark.parametrize("instruction", [True, False])
def test_conditioning_is_the_pipelines(pipe, tiny_sana_dir, encoded, instruction):
    """With the instruction the pipeline is called as it stands, so its own default is what ours must be."""
    family = family_for(tiny_model("sana", tiny_sana_dir, complex_human_instruction=instruction))
    found = family.load_text("cpu", torch.float32).encode(PROMPTS).tensors
    seen = {}
    pipe.transformer.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    for row, prompt in enumerate(PROMPTS):
        stock_call(pipe, family.model, prompt, noise_for([1], SANA_LATENT), 1, "latent")
        assert torch.equal(found["prompt_embeds"][row], seen["encoder_hidden_states"][0])
        assert torch.equal(found["prompt_attention_mask"][row], seen["encoder_attention_mask"][0].float())
    pipe.transformer._forward_pre_hooks.clear()
    same = torch.equal(found["prompt_embeds"], encoded.tensors["prompt_embeds"])
    assert same is not instruction


def test_padding_is_masked(sana, denoiser, encoded):
    """Whatever stands in the padding changes nothing, and something does depend on the rest."""
    mask = encoded.tensors["prompt_attention_mask"]
    assert mask[0].tolist() == [1.0] * 5 + [0.0] * 7 and mask[1].sum() > 5
    x, sigma = noise_for([1], SANA_LATENT), torch.tensor(0.5)

    def velocity(change):
        embeds = encoded.tensors["prompt_embeds"][:1] + change[None, :, None]
        return sana.velocity(denoiser, x, sigma, type(encoded)({"prompt_embeds": embeds, "prompt_attention_mask": mask[:1]}))

    base = velocity(torch.zeros(12))
    assert torch.equal(velocity((1 - mask[0]) * 0.7), base)
    assert (velocity(mask[0] * 0.7) - base).abs().max() > 1e-3


@pytest.mark.parametrize("steps", [1, 2, 5, 14, 20])
def test_dpm2_latents_are_the_stock_pipelines(pipe, sana, denoiser, encoded, steps):
    """Its solver computes log(alpha / sigma), up to 8, in float32: coefficients are off by 8 x 2^-23 = 1e-6 of themselves, ours
    (float64) are not. Errors of that size per step on latents of order 1, twice over for the second-order term, add up."""
    ours = sample(sana, denoiser, encoded.rows(0).repeat(3), SEEDS, steps, "dpm2")
    assert ours.shape == (3, *SANA_LATENT) and ours.dtype == torch.float32
    theirs = stock_call(pipe, sana.model, PROMPTS[0], noise_for(SEEDS, SANA_LATENT), steps, "latent")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * (steps + 1) * float(theirs.abs().max()))
    assert theirs.std() > 0.1


def test_images_are_the_stock_pipelines(pipe, sana, denoiser, encoded):
    """Stock latents decode to the stock pictures bit for bit; ours differ by 1e-6 and may fall on the other side of a half."""
    vae, noise = sana.load_vae("cpu", torch.float32), noise_for(SEEDS, SANA_LATENT)
    theirs = as_array(stock_call(pipe, sana.model, PROMPTS[0], noise, 5, "pil"))
    latents = stock_call(pipe, sana.model, PROMPTS[0], noise, 5, "latent")
    np.testing.assert_array_equal(sana.decode(vae, latents).numpy(), theirs)
    ours = sana.decode(vae, sample(sana, denoiser, encoded.rows(0).repeat(3), SEEDS, 5, "dpm2")).numpy()
    difference = np.abs(ours.astype(int) - theirs)
    assert difference.max() <= 1 and (difference > 0).mean() < 1e-3
    assert ours.std() > 10


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_euler_with_the_scheduler_swapped_on_both_sides(euler_dir, encoded, steps):
    """Bit for bit, as in the other families."""
    family = family_for(tiny_model("sana", euler_dir))
    pipe, noise = stock_pipeline("sana", euler_dir), noise_for(SEEDS, SANA_LATENT)
    assert type(pipe.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    sigmas = np.linspace(1, 1 / steps, steps).tolist()
    transformer = family.load_transformer("cpu", torch.float32)
    ours = sample(family, transformer, encoded.rows(0).repeat(3), SEEDS, steps, "euler")
    assert torch.equal(ours, stock_call(pipe, family.model, PROMPTS[0], noise, steps, "latent", sigmas=sigmas))
    theirs = as_array(stock_call(pipe, family.model, PROMPTS[0], noise, steps, "pil", sigmas=sigmas))
    np.testing.assert_array_equal(family.decode(family.load_vae("cpu", torch.float32), ours).numpy(), theirs)


@pytest.mark.parametrize("shift", [None, 1.5, 6.0])
def test_schedule_and_timesteps_are_the_schedulers(pipe, tiny_sana_dir, shift):
    """At every number of steps up to 100: the same float32 sigmas, first below 1, and the same whole timesteps."""
    family = family_for(tiny_model("sana", tiny_sana_dir, shift=shift))
    scheduler = type(pipe.scheduler).from_config({**pipe.scheduler.config, "flow_shift": shift or 3.0})
    for steps in range(1, 101):
        scheduler.set_timesteps(steps)
        sigmas = family.sigmas(steps)
        assert torch.equal(sigmas, scheduler.sigmas) and sigmas.dtype == torch.float32
        assert 0.99 < sigmas[0] < 1 and sigmas[-1] == 0 and (sigmas[1:] < sigmas[:-1]).all()
        assert family.timestep(sigmas[:-1]).tolist() == scheduler.timesteps.tolist()


def test_sigmas_closed_form(sana):
    """The last of n steps ends at 0; the i-th stands at s / (1 + 2 s) x 3 with s = 0.999 (n - i) / n."""
    s = 0.999 * np.arange(5, 0, -1) / 5
    np.testing.assert_allclose(sana.sigmas(5), np.append(3 * s / (1 + 2 * s), 0), rtol=2.0**-23)


def test_time_is_whole_thousandths(sana, denoiser, encoded):
    x = noise_for([1, 2], SANA_LATENT)
    one = sana.velocity(denoiser, x, torch.tensor([0.2507, 0.9]), encoded)
    theirs = denoiser(
        hidden_states=x,
        timestep=torch.tensor([250, 899]),  # 0.9 in float32 is just below 0.9
        encoder_hidden_states=encoded.tensors["prompt_embeds"],
        encoder_attention_mask=encoded.tensors["prompt_attention_mask"],
    ).sample
    assert torch.equal(one, theirs)
    assert torch.equal(sana.velocity(denoiser, x, torch.tensor(0.25), encoded)[0], one[0])


def test_a_scheduler_without_flow_sigmas_is_refused(tiny_sana_dir, tmp_path):
    shutil.copytree(tiny_sana_dir, tmp_path / "model")
    file = tmp_path / "model" / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_flow_sigmas": False}))
    with pytest.raises(ValueError, match="has no flow sigmas"):
        family_for(tiny_model("sana", tmp_path / "model")).sigmas(4)
    index = tmp_path / "model" / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "scheduler": ["diffusers", "DDIMScheduler"]}))
    with pytest.raises(ValueError, match="is a DDIMScheduler; family 'sana' takes DPMSolverMultistepScheduler or FlowMatch"):
        family_for(tiny_model("sana", tmp_path / "model"))


def test_sizes(tiny_sana_dir):
    with pytest.raises(ValueError, match=r"model\.width: 48 pixels; this model makes multiples of 32"):
        family_for(tiny_model("sana", tiny_sana_dir, width=48)).check()

"""What SANA has of its own, against diffusers' own pipeline; Euler's scheduler in its place is in
test_families_parity.py.
"""

import json
import shutil

import numpy as np
import pytest
import torch

from policy.families import family_for
from policy.sampling.noise import noise_for
from tests.tiny_families import PROMPTS, Tiny, as_array, stock_call, tiny_model
from tests.tiny_sana import SANA_LATENT


@pytest.fixture(scope="module")
def tiny(tiny_sana_dir):
    return Tiny("sana", tiny_sana_dir)


@pytest.mark.parametrize("instruction", [True, False])
def test_conditioning_equals_that_of_the_diffusers_pipeline(tiny, instruction):
    """With the instruction the pipeline is called as it stands, so its own default is what ours
    must be.
    """
    family, pipe = tiny.other(complex_human_instruction=instruction), tiny.pipe
    found = family.load_text("cpu", torch.float32).encode(PROMPTS).tensors
    seen = {}
    pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    for row, prompt in enumerate(PROMPTS):
        stock_call(pipe, family.model, prompt, noise_for([1], SANA_LATENT), 1, "latent")
        assert torch.equal(found["prompt_embeds"][row], seen["encoder_hidden_states"][0])
        assert torch.equal(
            found["prompt_attention_mask"][row], seen["encoder_attention_mask"][0].float()
        )
    pipe.transformer._forward_pre_hooks.clear()
    same = torch.equal(found["prompt_embeds"], tiny.encoded.tensors["prompt_embeds"])
    assert same is not instruction


def test_padding_is_masked(tiny):
    """Whatever stands in the padding changes nothing, and something does depend on the rest."""
    sana, denoiser, encoded = tiny.family, tiny.denoiser, tiny.encoded
    mask = encoded.tensors["prompt_attention_mask"]
    assert mask[0].tolist() == [1.0] * 5 + [0.0] * 7 and mask[1].sum() > 5
    x, sigma = noise_for([1], SANA_LATENT), torch.tensor(0.5)

    def velocity(change):
        embeds = encoded.tensors["prompt_embeds"][:1] + change[None, :, None]
        return sana.velocity(
            denoiser,
            x,
            sigma,
            type(encoded)({"prompt_embeds": embeds, "prompt_attention_mask": mask[:1]}),
        )

    base = velocity(torch.zeros(12))
    assert torch.equal(velocity((1 - mask[0]) * 0.7), base)
    assert (velocity(mask[0] * 0.7) - base).abs().max() > 1e-3


@pytest.mark.parametrize("steps", [1, 2, 5, 14, 20])
def test_dpmpp_2m_latents_are_the_stock_pipelines(tiny, steps):
    """Its solver computes log(alpha / sigma), up to 8, in float32: coefficients are off by 8 x
    2^-23 = 1e-6 of themselves, ours (float64) are not. Errors of that size per step on latents of
    order 1, twice over for the second-order term, add up.
    """
    ours = tiny.ours(steps, "dpmpp_2m")
    assert ours.shape == (3, *SANA_LATENT) and ours.dtype == torch.float32
    theirs = tiny.stock(steps, "latent")
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=2e-6 * (steps + 1) * float(theirs.abs().max())
    )
    assert theirs.std() > 0.1


def test_images_are_close_to_those_of_the_diffusers_pipeline(tiny):
    """Stock latents decode to the stock images bit for bit; ours differ by 1e-6 and may fall on
    the other side of a half.
    """
    vae, theirs = tiny.family.load_vae("cpu", torch.float32), as_array(tiny.stock(5, "pil"))
    np.testing.assert_array_equal(tiny.family.decode(vae, tiny.stock(5, "latent")).numpy(), theirs)
    ours = tiny.family.decode(vae, tiny.ours(5, "dpmpp_2m")).numpy()
    difference = np.abs(ours.astype(int) - theirs)
    assert difference.max() <= 1 and (difference > 0).mean() < 1e-3
    assert ours.std() > 10


@pytest.mark.parametrize("shift", [None, 1.5, 6.0])
def test_schedule_and_timesteps_are_the_schedulers(tiny, shift):
    """At every number of steps up to 100: the same float32 sigmas, first below 1, and the same
    whole timesteps.
    """
    family, own = tiny.other(shift=shift), tiny.pipe.scheduler
    scheduler = type(own).from_config({**own.config, "flow_shift": shift or 3.0})
    for steps in range(1, 101):
        scheduler.set_timesteps(steps)
        sigmas = family.sigmas(steps)
        assert torch.equal(sigmas, scheduler.sigmas) and sigmas.dtype == torch.float32
        assert 0.99 < sigmas[0] < 1 and sigmas[-1] == 0 and (sigmas[1:] < sigmas[:-1]).all()
        assert family.timestep(sigmas[:-1]).tolist() == scheduler.timesteps.tolist()


def test_sigmas_closed_form(tiny):
    """The last of n steps ends at 0; the i-th stands at s / (1 + 2 s) x 3 with s = 0.999 (n - i) /
    n.
    """
    s = 0.999 * np.arange(5, 0, -1) / 5
    np.testing.assert_allclose(
        tiny.family.sigmas(5), np.append(3 * s / (1 + 2 * s), 0), rtol=2.0**-23
    )


def test_time_is_whole_thousandths(tiny):
    sana, denoiser, encoded = tiny.family, tiny.denoiser, tiny.encoded
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
    index.write_text(
        json.dumps({**json.loads(index.read_text()), "scheduler": ["diffusers", "DDIMScheduler"]})
    )
    with pytest.raises(
        ValueError,
        match="is a DDIMScheduler; family 'sana' takes DPMSolverMultistepScheduler or FlowMatch",
    ):
        family_for(tiny_model("sana", tmp_path / "model"))


def test_sizes(tiny):
    with pytest.raises(
        ValueError, match=r"model\.width: 48 pixels; this model makes multiples of 32"
    ):
        tiny.other(width=48).check()

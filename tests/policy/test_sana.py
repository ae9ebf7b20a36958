"""Properties that only SANA has, compared with the pipeline of diffusers. test_families_parity.py
tests SANA with the Euler scheduler.
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
    """With the instruction, the pipeline is called with its defaults, so our default must be the
    same as that of the pipeline.
    """
    family, pipe = tiny.other(complex_human_instruction=instruction), tiny.pipe
    result = family.load_text("cpu", torch.float32).encode(PROMPTS).tensors
    received = {}
    pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: received.update(kwargs), with_kwargs=True
    )
    for row, prompt in enumerate(PROMPTS):
        stock_call(pipe, family.model, prompt, noise_for([1], SANA_LATENT), 1, "latent")
        assert torch.equal(result["prompt_embeds"][row], received["encoder_hidden_states"][0])
        assert torch.equal(
            result["prompt_attention_mask"][row], received["encoder_attention_mask"][0].float()
        )
    pipe.transformer._forward_pre_hooks.clear()
    same = torch.equal(result["prompt_embeds"], tiny.encoded.tensors["prompt_embeds"])
    assert same is not instruction


def test_padding_is_masked(tiny):
    """The content of the padding changes nothing, and the other tokens do change the result."""
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
def test_dpmpp_2m_latents_match_the_diffusers_pipeline(tiny, steps):
    """The solver of diffusers computes log(alpha / sigma), which is up to 8, in float32. Its
    coefficients therefore have a relative error of 8 x 2^-23 = 1e-6, and ours (float64) do not. The
    steps add errors of this size to latents of order 1, twice for the second-order term.
    """
    ours = tiny.ours(steps, "dpmpp_2m")
    assert ours.shape == (3, *SANA_LATENT) and ours.dtype == torch.float32
    theirs = tiny.stock(steps, "latent")
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=2e-6 * (steps + 1) * float(theirs.abs().max())
    )
    assert theirs.std() > 0.1


def test_images_are_close_to_those_of_the_diffusers_pipeline(tiny):
    """The latents of diffusers decode to the images of diffusers bit for bit. Our latents differ by
    1e-6, so a pixel value may be rounded in the other direction.
    """
    vae, theirs = tiny.family.load_vae("cpu", torch.float32), as_array(tiny.stock(5, "pil"))
    np.testing.assert_array_equal(tiny.family.decode(vae, tiny.stock(5, "latent")).numpy(), theirs)
    ours = tiny.family.decode(vae, tiny.ours(5, "dpmpp_2m")).numpy()
    difference = np.abs(ours.astype(int) - theirs)
    assert difference.max() <= 1 and (difference > 0).mean() < 1e-3
    assert ours.std() > 10


@pytest.mark.parametrize("shift", [None, 1.5, 6.0])
def test_sigmas_and_timesteps_equal_those_of_the_scheduler(tiny, shift):
    """For every number of steps up to 100, the float32 sigmas and the integer timesteps are equal.
    The first sigma is below 1.
    """
    family, original = tiny.other(shift=shift), tiny.pipe.scheduler
    scheduler = type(original).from_config({**original.config, "flow_shift": shift or 3.0})
    for steps in range(1, 101):
        scheduler.set_timesteps(steps)
        sigmas = family.sigmas(steps)
        assert torch.equal(sigmas, scheduler.sigmas) and sigmas.dtype == torch.float32
        assert 0.99 < sigmas[0] < 1 and sigmas[-1] == 0 and (sigmas[1:] < sigmas[:-1]).all()
        assert family.timestep(sigmas[:-1]).tolist() == scheduler.timesteps.tolist()


def test_sigmas_match_the_closed_form(tiny):
    """The last of n steps ends at 0. The i-th sigma is 3 s / (1 + 2 s) with s = 0.999 (n
    - i) / n.
    """
    s = 0.999 * np.arange(5, 0, -1) / 5
    np.testing.assert_allclose(
        tiny.family.sigmas(5), np.append(3 * s / (1 + 2 * s), 0), rtol=2.0**-23
    )


def test_timesteps_are_whole_thousandths(tiny):
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


def test_scheduler_without_flow_sigmas_is_refused(tiny_sana_dir, tmp_path):
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


def test_unsupported_size_is_refused(tiny):
    with pytest.raises(
        ValueError, match=r"model\.width: 48 pixels; this model needs multiples of 32"
    ):
        tiny.other(width=48).check()

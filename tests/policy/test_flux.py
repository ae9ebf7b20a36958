"""Properties that only FLUX.1 has, compared with the pipeline of diffusers. test_families_parity.py
tests the others.
"""

import numpy as np
import pytest
import torch

from policy.sampling.noise import noise_for
from policy.sampling.sample import sample
from tests.tiny_families import PROMPTS, SEEDS, Tiny, as_array, stock_call
from tests.tiny_flux import FLUX_LATENT


@pytest.fixture(scope="module")
def tiny(tiny_flux_dir):
    return Tiny("flux", tiny_flux_dir)


def test_non_square_images_match_diffusers(tiny):
    """Rows and columns are not exchanged. The image is 16 high and 24 wide, which gives 24 tokens
    and therefore another shift.
    """
    wide = tiny.other(width=24)
    assert wide.latent_shape == (24, 16)
    ours = sample(wide, tiny.denoiser, tiny.encoded.rows(1).repeat(2), SEEDS[:2], 3, "euler")
    theirs = stock_call(
        tiny.pipe, wide.model, PROMPTS[1], noise_for(SEEDS[:2], wide.latent_shape), 3, "pil"
    )
    np.testing.assert_array_equal(
        wide.decode(wide.load_vae("cpu", torch.float32), ours).numpy(), as_array(theirs)
    )


@pytest.mark.parametrize(("side", "tokens"), [(16, 16), (64, 256), (256, 4096)])
def test_shift_depends_on_the_resolution(tiny, side, tokens):
    """sigma = e^mu / (e^mu + 1/t - 1). mu is linear in the number of tokens: 0.5 at 256 and 1.15 at
    4096. sigma is float32, and t is rounded to float32.
    """
    family = tiny.other(height=side, width=side)
    assert family.latent_shape == (tokens, 16)
    mu = 0.5 + 0.65 * (tokens - 256) / 3840
    t = np.linspace(1, 0.1, 10)
    expected = np.append(np.exp(mu) / (np.exp(mu) + 1 / t - 1), 0.0)
    sigmas = family.sigmas(10)
    np.testing.assert_allclose(sigmas, expected, rtol=8 * 2.0**-24)
    assert sigmas.dtype == torch.float32 and sigmas[0] == 1 and (sigmas[1:] < sigmas[:-1]).all()


def test_fixed_shift_replaces_the_dynamic_one(tiny):
    sigmas = tiny.other(shift=3.0).sigmas(4)
    np.testing.assert_allclose(sigmas, [1, 0.9, 0.75, 0.5, 0], rtol=4 * 2.0**-24)  # 3 t / (1 + 2 t)


def test_denoiser_receives_sigma_as_time_and_guidance_as_input(tiny):
    flux, denoiser, encoded = tiny.family, tiny.denoiser, tiny.encoded
    x = noise_for([1, 2], FLUX_LATENT)
    one = flux.velocity(denoiser, x, torch.tensor(0.25), encoded)
    assert torch.equal(one, flux.velocity(denoiser, x, torch.tensor([0.25, 0.25]), encoded))
    grid = torch.tensor(
        [[0, row, column] for row in range(4) for column in range(4)], dtype=torch.float32
    )
    theirs = denoiser(
        hidden_states=x,
        timestep=torch.tensor([0.25, 0.25]),
        guidance=torch.tensor([3.5, 3.5]),
        encoder_hidden_states=encoded.tensors["prompt_embeds"],
        pooled_projections=encoded.tensors["pooled_prompt_embeds"],
        img_ids=grid,
        txt_ids=torch.zeros(12, 3),
    ).sample
    assert torch.equal(one, theirs)
    assert not torch.equal(one, flux.velocity(denoiser, x, torch.tensor([0.25, 0.75]), encoded))
    other = tiny.other(guidance=1.0)
    assert (other.velocity(denoiser, x, torch.tensor(0.25), encoded) - one).abs().max() > 1e-3


def test_guidance_is_required(tiny):
    family, noise = tiny.other(guidance=None), noise_for([1], FLUX_LATENT)
    for check in (
        family.check,
        lambda: family.velocity(tiny.denoiser, noise, torch.tensor(0.5), tiny.encoded.rows(0)),
    ):
        with pytest.raises(
            ValueError, match=r"model\.guidance: .* was distilled with embedded guidance: set"
        ):
            check()

"""The FLUX.1 family against diffusers' own pipeline."""

import numpy as np
import pytest
import torch

from policy.families import family_for
from policy.sampling.noise import noise_for
from policy.sampling.sample import sample
from tests.tiny_families import as_array, stock_call, stock_pipeline, tiny_model
from tests.tiny_flux import FLUX_LATENT

SEEDS = [11, 2**40 + 3, 7]
PROMPTS = ["a red circle", "two blue crosses above a green square"]


@pytest.fixture(scope="module")
def pipe(tiny_flux_dir):
    return stock_pipeline("flux", tiny_flux_dir)


@pytest.fixture(scope="module")
def flux(tiny_flux_dir):
    return family_for(tiny_model("flux", tiny_flux_dir))


@pytest.fixture(scope="module")
def denoiser(flux):
    return flux.load_transformer("cpu", torch.float32)


@pytest.fixture(scope="module")
def encoded(flux):
    return flux.load_text("cpu", torch.float32).encode(PROMPTS)


def test_conditioning_is_the_pipelines(pipe, encoded):
    """Encoded one by one against a batch of two: sums in another order, values of order 1."""
    embeds, pooled, _ = pipe.encode_prompt(PROMPTS, None, max_sequence_length=12)
    torch.testing.assert_close(encoded.tensors["prompt_embeds"], embeds, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(encoded.tensors["pooled_prompt_embeds"], pooled, rtol=1e-5, atol=1e-5)
    assert (embeds[0] - embeds[1]).abs().max() > 0.1 and (pooled[0] - pooled[1]).abs().max() > 0.1


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_euler_latents_are_the_stock_pipelines(pipe, flux, denoiser, encoded, steps):
    """Bit for bit: the same operations on the same shapes, with packed latents and embedded guidance."""
    ours = sample(flux, denoiser, encoded.rows(0).repeat(3), SEEDS, steps, "euler")
    assert ours.shape == (3, *FLUX_LATENT) and ours.dtype == torch.float32
    assert torch.equal(ours, stock_call(pipe, flux.model, PROMPTS[0], noise_for(SEEDS, FLUX_LATENT), steps, "latent"))


def test_images_are_the_stock_pipelines(pipe, flux, denoiser, encoded):
    latents = sample(flux, denoiser, encoded.rows(0).repeat(3), SEEDS, 4, "euler")
    ours = flux.decode(flux.load_vae("cpu", torch.float32), latents)
    theirs = as_array(stock_call(pipe, flux.model, PROMPTS[0], noise_for(SEEDS, FLUX_LATENT), 4, "pil"))
    assert ours.dtype == torch.uint8
    np.testing.assert_array_equal(ours.numpy(), theirs)
    assert ours.float().std() > 10


def test_pictures_that_are_not_square(pipe, tiny_flux_dir, denoiser, encoded):
    """Rows and columns are not exchanged: 16 high, 24 wide; 24 tokens, so another shift too."""
    wide = family_for(tiny_model("flux", tiny_flux_dir, width=24))
    assert wide.latent_shape == (24, 16)
    ours = sample(wide, denoiser, encoded.rows(1).repeat(2), SEEDS[:2], 3, "euler")
    theirs = stock_call(pipe, wide.model, PROMPTS[1], noise_for(SEEDS[:2], wide.latent_shape), 3, "pil")
    np.testing.assert_array_equal(wide.decode(wide.load_vae("cpu", torch.float32), ours).numpy(), as_array(theirs))


@pytest.mark.parametrize(("side", "tokens"), [(16, 16), (64, 256), (256, 4096)])
def test_the_shift_depends_on_the_resolution(tiny_flux_dir, side, tokens):
    """sigma = e^mu / (e^mu + 1/t - 1), mu linear in the tokens: 0.5 at 256 and 1.15 at 4096; float32 and t rounded to it."""
    family = family_for(tiny_model("flux", tiny_flux_dir, height=side, width=side))
    assert family.latent_shape == (tokens, 16)
    mu = 0.5 + 0.65 * (tokens - 256) / 3840
    t = np.linspace(1, 0.1, 10)
    wanted = np.append(np.exp(mu) / (np.exp(mu) + 1 / t - 1), 0.0)
    sigmas = family.sigmas(10)
    np.testing.assert_allclose(sigmas, wanted, rtol=8 * 2.0**-24)
    assert sigmas.dtype == torch.float32 and sigmas[0] == 1 and (sigmas[1:] < sigmas[:-1]).all()


def test_a_fixed_shift_replaces_the_dynamic_one(tiny_flux_dir):
    sigmas = family_for(tiny_model("flux", tiny_flux_dir, shift=3.0)).sigmas(4)
    np.testing.assert_allclose(sigmas, [1, 0.9, 0.75, 0.5, 0], rtol=4 * 2.0**-24)  # 3 t / (1 + 2 t)


def test_time_is_sigma_and_guidance_is_an_input(tiny_flux_dir, flux, denoiser, encoded):
    x = noise_for([1, 2], FLUX_LATENT)
    one = flux.velocity(denoiser, x, torch.tensor(0.25), encoded)
    assert torch.equal(one, flux.velocity(denoiser, x, torch.tensor([0.25, 0.25]), encoded))
    grid = torch.tensor([[0, row, column] for row in range(4) for column in range(4)], dtype=torch.float32)
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
    other = family_for(tiny_model("flux", tiny_flux_dir, guidance=1.0))
    assert (other.velocity(denoiser, x, torch.tensor(0.25), encoded) - one).abs().max() > 1e-3


def test_guidance_must_be_given(tiny_flux_dir, denoiser, encoded):
    family = family_for(tiny_model("flux", tiny_flux_dir, guidance=None))
    for ask in (family.check, lambda: family.velocity(denoiser, noise_for([1], FLUX_LATENT), torch.tensor(0.5), encoded.rows(0))):
        with pytest.raises(ValueError, match=r"model\.guidance: .* was distilled with an embedded guidance: give one"):
            ask()

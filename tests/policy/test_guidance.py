"""Classifier-free guidance against the stock pipelines, which have it in words of their own."""

import pytest
import torch

from configs.sections import Guidance
from policy.families import family_for
from policy.sampling.guidance import Guided, velocity
from policy.sampling.noise import noise_for
from policy.sampling.sample import sample
from policy.types import Conditioning
from tests.tiny_families import (
    PROMPTS,
    SEEDS,
    SOLVER,
    Tiny,
    encode,
    source_for,
    stock_call,
    tiny_model,
)
from tests.tiny_flux2 import make_tiny_flux2

NEGATIVE = "a blue cross"
ASKED = {
    "sd3": {"guidance_scale": 3.0, "negative_prompt": NEGATIVE},
    "sana": {"guidance_scale": 3.0, "negative_prompt": NEGATIVE},
    "qwen_image": {"true_cfg_scale": 3.0, "negative_prompt": NEGATIVE},
    "qwen_image_edit": {"true_cfg_scale": 3.0, "negative_prompt": NEGATIVE},
    "z_image": {"guidance_scale": 2.0, "negative_prompt": NEGATIVE},
    "flux2_klein": {"guidance_scale": 3.0},
    "wan": {"guidance_scale": 3.0, "negative_prompt": NEGATIVE},
    "sana_video": {"guidance_scale": 3.0, "negative_prompt": NEGATIVE},
}
"""A strength of 3, as each pipeline is asked for it; klein's negative prompt is always empty."""
PASSES = {
    "sd3": True,
    "sana": True,
    "qwen_image": False,
    "qwen_image_edit": False,
    "z_image": True,
    "flux2_klein": False,
    "wan": False,
    "sana_video": True,
}
"""Whether the pipeline takes one pass of twice the batch."""


@pytest.fixture(params=ASKED)
def tiny(request):
    return Tiny(request.param, request.getfixturevalue(f"tiny_{request.param}_dir"))


def guided_latents(tiny: Tiny, one_pass: bool, steps: int = 4) -> torch.Tensor:
    negative = "" if tiny.name == "flux2_klein" else NEGATIVE
    rows = encode(tiny.family, PROMPTS[:1], negative).repeat(len(SEEDS))
    guided = Guided(3.0, one_pass)
    return sample(tiny.family, tiny.denoiser, rows, SEEDS, steps, SOLVER[tiny.name], guided=guided)


def test_guided_latents_equal_those_of_the_stock_pipeline(tiny):
    """Bit for bit with the pipeline's own number of passes, where the solver is its own to the bit
    too; up to the order of sums with the other.
    """
    noise = noise_for(SEEDS, tiny.family.latent_shape)
    theirs = stock_call(
        tiny.pipe, tiny.family.model, PROMPTS[0], noise, 4, "latent", **ASKED[tiny.name]
    )
    ours = guided_latents(tiny, PASSES[tiny.name])
    if tiny.name.startswith("sana"):  # as in test_sana.py, and three times as much
        size = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3 * 2e-6 * 5 * size)
    else:
        assert torch.equal(ours, theirs)
    other = guided_latents(tiny, not PASSES[tiny.name])
    torch.testing.assert_close(other, ours, rtol=0, atol=2e-4 * float(ours.abs().max()))
    assert (tiny.ours(4, SOLVER[tiny.name]) - ours).abs().max() > 1e-3


def test_scale_one_means_no_guidance():
    settings = Guidance(regenerate=4.0)
    assert Guided.of(settings, "explore") is None
    assert Guided.of(settings, "regenerate") == Guided(4.0, True)
    assert settings.stages == ["regenerate"]


def test_rows_keep_their_negative_prompt(tiny_sd3_dir):
    family = family_for(tiny_model("sd3", tiny_sd3_dir))
    plain = family.load_text("cpu", torch.float32)
    rows = family.load_text("cpu", torch.float32, NEGATIVE).encode(PROMPTS)
    along, against = rows.rows([1, 0]).split_negative()
    expected = plain.encode([PROMPTS[1], PROMPTS[0]])
    negative = plain.encode([NEGATIVE, NEGATIVE])
    for name, tensor in expected.tensors.items():
        assert torch.equal(along.tensors[name], tensor)
        assert torch.equal(against.tensors[name], negative.tensors[name])
    with pytest.raises(ValueError, match="with a negative prompt"):
        expected.split_negative()


def test_a_negative_prompt_is_encoded_with_the_source_image(tiny_qwen_image_edit_dir):
    family = family_for(tiny_model("qwen_image_edit", tiny_qwen_image_edit_dir))
    images = [source_for(prompt, 32, 32) for prompt in PROMPTS]
    _, against = encode(family, PROMPTS, NEGATIVE).split_negative()
    plain = family.load_text("cpu", torch.float32).encode([NEGATIVE] * 2, images)
    assert all(torch.equal(against.tensors[name], plain.tensors[name]) for name in plain.tensors)
    first, second = plain.tensors["prompt_embeds"]
    assert (first - second).abs().max() > 1e-3


def test_gradients_flow_through_both_velocities(tiny_sd3_dir):
    """d/dw of v- + s (v - v-) is (1 - s) dv- + s dv: by two separate backward passes."""
    tiny = Tiny("sd3", tiny_sd3_dir)
    weight = tiny.denoiser.proj_out.weight.requires_grad_()
    rows = tiny.family.load_text("cpu", torch.float32, NEGATIVE).encode(PROMPTS)
    x, sigma = noise_for(SEEDS[:2], tiny.family.latent_shape), torch.tensor([0.3, 0.8])

    def gradient(cond: Conditioning, guided: Guided | None) -> torch.Tensor:
        found = velocity(tiny.family, tiny.denoiser, x, sigma, cond, guided)
        return torch.autograd.grad(found.sum(), weight)[0]

    along, against = (gradient(part, None) for part in rows.split_negative())
    for one_pass in (True, False):
        found = gradient(rows, Guided(2.5, one_pass))
        torch.testing.assert_close(found, 2.5 * along - 1.5 * against, rtol=1e-4, atol=1e-3)
    assert (along - against).abs().max() > 0.1


@pytest.mark.parametrize("name", ["flux", "flux_kontext", "flux2"])
def test_a_distilled_model_has_no_guidance(name, request):
    family = family_for(tiny_model(name, request.getfixturevalue(f"tiny_{name}_dir")))
    family.check(Guidance())
    with pytest.raises(
        ValueError, match=r"guidance\.train: .* is distilled.*leave out \[guidance\]"
    ):
        family.check(Guidance(train=2.0))


def test_the_index_of_klein_states_whether_it_is_distilled(tiny_flux2_klein_dir, tmp_path):
    family_for(tiny_model("flux2_klein", tiny_flux2_klein_dir)).check(Guidance(explore=4.0))
    distilled = make_tiny_flux2(tmp_path, klein=True, is_distilled=True)
    with pytest.raises(ValueError, match=r"guidance\.explore: .* is distilled"):
        family_for(tiny_model("flux2_klein", distilled)).check(Guidance(explore=4.0))

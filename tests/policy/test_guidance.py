"""Classifier-free guidance is compared with the pipelines of diffusers, whose argument names
differ.
"""

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
ARGUMENTS = {
    "sd3": {"guidance_scale": 3.0, "negative_prompt": NEGATIVE},
    "sana": {"guidance_scale": 3.0, "negative_prompt": NEGATIVE},
    "qwen_image": {"true_cfg_scale": 3.0, "negative_prompt": NEGATIVE},
    "qwen_image_edit": {"true_cfg_scale": 3.0, "negative_prompt": NEGATIVE},
    "z_image": {"guidance_scale": 2.0, "negative_prompt": NEGATIVE},
    "flux2_klein": {"guidance_scale": 3.0},
    "wan": {"guidance_scale": 3.0, "negative_prompt": NEGATIVE},
    "sana_video": {"guidance_scale": 3.0, "negative_prompt": NEGATIVE},
}
"""The arguments that give each pipeline its guidance strength. The negative prompt of FLUX.2 klein
is always empty.
"""
ONE_PASS = {
    "sd3": True,
    "sana": True,
    "qwen_image": False,
    "qwen_image_edit": False,
    "z_image": True,
    "flux2_klein": False,
    "wan": False,
    "sana_video": True,
}
"""Whether the pipeline runs one pass of twice the batch size."""


@pytest.fixture(params=ARGUMENTS)
def tiny(request):
    return Tiny(request.param, request.getfixturevalue(f"tiny_{request.param}_dir"))


def guided_latents(tiny: Tiny, one_pass: bool, steps: int = 4) -> torch.Tensor:
    negative = "" if tiny.name == "flux2_klein" else NEGATIVE
    rows = encode(tiny.family, PROMPTS[:1], negative).repeat(len(SEEDS))
    guided = Guided(3.0, one_pass)
    return sample(tiny.family, tiny.denoiser, rows, SEEDS, steps, SOLVER[tiny.name], guided=guided)


def test_guided_latents_match_the_diffusers_pipeline(tiny):
    """With the same number of passes as the pipeline, latents are equal bit for bit if the solver
    is equal bit for bit too. With the other number of passes, they are equal up to the order of
    sums.
    """
    noise = noise_for(SEEDS, tiny.family.latent_shape)
    theirs = stock_call(
        tiny.pipe, tiny.family.model, PROMPTS[0], noise, 4, "latent", **ARGUMENTS[tiny.name]
    )
    ours = guided_latents(tiny, ONE_PASS[tiny.name])
    # the tolerance of test_sana.py, times the guidance scale of three
    if tiny.name.startswith("sana"):
        size = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3 * 2e-6 * 5 * size)
    else:
        assert torch.equal(ours, theirs)
    other = guided_latents(tiny, not ONE_PASS[tiny.name])
    torch.testing.assert_close(other, ours, rtol=0, atol=2e-4 * float(ours.abs().max()))
    assert (tiny.ours(4, SOLVER[tiny.name]) - ours).abs().max() > 1e-3


def test_guidance_scale_of_one_means_no_guidance():
    settings = Guidance(regenerate=4.0)
    assert Guided.of(settings, "explore") is None
    assert Guided.of(settings, "regenerate") == Guided(4.0, True)
    assert settings.stages == ["regenerate"]


def test_rows_keep_their_negative_prompt(tiny_sd3_dir):
    family = family_for(tiny_model("sd3", tiny_sd3_dir))
    plain = family.load_text("cpu", torch.float32)
    rows = family.load_text("cpu", torch.float32, NEGATIVE).encode(PROMPTS)
    positive, negative_rows = rows.rows([1, 0]).split_negative()
    expected = plain.encode([PROMPTS[1], PROMPTS[0]])
    negative = plain.encode([NEGATIVE, NEGATIVE])
    for name, tensor in expected.tensors.items():
        assert torch.equal(positive.tensors[name], tensor)
        assert torch.equal(negative_rows.tensors[name], negative.tensors[name])
    with pytest.raises(ValueError, match="with a negative prompt"):
        expected.split_negative()


def test_negative_prompt_is_encoded_with_the_image_of_its_row(tiny_qwen_image_edit_dir):
    family = family_for(tiny_model("qwen_image_edit", tiny_qwen_image_edit_dir))
    images = [source_for(prompt, 32, 32) for prompt in PROMPTS]
    _, negative = encode(family, PROMPTS, NEGATIVE).split_negative()
    plain = family.load_text("cpu", torch.float32).encode([NEGATIVE] * 2, images)
    assert all(torch.equal(negative.tensors[name], plain.tensors[name]) for name in plain.tensors)
    first, second = plain.tensors["prompt_embeds"]
    assert (first - second).abs().max() > 1e-3


def test_gradients_flow_through_both_velocities(tiny_sd3_dir):
    """The gradient of v- + s (v - v-) is (1 - s) dv- + s dv. The test computes both parts by two
    separate backward passes.
    """
    tiny = Tiny("sd3", tiny_sd3_dir)
    weight = tiny.denoiser.proj_out.weight.requires_grad_()
    rows = tiny.family.load_text("cpu", torch.float32, NEGATIVE).encode(PROMPTS)
    x, sigma = noise_for(SEEDS[:2], tiny.family.latent_shape), torch.tensor([0.3, 0.8])

    def gradient(cond: Conditioning, guided: Guided | None) -> torch.Tensor:
        result = velocity(tiny.family, tiny.denoiser, x, sigma, cond, guided)
        return torch.autograd.grad(result.sum(), weight)[0]

    positive, negative = (gradient(part, None) for part in rows.split_negative())
    for one_pass in (True, False):
        result = gradient(rows, Guided(2.5, one_pass))
        torch.testing.assert_close(result, 2.5 * positive - 1.5 * negative, rtol=1e-4, atol=1e-3)
    assert (positive - negative).abs().max() > 0.1


@pytest.mark.parametrize("name", ["flux", "flux_kontext", "flux2"])
def test_distilled_models_refuse_guidance(name, request):
    family = family_for(tiny_model(name, request.getfixturevalue(f"tiny_{name}_dir")))
    family.check(Guidance())
    with pytest.raises(
        ValueError, match=r"guidance\.train: .* is distilled.*leave out \[guidance\]"
    ):
        family.check(Guidance(train=2.0))


def test_klein_index_determines_whether_the_model_is_distilled(tiny_flux2_klein_dir, tmp_path):
    family_for(tiny_model("flux2_klein", tiny_flux2_klein_dir)).check(Guidance(explore=4.0))
    distilled = make_tiny_flux2(tmp_path, klein=True, is_distilled=True)
    with pytest.raises(ValueError, match=r"guidance\.explore: .* is distilled"):
        family_for(tiny_model("flux2_klein", distilled)).check(Guidance(explore=4.0))

"""Each family with the Euler solver is compared with the pipeline of diffusers. The pipeline of
SANA has another scheduler by default; here it gets the Euler scheduler.
"""

import json
import shutil

import numpy as np
import pytest
import torch

from configs.sections import Model
from policy.sampling.noise import noise_for
from policy.sampling.sample import sample
from policy.types import Conditioning
from tests.tiny_families import NAMES, PROMPTS, SEEDS, Tiny, as_array, encode, stock_call
from tests.tiny_sana import make_tiny_sana
from tests.tiny_sana_video import make_tiny_sana_video

LATENT = {
    "sd3": (4, 8, 8),
    "flux": (16, 16),
    "flux_kontext": (16, 16),
    "sana": (4, 8, 8),
    "qwen_image": (16, 16),
    "qwen_image_edit": (64, 16),
    "z_image": (4, 8, 8),
    "flux2": (16, 4, 4),
    "flux2_klein": (16, 4, 4),
    "wan": (4, 2, 4, 4),
    "sana_video": (4, 2, 8, 8),
}


@pytest.fixture(scope="module", params=NAMES)
def tiny(request, tmp_path_factory):
    makers = {"sana": make_tiny_sana, "sana_video": make_tiny_sana_video}
    if make := makers.get(request.param):
        return Tiny(request.param, make(tmp_path_factory.mktemp("sana_euler"), euler=True))
    return Tiny(request.param, request.getfixturevalue(f"tiny_{request.param}_dir"))


def sigmas_argument(tiny: Tiny, steps: int) -> dict:
    """Return the sigmas argument for SANA's pipelines, which otherwise use the spacing of the
    scheduler. The other pipelines are called with this spacing anyway.
    """
    arguments = {"sigmas": np.linspace(1, 1 / steps, steps).tolist()}
    return arguments if tiny.name.startswith("sana") else {}


def image_shape(model: Model) -> tuple[int, ...]:
    """Return the shape of an image or of a clip."""
    image = (3, model.height, model.width)
    return image if model.frames is None else (model.frames, *image)


# the test of images below uses 4 steps
@pytest.mark.parametrize("steps", [2, pytest.param(4, marks=pytest.mark.slow), 10])
def test_latents_equal_those_of_the_diffusers_pipeline(tiny, steps):
    """Latents are equal bit for bit, because both run the same operations on the same shapes, with
    the packed latents and embedded guidance of FLUX.1.
    """
    assert type(tiny.pipe.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    ours = tiny.ours(steps, "euler")
    assert ours.shape == (3, *LATENT[tiny.name]) and ours.dtype == torch.float32
    assert torch.equal(ours, tiny.stock(steps, "latent", **sigmas_argument(tiny, steps)))


def test_images_equal_those_of_the_diffusers_pipeline(tiny):
    ours = tiny.family.decode(tiny.family.load_vae("cpu", torch.float32), tiny.ours(4, "euler"))
    assert ours.dtype == torch.uint8 and ours.shape == (3, *image_shape(tiny.family.model))
    np.testing.assert_array_equal(
        ours.numpy(), as_array(tiny.stock(4, "pil", **sigmas_argument(tiny, 4)))
    )
    assert ours.float().std() > 10


def test_edit_model_with_a_noise_free_source_matches_diffusers(tiny_qwen_image_edit_dir, tmp_path):
    """Qwen-Image-Edit-2511 has the same class and weights as the earlier version, but its source
    image is modulated at timestep 0.
    """
    directory = shutil.copytree(tiny_qwen_image_edit_dir, tmp_path / "model")
    file = directory / "transformer" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "zero_cond_t": True}))
    newer = Tiny("qwen_image_edit", directory)
    ours = newer.ours(3, "euler")
    assert torch.equal(ours, newer.stock(3, "latent"))
    assert not torch.equal(ours, Tiny("qwen_image_edit", tiny_qwen_image_edit_dir).ours(3, "euler"))


@pytest.mark.parametrize("tiny", NAMES, indirect=True)
def test_one_step_matches_diffusers_or_is_refused(tiny):
    """With one step, Qwen-Image's scheduler divides by 0 and the latents of its pipeline are not
    finite, so our sampler refuses one step for it.
    """
    if tiny.name.startswith("qwen_image"):
        with pytest.raises(ValueError, match=r"1 sampling step: .* needs at least 2"):
            tiny.ours(1, "euler")
    else:
        assert torch.equal(
            tiny.ours(1, "euler"), tiny.stock(1, "latent", **sigmas_argument(tiny, 1))
        )


@pytest.mark.parametrize("tiny", [name for name in NAMES if name != "sana"], indirect=True)
def test_non_square_images_match_diffusers(tiny):
    """Rows and columns are not exchanged. Images are 16 high and 24 wide, or as wide as the
    pipeline needs.
    """
    widths = {"wan": 32, "sana_video": 64, "qwen_image_edit": 64}
    wide = tiny.other(width=widths.get(tiny.name, 24))
    row = encode(wide, PROMPTS[1:]) if wide.edits else tiny.encoded.rows(1)
    ours = sample(wide, tiny.denoiser, row.repeat(2), SEEDS[:2], 3, "euler")
    noise = noise_for(SEEDS[:2], wide.latent_shape)
    theirs = stock_call(
        tiny.pipe, wide.model, PROMPTS[1], noise, 3, "pil", **sigmas_argument(tiny, 3)
    )
    result = wide.decode(wide.load_vae("cpu", torch.float32), ours).numpy()
    assert result.shape == (2, *image_shape(wide.model))
    np.testing.assert_array_equal(result, as_array(theirs))


PADDED = ("qwen_image", "qwen_image_edit", "z_image")


@pytest.mark.parametrize("tiny", PADDED, indirect=True)
def test_prompts_of_two_lengths_in_a_batch_are_independent(tiny):
    """Padding and masks keep rows independent: a row of a mixed batch equals the same row alone, up
    to the order of sums. The content of the padding changes no bit.
    """
    x, sigma = noise_for(SEEDS[:2], tiny.family.latent_shape), torch.tensor(0.5)
    short, long = tiny.encoded.tensors["prompt_embeds_mask"].sum(1).tolist()
    assert short < long
    both = tiny.family.velocity(tiny.denoiser, x, sigma, tiny.encoded)
    for row in range(2):
        alone = tiny.family.velocity(tiny.denoiser, x[row : row + 1], sigma, tiny.encoded.rows(row))
        torch.testing.assert_close(both[row : row + 1], alone, rtol=0, atol=1e-5)
    tensors = dict(tiny.encoded.tensors)
    tensors["prompt_embeds"] = tensors["prompt_embeds"].clone()
    tensors["prompt_embeds"][0, int(short) :] = 0.7
    assert torch.equal(tiny.family.velocity(tiny.denoiser, x, sigma, Conditioning(tensors)), both)


@pytest.mark.parametrize(
    "tiny", ["qwen_image", "z_image", "flux2", "flux2_klein", "wan"], indirect=True
)
def test_conditioning_equals_that_of_the_diffusers_pipeline(tiny):
    """The conditioning is equal bit for bit, because the prompts are encoded one at a time. The two
    prompts have different conditioning.
    """
    tokens = tiny.family.model.max_sequence_length
    for row, prompt in enumerate(PROMPTS):
        more = {"do_classifier_free_guidance": False} if tiny.name == "z_image" else {}
        with torch.no_grad():  # with gradients, attention would use another kernel
            embeds, *_ = tiny.pipe.encode_prompt(prompt, max_sequence_length=tokens, **more)
        used = embeds[0]
        result = tiny.encoded.tensors["prompt_embeds"][row]
        assert torch.equal(result[: len(used)], used) and not result[len(used) :].any()
    first, second = tiny.encoded.tensors["prompt_embeds"]
    assert (first - second).abs().max() > 0.01


@pytest.mark.parametrize("tiny", ["sd3", "flux", "flux_kontext"], indirect=True)
def test_conditioning_is_close_to_that_of_the_diffusers_pipeline(tiny):
    """Our encoder encodes prompts one by one, and the pipeline encodes both in a batch, so values
    of order 1 differ by the order of sums. test_sana.py compares SANA's conditioning bit for bit.
    """
    more = {"max_sequence_length": tiny.family.model.max_sequence_length}
    if tiny.name == "sd3":
        embeds, _, pooled, _ = tiny.pipe.encode_prompt(
            PROMPTS, None, None, do_classifier_free_guidance=False, **more
        )
    else:
        embeds, pooled, _ = tiny.pipe.encode_prompt(PROMPTS, None, **more)
    torch.testing.assert_close(tiny.encoded.tensors["prompt_embeds"], embeds, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        tiny.encoded.tensors["pooled_prompt_embeds"], pooled, rtol=1e-5, atol=1e-5
    )
    # the conditioning of the two prompts differs
    assert (embeds[0] - embeds[1]).abs().max() > 0.1 and (pooled[0] - pooled[1]).abs().max() > 0.1

"""Each family with the Euler solver against diffusers' own pipeline. SANA's pipeline brings another
scheduler: here it has Euler's.
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


def spaced(tiny: Tiny, steps: int) -> dict:
    """SANA's pipeline takes the scheduler's own spacing unless told otherwise; the other two are
    called with this one.
    """
    requested = {"sigmas": np.linspace(1, 1 / steps, steps).tolist()}
    return requested if tiny.name.startswith("sana") else {}


def drawn(model: Model) -> tuple[int, ...]:
    """Shape of an image, or of a clip."""
    image = (3, model.height, model.width)
    return image if model.frames is None else (model.frames, *image)


# images, below, are after 4
@pytest.mark.parametrize("steps", [2, pytest.param(4, marks=pytest.mark.slow), 10])
def test_latents_equal_those_of_the_stock_pipeline(tiny, steps):
    """Bit for bit: the same operations on the same shapes, with FLUX.1's packed latents and
    embedded guidance.
    """
    assert type(tiny.pipe.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    ours = tiny.ours(steps, "euler")
    assert ours.shape == (3, *LATENT[tiny.name]) and ours.dtype == torch.float32
    assert torch.equal(ours, tiny.stock(steps, "latent", **spaced(tiny, steps)))


def test_images_equal_those_of_the_stock_pipeline(tiny):
    ours = tiny.family.decode(tiny.family.load_vae("cpu", torch.float32), tiny.ours(4, "euler"))
    assert ours.dtype == torch.uint8 and ours.shape == (3, *drawn(tiny.family.model))
    np.testing.assert_array_equal(ours.numpy(), as_array(tiny.stock(4, "pil", **spaced(tiny, 4))))
    assert ours.float().std() > 10


def test_an_edit_model_with_a_source_at_timestep_zero(tiny_qwen_image_edit_dir, tmp_path):
    """Qwen-Image-Edit-2511: the same class and weights, modulated at timestep 0 for the source."""
    directory = shutil.copytree(tiny_qwen_image_edit_dir, tmp_path / "model")
    file = directory / "transformer" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "zero_cond_t": True}))
    newer = Tiny("qwen_image_edit", directory)
    ours = newer.ours(3, "euler")
    assert torch.equal(ours, newer.stock(3, "latent"))
    assert not torch.equal(ours, Tiny("qwen_image_edit", tiny_qwen_image_edit_dir).ours(3, "euler"))


@pytest.mark.parametrize("tiny", NAMES, indirect=True)
def test_one_step(tiny):
    """Qwen-Image's scheduler divides by 0 there: its pipeline's latents are not finite."""
    if tiny.name.startswith("qwen_image"):
        with pytest.raises(ValueError, match=r"1 sampling step: .* needs at least 2"):
            tiny.ours(1, "euler")
    else:
        assert torch.equal(tiny.ours(1, "euler"), tiny.stock(1, "latent", **spaced(tiny, 1)))


@pytest.mark.parametrize("tiny", [name for name in NAMES if name != "sana"], indirect=True)
def test_non_square_images_equal_those_of_the_stock_pipeline(tiny):
    """Rows and columns are not exchanged: 16 high, 24 wide, or as the pipeline has it."""
    widths = {"wan": 32, "sana_video": 64, "qwen_image_edit": 64}
    wide = tiny.other(width=widths.get(tiny.name, 24))
    row = encode(wide, PROMPTS[1:]) if wide.edits else tiny.encoded.rows(1)
    ours = sample(wide, tiny.denoiser, row.repeat(2), SEEDS[:2], 3, "euler")
    noise = noise_for(SEEDS[:2], wide.latent_shape)
    theirs = stock_call(tiny.pipe, wide.model, PROMPTS[1], noise, 3, "pil", **spaced(tiny, 3))
    found = wide.decode(wide.load_vae("cpu", torch.float32), ours).numpy()
    assert found.shape == (2, *drawn(wide.model))
    np.testing.assert_array_equal(found, as_array(theirs))


PADDED = ("qwen_image", "qwen_image_edit", "z_image")


@pytest.mark.parametrize("tiny", PADDED, indirect=True)
def test_prompts_of_two_lengths_do_not_affect_each_other(tiny):
    """Padding and masks keep rows apart: a row of a mixed batch is what it is alone, up to the
    order of sums; and what stands in the padding changes no bit.
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
def test_conditioning_equals_that_of_the_stock_pipeline(tiny):
    """Bit for bit, as one prompt goes at a time; the two prompts differ."""
    tokens = tiny.family.model.max_sequence_length
    for row, prompt in enumerate(PROMPTS):
        more = {"do_classifier_free_guidance": False} if tiny.name == "z_image" else {}
        with torch.no_grad():  # attention has another kernel where gradients are asked for
            embeds, *_ = tiny.pipe.encode_prompt(prompt, max_sequence_length=tokens, **more)
        used = embeds[0]
        found = tiny.encoded.tensors["prompt_embeds"][row]
        assert torch.equal(found[: len(used)], used) and not found[len(used) :].any()
    first, second = tiny.encoded.tensors["prompt_embeds"]
    assert (first - second).abs().max() > 0.01


@pytest.mark.parametrize("tiny", ["sd3", "flux", "flux_kontext"], indirect=True)
def test_conditioning_equals_that_of_the_pipeline(tiny):
    """Encoded one by one against a batch of two: sums in another order, values of order 1. SANA's
    is in test_sana.py, bit for bit.
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
    # the two prompts do differ
    assert (embeds[0] - embeds[1]).abs().max() > 0.1 and (pooled[0] - pooled[1]).abs().max() > 0.1

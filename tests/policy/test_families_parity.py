"""Each family with the Euler solver against diffusers' own pipeline. SANA's pipeline brings another
scheduler: here it has Euler's.
"""

import numpy as np
import pytest
import torch

from tests.tiny_families import NAMES, PROMPTS, Tiny, as_array
from tests.tiny_sana import make_tiny_sana

LATENT = {"sd3": (4, 8, 8), "flux": (16, 16), "sana": (4, 8, 8)}


@pytest.fixture(scope="module", params=NAMES)
def tiny(request, tmp_path_factory):
    if request.param == "sana":
        return Tiny("sana", make_tiny_sana(tmp_path_factory.mktemp("sana_euler"), euler=True))
    return Tiny(request.param, request.getfixturevalue(f"tiny_{request.param}_dir"))


def spaced(tiny: Tiny, steps: int) -> dict:
    """SANA's pipeline takes the scheduler's own spacing unless told otherwise; the other two are
    called with this one.
    """
    return {"sigmas": np.linspace(1, 1 / steps, steps).tolist()} if tiny.name == "sana" else {}


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_latents_are_the_stock_pipelines(tiny, steps):
    """Bit for bit: the same operations on the same shapes, with FLUX.1's packed latents and
    embedded guidance.
    """
    assert type(tiny.pipe.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
    ours = tiny.ours(steps, "euler")
    assert ours.shape == (3, *LATENT[tiny.name]) and ours.dtype == torch.float32
    assert torch.equal(ours, tiny.stock(steps, "latent", **spaced(tiny, steps)))


def test_images_are_the_stock_pipelines(tiny):
    ours = tiny.family.decode(tiny.family.load_vae("cpu", torch.float32), tiny.ours(4, "euler"))
    assert ours.dtype == torch.uint8 and ours.shape == (
        3,
        3,
        tiny.family.model.height,
        tiny.family.model.width,
    )
    np.testing.assert_array_equal(ours.numpy(), as_array(tiny.stock(4, "pil", **spaced(tiny, 4))))
    assert ours.float().std() > 10


@pytest.mark.parametrize("tiny", ["sd3", "flux"], indirect=True)
def test_conditioning_is_the_pipelines(tiny):
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
    assert (embeds[0] - embeds[1]).abs().max() > 0.1 and (
        pooled[0] - pooled[1]
    ).abs().max() > 0.1  # the two prompts do differ

"""Wan 2.2 TI2V 5B as text to video: the stock pipeline tells each token its timestep, and the
family one to the clip; an autoencoder of patches.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from policy.families import family_for
from policy.sampling.noise import noise_for
from tests.cluster import test_families_ring
from tests.policy import test_families, test_families_training, test_guidance, test_lora_files
from tests.tiny_families import PROMPTS, SEEDS, Tiny, as_array, stock_call, tiny_model
from tests.tiny_wan import SCHEDULERS, make_tiny_wan


@pytest.fixture(scope="module")
def tiny_wan_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the place of Wan 2.1's, for tests of every family."""
    return make_tiny_wan(tmp_path_factory.mktemp("tiny_wan22"), wan22=True)


@pytest.fixture(scope="module")
def tiny(tiny_wan_dir) -> Tiny:
    return Tiny("wan", tiny_wan_dir)


@pytest.mark.parametrize("steps", [2, 10])
@pytest.mark.parametrize("guided", [False, True])
def test_latents_equal_those_of_the_diffusers_pipeline(tiny, steps, guided):
    """Bit for bit where it tells each clip its timestep. As published each token, so that the
    embedder's products have more rows, whose sums may be grouped otherwise.
    """
    if guided:
        ours, more = test_guidance.guided_latents(tiny, False, steps), test_guidance.ASKED["wan"]
    else:
        ours, more = tiny.ours(steps, "euler"), {}
    told: list[tuple[int, ...]] = []
    hook = tiny.pipe.transformer.register_forward_pre_hook(
        lambda module, args, named: told.append((*named["timestep"].shape,)), with_kwargs=True
    )
    published = tiny.stock(steps, "latent", **more)
    tiny.pipe.register_to_config(expand_timesteps=False)
    by_clip = tiny.stock(steps, "latent", **more)
    tiny.pipe.register_to_config(expand_timesteps=True)
    hook.remove()
    assert told == [(3, 2)] * (len(told) // 2) + [(3,)] * (len(told) // 2)
    assert ours.shape == (3, 6, 2, 2, 2) and torch.equal(ours, by_clip)
    size = float(published.abs().max())
    torch.testing.assert_close(ours, published, rtol=0, atol=2e-6 * steps * size)


@pytest.mark.parametrize(("frames", "tiles"), [(1, False), (9, False), (5, True)])
def test_clips_of_any_length_are_the_stock_pipelines(tiny, frames, tiles):
    """Of two latents, decoded whole or in tiles of 16 x 16 pixels."""
    family = tiny.other(frames=frames, width=32)
    assert family.latent_shape == (6, 1 + (frames - 1) // 4, 2, 4)
    latents = noise_for(SEEDS[:2], family.latent_shape)
    vae, stock = family.load_vae("cpu", torch.float32), tiny.pipe.vae
    calls: list[int] = []
    vae.decoder.register_forward_hook(lambda *_: calls.append(1))
    for one in (vae, stock) if tiles else ():
        one.enable_tiling(16, 16, 8, 8)
    clips = family.decode(vae, latents).numpy()
    assert len(calls) == 2 * family.latent_shape[1] * (8 if tiles else 1)
    assert clips.shape == (2, frames, 3, 16, 32) and clips.std() > 10
    drawn = stock_call(tiny.pipe, family.model, PROMPTS[0], latents, 0, "pil")
    stock.disable_tiling()
    np.testing.assert_array_equal(clips, as_array(drawn))


@pytest.mark.parametrize("steps", [2, 6])
def test_unipc_latents_are_the_stock_pipelines(tmp_path, steps):
    """With the published scheduler; the tolerance is that of Wan 2.1's test."""
    tiny = Tiny("wan", make_tiny_wan(tmp_path, scheduler=SCHEDULERS[1], wan22=True))
    ours, theirs = tiny.ours(steps, "unipc"), tiny.stock(steps, "latent")
    size = float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * (steps + 1) * size)


@pytest.mark.parametrize(
    "holds",
    [
        test_families.test_products_of_the_blocks_are_quantized,
        test_families.test_lora_targets_are_quantized_layers_of_the_blocks,
    ],
)
def test_tables_of_the_family_fit(holds, tiny):
    holds(tiny.family)


@pytest.mark.parametrize(
    "holds",
    [
        test_families_training.test_update_changes_only_lora_weights,
        test_families_training.test_gradient_checkpointing_gives_the_same_gradients,
    ],
)
def test_what_holds_of_every_family(holds, tiny_wan_dir):
    holds("wan", tiny_wan_dir)


def test_the_export_loads_in_stock_diffusers(request, randomise, tmp_path):
    test_lora_files.test_exported_lora_of_other_families_generates_the_same_in_diffusers(
        "wan", request, randomise, tmp_path
    )


@pytest.mark.slow
def test_two_iterations_through_all_services(ray_here, request, tmp_path):
    test_families_ring.test_two_iterations_of_the_newer_families(ray_here, request, tmp_path, "wan")


def test_sizes_that_cannot_be_drawn(tiny_wan_dir):
    with pytest.raises(ValueError, match=r"model\.width: 24 pixels; this .* multiples of 16"):
        family_for(tiny_model("wan", tiny_wan_dir, width=24)).check()

"""Wan 2.2 TI2V 5B for text to video. The pipeline of diffusers gives each token its timestep, and
our family gives one timestep to the clip. The autoencoder works on patches.
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
    """A tiny Wan 2.2 that replaces Wan 2.1 in the tests of every family."""
    return make_tiny_wan(tmp_path_factory.mktemp("tiny_wan22"), wan22=True)


@pytest.fixture(scope="module")
def tiny(tiny_wan_dir) -> Tiny:
    return Tiny("wan", tiny_wan_dir)


@pytest.mark.parametrize("steps", [2, 10])
@pytest.mark.parametrize("guided", [False, True])
def test_latents_equal_those_of_the_diffusers_pipeline(tiny, steps, guided):
    """The latents are equal bit for bit if the pipeline gives each clip one timestep. The published
    pipeline gives each token its timestep, so the products of the embedder have more rows and their
    sums may be grouped differently.
    """
    if guided:
        ours, more = (
            test_guidance.guided_latents(tiny, False, steps),
            test_guidance.ARGUMENTS["wan"],
        )
    else:
        ours, more = tiny.ours(steps, "euler"), {}
    timestep_shapes: list[tuple[int, ...]] = []
    hook = tiny.pipe.transformer.register_forward_pre_hook(
        lambda module, args, named: timestep_shapes.append((*named["timestep"].shape,)),
        with_kwargs=True,
    )
    published = tiny.stock(steps, "latent", **more)
    tiny.pipe.register_to_config(expand_timesteps=False)
    by_clip = tiny.stock(steps, "latent", **more)
    tiny.pipe.register_to_config(expand_timesteps=True)
    hook.remove()
    assert timestep_shapes == [(3, 2)] * (len(timestep_shapes) // 2) + [(3,)] * (
        len(timestep_shapes) // 2
    )
    assert ours.shape == (3, 6, 2, 2, 2) and torch.equal(ours, by_clip)
    size = float(published.abs().max())
    torch.testing.assert_close(ours, published, rtol=0, atol=2e-6 * steps * size)


@pytest.mark.parametrize(("frames", "tiles"), [(1, False), (9, False), (5, True)])
def test_clips_of_any_length_match_the_diffusers_pipeline(tiny, frames, tiles):
    """Two latents are decoded at once or in tiles of 16 x 16 pixels."""
    family = tiny.other(frames=frames, width=32)
    assert family.latent_shape == (6, 1 + (frames - 1) // 4, 2, 4)
    latents = noise_for(SEEDS[:2], family.latent_shape)
    vae, stock = family.load_vae("cpu", torch.float32), tiny.pipe.vae
    calls: list[int] = []
    vae.decoder.register_forward_hook(lambda *_: calls.append(1))
    for autoencoder in (vae, stock) if tiles else ():
        autoencoder.enable_tiling(16, 16, 8, 8)
    clips = family.decode(vae, latents).numpy()
    assert len(calls) == 2 * family.latent_shape[1] * (8 if tiles else 1)
    assert clips.shape == (2, frames, 3, 16, 32) and clips.std() > 10
    images = stock_call(tiny.pipe, family.model, PROMPTS[0], latents, 0, "pil")
    stock.disable_tiling()
    np.testing.assert_array_equal(clips, as_array(images))


@pytest.mark.parametrize("steps", [2, 6])
def test_unipc_latents_match_the_diffusers_pipeline(tmp_path, steps):
    """The scheduler is the published one. The tolerance is that of the test for Wan 2.1."""
    tiny = Tiny("wan", make_tiny_wan(tmp_path, scheduler=SCHEDULERS[1], wan22=True))
    ours, theirs = tiny.ours(steps, "unipc"), tiny.stock(steps, "latent")
    size = float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * (steps + 1) * size)


@pytest.mark.parametrize(
    "family_test",
    [
        test_families.test_products_of_the_blocks_are_quantized,
        test_families.test_lora_targets_are_quantized_layers_of_the_blocks,
    ],
)
def test_tables_of_the_family_match_the_model(family_test, tiny):
    family_test(tiny.family)


@pytest.mark.parametrize(
    "family_test",
    [
        test_families_training.test_update_changes_only_lora_weights,
        test_families_training.test_gradient_checkpointing_gives_the_same_gradients,
    ],
)
def test_training_tests_of_every_family_pass(family_test, tiny_wan_dir):
    family_test("wan", tiny_wan_dir)


def test_exported_lora_loads_in_diffusers(request, randomise, tmp_path):
    test_lora_files.test_exported_lora_of_other_families_generates_the_same_in_diffusers(
        "wan", request, randomise, tmp_path
    )


@pytest.mark.slow
def test_two_iterations_through_all_services(ray_here, request, tmp_path):
    test_families_ring.test_newer_families_train_two_iterations(ray_here, request, tmp_path, "wan")


def test_unsupported_sizes_are_refused(tiny_wan_dir):
    with pytest.raises(ValueError, match=r"model\.width: 24 pixels; this .* multiples of 16"):
        family_for(tiny_model("wan", tiny_wan_dir, width=24)).check()

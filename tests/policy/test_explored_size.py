"""Proxy images that are smaller than the training images and use the same noise at lower
resolution.
"""

import numpy as np
import pytest
import torch

from configs.load import ConfigError, load
from policy.families import family_for
from policy.sampling.noise import noise_for
from policy.sampling.sample import sample
from tests.tiny_families import NAMES, PROMPTS, SETTINGS, SOLVER, Tiny, tiny_model

SEEDS = list(range(300))


@pytest.fixture(params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture
def sizes(name, request):
    """Return the family at twice its image size and the family at its own image size."""
    directory, settings = request.getfixturevalue(f"tiny_{name}_dir"), SETTINGS[name]
    twice = {side: 2 * settings[side] for side in ("height", "width")}
    return tuple(family_for(tiny_model(name, directory, **more)) for more in (twice, {}))


def test_packing_reverses_the_spatial_view_of_latents(sizes):
    for family in sizes:
        latents = noise_for([1, 2], family.latent_shape)
        spatial = family.spatial(latents)
        assert spatial.ndim == 4 and torch.equal(family.packed(spatial), latents)
        channels = (
            family.part_config("vae").get("z_dim") or family.part_config("vae")["latent_channels"]
        )
        assert spatial.shape[1] == channels * (family.latent_shape[1] if family.video else 1)


def test_smaller_noise_is_the_block_sum_of_the_same_noise(sizes):
    """The smaller noise is the sum of each 2 x 2 block divided by 2. It is standard normal again.
    Its values are independent, so with ``count`` values the mean is within 4 / sqrt(count) of 0 and
    the variance within 4 sqrt(2 / count) of 1.
    """
    full, small = sizes
    noise = noise_for(SEEDS, full.latent_shape)
    result = full.smaller_noise(noise, small)
    assert result.shape == (len(SEEDS), *small.latent_shape)
    count = result.numel()
    assert abs(float(result.mean())) < 4 / count**0.5
    assert abs(float(result.var()) - 1) < 4 * (2 / count) ** 0.5
    large, reduced = full.spatial(noise)[7].numpy(), small.spatial(result)[7].numpy()
    _, rows, columns = large.shape
    blocks = large.reshape(len(large), rows // 2, 2, columns // 2, 2).sum((2, 4)) / 2
    np.testing.assert_allclose(reduced, blocks, atol=1e-6)
    assert torch.equal(full.smaller_noise(noise[7:8], small), result[7:8])


def test_smaller_image_uses_the_noise_of_the_full_size(name, sizes, request):
    """Families that edit images are skipped, because their source is as large as the result."""
    full, small = sizes
    if full.edits:
        return
    tiny = Tiny(name, request.getfixturevalue(f"tiny_{name}_dir"))
    rows, seeds = tiny.encoded.rows(0).repeat(2), [3, 4]
    from_full_noise = sample(small, tiny.denoiser, rows, seeds, 3, SOLVER[name], full=full)
    from_own_noise = sample(small, tiny.denoiser, rows, seeds, 3, SOLVER[name])
    assert from_full_noise.shape == from_own_noise.shape
    assert not torch.equal(from_full_noise, from_own_noise)
    assert PROMPTS and bool(torch.isfinite(from_full_noise).all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["explore.height=16"], "explore.height: only one side is set: set both or neither"),
        (
            ["explore.height=24", "explore.width=16"],
            "explore.height: 24 does not divide model.height = 32",
        ),
        (
            ["explore.height=16", "explore.width=16", "arm=naive_quant"],
            "explore.height: arm 'naive_quant' trains on the explored images themselves",
        ),
        (
            ["explore.height=16", "explore.width=16", "arm=diffusionnft"],
            "explore.height: arm 'diffusionnft' explores nothing",
        ),
    ],
)
def test_invalid_explored_sizes_are_refused(changes, message):
    with pytest.raises(ConfigError) as caught:
        load("quickstart", changes)
    assert len(caught.value.lines) == 1 and message in caught.value.lines[0]


def test_editing_model_refuses_a_smaller_explored_size(tiny_flux_kontext_dir):
    from planning.preflight import check_model

    changes = [
        f"model.path={tiny_flux_kontext_dir}",
        "model.family=flux_kontext",
        "model.guidance=2.5",
        "explore.height=16",
        "explore.width=16",
    ]
    with pytest.raises(
        ConfigError, match=r"explore\.height: a model that edits images must explore at"
    ):
        check_model(load("quickstart", changes))


def test_explored_size_that_the_model_cannot_generate_is_refused(tiny_sana_dir):
    from planning.preflight import check_model

    changes = [
        f"model.path={tiny_sana_dir}",
        "model.family=sana",
        "model.height=64",
        "model.width=64",
        "explore.height=16",
        "explore.width=32",
    ]
    with pytest.raises(ConfigError, match=r"explore\.height: 16 pixels; this model needs"):
        check_model(load("quickstart", changes))

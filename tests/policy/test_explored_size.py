"""Proxy images of another size than those that are trained on: the same noise, cut down."""

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
    """(the family at twice the size, the family at its own)."""
    directory, settings = request.getfixturevalue(f"tiny_{name}_dir"), SETTINGS[name]
    twice = {side: 2 * settings[side] for side in ("height", "width")}
    return tuple(family_for(tiny_model(name, directory, **more)) for more in (twice, {}))


def test_latents_convert_to_spatial_layout_and_back(sizes):
    for family in sizes:
        latents = noise_for([1, 2], family.latent_shape)
        spatial = family.spatial(latents)
        assert spatial.ndim == 4 and torch.equal(family.packed(spatial), latents)
        channels = (
            family.part_config("vae").get("z_dim") or family.part_config("vae")["latent_channels"]
        )
        assert spatial.shape[1] == channels * (family.latent_shape[1] if family.video else 1)


def test_smaller_noise_is_the_coarse_part_of_the_same_noise(sizes):
    """Sum of each 2 x 2 block over 2: standard normal again (each of B x n values is one draw, so
    mean and variance are good to 4 / sqrt and 4 sqrt(2) / sqrt of their number), and a block of
    neighbours that are alike keeps what it had, times 2.
    """
    full, small = sizes
    noise = noise_for(SEEDS, full.latent_shape)
    found = full.smaller_noise(noise, small)
    assert found.shape == (len(SEEDS), *small.latent_shape)
    count = found.numel()
    assert abs(float(found.mean())) < 4 / count**0.5
    assert abs(float(found.var()) - 1) < 4 * (2 / count) ** 0.5
    one, cut = full.spatial(noise)[7].numpy(), small.spatial(found)[7].numpy()
    _, rows, columns = one.shape
    blocks = one.reshape(len(one), rows // 2, 2, columns // 2, 2).sum((2, 4)) / 2
    np.testing.assert_allclose(cut, blocks, atol=1e-6)
    assert torch.equal(full.smaller_noise(noise[7:8], small), found[7:8])


def test_a_smaller_image_starts_from_the_reduced_noise(name, sizes, request):
    """Not by families that edit: their source is as large as what is drawn."""
    full, small = sizes
    if full.edits:
        return
    tiny = Tiny(name, request.getfixturevalue(f"tiny_{name}_dir"))
    rows, seeds = tiny.encoded.rows(0).repeat(2), [3, 4]
    drawn = sample(small, tiny.denoiser, rows, seeds, 3, SOLVER[name], full=full)
    own = sample(small, tiny.denoiser, rows, seeds, 3, SOLVER[name])
    assert drawn.shape == own.shape and not torch.equal(drawn, own)
    assert PROMPTS and bool(torch.isfinite(drawn).all())


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
def test_invalid_sizes_are_refused(changes, message):
    with pytest.raises(ConfigError) as caught:
        load("quickstart", changes)
    assert len(caught.value.lines) == 1 and message in caught.value.lines[0]


def test_an_editor_explores_at_full_size(tiny_flux_kontext_dir):
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


def test_sizes_that_the_model_does_not_support_are_refused(tiny_sana_dir):
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

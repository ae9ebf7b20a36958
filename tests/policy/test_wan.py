"""Wan: frames, the multistep schedule of its published pipelines, and refused settings."""

import numpy as np
import pytest
import torch

from configs.load import ConfigError, load
from planning.preflight import check_model
from policy.families import family_for
from policy.sampling.noise import noise_for
from policy.sampling.sample import sample
from tests.cluster.runs import tiny_config
from tests.tiny_families import PROMPTS, SEEDS, Tiny, as_array, stock_call, tiny_model
from tests.tiny_wan import SCHEDULERS, make_tiny_wan


@pytest.fixture(scope="module")
def multistep(tmp_path_factory) -> Tiny:
    """A tiny pipeline with the scheduler of the published pipelines."""
    directory = make_tiny_wan(tmp_path_factory.mktemp("tiny_wan_unipc"), scheduler=SCHEDULERS[1])
    return Tiny("wan", directory)


@pytest.mark.parametrize("frames", [1, 5, 9])
def test_clips_of_any_length_match_the_diffusers_pipeline(tiny_wan_dir, frames):
    """Latents are equal bit for bit. Clips are 16 high and 32 wide."""
    tiny = Tiny("wan", tiny_wan_dir)
    family = tiny.other(frames=frames, width=32)
    ours = sample(family, tiny.denoiser, tiny.encoded.rows(0).repeat(2), SEEDS[:2], 3, "euler")
    assert ours.shape == (2, 4, 1 + (frames - 1) // 4, 4, 8)
    noise = noise_for(SEEDS[:2], family.latent_shape)
    assert torch.equal(ours, stock_call(tiny.pipe, family.model, PROMPTS[0], noise, 3, "latent"))
    clips = family.decode(family.load_vae("cpu", torch.float32), ours).numpy()
    assert clips.shape == (2, frames, 3, 16, 32)
    theirs = as_array(stock_call(tiny.pipe, family.model, PROMPTS[0], noise, 3, "pil"))
    # we decode clips one at a time, so values near .5 may be rounded to another gray level
    assert np.abs(clips.astype(int) - theirs).max() <= 1


@pytest.mark.parametrize("steps", [1, 2, 4, 10, 40])
def test_sigmas_and_timesteps_equal_those_of_the_multistep_scheduler(multistep, steps):
    scheduler = multistep.pipe.scheduler
    scheduler.set_timesteps(steps)
    sigmas = multistep.family.sigmas(steps)
    assert torch.equal(sigmas, scheduler.sigmas) and sigmas[-1] == 0
    timesteps = []

    class RecordsTimesteps:
        patch_embedding = torch.nn.Linear(1, 1)

        def __call__(self, hidden_states, timestep, **rest):
            timesteps.append(timestep.tolist())
            return (hidden_states,)

    x = noise_for([1, 2], multistep.family.latent_shape)
    for sigma in sigmas[:-1]:
        multistep.family.velocity(RecordsTimesteps(), x, sigma, multistep.encoded)
    assert timesteps == [[float(t)] * 2 for t in scheduler.timesteps]
    assert multistep.other(shift=5.0).sigmas(4)[1] > multistep.family.sigmas(4)[1]
    assert multistep.other(schedule="uniform").sigmas(2).tolist() == [1.0, 0.5, 0.0]


def test_first_order_steps_are_euler_steps(multistep):
    """The published scheduler with order 1 and without its corrector takes Euler steps in another
    form, so the latents are equal up to rounding.
    """
    from diffusers import UniPCMultistepScheduler

    config = dict(multistep.pipe.scheduler.config)
    plain = {**config, "solver_order": 1, "disable_corrector": list(range(10))}
    multistep.pipe.scheduler = UniPCMultistepScheduler.from_config(plain)
    theirs = multistep.stock(6, "latent")
    multistep.pipe.scheduler = UniPCMultistepScheduler.from_config(config)
    size = float(theirs.abs().max())
    torch.testing.assert_close(multistep.ours(6, "euler"), theirs, rtol=0, atol=1e-5 * size)
    assert (multistep.stock(6, "latent") - theirs).abs().max() > 1e-3 * size


@pytest.mark.parametrize("steps", [1, 2, 6, 20])
def test_unipc_latents_match_the_diffusers_pipeline(multistep, steps):
    """The scheduler is the published one, unchanged. Its coefficients are float32: they use
    log(alpha / sigma), which is up to 14 at the first sigma, and differences of 1 / h. Each has a
    relative error of up to 14 x 2^-23. Ours (float64) do not have this error. The errors of the
    steps add up.
    """
    ours, theirs = multistep.ours(steps, "unipc"), multistep.stock(steps, "latent")
    size = float(theirs.abs().max())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * (steps + 1) * size)
    if steps > 2:
        assert (multistep.ours(steps, "dpmpp_2m") - theirs).abs().max() > 1e-4 * size


def test_proxy_clips_use_the_noise_of_the_first_frames(tiny_wan_dir):
    """A proxy clip of 5 frames of 16x16 uses the noise of the first latent frames of a clip of 9
    frames of 32x32, summed over blocks.
    """
    tiny = Tiny("wan", tiny_wan_dir)
    full = tiny.other(frames=9, height=32, width=32)
    noise = noise_for(SEEDS, full.latent_shape)
    assert torch.equal(full.smaller_noise(noise, tiny.other(frames=5, height=32, width=32)),
                       noise[:, :, :2])  # fmt: skip
    small = tiny.other(frames=5)
    blocks = noise[:, :, :2].numpy().reshape(3, 4, 2, 4, 2, 4, 2).sum((4, 6)) / 2
    np.testing.assert_allclose(full.smaller_noise(noise, small).numpy(), blocks, atol=1e-6)
    latents = sample(small, tiny.denoiser, tiny.encoded.rows(0), SEEDS[:1], 2, "euler", full=full)
    assert latents.shape == (1, *small.latent_shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"frames": None},
            r"model\.frames: family 'wan' generates clips: set the number of frames, 4k \+ 1",
        ),
        ({"frames": 16}, r"model\.frames: 16 frames; this model needs 4k \+ 1, such as 33"),
        ({"height": 24}, r"model\.height: 24 pixels; this model needs multiples of 16"),
    ],
)
def test_unsupported_sizes_are_refused(tiny_wan_dir, changes, message):
    with pytest.raises(ValueError, match=message):
        family_for(tiny_model("wan", tiny_wan_dir, **changes)).check()


def test_tiny_decoder_is_refused_for_clips(tiny_wan_dir, tmp_path):
    config = tiny_config(
        tiny_wan_dir,
        tmp_path,
        "tiny",
        model__family="wan",
        model__frames=5,
        explore__decoder="tiny",
    )
    with pytest.raises(ConfigError, match="'tiny' does not decode clips: use 'full'"):
        check_model(config)


@pytest.mark.parametrize("change", [{"frames": 5}, {"fps": 8}])
def test_frames_are_refused_for_image_models(tiny_sd3_dir, change):
    (key,) = change
    with pytest.raises(
        ValueError, match=rf"model\.{key}: family 'sd3' generates images, not clips: leave it out"
    ):
        family_for(tiny_model("sd3", tiny_sd3_dir, **change))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["explore.frames=5"], "explore.frames: 5 without model.frames: images have no frames"),
        (["model.frames=5", "explore.frames=9"], "explore.frames: 9 is more than model.frames = 5"),
        (
            ["model.frames=9", "explore.frames=5", "arm=naive_quant"],
            "explore.frames: arm 'naive_quant' trains on the explored images themselves",
        ),
    ],
)
def test_invalid_explored_frames_are_refused(changes, message):
    with pytest.raises(ConfigError) as caught:
        load("quickstart", changes)
    assert len(caught.value.lines) == 1 and message in caught.value.lines[0]

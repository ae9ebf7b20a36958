"""The tiny video model, and the tiny model at half the side: the parts of their training."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from configs.load import load
from configs.sections import Model
from policy.families import family_for
from policy.sampling.noise import noise_for
from policy.sampling.sample import sample
from rewards.shapes import ShapesScorer
from shapes.half import halved
from shapes.half_build import downsample_noise
from shapes.moving import FRAMES, ClipPool
from shapes.muon import Muon, orthogonal
from shapes.training import backward, matrices_apart
from shapes.vae import calibrate
from shapes.video_build import assemble
from shapes.video_denoiser import Clips, VideoLearner, by_token
from shapes.video_vae import build_vae, encode, to_video, unclamped
from tests.tiny_families import stock_call, stock_pipeline


def by(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(0)
    return build_vae().eval()


def test_a_caption_is_true_in_every_frame_of_a_moving_clip():
    pool = ClipPool(3)
    clips, which, cells = pool.clips(60)
    assert clips.shape == (60, FRAMES, 3, 32, 32) and cells.shape == (60, 3, 8, 8)
    captions = [pool.scenes[index].caption for index in which]
    for frame in (0, 3, FRAMES - 1):
        shown = ShapesScorer()(np.ascontiguousarray(clips[:, frame]), captions, [{}] * 60)
        assert shown.min() > 0.95
    moved = (clips[:, 0] != clips[:, -1]).any((1, 2, 3))
    assert moved.mean() > 0.95
    # a cell with one object is labelled at the first frame, with the color of its pixels
    row, high, wide = (found[0] for found in np.nonzero(cells[:, 0]))
    patch = clips[row, 0, :, 4 * high : 4 * high + 4, 4 * wide : 4 * wide + 4]
    assert np.ptp(patch.reshape(3, -1).mean(1)) > 20  # not grey


def test_the_first_latent_frames_encode_the_first_frames(vae):
    clips = ClipPool(4).clips(3)[0]
    whole = encode(vae, clips)
    assert whole.shape == (3, 48, 3, 4, 4)
    for frames, latent in ((1, 1), (5, 2)):
        torch.testing.assert_close(encode(vae, clips[:, :frames]), whole[:, :, :latent])


def test_unclamped_decoding_equals_decoding_within_range(vae):
    latents = encode(vae, ClipPool(5).clips(2)[0])
    with torch.no_grad():
        ours, theirs = unclamped(vae, latents), vae.decode(latents).sample
    assert torch.equal(ours.clamp(-1, 1), theirs)


def test_calibration_of_clips_keeps_them_and_gives_unit_latents(vae):
    torch.manual_seed(0)
    own = build_vae().eval()
    own.load_state_dict(vae.state_dict())
    clips = ClipPool(6).clips(40)[0]
    with torch.no_grad():
        before = unclamped(own, encode(own, clips[:4]))
        calibrate(own, encode(own, clips), 0.3)
        after = unclamped(own, encode(own, clips[:4]))
    torch.testing.assert_close(before, after, rtol=0, atol=2e-2 * float(before.abs().max()))
    latents = encode(own, clips).transpose(0, 1).flatten(1)
    assert float(latents.var(1).mean()) == pytest.approx(1.0, abs=0.05)
    assert float(torch.corrcoef(latents)[~torch.eye(48, dtype=torch.bool)].abs().max()) < 0.05


def test_cells_are_in_the_order_of_tokens():
    """Cells are listed token by token: the four cells of a token's 8x8 pixels, then those of the
    next token.
    """
    cells = torch.arange(2 * 3 * 64).view(2, 3, 8, 8)
    assert by_token(cells)[0, :8].tolist() == [0, 1, 8, 9, 2, 3, 10, 11]
    assert by_token(cells)[1, 64 * 2 + 63] == cells[1, 2, 7, 7]


def test_a_step_on_clips_of_each_length_learns(vae):
    clips, learner = Clips(vae, seed=1, count=32), VideoLearner()
    optimizer = matrices_apart(learner)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(
        list(learner.parameters())
    )
    batches = [clips.batch(by(seed), done) for seed, done in ((0, 0.0), (1, 0.9), (5, 0.9))]
    lengths = {batch.x0.shape[2] for batch in batches}
    assert lengths <= {1, 2, 3} and len(lengths) > 1
    for batch in batches:
        found = backward(learner, batch, four_bits=False)
        # with zero output the loss is E|eps - x0|^2
        expected = (batch.eps - batch.x0).square().mean().item()
        assert found.velocity.item() == pytest.approx(expected, rel=1e-5)
        grown = learner.transformer.proj_out.weight.grad
        assert grown is not None and grown.abs().max() > 0
        learner.zero_grad()


def test_text_is_zero_after_its_own_tokens(vae):
    """As in WanPipeline, embeddings after a caption's own tokens are zero."""
    learner, clips = VideoLearner(), Clips(vae, seed=1, count=4)
    torch.nn.init.normal_(learner.transformer.proj_out.weight, std=0.2, generator=by(1))
    for block in learner.transformer.blocks:
        torch.nn.init.normal_(block.attn2.to_out[0].weight, std=0.2, generator=by(2))
    x, t = torch.randn(1, 48, 2, 4, 4, generator=by(3)), torch.tensor([0.5])
    ids, mask = clips.ids[:1].clone(), clips.mask[:1]
    assert mask[0].tolist()[:5] == [1, 1, 1, 1, 0]  # "a red circle" and the end token
    with torch.no_grad():
        first = learner(x, t, ids, mask)[0]
        ids[0, 6] = 5
        assert torch.allclose(learner(x, t, ids, mask)[0], first, atol=1e-6)
        ids[0, 1] = 5
        assert not torch.allclose(learner(x, t, ids, mask)[0], first, atol=1e-4)


def test_muon_takes_a_convolution_as_the_matrix_of_its_output_channels():
    weight = torch.nn.Parameter(torch.zeros(6, 4, 3, 3))
    weight.grad = torch.randn(weight.shape, generator=by(4))
    expected = orthogonal(weight.grad.flatten(1)[None].clone())[0]
    Muon([weight], [], lr=0.5, other_lr=1.0, decay=0.0).step()
    assert torch.allclose(weight.detach().flatten(1), -0.5 * expected, atol=1e-4)


def test_half_size_images_are_means_with_reduced_noise():
    images = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    assert halved(images).shape == (2, 3, 2, 2)
    assert halved(images)[0, 0, 0, 0] == np.rint(np.mean([0, 1, 4, 5]))
    full, small = (
        family_for(Model(path="shapes", height=side, width=side, max_sequence_length=1))
        for side in (32, 16)
    )
    noise = torch.randn(2, 12, 8, 8, generator=by(6))
    assert torch.allclose(downsample_noise(noise), full.smaller_noise(noise, small), atol=1e-6)


def test_clips_to_tensors_and_back():
    clips = ClipPool(7).clips(2)[0]
    video = to_video(clips)
    assert video.shape == (2, 3, FRAMES, 32, 32)
    torch.testing.assert_close((video[1, :, 4] + 1) * 127.5, torch.from_numpy(clips[1, 4]).float())


def test_a_built_model_equals_the_stock_pipeline_and_its_configuration(vae, tmp_path):
    """Latents of random weights, generated alone in their batch, are equal bit for bit."""
    learner = VideoLearner()
    torch.nn.init.normal_(learner.transformer.proj_out.weight, std=0.2, generator=by(1))
    for name, p in learner.transformer.named_parameters():
        if name.endswith(("scale_shift_table", "attn2.to_out.0.weight")):
            torch.nn.init.normal_(p, std=0.2, generator=by(2))
    assemble(vae, learner, tmp_path / "model")
    config = load("shapes/video.toml", [f"model.path={tmp_path / 'model'}"])
    assert (config.model.frames, config.rewards.frames, config.arm) == (9, 3, "sol_rl")
    family = family_for(config.model)
    caption = "a red circle left of a blue square"
    encoded = family.load_text("cpu", torch.float32).encode([caption])
    transformer = family.load_transformer("cpu", torch.float32)
    ours = sample(family, transformer, encoded, [11], 3, "euler")
    assert ours.shape == (1, 48, 3, 4, 4)
    noise = noise_for([11], family.latent_shape)
    pipe = stock_pipeline("wan", tmp_path / "model")
    assert torch.equal(ours, stock_call(pipe, family.model, caption, noise, 3, "latent"))
    other = stock_call(pipe, family.model, "two green crosses", noise, 3, "latent")
    assert not torch.allclose(ours, other, atol=1e-3)
    clips = family.decode(family.load_vae("cpu", torch.float32), ours)
    assert clips.shape == (1, 9, 3, 32, 32)

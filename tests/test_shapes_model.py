"""The tiny model: the parts of its training, and the shipped model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from rewards.shapes import ShapesScorer
from shapes import prompts
from shapes.checksum import checksum
from shapes.data import Pool
from shapes.denoiser import BATCH, TIME_MEAN, TIME_STD, Examples, Learner
from shapes.fp4 import in_four_bits, quantizable, round_to_fp4
from shapes.grammar import all_scenes
from shapes.muon import orthogonal
from shapes.state import load_or_create, load_state, save_state
from shapes.text import TOKENS, clip_tokenizer, words
from shapes.training import backward, draw_times, matrices_apart
from shapes.vae import build_vae, calibrate, encode, to_float

MODEL = Path(prompts.__file__).parent / "model"


def by(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_fp4_rounding_gives_the_formats_values():
    row = [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, -6]
    # ties go to even codes; amax 2688 makes every scale exact
    read = [0, 0, 0.5, 1, 1, 1, 1.5, 2, 2, 2, 3, 4, 4, 4, 6, -6]
    weight = torch.tensor([row, [448 * value for value in row]])
    assert torch.equal(
        round_to_fp4(weight), torch.tensor([read, [448.0 * value for value in read]])
    )
    assert torch.equal(round_to_fp4(torch.zeros(2, 32)), torch.zeros(2, 32))
    nvfp4 = pytest.importorskip("policy.precision.nvfp4")
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    peer = nvfp4.dequantize(nvfp4.quantize(weight))
    # scales are multiplied in another order, so that a few ties round the other way
    assert (~torch.isclose(round_to_fp4(weight), peer, rtol=1e-5, atol=1e-7)).float().mean() < 2e-3


def test_weights_are_rounded_to_four_bits_within_the_context_only():
    learner = Learner()
    torch.nn.init.normal_(
        learner.transformer.proj_out.weight, generator=torch.Generator().manual_seed(4)
    )
    layers = quantizable(learner.transformer)
    # q, k, v, out and two of the feed-forward in both streams; the last block lacks 3 of the text's
    assert len(layers) == 4 * 12 - 3
    before = [layer.weight.clone() for layer in layers]
    seen = []
    handle = layers[0].register_forward_hook(lambda _m, inputs, _o: seen.append(inputs[0]))
    x = torch.randn(2, 12, 8, 8, generator=torch.Generator().manual_seed(5))
    ids, long = torch.ones(2, 11, dtype=torch.long), torch.zeros(1, 1, 128)
    with in_four_bits(learner.transformer):
        assert all(
            not torch.equal(layer.weight, wide) for layer, wide in zip(layers, before, strict=True)
        )
        learner(x, torch.tensor([0.5, 0.9]), ids, long)
    assert all(torch.equal(layer.weight, wide) for layer, wide in zip(layers, before, strict=True))
    learner(x, torch.tensor([0.5, 0.9]), ids, long)
    handle.remove()
    rounded, wide = seen
    flat = wide.reshape(-1, wide.shape[-1])
    # the first layer of the first block gets the same input: rounded inside, and unchanged
    # afterwards
    assert torch.allclose(rounded.reshape(flat.shape), round_to_fp4(flat), atol=1e-6)
    assert not torch.equal(rounded, wide)


def test_a_four_bit_step_goes_downhill():
    """A small step against the gradient of the four-bit loss lowers it."""
    torch.manual_seed(0)
    learner = Learner()
    torch.nn.init.normal_(learner.transformer.proj_out.weight, std=0.2)
    for block in learner.transformer.transformer_blocks:
        torch.nn.init.normal_(block.norm1.linear.weight, std=0.2)
    examples = Examples(build_vae().eval(), seed=1, count=64)
    first = backward(learner, examples.batch(by(3)), four_bits=True)
    assert first.agree.item() > 0
    squared = sum(float(p.grad.square().sum()) for p in learner.parameters() if p.grad is not None)
    with torch.no_grad():
        for p in learner.parameters():
            if p.grad is not None:
                p.add_(p.grad, alpha=-1e-2 * float(first.total) / squared)
    second = backward(learner, examples.batch(by(3)), four_bits=True)
    assert second.total.item() < first.total.item()


def test_orthogonalization_flattens_the_spectrum():
    values = torch.linalg.svdvals(
        orthogonal(torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(1)))
    )
    assert values.min() > 0.5 and values.max() < 1.3  # the quintic's fixed band is about 0.7 to 1.2


def test_calibration_keeps_images_and_gives_unit_latents():
    torch.manual_seed(0)
    vae = build_vae().eval()
    pool = Pool(3)
    x = to_float(pool.images(8)[0])
    with torch.no_grad():
        before = vae.decode(vae.encode(x).latent_dist.mode()).sample
        calibrate(vae, encode(vae, pool.images(300)[0]))
        after = vae.decode(vae.encode(x).latent_dist.mode()).sample
    # A rotation and its inverse in FP32, amplified by the narrowest direction of an untrained
    # encoder.
    assert torch.allclose(before, after, atol=2e-2 * float(before.abs().max()))
    latents = encode(vae, pool.images(300)[0])
    assert float(latents.var((0, 2, 3)).mean()) == pytest.approx(1.0, abs=0.15)
    assert float(latents.mean((0, 2, 3)).abs().max()) < 0.2


def test_one_training_step_learns_and_resumes(tmp_path):
    vae = build_vae().eval()
    examples = Examples(vae, seed=1, count=64)
    learner = Learner()
    optimizer = matrices_apart(learner)
    trained = sum(len(group["params"]) for group in optimizer.param_groups)
    assert trained == len(list(learner.parameters()))
    for seed in (0, 1):
        found = backward(learner, examples.batch(by(seed)), four_bits=False)
        if (
            seed == 0
            # with zero output the loss is E|eps - x0|^2, and the head's prediction is nearly
            # uniform over 25 classes
        ):
            assert found.cells.item() == pytest.approx(math.log(25), rel=0.2)
        optimizer.step()
        optimizer.zero_grad()
    save_state(tmp_path / "state", learner, optimizer, {"step": 2})
    again = Learner()
    fresh = matrices_apart(again)
    assert load_state(tmp_path / "state", again, fresh) == {"step": 2}
    for mine, theirs in zip(learner.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    mine, theirs = (o.state_dict()["state"] for o in (optimizer, fresh))
    assert mine.keys() == theirs.keys() and len(mine) == trained
    assert all(torch.equal(mine[p][slot], theirs[p][slot]) for p in mine for slot in mine[p])
    assert load_state(tmp_path / "none", again, fresh) == {}


def test_rendered_images_are_cached(tmp_path):
    made: list[torch.Tensor] = []

    def make() -> dict[str, torch.Tensor]:
        made.append(torch.arange(3))
        return {"x": made[-1]}

    for cache, times in ((tmp_path / "kept.safetensors", 1), (None, 3)):
        for _ in range(2):
            assert torch.equal(load_or_create(cache, make)["x"], torch.arange(3))
        assert len(made) == times
    assert [path.name for path in tmp_path.iterdir()] == ["kept.safetensors"]


def test_training_times_favor_high_noise():
    t = torch.cat([draw_times(by(seed), BATCH, TIME_MEAN, TIME_STD) for seed in range(40)])
    # Logit-normal around 0.7 has its median at sigmoid(0.7) = 0.668; one time in ten is uniform,
    # which moves the median to about 0.65.
    assert 0.63 < t.median() < 0.68 and t.min() > 0 and t.max() < 1


def test_every_word_is_one_token():
    tokenizer = clip_tokenizer()
    assert all(len(tokenizer(word).input_ids) == 3 for word in words())
    assert max(len(tokenizer(scene.caption).input_ids) for scene in all_scenes()) <= TOKENS


# the shipped model


def test_shipped_model_is_small_and_named():
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 12_000_000
    assert checksum(MODEL) in (MODEL.parent / "README.md").read_text()
    assert {path.suffix for path in files} <= {".json", ".safetensors"}


def test_shipped_model_generates_captions_in_stock_diffusers(tmp_path):
    from diffusers import StableDiffusion3Pipeline

    pipe = StableDiffusion3Pipeline.from_pretrained(MODEL)
    pipe.set_progress_bar_config(disable=True)
    rows = [json.loads(line) for line in (prompts.FOLDER / "train.jsonl").read_text().splitlines()][
        :24
    ]
    texts = [row["prompt"] for row in rows]

    def generated(pipeline) -> np.ndarray:
        out = pipeline(
            texts,
            height=32,
            width=32,
            num_inference_steps=10,
            sigmas=list(np.linspace(1, 0.1, 10)),
            guidance_scale=1.0,
            max_sequence_length=1,
            generator=torch.Generator().manual_seed(0),
            output_type="np",
        ).images
        return (out * 255).round().astype(np.uint8).transpose(0, 3, 1, 2)

    images = generated(pipe)
    total = ShapesScorer()(images, texts, rows)
    chance = ShapesScorer()(images, texts[1:] + texts[:1], rows[1:] + rows[:1])
    assert total.mean() > 0.45 and chance.mean() < 0.2
    pipe.save_pretrained(tmp_path / "copy")
    again = StableDiffusion3Pipeline.from_pretrained(tmp_path / "copy")
    again.set_progress_bar_config(disable=True)
    assert np.array_equal(generated(again), images)

"""Behavior of all learned scorers on tiny random models: pairing, batches, precision, and wrong
settings.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rewards import ScorerSetupError
from rewards.imagereward import MEAN, STD
from tests.rewards import parity
from tests.rewards.learned import IMAGES, PROMPTS, made

NAMES = ("clipscore", "hpsv2", "pickscore", "imagereward")


@pytest.mark.parametrize("name", NAMES)
def test_every_image_is_scored_with_its_own_prompt_whatever_the_batch(settings, name):
    """Batches of 3 and 7 and single images are summed in other orders: FP32 rounding of scores of
    order one.

    PickScore's are of order 100 / 26.
    """
    together = made(settings, name)(IMAGES, PROMPTS, [{}] * 7)
    assert together.dtype == np.float32 and together.shape == (7,) and together.std() > 0.01
    for size in (1, 3):
        assert np.allclose(
            made(settings, name, batch_size=size)(IMAGES, PROMPTS, [{}] * 7),
            together,
            atol=1e-5,
            rtol=0,
        )
    order = np.array([6, 2, 0, 5, 1, 4, 3])
    turned = made(settings, name)(IMAGES[order], [PROMPTS[i] for i in order], [{}] * 7)
    assert np.allclose(turned, together[order], atol=1e-5, rtol=0)
    shifted = made(settings, name)(IMAGES, PROMPTS[1:] + PROMPTS[:1], [{}] * 7)
    assert np.abs(shifted - together).max() > 0.01  # the words matter
    assert made(settings, name)(IMAGES[:0], [], []).shape == (0,)


@pytest.mark.parametrize(
    ("name", "image", "text", "rows"),
    [
        ("clipscore", "encode_image", "encode_text", ([4, 3], [3, 3])),
        ("hpsv2", "encode_image", "encode_text", ([4, 3], [3, 3])),
        ("pickscore", "get_image_features", "get_text_features", ([4, 3], [3, 3])),
        (
            "imagereward",
            "visual_encoder",
            "text_encoder",
            ([4, 3], [4, 3]),
        ),  # its text tower attends to the image: one row per pair
    ],
)
def test_only_pairs_are_computed(settings, name, image, text, rows, monkeypatch):
    """Each tower gets one row per image, or per distinct prompt of a batch; never every pair."""
    scorer = made(settings, name, batch_size=4)
    seen: dict[str, list[int]] = {image: [], text: []}
    for tower in (image, text):
        module, forward = getattr(scorer.model, tower), None
        owner = module if isinstance(module, torch.nn.Module) else scorer.model
        attribute = "forward" if owner is module else tower
        forward = getattr(owner, attribute)

        def counted(*args, forward=forward, tower=tower, **kwargs):
            first = next(
                value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)
            )
            seen[tower].append(len(first))
            return forward(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, counted)
    scorer(IMAGES, PROMPTS, [{}] * 7)
    assert (seen[image], seen[text]) == rows


@pytest.mark.parametrize("name", NAMES)
def test_lower_precision_is_close_but_not_equal(settings, name):
    """BF16 keeps 8 bits and FP16 11: relative errors of 4e-3 and 5e-4 per operation.

    After two layers they are a few per cent and per mille of the scores' range.
    """
    wide, bf16, fp16 = (
        made(settings, name, dtype=dtype)(IMAGES, PROMPTS, [{}] * 7)
        for dtype in ("fp32", "bf16", "fp16")
    )
    scale = np.abs(wide).max()
    assert 0 < np.abs(wide - bf16).max() < 0.2 * scale
    assert 0 < np.abs(wide - fp16).max() < 0.02 * scale


def test_imagereward_is_normalized_with_the_published_mean_and_deviation(settings):
    scorer = made(settings, "imagereward")
    with torch.inference_mode():
        words = scorer.tokenise(
            PROMPTS, padding="max_length", truncation=True, max_length=35, return_tensors="pt"
        )
        raw = scorer.model(scorer.pixels(IMAGES), words.input_ids, words.attention_mask)
    assert words.input_ids[0, 0] == 101 and words.input_ids.shape == (7, 35)
    assert np.allclose(scorer(IMAGES, PROMPTS, [{}] * 7), (raw.numpy() - MEAN) / STD, atol=1e-6)


def test_text_beyond_the_context_is_truncated(settings):
    for name, limit in (("clipscore", 75), ("pickscore", 75), ("imagereward", 33)):
        scorer = made(settings, name)
        word = "word9" if name == "imagereward" else "house"  # one token each
        texts = [" ".join([word] * count) for count in (limit - 1, limit, limit + 40)]
        short, full, over = scorer(np.repeat(IMAGES[:1], 3, 0), texts, [{}] * 3)
        assert full == pytest.approx(over, abs=1e-6) and abs(short - full) > 1e-4, name


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "clipscore",
            {"checkpoint": "no/such/file.pt"},
            "checkpoint 'no/such/file.pt' not found.*docs/rewards.md",
        ),
        ("clipscore", {"architecture": "ViT-Q-99"}, "unknown to open_clip"),
        (
            "clipscore",
            {"architecture": {"embed_dim": 3}},
            "architecture lacks vision_cfg, text_cfg",
        ),
        (
            "hpsv2",
            {"architecture": {**parity.TINY, "embed_dim": 25}},
            r"is \[\d+, 24\], not \[\d+, 25\]; set architecture",
        ),
        ("hpsv2", {"dtype": "int4"}, "dtype is 'int4': use one of fp32, bf16, fp16"),
        ("pickscore", {"batch_size": 0}, "batch_size is 0: use a whole number, 1 or more"),
        (
            "imagereward",
            {"architecture": {"audio": {}}},
            "architecture has audio: only the tables vision and text are allowed",
        ),
    ],
)
def test_invalid_settings_are_one_line(settings, name, change, message):
    with pytest.raises(ScorerSetupError, match=message) as caught:
        made(settings, name, **change)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"scorer {name!r}: ")

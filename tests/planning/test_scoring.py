"""Seconds of scorers, computed by hand: one that generates its score as text, and one that does
not.
"""

from typing import Any

import open_clip
import pytest

from configs.load import load
from planning.assumptions import Device
from planning.scoring import score_seconds
from rewards.imagereward import VISION, ImageReward
from rewards.openclip import ClipScore, HPSv2
from rewards.pickscore import ARCHITECTURE, PickScore

DEVICE = Device("none of the table", 100.0, 100.0, 80.0, utilisation=0.5, bandwidth=2.0)
COUNT = 8_292_166_656
"""Parameters of Qwen2.5-VL-7B."""


def tokens(patch: int) -> int:
    """Return the patches of 224 x 224 pixels, and the token that summarizes them."""
    return (224 // patch) ** 2 + 1


def seconds(images: int, *changes: str, device: Device = DEVICE) -> float:
    config = load("sd35_medium-sol_rl-hpsv2", changes)
    (found,) = score_seconds(config, [(images, config.model)], device).values()
    return found


def written(**settings: Any) -> str:
    recorded = "".join(f', {name} = "{value}"' if isinstance(value, str) else f", {name} = {value}"
                   for name, value in settings.items())  # fmt: skip
    return f'rewards.scorers=[{{name = "unifiedreward", settings = {{batch_size = 4{recorded}}}}}]'


def test_operations_of_a_known_tower():
    """ViT-H/14: 32 layers of width 1280 over 257 tokens, at half of 100 TFLOP/s in BF16."""
    flops = 32 * 257 * (24 * 1280**2 + 4 * 257 * 1280)
    assert seconds(10) == pytest.approx(10 * flops / 50e12)


def test_the_towers_equal_those_of_the_published_models():
    for scorer in (ClipScore, HPSv2):
        vision: Any = (open_clip.get_model_config(scorer.default) or {})["vision_cfg"]
        assert scorer.tower == (vision["width"], vision["layers"], tokens(vision["patch_size"]))
    vision = ARCHITECTURE["vision_config"]
    assert PickScore.tower == (vision["hidden_size"], vision["num_hidden_layers"], tokens(14))
    assert ImageReward.tower == (VISION["hidden_size"], VISION["num_hidden_layers"], tokens(16))


def test_operations_of_a_generative_scorer():
    """512 x 512 pixels are 334 tokens, and the question has 230; 80 are written, four images at a
    time.

    For each the 16.6 GB pass through 2 TB/s.
    """
    read = 2 * COUNT * (230 + 512 * 512 / 784) / 50e12
    write = 80 / 4 * 2 * COUNT / 2e12
    size = ("model.height=512", "model.width=512")
    assert seconds(3, *size, written()) == pytest.approx(3 * (read + write))
    final = 8 / 4 * 2 * COUNT / 2e12
    assert seconds(1, *size, written(form="final")) == pytest.approx(read + final)


def test_fewer_pixels_need_fewer_operations():
    size = ("model.height=1024", "model.width=1024")
    fewer = seconds(1, *size, written(max_pixels=512 * 512))
    less = 2 * COUNT * 3 * 512 * 512 / 784 / 50e12
    assert seconds(1, *size, written()) - fewer == pytest.approx(less)


def test_a_model_of_unknown_size_counts_nothing():
    assert seconds(1, written(checkpoint="someone/else")) == 0.0

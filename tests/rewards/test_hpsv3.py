"""HPSv3 through its authors' package: the calls to it, and the use of its answers.

The package needs another version of transformers, so a stand-in with its interface answers.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from configs.rewards import Scorer as ScorerConfig
from rewards import ScorerError, ScorerSetupError, build, check_settings, model_bytes

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 3, 4, 6), dtype=np.uint8)
PROMPTS, METADATA = list("abcde"), [{}] * 5


class Inferencer:
    """Stand-in for ``hpsv3.HPSv3RewardInferencer``: mean of the image, and the prompt's letter as
    deviation.
    """

    def __init__(self, config_path: Any, checkpoint_path: str, device: str = "cuda"):
        self.made, self.sizes, self.wide = (config_path, checkpoint_path, device), [], 2

    def reward(self, images: list[Any], prompts: list[str]) -> torch.Tensor:
        assert all(image.mode == "RGB" and image.size == (6, 4) for image in images)
        self.sizes.append(len(images))
        rows = [
            [np.asarray(image)[..., 0].mean()] + [float(ord(text))] * (self.wide - 1)
            for image, text in zip(images, prompts, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.bfloat16)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch) -> str:
    (tmp_path / "HPSv3.safetensors").write_bytes(b"x" * 11)
    package = SimpleNamespace(HPSv3RewardInferencer=Inferencer)
    monkeypatch.setitem(sys.modules, "hpsv3", package)
    return str(tmp_path)


def scorer(checkpoint: str, **more: object) -> Any:
    settings = {"checkpoint": checkpoint, **more}
    return build(ScorerConfig(name="hpsv3", settings=settings), "cpu")


def test_the_mean_is_the_score_and_the_deviation_a_part(checkpoint):
    made = scorer(checkpoint, batch_size=2)
    found = made(IMAGES, PROMPTS, METADATA)
    assert made._model.made == (None, f"{checkpoint}/HPSv3.safetensors", "cpu")
    assert made._model.sizes == [2, 2, 1] and found.dtype == np.float32
    # rounded to bfloat16, 8 bits, by the model
    np.testing.assert_allclose(found, IMAGES[:, 0].mean((1, 2)), rtol=2**-8)
    assert made.parts["sigma"].tolist() == [97, 98, 99, 100, 101]


def test_an_unexpected_answer_is_a_failure(checkpoint):
    made = scorer(checkpoint)
    made._model.wide = 1
    with pytest.raises(ScorerError, match=r"answered \[5, 1\] for 5 images"):
        made(IMAGES, PROMPTS, METADATA)


def test_invalid_settings_are_found_before_loading(checkpoint, tmp_path, monkeypatch):
    assert model_bytes(ScorerConfig(name="hpsv3", settings={"checkpoint": checkpoint})) == 11
    assert model_bytes(ScorerConfig(name="hpsv3")) is None  # that of the hub
    (tmp_path / "x.pth").touch()
    for settings, message in (
        ({"checkpoint": str(tmp_path / "x.pth")}, "only safetensors files are read"),
        ({"checkpoint": str(tmp_path / "no.safetensors")}, "checkpoint"),
        ({"batch_size": 0}, "batch_size is 0"),
    ):
        with pytest.raises(ScorerSetupError, match=message):
            check_settings(ScorerConfig(name="hpsv3", settings=settings))
    monkeypatch.setitem(sys.modules, "hpsv3", None)
    with pytest.raises(ScorerSetupError, match="an environment with hpsv3==1.0.0"):
        scorer(checkpoint)

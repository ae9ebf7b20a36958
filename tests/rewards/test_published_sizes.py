"""The sizes of published scorers, which the plan takes from a table."""

import pytest
import torch

from rewards import ScorerSetupError
from rewards.imagereward import ImageReward
from rewards.openclip import ClipScore, HPSv2
from rewards.pickscore import PickScore


@pytest.mark.parametrize("kind", [ImageReward, PickScore, ClipScore, HPSv2])
def test_the_parameters_are_those_of_the_architecture(kind, monkeypatch):
    with torch.device("meta"):
        network = kind.network({})
    count = sum(parameter.numel() for parameter in network.parameters())
    monkeypatch.setattr(kind, "network", None)  # it is not built
    assert kind.model_bytes({"dtype": "bf16"}) == 2 * count
    assert kind.model_bytes({"checkpoint": "x/y"}) == 4 * count


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        (ClipScore, "ViT-B-32"),
        (HPSv2, "ViT-B-32"),
        (PickScore, {"vision_config": {}, "text_config": {}, "projection_dim": 512}),
    ],
)
def test_another_architecture_is_counted(kind, architecture):
    """Transformers' default CLIP is a ViT-B/32 too."""
    settings = {"checkpoint": "x/y", "architecture": architecture}
    assert kind.model_bytes(settings) == 151_277_313 * 4


def test_another_architecture_that_cannot_be_built_is_refused():
    with pytest.raises(ScorerSetupError, match="architecture = 'ViT-X-1': unknown to open_clip"):
        ClipScore.model_bytes({"checkpoint": "x/y", "architecture": "ViT-X-1"})

"""An untrained detector, in the form in which transformers saves one."""

from collections.abc import Sequence
from pathlib import Path

import torch


def make_detector(out: Path, names: Sequence[str]) -> Path:
    """Write a Mask2Former for these classes: seven queries, 64 x 64 pixels, random weights."""
    from transformers import (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        Mask2FormerImageProcessor,
        SwinConfig,
    )

    backbone = SwinConfig(
        image_size=64, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32,
        encoder_feedforward_dim=32, encoder_layers=1, decoder_layers=2, num_attention_heads=2,
        dim_feedforward=32, num_queries=7, id2label=dict(enumerate(names)),
    )  # fmt: skip
    torch.manual_seed(0)
    Mask2FormerForUniversalSegmentation(config).save_pretrained(out)
    Mask2FormerImageProcessor(size={"height": 64, "width": 64}).save_pretrained(out)
    return out

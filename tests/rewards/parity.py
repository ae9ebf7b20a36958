"""Comparison of the scorers with their peers on difficult images and prompts, for tests and `make
parity`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from configs.rewards import Scorer as ScorerConfig
from rewards import build
from tests.rewards import peers

BOUND = 1e-5
LEAST_SPREAD = (
    100 * BOUND
    # The unit is the standard deviation of the peer's scores: a scorer that ignores its images is
    # far beyond the bound.
)
PROMPTS = (
    "a red circle left of a blue square",
    "",
    "an endless row of small wooden houses beside a slow green river, " * 12,
    "\U0001f680 over \U0001f5fc, \U0001f468\u200d\U0001f469\u200d\U0001f467 watching",
    "\u4e00\u53ea\u7ea2\u8272\u7684\u72d0\u72f8 \u3068 \u6771\u4eac\u306e\u591c",
)
TINY = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
TINY_BLIP: dict[str, Any] = {"image": 32, "patch": 8, "vision": (32, 2, 2), "text": (48, 2, 4, 96)}


def images() -> dict[str, np.ndarray]:
    """Return uint8 [3, H, W] by name.

    The sides are such that the crop removes an even number of pixels at 32 and at 224. An odd
    number is cut differently by transformers and torchvision, which ``test_images`` covers.
    """
    rng = np.random.default_rng(3)
    ramp = np.linspace(0, 255, 96)[None, None, :] * np.array([1.0, 0.4, 0.1])[:, None, None]
    return {
        "noise, square": rng.integers(0, 256, (3, 48, 48), dtype=np.uint8),
        "ramp, wide": np.broadcast_to(ramp, (3, 64, 96)).astype(np.uint8),
        "noise, tall": rng.integers(0, 256, (3, 80, 40), dtype=np.uint8),
        "one pixel": np.array([200, 30, 90], np.uint8).reshape(3, 1, 1),
        "black": np.zeros((3, 40, 40), np.uint8),
    }


@dataclass(frozen=True)
class Parity:
    """Difference of a scorer from its peer over all pairs."""

    scorer: str
    peer: str
    size: str  # small or full
    pairs: int
    largest: float  # absolute difference
    spread: float  # standard deviation of the peer's scores

    @property
    def problem(self) -> str | None:
        """What is wrong, or None."""
        if not self.largest <= BOUND:
            return (
                f"{self.scorer} differs from {self.peer} by {self.largest:.2e}, more than {BOUND:g}"
            )
        if not self.spread >= LEAST_SPREAD:
            return (
                f"{self.scorer}: the peer's scores hardly differ (deviation {self.spread:.2e}):"
                " that proves nothing"
            )
        return None


def compare(scorer: str, size: str, peer_name: str, ours: Any, peer: peers.Peer) -> Parity:
    """Compare all prompts with every image at the small size, and one prompt per image at the full
    size.
    """
    mine, theirs = [], []
    for place, image in enumerate(images().values()):
        prompts = list(PROMPTS) if size == "small" else [PROMPTS[place]]
        mine += ours(np.stack([image] * len(prompts)), prompts, [{}] * len(prompts)).tolist()
        image = Image.fromarray(image.transpose(1, 2, 0))
        theirs += [peer(image, prompt) for prompt in prompts]
    difference = np.abs(np.array(mine) - np.array(theirs))
    return Parity(
        scorer, peer_name, size, len(mine), float(difference.max()), float(np.std(theirs))
    )


def scorer(name: str, checkpoint: Path, **settings: Any) -> Any:
    """Build a built-in scorer as users do; with batches of 2, a batch ends within an image's
    prompts.
    """
    return build(
        ScorerConfig(
            name=name,
            settings={"checkpoint": str(checkpoint), "batch_size": 2, "device": "cpu", **settings},
        )
    )


def clipscore(size: str, folder: Path) -> Parity:
    """Compare open_clip's CLIP (ours) with that of transformers."""
    import open_clip

    name = "ViT-L-14-quickgelu"
    cfg: dict[str, Any] = (
        {**TINY, "quick_gelu": True} if size == "small" else open_clip.get_model_config(name) or {}
    )
    model = open_clip.CLIP(**cfg)
    peers.randomise(model, 1)
    file = folder / "open_clip_model.safetensors"
    save_file(model.state_dict(), file)
    del model  # the full ones are gigabytes
    ours = scorer("clipscore", folder, **({"architecture": cfg} if size == "small" else {}))
    return compare(
        "clipscore", size, "transformers", ours, peers.transformers_clip(cfg, load_file(file))
    )


def pickscore(size: str, folder: Path) -> Parity:
    """Compare transformers' CLIP (ours) with that of open_clip."""
    import open_clip
    from transformers import CLIPConfig, CLIPModel

    cfg: dict[str, Any] = TINY if size == "small" else open_clip.get_model_config("ViT-H-14") or {}
    tables = peers.transformers_config(cfg)
    model = CLIPModel(CLIPConfig(**tables))
    peers.randomise(model, 2)
    file = folder / "model.safetensors"
    save_file(model.state_dict(), file)
    del model
    ours = scorer("pickscore", folder, **({"architecture": tables} if size == "small" else {}))
    return compare(
        "pickscore", size, "open_clip", ours, peers.open_clip_pickscore(cfg, load_file(file))
    )


def hpsv2(size: str, folder: Path) -> Parity:
    """Compare open_clip (ours) with hpsv2x's copy of an older version.

    The checkpoint has the released form, a state dict in a torch file.
    """
    import open_clip

    cfg: dict[str, Any] = TINY if size == "small" else open_clip.get_model_config("ViT-H-14") or {}
    model = peers.hpsv2_model(cfg)
    peers.randomise(model, 3)
    torch.save({"state_dict": model.state_dict()}, folder / "HPS_v2.1_compressed.pt")
    ours = scorer("hpsv2", folder, **({"architecture": cfg} if size == "small" else {}))
    return compare("hpsv2", size, "hpsv2x", ours, peers.hpsv2_peer(cfg, model))


def imagereward(size: str, folder: Path) -> Parity:
    """Compare transformers' BLIP with renamed weights (ours) with the package of the paper."""
    small = TINY_BLIP if size == "small" else None
    model = peers.imagereward_model(folder, small)
    peers.randomise(model, 4)
    torch.save(model.state_dict(), folder / "ImageReward.pt")
    settings: dict[str, Any] = {"vocabulary": str(peers.vocabulary())}
    if small:
        settings["architecture"] = blip_architecture(small)
    return compare(
        "imagereward",
        size,
        "image-reward",
        scorer("imagereward", folder, **settings),
        lambda i, p: model.score(p, i),
    )


def blip_architecture(sizes: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the tables that the scorer accepts for sizes such as ``TINY_BLIP``."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    vision = dict(zip(names, sizes["vision"], strict=True)) | {
        "image_size": sizes["image"],
        "patch_size": sizes["patch"],
    }
    vision["intermediate_size"] = 4 * sizes["vision"][0]
    return {
        "vision": vision,
        "text": dict(zip((*names, "intermediate_size"), sizes["text"], strict=True)),
    }


CASES: dict[str, tuple[Callable[[str, Path], Parity], str | None]] = {
    "clipscore": (clipscore, None),
    "pickscore": (pickscore, None),
    "hpsv2": (hpsv2, "hpsv2"),
    "imagereward": (imagereward, "ImageReward"),
}
"""The comparison of each scorer, and the folder of the package that it needs in addition."""


def run(name: str, size: str) -> Parity:
    """Run one comparison, small or full."""
    with tempfile.TemporaryDirectory() as folder:
        return CASES[name][0](size, Path(folder))

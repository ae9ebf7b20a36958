"""CLIPScore and HPSv2: cosine similarity of open_clip features, with the resizing of each."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from configs.paths import is_file
from configs.section import Tree
from records.errors import first_line
from rewards.base import ScorerSetupError, Settings
from rewards.checkpoints import DAMAGED, fetch, load_weights, local, locate, read_state, repository
from rewards.images import CLIP_MEAN, CLIP_STD, crop_square, normalize, pad_square, to_float
from rewards.paired import PairedScorer, cosine, distinct

if TYPE_CHECKING:
    import open_clip
    from open_clip.tokenizer import HFTokenizer, SimpleTokenizer

CONFIG = "open_clip_config.json"
FILES = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "model.safetensors",
    "open_clip_pytorch_model.bin",
)


SIZES = (
    "width",
    "layers",
    "heads",
    "head_width",
    "patch_size",
    "image_size",
    "vocab_size",
    "context_length",
)
MOST, MOST_LAYERS = 2**20, 1000
"""Limits above those of any real model, yet low enough that building one terminates."""


class OpenClipScorer(PairedScorer):
    """Cosine similarity of the image and text features of an open_clip model, without logit scale.

    ``checkpoint``: a file, a directory or a hub id of open_clip weights. ``architecture``: a name
    that open_clip knows, or a table like its model configurations (embed_dim, vision_cfg,
    text_cfg); by default that of ``open_clip_config.json``, next to the weights or on the hub. If
    that file is missing, a local checkpoint is assumed to have the scorer's own architecture,
    ``default``, like the repository ``published``, and any other repository is refused.
    """

    default = ""
    published = ""
    resizes: ClassVar[dict[str, str]] = {}  # open_clip's resize settings that the scorer implements
    paths = {"checkpoint": FILES}

    def __init__(
        self,
        checkpoint: str,
        architecture: str | Tree | None = None,
        batch_size: int = 16,
        dtype: str = "fp32",
        device: str | None = None,
    ) -> None:
        super().__init__(batch_size, dtype, device)
        description = self._description(checkpoint, architecture is not None)
        path = locate(checkpoint, self.paths["checkpoint"])
        cfg = _config(architecture or description.get("model_cfg") or self.default)
        what = str(architecture or self.default)
        self.model = load_weights(partial(_build, cfg), read_state(path), path, what)
        self.model.to(self.device, self.dtype).eval()
        self.tokenise = _tokenizer(cfg, path)
        preprocess = description.get("preprocess_cfg", {})
        self.mean, self.std = preprocess.get("mean", CLIP_MEAN), preprocess.get("std", CLIP_STD)
        self.size = int(cfg["vision_cfg"].get("image_size", 224))

    @classmethod
    def network(cls, settings: Settings) -> torch.nn.Module | None:
        """Build the model without network access; None if the architecture is unknown."""
        architecture = cls._architecture(settings)
        return None if architecture is None else _build(_config(architecture))

    @classmethod
    def is_published(cls, settings: Settings) -> bool:
        """Return True for the scorer's own architecture, unless local files describe another."""
        return cls._architecture(settings) == cls.default

    @classmethod
    def _architecture(cls, settings: Settings) -> str | Tree | None:
        """Return the architecture that is set, or described next to a local checkpoint, or default.

        None if a checkpoint of the shipped tree has not been built.
        """
        requested, source = settings.get("architecture"), str(settings.get("checkpoint", ""))
        try:
            path = local(source, cls.paths["checkpoint"])
        except ScorerSetupError:  # not on this machine: assume the scorer's own architecture
            path = None
            if not requested and source.startswith("shapes/"):
                return None
        if not requested and path is not None and is_file(beside := path.with_name(CONFIG)):
            requested = _read_description(beside).get("model_cfg")
        return requested or cls.default

    def _description(self, checkpoint: str, architecture_given: bool) -> Tree:
        """Return open_clip's description of a checkpoint; empty for none and for ``published``."""
        names = self.paths["checkpoint"]
        repo = repository(checkpoint, names)
        if repo == self.published:
            return {}
        file = locate(checkpoint, names).with_name(CONFIG) if repo is None else fetch(repo, CONFIG)
        description = _read_description(file) if file is not None and is_file(file) else {}
        if repo is not None and not description.get("model_cfg") and not architecture_given:
            raise ScorerSetupError(
                f"{repo!r} has no {CONFIG} that states its architecture: set architecture, or use"
                f" {self.published}"
            )
        for key, own in self.resizes.items():
            if (requested := description.get("preprocess_cfg", {}).get(key, own)) != own:
                raise ScorerSetupError(
                    f"{checkpoint!r}: its {CONFIG} has {key} = {requested!r}; this scorer makes"
                    f" images with {own!r} only"
                )
        return description

    def score(self, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """Return the cosine similarity, in [-1, 1], of each image and its prompt."""
        unique, places = distinct(prompts)
        image = self.model.encode_image(pixels.to(self.device, self.dtype))
        text = self.model.encode_text(self.tokenise(unique).to(self.device))
        return cosine(image, text[torch.tensor(places, device=self.device)])


class ClipScore(OpenClipScorer):
    """CLIPScore (arXiv 2104.08718) as plain cosine: without its factor 2.5 and clipping at zero.

    Images are preprocessed like in open_clip's validation transform: shorter side resized
    bicubically, center crop, normalization.
    """

    default = "ViT-L-14-quickgelu"
    parameters = 427_616_513
    published = "timm/vit_large_patch14_clip_224.openai"
    tower = (1024, 24, 257)
    resizes = {"interpolation": "bicubic", "resize_mode": "shortest"}

    def pixels(self, images: np.ndarray) -> torch.Tensor:
        """Preprocess uint8 [B, 3, H, W] to float32 [B, 3, S, S]."""
        crop = crop_square(images, self.size)
        return normalize(to_float(crop), self.mean, self.std)


class HPSv2(OpenClipScorer):
    """Human Preference Score v2 (arXiv 2306.09341): the raw cosine of a fine-tuned ViT-H/14.

    Unlike in CLIP, the longer side is resized, and the rest is padded with black.
    """

    default = "ViT-H-14"
    parameters = 986_109_441
    published = "xswu/HPSv2"
    tower = (1280, 32, 257)
    paths = {"checkpoint": ("HPS_v2.1_compressed.pt", "HPS_v2_compressed.pt", *FILES)}

    def pixels(self, images: np.ndarray) -> torch.Tensor:
        """Preprocess uint8 [B, 3, H, W] to float32 [B, 3, S, S]."""
        return normalize(pad_square(images, self.size), self.mean, self.std)


def _read_description(file: Path) -> Tree:
    """Read open_clip_config.json. Raises ScorerSetupError if it is malformed."""
    try:
        description = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, RecursionError, TypeError, ValueError) as error:
        raise ScorerSetupError(
            f"{file}: not a JSON object ({error}): remove it, or fix it"
        ) from None
    for key in ("model_cfg", "preprocess_cfg"):
        if not isinstance(description.get(key, {}), dict):
            raise ScorerSetupError(
                f"{file}: {key} = {str(description[key])[:80]}: a table is expected"
            )
    for key in ("mean", "std"):
        values = description.get("preprocess_cfg", {}).get(key, CLIP_STD)
        if not _is_colour(values) or (key == "std" and not all(values)):
            raise ScorerSetupError(
                f"{file}: {key} = {str(values)[:80]}: expected a finite number for each of three"
                " colors"
            )
    return description


def _is_colour(values: object) -> bool:
    return (
        isinstance(values, list | tuple)
        and len(values) == 3
        and all(type(value) in (int, float) and abs(value) <= MOST for value in values)
    )


def _config(requested: str | Tree) -> Tree:
    """Return the model configuration of a name or a table.

    Raises ScorerSetupError unless it describes a plain CLIP.
    """
    import open_clip

    config = (
        open_clip.get_model_config(requested) if isinstance(requested, str) else dict(requested)
    )
    if config is None:
        raise ScorerSetupError(
            f"architecture = {requested!r}: unknown to open_clip; `open_clip.list_models()` lists"
            " all models"
        )
    for key in ("vision_cfg", "text_cfg"):
        if not isinstance(config.get(key, {}), dict):
            raise ScorerSetupError(f"architecture: {key} = {str(config[key])[:80]}: not a table")
    sizes = {"embed_dim": config.get("embed_dim", 1)}
    sizes |= {key: config.get("vision_cfg", {}).get(key, 1) for key in SIZES}
    sizes |= {f"text {key}": config.get("text_cfg", {}).get(key, 1) for key in SIZES}
    for key, size in sizes.items():
        if type(size) is not int or not 1 <= size <= (MOST_LAYERS if "layers" in key else MOST):
            raise ScorerSetupError(
                f"architecture: {key} = {str(size)[:80]}: expected a positive integer"
            )
    missing = [key for key in ("embed_dim", "vision_cfg", "text_cfg") if key not in config]
    if missing or config.get("custom_text") or "hf_model_name" in config.get("text_cfg", {}):
        why = f"lacks {', '.join(missing)}" if missing else "has a separate text tower"
        raise ScorerSetupError(
            f"architecture {why}: only a plain CLIP is supported, such as {{embed_dim, vision_cfg,"
            " text_cfg}"
        )
    return config


def _build(cfg: Tree) -> open_clip.CLIP:
    import open_clip

    try:
        return open_clip.CLIP(**{key: value for key, value in cfg.items() if key != "custom_text"})
    # raised for values of a wrong type, or values that do not fit together
    except DAMAGED as error:
        raise ScorerSetupError(
            f"architecture: open_clip cannot build it: {first_line(error)}: fix {cfg}"
        ) from None


def _tokenizer(cfg: Tree, path: Path) -> SimpleTokenizer | HFTokenizer:
    """Return CLIP's own tokenizer, or the one next to the checkpoint if ``cfg`` names one."""
    from open_clip.tokenizer import HFTokenizer, SimpleTokenizer

    length = int(cfg["text_cfg"].get("context_length", 77))
    if not cfg["text_cfg"].get("hf_tokenizer_name"):
        return SimpleTokenizer(context_length=length)
    if not is_file(path.with_name("tokenizer.json")):
        raise ScorerSetupError(
            f"{path.parent}: {CONFIG} names a tokenizer, but tokenizer.json is missing: give a"
            " directory with both"
        )
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path.with_name("tokenizer.json")))
        tokenizer = HFTokenizer(str(path.parent), context_length=length)
        tokenizer(["a"])
        size = len(tokenizer.tokenizer)
    except Exception as error:  # tokenizers raises Exception itself
        raise ScorerSetupError(
            f"{path.parent}: tokenizer.json and tokenizer_config.json do not describe a tokenizer"
            f" ({first_line(error)[:200]}): give a directory with both"
        ) from None
    if size != (requested := int(cfg["text_cfg"].get("vocab_size", 49408))):
        raise ScorerSetupError(
            f"{path.parent}: the tokenizer has {size} words, but the model has {requested}: they do"
            " not match"
        )
    return tokenizer

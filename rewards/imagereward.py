"""ImageReward (arXiv 2304.05977) on transformers' BLIP: the released weights, renamed.

The package of the paper pins libraries that cannot be installed beside open_clip, so its code is
not used; `make parity` compares the two.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from configs.section import Tree
from rewards.base import ScorerSetupError, Settings
from rewards.checkpoints import load_weights, locate, read_state
from rewards.images import crop_square, normalize, to_float
from rewards.paired import PairedScorer

if TYPE_CHECKING:
    from transformers import BertTokenizer

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of raw rewards over the authors' data
TOKENS = 35  # of a prompt, [CLS] and [SEP] included
FILES, WORD_FILES = ("ImageReward.pt", "ImageReward.safetensors"), ("vocab.txt",)
WORDS = 30522  # of bert-base-uncased
HEAD = ((0, 1024), (2, 128), (4, 64), (6, 16), (7, 1))
"""(place among the released layers, width); the places between are dropout."""
VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 224,
}
TEXT = {
    "vocab_size": 30524,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
SEEN = "blip.visual_encoder."
RENAMES = (
    *(
        (re.escape(SEEN) + theirs, f"visual_encoder.{ours}")
        for theirs, ours in (
            (r"patch_embed\.proj", "embeddings.patch_embedding"),
            (r"cls_token$", "embeddings.class_embedding"),
            (r"pos_embed$", "embeddings.position_embedding"),
            (r"norm\.", "post_layernorm."),
            (r"blocks\.(\d+)\.norm([12])", r"encoder.layers.\1.layer_norm\2"),
            (r"blocks\.(\d+)\.attn\.qkv", r"encoder.layers.\1.self_attn.qkv"),
            (r"blocks\.(\d+)\.attn\.proj", r"encoder.layers.\1.self_attn.projection"),
            (r"blocks\.(\d+)\.mlp", r"encoder.layers.\1.mlp"),
        )
    ),
    (r"mlp\.layers\.", "mlp."),
    (r"blip\.", ""),
)
"""Beginnings of the released names, and what stands there here: the first that fits."""
UNUSED = re.compile(r"blip\.(vision_proj|text_proj)\.|.*\.position_ids$")


class BlipReward(torch.nn.Module):
    """BLIP's image encoder, its text encoder that attends to the image, a head on [CLS]."""

    def __init__(self, vision: Tree, text: Tree) -> None:
        super().__init__()
        from transformers.models.blip.configuration_blip import BlipTextConfig, BlipVisionConfig
        from transformers.models.blip.modeling_blip import BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        seen = BlipVisionConfig(
            **{**VISION, "patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-6, **vision}
        )
        read = BlipTextConfig(
            **{
                **TEXT,
                "encoder_hidden_size": seen.hidden_size,
                "layer_norm_eps": 1e-12,
                "is_decoder": True,  # what makes the layers that attend to the image
                **text,
            }
        )
        self.visual_encoder = BlipVisionModel(seen)
        self.text_encoder = BlipTextModel(read, add_pooling_layer=False)
        widths = [read.hidden_size, *(width for _, width in HEAD)]
        self.mlp = torch.nn.ModuleDict(
            {str(place): torch.nn.Linear(widths[i], width) for i, (place, width) in enumerate(HEAD)}
        )
        self.image_size = int(seen.image_size)  # pyright: ignore[reportArgumentType]

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Pixels [B, 3, S, S], ids and mask [B, 35] -> raw rewards [B]."""
        seen = self.visual_encoder(pixel_values=pixels).last_hidden_state
        everything = torch.ones(seen.shape[:-1], dtype=torch.long, device=seen.device)
        read = self.text_encoder(
            input_ids=ids,
            attention_mask=mask,
            encoder_hidden_states=seen,
            encoder_attention_mask=everything,
            is_decoder=False,  # words see the words after them
        ).last_hidden_state[:, 0]
        for layer in self.mlp.values():  # one after another, without activations between
            read = layer(read)
        return read[:, 0]


class ImageReward(PairedScorer):
    """Learned human preference, about zero mean and unit deviation over the authors' data.

    ``vocabulary``: vocab.txt of bert-base-uncased, as a file, a directory or a hub id.
    ``architecture``: tables ``vision`` and ``text`` of transformers' BlipVisionConfig and
    BlipTextConfig, over the released ones. Keep ``dtype`` fp32: lower ones move the scores.
    """

    paths = {"checkpoint": FILES, "vocabulary": WORD_FILES}
    tower = (1024, 24, 197)

    def __init__(
        self,
        checkpoint: str,
        vocabulary: str = "google-bert/bert-base-uncased",
        architecture: dict[str, Tree] | None = None,
        batch_size: int = 16,
        dtype: str = "fp32",
        device: str | None = None,
    ) -> None:
        super().__init__(batch_size, dtype, device)
        self.tokenise = bert_tokenizer(vocabulary)
        path = locate(checkpoint, self.paths["checkpoint"])
        network = partial(self.network, {"architecture": architecture})
        model = load_weights(network, renamed(read_state(path), path), path, "ImageReward")
        self.model = model.to(self.device, self.dtype).eval()

    @staticmethod
    def check(settings: Settings) -> None:
        """Also refuses other tables than vision and text in ``architecture``."""
        PairedScorer.check(settings)
        _check_tables(settings["architecture"] or {})

    @classmethod
    def network(cls, settings: Settings) -> BlipReward:
        """The model that ``architecture`` describes. Raises ScorerSetupError for other tables."""
        _check_tables(tables := settings.get("architecture") or {})
        return BlipReward(tables.get("vision", {}), tables.get("text", {}))

    def pixels(self, images: np.ndarray) -> torch.Tensor:
        """uint8 [B, 3, H, W] -> float32 [B, 3, S, S]."""
        crop = crop_square(images, self.model.image_size)
        return normalize(to_float(crop))

    def score(self, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """The normalized reward of each image for its prompt."""
        words = self.tokenise(
            prompts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        )
        raw = self.model(
            pixels.to(self.device, self.dtype),
            words.input_ids.to(self.device),
            words.attention_mask.to(self.device),
        )
        return (raw.float() - MEAN) / STD


def _check_tables(architecture: Settings) -> None:
    if unknown := sorted(architecture.keys() - {"vision", "text"}):
        raise ScorerSetupError(
            f"architecture has {', '.join(unknown)}: it takes the tables vision and text"
        )


def renamed(state: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """The released names as ``BlipReward`` has them. Raises ScorerSetupError for another file."""
    if not any(name.startswith(SEEN) for name in state):
        raise ScorerSetupError(
            f"{path}: no ImageReward checkpoint: no name in it starts with {SEEN!r}"
        )
    return {_rename(name): value for name, value in state.items() if not UNUSED.match(name)}


def _rename(name: str) -> str:
    for pattern, ours in RENAMES:
        if found := re.match(pattern, name):
            return found.expand(ours) + name[found.end() :]
    return name


def bert_tokenizer(vocabulary: str) -> BertTokenizer:
    """bert-base-uncased's tokenizer from its vocab.txt. Raises ScorerSetupError where that is
    another vocabulary.

    The words are read here: transformers, asked for a name that it cannot find offline, answers
    with a vocabulary of five words.
    """
    from transformers import BertTokenizer

    path = locate(vocabulary, WORD_FILES)
    words = path.read_text(encoding="utf-8").splitlines()
    if len(words) != WORDS or words[101] != "[CLS]":
        raise ScorerSetupError(
            f"{path}: {len(words)} words: bert-base-uncased has {WORDS} with [CLS] at 101; give its"
            " vocab.txt"
        )
    return BertTokenizer(
        vocab={word: place for place, word in enumerate(words)}, do_lower_case=True
    )

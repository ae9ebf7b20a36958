"""ImageReward (arXiv 2304.05977) on transformers' BLIP, with the released weights renamed.

The paper's package pins libraries that cannot be installed together with open_clip, so its code is
not used; `make parity` compares the two implementations.
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
"""(index among the released layers, width); the indices in between are dropout layers."""
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
"""Patterns of prefixes of the released names, and their replacements; the first match applies."""
UNUSED = re.compile(r"blip\.(vision_proj|text_proj)\.|.*\.position_ids$")


class BlipReward(torch.nn.Module):
    """BLIP's image encoder, its text encoder with cross-attention to it, and a head on [CLS]."""

    def __init__(self, vision: Tree, text: Tree) -> None:
        super().__init__()
        from transformers.models.blip.configuration_blip import BlipTextConfig, BlipVisionConfig
        from transformers.models.blip.modeling_blip import BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        vision_config = BlipVisionConfig(
            **{**VISION, "patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-6, **vision}
        )
        text_config = BlipTextConfig(
            **{
                **TEXT,
                "encoder_hidden_size": vision_config.hidden_size,
                "layer_norm_eps": 1e-12,
                "is_decoder": True,  # creates the cross-attention layers
                **text,
            }
        )
        self.visual_encoder = BlipVisionModel(vision_config)
        self.text_encoder = BlipTextModel(text_config, add_pooling_layer=False)
        widths = [text_config.hidden_size, *(width for _, width in HEAD)]
        self.mlp = torch.nn.ModuleDict(
            {str(place): torch.nn.Linear(widths[i], width) for i, (place, width) in enumerate(HEAD)}
        )
        self.image_size = int(vision_config.image_size)  # pyright: ignore[reportArgumentType]

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return raw rewards [B] of pixels [B, 3, S, S] and prompts, ids and mask [B, 35]."""
        image_states = self.visual_encoder(pixel_values=pixels).last_hidden_state
        image_mask = torch.ones(
            image_states.shape[:-1], dtype=torch.long, device=image_states.device
        )
        hidden = self.text_encoder(
            input_ids=ids,
            attention_mask=mask,
            encoder_hidden_states=image_states,
            encoder_attention_mask=image_mask,
            is_decoder=False,  # bidirectional attention: no causal mask
        ).last_hidden_state[:, 0]
        for layer in self.mlp.values():  # linear layers in sequence, without activations
            hidden = layer(hidden)
        return hidden[:, 0]


class ImageReward(PairedScorer):
    """Learned human preference, with about zero mean and unit deviation over the authors' data.

    ``vocabulary``: vocab.txt of bert-base-uncased, as a file, a directory or a hub id.
    ``architecture``: tables ``vision`` and ``text`` that override values of the released
    BlipVisionConfig and BlipTextConfig of transformers. Keep ``dtype`` fp32: lower precision
    changes the scores.
    """

    paths = {"checkpoint": FILES, "vocabulary": WORD_FILES}
    tower = (1024, 24, 197)
    parameters = 446_206_689

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
        """Raise ScorerSetupError also if ``architecture`` has tables other than vision and text."""
        PairedScorer.check(settings)
        _check_tables(settings["architecture"] or {})

    @classmethod
    def network(cls, settings: Settings) -> BlipReward:
        """Build the model of ``architecture``. Raises ScorerSetupError for other tables."""
        _check_tables(tables := settings.get("architecture") or {})
        return BlipReward(tables.get("vision", {}), tables.get("text", {}))

    def pixels(self, images: np.ndarray) -> torch.Tensor:
        """Preprocess uint8 [B, 3, H, W] to float32 [B, 3, S, S]."""
        crop = crop_square(images, self.model.image_size)
        return normalize(to_float(crop))

    def score(self, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """Return the normalized reward of each image for its prompt."""
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
            f"architecture has {', '.join(unknown)}: only the tables vision and text are allowed"
        )


def renamed(state: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    """Rename released weights to the names of ``BlipReward``.

    Raises ScorerSetupError if ``state`` is not from an ImageReward checkpoint.
    """
    if not any(name.startswith(SEEN) for name in state):
        raise ScorerSetupError(
            f"{path}: no ImageReward checkpoint: no name in it starts with {SEEN!r}"
        )
    return {_rename(name): value for name, value in state.items() if not UNUSED.match(name)}


def _rename(name: str) -> str:
    for pattern, replacement in RENAMES:
        if match := re.match(pattern, name):
            return match.expand(replacement) + name[match.end() :]
    return name


def bert_tokenizer(vocabulary: str) -> BertTokenizer:
    """Return the tokenizer of bert-base-uncased, built from its vocab.txt.

    The file is read explicitly, because transformers returns a tokenizer of five words for a name
    that it cannot find offline. Raises ScorerSetupError if the vocabulary is another.
    """
    from transformers import BertTokenizer

    path = locate(vocabulary, WORD_FILES)
    words = path.read_text(encoding="utf-8").splitlines()
    if len(words) != WORDS or words[101] != "[CLS]":
        raise ScorerSetupError(
            f"{path}: {len(words)} words, but bert-base-uncased has {WORDS} with [CLS] at 101:"
            " give its vocab.txt"
        )
    return BertTokenizer(
        vocab={word: index for index, word in enumerate(words)}, do_lower_case=True
    )

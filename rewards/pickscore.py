"""PickScore (arXiv 2305.01569): a CLIP ViT-H/14, fine-tuned on human choices, in transformers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from configs.section import Tree
from rewards.base import ScorerSetupError, Settings
from rewards.checkpoints import load_weights, locate, read_state
from rewards.images import crop_square, normalize, to_float
from rewards.paired import PairedScorer, cosine, distinct

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

SCALE = 26.0  # divisor that brings the usual range, about 17 to 26, near 1, as in reward training
FILES = ("model.safetensors", "pytorch_model.bin")
ARCHITECTURE: Tree = {
    "projection_dim": 1024,
    "text_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "hidden_act": "gelu",
        "projection_dim": 1024,
    },
    "vision_config": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "patch_size": 14,
        "image_size": 224,
        "hidden_act": "gelu",
        "projection_dim": 1024,
    },
}


class PickScore(PairedScorer):
    """exp(logit scale) x cosine / 26 of a CLIP model of transformers.

    ``architecture``: a table of transformers' CLIPConfig, by default ViT-H/14. Images are
    preprocessed as by transformers' Pillow image processor; prompts are tokenized with CLIP's
    vocabulary, which open_clip ships.
    """

    paths = {"checkpoint": FILES}
    tower = (1280, 32, 257)
    parameters = 986_109_441

    def __init__(
        self,
        checkpoint: str,
        architecture: Tree | None = None,
        batch_size: int = 16,
        dtype: str = "fp32",
        device: str | None = None,
    ) -> None:
        super().__init__(batch_size, dtype, device)
        path = locate(checkpoint, self.paths["checkpoint"])
        state = {
            name: value
            for name, value in read_state(path).items()
            if not name.endswith(".position_ids")
        }
        self.model: Any = load_weights(
            partial(self.network, {"architecture": architecture}),
            state,
            path,
            "transformers' CLIPModel ViT-H/14" if architecture is None else "this CLIPModel",
        )
        self.model.to(self.device, self.dtype).eval()
        self.size = int(self.model.config.vision_config.image_size)
        self.length = int(self.model.config.text_config.max_position_embeddings)
        self.tokenise = clip_tokenizer()

    @classmethod
    def network(cls, settings: Settings) -> torch.nn.Module:
        """Build transformers' CLIPModel. Raises ScorerSetupError if ``architecture`` is invalid."""
        from transformers import CLIPConfig, CLIPModel

        try:
            return CLIPModel(CLIPConfig(**(settings.get("architecture") or ARCHITECTURE)))
        except (TypeError, ValueError) as error:
            raise ScorerSetupError(
                f"architecture: transformers cannot build it: {error}: fix"
                f" {settings['architecture']}"
            ) from None

    def pixels(self, images: np.ndarray) -> torch.Tensor:
        """Preprocess uint8 [B, 3, H, W] to float32 [B, 3, S, S]."""
        crop = crop_square(images, self.size, "floor")
        return normalize(to_float(crop))

    def score(self, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """Return the scaled cosine similarity of each image and its prompt."""
        unique, places = distinct(prompts)
        words = self.tokenise(
            unique,
            padding="max_length",
            truncation=True,
            max_length=self.length,
            return_tensors="pt",
        )
        image = self.model.get_image_features(
            pixel_values=pixels.to(self.device, self.dtype)
        ).pooler_output
        text = self.model.get_text_features(
            input_ids=words.input_ids.to(self.device),
            attention_mask=words.attention_mask.to(self.device),
        ).pooler_output
        paired = text[torch.tensor(places, device=self.device)]
        return self.model.logit_scale.float().exp() * cosine(image, paired) / SCALE


def clip_tokenizer() -> CLIPTokenizer:
    """Return CLIP's tokenizer with the vocabulary in open_clip's wheel, without a download."""
    from open_clip.tokenizer import SimpleTokenizer
    from transformers import CLIPTokenizer

    shipped = SimpleTokenizer()
    # open_clip spells these two tokens differently
    ends = {shipped.sot_token_id: "<|startoftext|>", shipped.eot_token_id: "<|endoftext|>"}
    vocabulary = {ends.get(place, word): place for word, place in shipped.encoder.items()}
    merges: Any = [pair for pair, _ in sorted(shipped.bpe_ranks.items(), key=lambda item: item[1])]
    return CLIPTokenizer(vocab=vocabulary, merges=merges)

"""Training of the denoiser and both CLIP text encoders by rectified flow (``shapes.training``).

They are trained on latents of the finished autoencoder. An auxiliary linear head predicts from the
middle of the transformer what each cell of the image shows; it is discarded afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from torch import nn

from shapes.data import Pool
from shapes.grammar import COLOURS, SHAPES
from shapes.state import load_or_create
from shapes.text import LONG_TOKENS, WIDTH, caption_ids, clip_encoder, t5_encoder, t5_tokenizer
from shapes.training import Batch, TrainingSchedule, draw_times, train
from shapes.vae import CHANNELS, encode

LAYERS, HEADS, HEAD_WIDTH = 4, 4, 32
BATCH = 96
IMAGES = 40_000
CHUNK = 4000  # images rendered and encoded at a time
NO_CAPTION = 0.04  # share of samples trained without a caption
TIME_MEAN, TIME_STD = 0.7, 1.1  # of the logit of t; corresponds to a time shift of 2


def build_transformer() -> SD3Transformer2DModel:
    """Return an untrained transformer of 2.3 M parameters.

    It has 64 image tokens of 4x4 pixels, 12 text tokens, width 128 and 4 layers.
    """
    torch.manual_seed(2)
    width = HEADS * HEAD_WIDTH
    model = SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=LAYERS,
        attention_head_dim=HEAD_WIDTH,
        num_attention_heads=HEADS,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=width,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    # zero initialization (adaLN-Zero): blocks start as the identity, the output as zero
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (
            (".norm1" in name and name.endswith("linear")) or name == "proj_out"
        ):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return model


class Learner(nn.Module):
    """The modules trained together: transformer, two text encoders, and the auxiliary head."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = build_transformer()
        self.text_encoder, self.text_encoder_2 = clip_encoder(3), clip_encoder(4)
        self.head = nn.Linear(HEADS * HEAD_WIDTH, 1 + len(COLOURS) * len(SHAPES))
        self.middle: list[torch.Tensor] = []
        self.transformer.transformer_blocks[LAYERS // 2 - 1].register_forward_hook(
            lambda _m, _i, out: self.middle.append(out[1])
        )

    def condition(self, ids: torch.Tensor, long: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return text tokens [B, 12, 128] and pooled text [B, 128] for token ids.

        They are concatenated as in StableDiffusion3Pipeline. ``long`` is the output of the T5
        encoder.
        """
        outs = [
            encoder(ids, output_hidden_states=True)
            for encoder in (self.text_encoder, self.text_encoder_2)
        ]
        tokens = torch.cat([out.hidden_states[-2] for out in outs], dim=-1)
        tokens = torch.cat([tokens, long.expand(len(ids), -1, -1)], dim=1)
        return tokens, torch.cat([out.text_embeds for out in outs], dim=-1)

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, ids: torch.Tensor, long: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return velocity [B, 12, 8, 8] and logits [B, 64, classes] of each cell's content."""
        tokens, pooled = self.condition(ids, long)
        self.middle.clear()
        out = self.transformer(
            hidden_states=x,
            encoder_hidden_states=tokens,
            pooled_projections=pooled,
            timestep=t * 1000,
            return_dict=False,
        )
        return out[0], self.head(self.middle.pop())


def create_examples(
    labelled: Callable[[int], tuple[np.ndarray, np.ndarray, np.ndarray]],
    encoded: Callable[[np.ndarray], torch.Tensor],
    count: int,
    chunk: int,
) -> dict[str, torch.Tensor]:
    """Create ``count`` examples, rounded down to whole chunks of ``chunk``.

    ``labelled(number)`` returns images or clips, scene indices and cell labels; ``encoded`` encodes
    the images or clips. The result has "latents", "which" (scene indices) and "cells" (uint8).
    """
    rows = []
    for _ in range(max(1, count // chunk)):
        images, indices, labels = labelled(min(chunk, count))
        labels = torch.from_numpy(labels).to(torch.uint8)
        rows.append((encoded(images), torch.from_numpy(indices), labels))
    latents, which, cells = (torch.cat(column) for column in zip(*rows, strict=True))
    return {"latents": latents, "which": which, "cells": cells}


class Examples:
    """Latents and captions to train on.

    They are rendered and encoded once, and stored in the file ``cache`` if one is given.
    """

    def __init__(
        self, vae: AutoencoderKL, seed: int, count: int = IMAGES, cache: Path | None = None
    ) -> None:
        pool = Pool(seed)
        parts = load_or_create(
            cache,
            lambda: create_examples(
                pool.labelled, lambda images: encode(vae, images), count, CHUNK
            ),
        )
        self.latents, self.which = parts["latents"], parts["which"]
        self.cells = parts["cells"].flatten(1)
        self.ids = caption_ids([scene.caption for scene in pool.scenes] + [""])
        ids = t5_tokenizer()(
            [""], padding="max_length", max_length=LONG_TOKENS, truncation=True, return_tensors="pt"
        ).input_ids
        with torch.no_grad():
            self.long = t5_encoder().eval()(ids).last_hidden_state

    def batch(self, generator: torch.Generator) -> Batch:
        """Return a batch of random latents with independent noise."""
        rows = torch.randint(len(self.latents), (BATCH,), generator=generator)
        ids = self.ids[self.which[rows]]
        dropped = torch.rand(BATCH, generator=generator) < NO_CAPTION
        t = draw_times(generator, BATCH, TIME_MEAN, TIME_STD)
        x0 = self.latents[rows]
        return Batch(
            x0,
            torch.randn(x0.shape, generator=generator),
            t,
            (torch.where(dropped[:, None], self.ids[-1], ids), self.long),
            self.cells[rows].long(),
        )


def train_denoiser(
    vae: AutoencoderKL,
    minutes: float,
    work: Path,
    log: Callable[[str], None],
    snapshot: Callable[[Learner], None],
) -> Learner:
    """Train for ``minutes`` (counted over resumed runs); return the averaged weights.

    ``snapshot(average)`` is called every minute.
    """
    examples = Examples(vae, seed=5, cache=work / "examples.safetensors")
    return train(
        Learner,
        lambda generator, _: examples.batch(generator),
        TrainingSchedule(minutes),
        work,
        log,
        snapshot,
    )

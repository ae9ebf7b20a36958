"""Training of the denoiser and both CLIP text encoders by rectified flow (``shapes.training``), on
latents of the finished autoencoder.

An auxiliary linear head reads from the middle of the transformer what lies in each cell of the
image; it is thrown away afterwards.
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
from shapes.state import kept
from shapes.text import LONG_TOKENS, WIDTH, caption_ids, clip_encoder, t5_encoder, t5_tokenizer
from shapes.training import Batch, Course, draw_times, train
from shapes.vae import CHANNELS, encode

LAYERS, HEADS, HEAD_WIDTH = 4, 4, 32
BATCH = 96
IMAGES = 40_000
CHUNK = 4000  # images that are made at a time
NO_CAPTION = 0.04  # share of samples trained without a caption
TIME_MEAN, TIME_STD = 0.7, 1.1  # of the logit of t: a shift of 2


def build_transformer() -> SD3Transformer2DModel:
    """2.3 M parameters: 64 image tokens of 4x4 pixels, 12 text tokens, width 128, 4 layers."""
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
    # blocks start as the identity, the output at zero (adaLN-Zero)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (
            (".norm1" in name and name.endswith("linear")) or name == "proj_out"
        ):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return model


class Learner(nn.Module):
    """The trained parts together: transformer, two text encoders, and the auxiliary head."""

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
        """Text tokens [B, 12, 128] and pooled text [B, 128] from token ids, put together as
        StableDiffusion3Pipeline does.
        """
        outs = [
            enc(ids, output_hidden_states=True) for enc in (self.text_encoder, self.text_encoder_2)
        ]
        tokens = torch.cat([out.hidden_states[-2] for out in outs], dim=-1)
        tokens = torch.cat([tokens, long.expand(len(ids), -1, -1)], dim=1)
        return tokens, torch.cat([out.text_embeds for out in outs], dim=-1)

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, ids: torch.Tensor, long: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Velocity [B, 12, 8, 8] and logits [B, 64, classes] of each cell's content."""
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


def made(
    labelled: Callable[[int], tuple[np.ndarray, np.ndarray, np.ndarray]],
    encoded: Callable[[np.ndarray], torch.Tensor],
    count: int,
    chunk: int,
) -> dict[str, torch.Tensor]:
    """``count`` examples, made ``chunk`` at a time: "latents", "which" scene, and uint8 "cells", as
    ``labelled(number)`` gives them with images or clips, which are ``encoded``.
    """
    rows = []
    for _ in range(max(1, count // chunk)):
        drawn, scene, cell = labelled(min(chunk, count))
        cell = torch.from_numpy(cell).to(torch.uint8)
        rows.append((encoded(drawn), torch.from_numpy(scene), cell))
    latents, which, cells = (torch.cat(column) for column in zip(*rows, strict=True))
    return {"latents": latents, "which": which, "cells": cells}


class Examples:
    """Latents and captions to train on: rendered and encoded once, and kept in the file ``cache``
    where one is given.
    """

    def __init__(
        self, vae: AutoencoderKL, seed: int, count: int = IMAGES, cache: Path | None = None
    ) -> None:
        pool = Pool(seed)
        parts = kept(
            cache, lambda: made(pool.labelled, lambda images: encode(vae, images), count, CHUNK)
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
        """Random latents, with independent noise."""
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
    """Train for ``minutes`` (counted over resumed runs); returns the averaged weights.
    ``snapshot(average)`` each minute.
    """
    examples = Examples(vae, seed=5, cache=work / "examples.safetensors")
    return train(
        Learner,
        lambda generator, _: examples.batch(generator),
        Course(minutes),
        work,
        log,
        snapshot,
    )

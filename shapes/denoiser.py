"""Training of the denoiser and both CLIP text encoders by rectified flow, on latents of the
finished autoencoder.

x_t = (1 - t) x0 + t eps, target eps - x0 (Liu et al. 2022; Esser et al. 2024). Everything that
decays does so by the share of the wall-clock budget that is gone, so a run always ends finished, on
any machine. An auxiliary linear head reads from the middle of the transformer what lies in each
cell of the image; it is thrown away afterwards.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, SD3Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import nn

from shapes.data import Pool
from shapes.fp4 import in_four_bits
from shapes.grammar import COLOURS, SHAPES
from shapes.muon import Muon
from shapes.state import load_state, save_state
from shapes.text import (
    LONG_TOKENS,
    TOKENS,
    WIDTH,
    clip_encoder,
    clip_tokenizer,
    t5_encoder,
    t5_tokenizer,
)
from shapes.vae import CHANNELS, encode

LAYERS, HEADS, HEAD_WIDTH = 4, 4, 32
BATCH = 96
IMAGES = 40_000
CHUNK = 4000  # images that are made at a time
MATRIX_LR, OTHER_LR, DECAY = 0.02, 2e-3, 0.02
NO_CAPTION = 0.04  # share of samples trained without a caption
TIME_MEAN, TIME_STD = 0.7, 1.1  # of the logit of t: a shift of 2
CELL_WEIGHT = 0.1
FP4_FROM = 0.6
"""Share of the budget from which on every second step runs in NVFP4, and is drawn towards what the
unquantized model says.
"""
AGREE_WEIGHT = 3.0
FLAT = 0.35  # share of the budget at full learning rate; linear to zero after it
EMA = 0.998


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

    def optimizer(self) -> Muon:
        """Muon on attention and feed-forward matrices, AdamW on the rest."""
        split: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for name, p in self.named_parameters():
            split[p.ndim == 2 and "transformer_blocks" in name and "norm1" not in name].append(p)
        return Muon(split[True], split[False], MATRIX_LR, OTHER_LR, DECAY)


class Examples:
    """Latents and captions to train on: rendered and encoded once, and kept in the file ``cache``
    where one is given.
    """

    def __init__(
        self, vae: AutoencoderKL, seed: int, count: int = IMAGES, cache: Path | None = None
    ) -> None:
        pool = Pool(seed)
        if cache and cache.exists():
            parts = load_file(cache)
        else:
            parts = self._made(vae, pool, count)
            if cache:
                save_file(parts, cache.with_suffix(".partial"))
                os.replace(cache.with_suffix(".partial"), cache)
        self.latents, self.which, self.cells = parts["latents"], parts["which"], parts["cells"]
        tokenizer = clip_tokenizer()
        captions = [scene.caption for scene in pool.scenes] + [""]
        self.ids = tokenizer(
            captions, padding="max_length", max_length=TOKENS, return_tensors="pt"
        ).input_ids
        ids = t5_tokenizer()(
            [""], padding="max_length", max_length=LONG_TOKENS, truncation=True, return_tensors="pt"
        ).input_ids
        with torch.no_grad():
            self.long = t5_encoder().eval()(ids).last_hidden_state

    @staticmethod
    def _made(vae: AutoencoderKL, pool: Pool, count: int) -> dict[str, torch.Tensor]:
        rows = []
        for _ in range(max(1, count // CHUNK)):
            images, scene, cell = pool.labelled(min(CHUNK, count))
            rows.append(
                (
                    encode(vae, images),
                    torch.from_numpy(scene),
                    torch.from_numpy(cell).flatten(1).to(torch.uint8),
                )
            )
        return {
            name: torch.cat(column)
            for name, column in zip(
                ("latents", "which", "cells"), zip(*rows, strict=True), strict=True
            )
        }

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random (latents, token ids, cells)."""
        rows = torch.randint(len(self.latents), (BATCH,), generator=generator)
        ids = self.ids[self.which[rows]]
        dropped = torch.rand(BATCH, generator=generator) < NO_CAPTION
        return (
            self.latents[rows],
            torch.where(dropped[:, None], self.ids[-1], ids),
            self.cells[rows].long(),
        )


def draw_times(generator: torch.Generator) -> torch.Tensor:
    """Stratified logit-normal times [B] in (0, 1), one in ten uniform."""
    u = (
        torch.randperm(BATCH, generator=generator) + torch.rand(BATCH, generator=generator)
    ) / BATCH
    t = torch.sigmoid(
        TIME_MEAN + TIME_STD * math.sqrt(2) * torch.erfinv(2 * u.clamp(1e-4, 1 - 1e-4) - 1)
    )
    flat = torch.rand(BATCH, generator=generator)
    return torch.where(torch.rand(BATCH, generator=generator) < 0.1, flat, t)


class Losses(NamedTuple):
    """Of one batch; ``agree`` is the mean squared difference between the NVFP4 and the full
    velocity, 0 where all was full.
    """

    velocity: torch.Tensor
    cells: torch.Tensor
    agree: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        return self.velocity + CELL_WEIGHT * self.cells + AGREE_WEIGHT * self.agree


def backward(
    learner: Learner, examples: Examples, generator: torch.Generator, four_bits: bool
) -> Losses:
    """Losses of one random batch, and their gradients; with ``four_bits`` those of the model run in
    NVFP4.
    """
    x0, ids, cells = examples.batch(generator)
    t = draw_times(generator)
    eps = torch.randn(x0.shape, generator=generator)
    shaped = t.view(-1, 1, 1, 1)
    inputs = ((1 - shaped) * x0 + shaped * eps, t, ids, examples.long)
    full = None
    if four_bits:
        with torch.no_grad():
            full, _ = learner(*inputs)
    with in_four_bits(learner.transformer) if four_bits else nullcontext():
        velocity, logits = learner(*inputs)
        agree = F.mse_loss(velocity, full) if full is not None else torch.zeros(())
        found = Losses(
            F.mse_loss(velocity, eps - x0),
            F.cross_entropy(logits.flatten(0, 1), cells.flatten()),
            agree,
        )
        found.total.backward()
    return found


def train_denoiser(
    vae: AutoencoderKL,
    minutes: float,
    work: Path,
    log: Callable[[str], None],
    snapshot: Callable[[Learner, float], None],
) -> Learner:
    """Train for ``minutes`` (counted over resumed runs); returns the averaged weights.
    ``snapshot(average, minute)`` each minute.
    """
    learner, average = Learner(), Learner().requires_grad_(False)
    optimizer = learner.optimizer()
    state = load_state(work / "denoiser", learner, optimizer)
    average.load_state_dict(learner.state_dict())
    load_state(work / "average", average, None)
    examples = Examples(vae, seed=5, cache=work / "examples.safetensors")
    step, spent = int(state.get("step", 0)), state.get("spent", 0.0)
    generator = torch.Generator().manual_seed(1000 + step)
    begin, saved, mean, first = time.monotonic() - spent, time.monotonic(), 0.0, step
    while spent < minutes * 60:
        done = spent / (minutes * 60)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * min(
                1.0, (step + 1) / 60, max(0.0, (1 - done) / (1 - FLAT))
            )
        optimizer.zero_grad(set_to_none=True)
        found = backward(learner, examples, generator, four_bits=done > FP4_FROM and step % 2 == 1)
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        step, spent = step + 1, time.monotonic() - begin
        keep = min(EMA, (1 + step) / (20 + step))
        torch._foreach_lerp_(list(average.parameters()), list(learner.parameters()), 1 - keep)
        mean += (found.velocity.item() - mean) / min(step - first, 100)
        if step % 50 == 0:
            log(
                f"denoiser step {step} {spent:.0f}s loss {mean:.4f} cells {found.cells.item():.4f}"
                f" NVFP4 {found.agree.item():.5f}"
            )
        if time.monotonic() - saved > 60 or spent >= minutes * 60:
            save_state(work / "denoiser", learner, optimizer, {"spent": spent, "step": step})
            save_state(work / "average", average, None, {"step": step})
            snapshot(average, spent / 60)
            saved = time.monotonic()
    return average.eval()

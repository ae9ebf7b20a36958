"""Denoiser of clips: diffusers' WanTransformer3DModel with a UMT5 text encoder.

Both are trained together by rectified flow (``shapes.training``) on clips of 1, 5 and 9 frames.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from shapes.denoiser import BATCH, NO_CAPTION, create_examples
from shapes.grammar import COLOURS, SHAPES
from shapes.moving import ClipPool
from shapes.state import load_or_create
from shapes.text import TOKENS, t5_tokenizer
from shapes.training import Batch, TrainingSchedule, draw_times, train
from shapes.video_vae import CHANNELS, encode

LAYERS, HEADS, HEAD_WIDTH, TEXT_WIDTH = 6, 4, 32, 64
CLIPS, CHUNK = 16_000, 1000
CLASSES = 1 + len(COLOURS) * len(SHAPES)
# of the logit of t; frames repeat each other, so more noise is needed than for images
TIME_MEAN, TIME_STD = 1.0, 1.1
LENGTHS = ((0.7, 0.2, 0.1), (0.2, 0.2, 0.6))
"""Shares of batches with 1, 2 and 3 latent frames.

The first row is used at the beginning, the second from the share ``FULL_FROM`` of the time on.
"""
FULL_FROM = 0.4
FP4_FROM = 0.93  # share of the time; late, because steps in NVFP4 take three times as long


def build_transformer() -> WanTransformer3DModel:
    """Return an untrained transformer of 1.8 M parameters.

    It has 16 tokens of 8x8 pixels per latent frame, width 128 and 6 layers.
    """
    torch.manual_seed(2)
    model = WanTransformer3DModel(
        patch_size=(1, 1, 1),
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_WIDTH,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=TEXT_WIDTH,
        freq_dim=128,
        ffn_dim=4 * HEADS * HEAD_WIDTH,
        num_layers=LAYERS,
        rope_max_seq_len=32,
    )
    # zero initialization: blocks start as the identity, the output as zero
    zeroed: list[Any] = [model.proj_out, model.condition_embedder.time_proj]
    blocks: Any = model.blocks
    for block in blocks:
        zeroed.append(block.attn2.to_out[0])
        nn.init.zeros_(block.scale_shift_table)
    for linear in zeroed:
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    return model


def build_text_encoder() -> UMT5EncoderModel:
    """Return an untrained encoder: two layers of width 64, one token per word of the grammar."""
    torch.manual_seed(3)
    config = UMT5Config(
        vocab_size=len(t5_tokenizer()),
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=2 * TEXT_WIDTH,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )
    return UMT5EncoderModel(config)


class VideoLearner(nn.Module):
    """The modules trained together: transformer, text encoder, and an auxiliary head.

    The head predicts from the middle of the transformer what each cell shows; it is discarded
    afterwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.text_encoder = build_transformer(), build_text_encoder()
        self.head = nn.Linear(HEADS * HEAD_WIDTH, 4 * CLASSES)
        self.middle: list[torch.Tensor] = []
        self.transformer.blocks[LAYERS // 2 - 1].register_forward_hook(
            lambda _m, _i, out: self.middle.append(torch.as_tensor(out))
        )

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return velocity [B, 48, T, 4, 4] and logits [B, T * 64, classes] of each cell's content.

        The text is zero after its own tokens, as in WanPipeline.
        """
        text = self.text_encoder(ids, mask).last_hidden_state * mask[..., None]
        self.middle.clear()
        out = self.transformer(
            hidden_states=x, timestep=t * 1000, encoder_hidden_states=text, return_dict=False
        )
        logits = self.head(self.middle.pop())
        return out[0], logits.unflatten(2, (4, CLASSES)).flatten(1, 2)


def by_token(cells: torch.Tensor) -> torch.Tensor:
    """Reorder cells [B, T, 8, 8] like the head's logits [B, T * 64]: four cells per token."""
    return cells.unflatten(3, (4, 2)).unflatten(2, (4, 2)).transpose(3, 4).flatten(1)


class Clips:
    """Latents and captions to train on.

    They are rendered and encoded once, and stored in the file ``cache`` if one is given. The first
    latent frames of a clip are a shorter clip.
    """

    def __init__(
        self, vae: AutoencoderKLWan, seed: int, count: int = CLIPS, cache: Path | None = None
    ) -> None:
        pool = ClipPool(seed)
        parts = load_or_create(
            cache,
            lambda: create_examples(pool.clips, lambda clips: encode(vae, clips), count, CHUNK),
        )
        self.latents, self.which, self.cells = parts["latents"], parts["which"], parts["cells"]
        captions = [scene.caption for scene in pool.scenes] + [""]
        tokens = t5_tokenizer()(
            captions, padding="max_length", max_length=TOKENS, return_tensors="pt"
        )
        self.ids, self.mask = tokens.input_ids, tokens.attention_mask

    def batch(self, generator: torch.Generator, done: float) -> Batch:
        """Return a batch of random clips of one length, with independent noise."""
        shares = torch.tensor(LENGTHS[done >= FULL_FROM])
        frames = int(torch.multinomial(shares, 1, generator=generator)) + 1
        rows = torch.randint(len(self.latents), (BATCH,), generator=generator)
        dropped = torch.rand(BATCH, generator=generator) < NO_CAPTION
        captions = torch.where(dropped, len(self.ids) - 1, self.which[rows])
        x0 = self.latents[rows, :, :frames]
        return Batch(
            x0,
            torch.randn(x0.shape, generator=generator),
            draw_times(generator, BATCH, TIME_MEAN, TIME_STD),
            (self.ids[captions], self.mask[captions]),
            by_token(self.cells[rows, :frames].long()),
        )


def train_denoiser(
    vae: AutoencoderKLWan,
    minutes: float,
    work: Path,
    log: Callable[[str], None],
    snapshot: Callable[[VideoLearner], None],
) -> VideoLearner:
    """Train for ``minutes`` (counted over resumed runs); return the averaged weights.

    ``snapshot(average)`` is called every minute.
    """
    clips = Clips(vae, seed=5, cache=work / "examples.safetensors")
    course = TrainingSchedule(minutes, fp4_from=FP4_FROM)
    return train(VideoLearner, clips.batch, course, work, log, snapshot)

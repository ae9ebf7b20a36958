"""Published architectures with random weights, at full size or reduced."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.section import Tree
from configs.sections import Model
from policy.families import Family, family_for
from policy.families.architectures import build, published, write_configs
from policy.types import Conditioning

TEXT_TOKENS, SMALL_TEXT_TOKENS = {"sd3": 256, "sana": 300, "sana_video": 300}, 32
"""Text tokens by family, if not 512; and those of a small model."""
SMALL_FRAMES = 5
WIDTH = 256
SMALL: dict[str, Tree] = {
    "sd3": {
        "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 64,
        "caption_projection_dim": WIDTH, "joint_attention_dim": WIDTH,
        "pooled_projection_dim": WIDTH, "dual_attention_layers": [],
        "pos_embed_max_size": 64,  # enough for 1024 pixels; the table is built with every model
    },
    "flux": {
        "num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2,
        "joint_attention_dim": WIDTH, "pooled_projection_dim": WIDTH,
    },
    "sana": {
        "num_layers": 2, "num_attention_heads": 8, "num_cross_attention_heads": 4,
        "cross_attention_head_dim": 64, "cross_attention_dim": WIDTH, "caption_channels": WIDTH,
    },
    "sana_video": {
        "num_layers": 2, "num_attention_heads": 4, "num_cross_attention_heads": 4,
        "cross_attention_head_dim": 112, "cross_attention_dim": 448, "caption_channels": WIDTH,
    },
    "qwen_image": {"num_layers": 2, "num_attention_heads": 2, "joint_attention_dim": WIDTH},
    "z_image": {
        "n_layers": 2, "n_refiner_layers": 1, "dim": 384, "n_heads": 3, "n_kv_heads": 3,
        "cap_feat_dim": WIDTH,
    },
    "flux2": {
        "num_layers": 1, "num_single_layers": 2, "num_attention_heads": 2,
        "joint_attention_dim": WIDTH,
    },
    "wan": {"num_layers": 2, "num_attention_heads": 2, "ffn_dim": 4 * WIDTH, "text_dim": WIDTH},
}  # fmt: skip
SMALL["flux2_klein"] = SMALL["flux2"]
"""Settings for machines without a GPU: few and narrow blocks of the published types."""


@dataclass(frozen=True)
class Case:
    """An architecture at one size.

    ``family`` reads its configuration files, and ``part`` describes its transformer, or each of
    its two transformers.
    """

    name: str
    family: Family
    part: Tree

    def build(
        self,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
        **config: object,
    ) -> nn.Module:
        """Build its denoiser with random weights; ``config`` overrides settings of ``part``."""
        part = {**self.part, "config": {**self.part["config"], **config}}
        return self.family.denoiser(lambda _: build(part, device, dtype))

    def inputs(self, batch: int, device: torch.device | str) -> tuple[Tensor, Tensor, Conditioning]:
        """Return (x [B, *latent], sigma [], conditioning of B rows).

        x and the conditioning are noise, and all text tokens are used.
        """
        generator = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        tensors = {
            name: (
                torch.ones(batch, *shape, device=device)
                if name.endswith("mask")
                else noise(batch, *shape)
            )
            for name, shape in self.family.conditioning_shapes.items()
        }
        return noise(batch, *self.family.latent_shape), torch.tensor(0.7), Conditioning(tensors)


@contextmanager
def case_of(name: str, pixels: int | None, small: bool) -> Iterator[Case]:
    """Yield a published architecture at ``pixels`` x ``pixels`` (None: as published).

    With ``small`` its settings are replaced by those of ``SMALL``. The configuration files exist
    only within the context.
    """
    model = published(name)
    family = model["family"]
    part = {**model["parts"]["transformer"]}
    if small:
        part["config"] = {**part["config"], **SMALL[family]}
    size: Tree = {side: pixels or model[side] for side in ("height", "width")}
    if "frames" in model:
        size["frames"] = SMALL_FRAMES if small else model["frames"]
    # its thousandfold is representable in BF16, in which the sines of its embedding are computed
    guidance = 4.0 if part["config"].get("guidance_embeds") else None
    with tempfile.TemporaryDirectory(prefix="sol-rl-bench-") as scratch:
        path = write_configs(model, scratch)
        for folder in path.glob("transformer*"):
            (folder / "config.json").write_text(json.dumps(part["config"]))
        settings = Model(
            family=family,
            path=str(path),
            max_sequence_length=SMALL_TEXT_TOKENS if small else TEXT_TOKENS.get(family, 512),
            guidance=guidance,
            **size,
        )
        yield Case(f"{name}{' (small)' if small else ''}", family_for(settings), part)

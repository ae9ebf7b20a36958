"""SANA's own checkpoints: the names and shapes of its code as diffusers has them.

Both layouts of the feed-forward are read, 1x1 convolutions and the linear layers of the checkpoint
that arXiv 2604.06916 trains, which are the same function. Queries, keys and values are one layer
there and three here.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn

from records.weights import read_state

UNUSED = re.compile(r"pos_embed|y_embedder\.y_embedding|logvar_linear\..*")
"""What training has and sampling has not: recomputed positions, the dropped caption, a variance."""
NAMES = (
    (r"x_embedder\.", "patch_embed."),
    (r"y_embedder\.y_proj\.fc(\d)\.", r"caption_projection.linear_\1."),
    (r"attention_y_norm\.", "caption_norm."),
    (r"t_embedder\.mlp\.0\.", "time_embed.emb.timestep_embedder.linear_1."),
    (r"t_embedder\.mlp\.2\.", "time_embed.emb.timestep_embedder.linear_2."),
    (r"t_block\.1\.", "time_embed.linear."),
    (r"final_layer\.linear\.", "proj_out."),
    (r"final_layer\.scale_shift_table", "scale_shift_table"),
    (r"blocks\.(\d+)\.scale_shift_table", r"transformer_blocks.\1.scale_shift_table"),
    (r"blocks\.(\d+)\.attn\.proj\.", r"transformer_blocks.\1.attn1.to_out.0."),
    (r"blocks\.(\d+)\.attn\.([qk])_norm\.", r"transformer_blocks.\1.attn1.norm_\2."),
    (r"blocks\.(\d+)\.cross_attn\.q_linear\.", r"transformer_blocks.\1.attn2.to_q."),
    (r"blocks\.(\d+)\.cross_attn\.proj\.", r"transformer_blocks.\1.attn2.to_out.0."),
    (r"blocks\.(\d+)\.cross_attn\.([qk])_norm\.", r"transformer_blocks.\1.attn2.norm_\2."),
    *(
        (rf"blocks\.(\d+)\.mlp\.{theirs}\.(?:conv|linear)\.", rf"transformer_blocks.\1.ff.{ours}.")
        for theirs, ours in (
            ("inverted_conv", "conv_inverted"),
            ("depth_conv", "conv_depth"),
            ("point_conv", "conv_point"),
        )
    ),
)
"""Beginnings of names there, and here."""
SPLIT = (
    (r"blocks\.(\d+)\.attn\.qkv\.(.*)", r"transformer_blocks.\1.attn1.to_{}.\2", "qkv"),
    (r"blocks\.(\d+)\.cross_attn\.kv_linear\.(.*)", r"transformer_blocks.\1.attn2.to_{}.\2", "kv"),
)
"""Layers there that are several here, one below the other."""


def native_state(path: Path, transformer: nn.Module) -> dict[str, Tensor]:
    """The weights of ``path`` for ``transformer``, which may be on the meta device.

    Raises FileNotFoundError, or ValueError for a file that is not its weights: one line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"model.native_path: there is no file {str(path)!r}")
    found: dict[str, Tensor] = {}
    for name, value in read_state(path).items():
        if not UNUSED.fullmatch(name):
            found |= _renamed(name, value)
    own = {name: value.shape for name, value in transformer.state_dict().items()}
    for name, value in found.items():
        if name in own and own[name] == (*value.shape, 1, 1):
            found[name] = value[..., None, None]
    problems = [
        *(f"it lacks {name}" for name in own.keys() - found.keys()),
        *(f"{name} is not of this architecture" for name in found.keys() - own.keys()),
        *(
            f"{name} has the shape {list(value.shape)}, not {list(own[name])}"
            for name, value in found.items()
            if name in own and value.shape != own[name]
        ),
    ]
    if problems:
        raise ValueError(
            f"model.native_path: {str(path)!r}: {min(problems)} ({len(problems)} such): give the"
            " weights of the pipeline's architecture"
        )
    return found


def _renamed(name: str, value: Tensor) -> dict[str, Tensor]:
    for pattern, ours, parts in SPLIT:
        if match := re.fullmatch(pattern, name):
            pieces = torch.chunk(value, len(parts))
            template = match.expand(ours)
            return {
                template.format(part): piece.clone()
                for part, piece in zip(parts, pieces, strict=False)
            }
    for pattern, ours in NAMES:
        if match := re.match(pattern, name):
            return {match.expand(ours) + name[match.end() :]: value}
    return {name: value}

"""Conversion of SANA's native checkpoints to diffusers' parameter names and shapes.

Two layouts of the feed-forward are supported, which compute the same function: 1x1 convolutions,
and the linear layers of the checkpoint that arXiv 2604.06916 trains. Queries, keys and values are
one layer in native checkpoints and three in diffusers.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn

from configs.paths import is_file
from records.weights import read_state

UNUSED = re.compile(r"pos_embed|y_embedder\.y_embedding|logvar_linear\..*")
"""Parameters not used in sampling: positions (recomputed), the dropped caption, a variance."""
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
        (rf"blocks\.(\d+)\.mlp\.{native}\.(?:conv|linear)\.", rf"transformer_blocks.\1.ff.{new}.")
        for native, new in (
            ("inverted_conv", "conv_inverted"),
            ("depth_conv", "conv_depth"),
            ("point_conv", "conv_point"),
        )
    ),
)
"""(pattern of a native name's prefix, the prefix in diffusers)."""
SPLIT = (
    (r"blocks\.(\d+)\.attn\.qkv\.(.*)", r"transformer_blocks.\1.attn1.to_{}.\2", "qkv"),
    (r"blocks\.(\d+)\.cross_attn\.kv_linear\.(.*)", r"transformer_blocks.\1.attn2.to_{}.\2", "kv"),
)
"""(pattern of a native name, template in diffusers, its parts), for layers to be split by rows."""


def native_state(path: Path, transformer: nn.Module) -> dict[str, Tensor]:
    """Read the native weights at ``path`` as a state dict for ``transformer``.

    ``transformer`` may be on the meta device. Raises FileNotFoundError, or ValueError if the file
    does not have its weights, with a message of one line.
    """
    if not is_file(path):
        raise FileNotFoundError(f"model.native_path: file not found: {str(path)!r}")
    state: dict[str, Tensor] = {}
    for name, value in read_state(path).items():
        if not UNUSED.fullmatch(name):
            state |= _renamed(name, value)
    shapes = {name: value.shape for name, value in transformer.state_dict().items()}
    for name, value in state.items():
        # a native linear layer that is a 1x1 convolution in diffusers
        if name in shapes and shapes[name] == (*value.shape, 1, 1):
            state[name] = value[..., None, None]
    problems = [
        *(f"it lacks {name}" for name in shapes.keys() - state.keys()),
        *(f"{name} is not of this architecture" for name in state.keys() - shapes.keys()),
        *(
            f"{name} has the shape {list(value.shape)}, not {list(shapes[name])}"
            for name, value in state.items()
            if name in shapes and value.shape != shapes[name]
        ),
    ]
    if problems:
        raise ValueError(
            f"model.native_path: {str(path)!r}: {min(problems)} ({len(problems)} such problems):"
            " give the weights of the pipeline's architecture"
        )
    return state


def _renamed(name: str, value: Tensor) -> dict[str, Tensor]:
    """Return one native parameter under its names in diffusers; unknown names are unchanged."""
    for pattern, diffusers_name, parts in SPLIT:
        if match := re.fullmatch(pattern, name):
            pieces = torch.chunk(value, len(parts))
            template = match.expand(diffusers_name)
            return {
                template.format(part): piece.clone()
                for part, piece in zip(parts, pieces, strict=False)
            }
    for pattern, prefix in NAMES:
        if match := re.match(pattern, name):
            return {match.expand(prefix) + name[match.end() :]: value}
    return {name: value}

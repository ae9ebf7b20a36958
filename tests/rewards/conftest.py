"""Learned scorers with small random weights."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from bench.rewards import some_vocabulary
from rewards.imagereward import BlipReward
from tests.rewards import parity, peers

BLIP = parity.blip_architecture(parity.TINY_BLIP)


@pytest.fixture(scope="session")
def settings(tmp_path_factory):
    """Return settings of every learned scorer, each with a random checkpoint."""
    import open_clip
    from transformers import CLIPConfig, CLIPModel

    folder = tmp_path_factory.mktemp("checkpoints")
    tables = peers.transformers_config(parity.TINY)
    clip = open_clip.CLIP(**parity.TINY)
    pick = CLIPModel(CLIPConfig(**tables))
    reward = BlipReward(BLIP["vision"], BLIP["text"])
    for seed, model in enumerate((clip, pick, reward)):
        peers.randomise(model, seed)
    save_file(clip.state_dict(), folder / "open_clip_model.safetensors")
    save_file(pick.state_dict(), folder / "model.safetensors")
    torch.save(released_names(reward.state_dict()), folder / "ImageReward.pt")
    (folder / "vocab.txt").write_text(some_vocabulary())
    return {
        "clipscore": {
            "checkpoint": str(folder / "open_clip_model.safetensors"),
            "architecture": parity.TINY,
        },
        "hpsv2": {
            "checkpoint": str(folder / "open_clip_model.safetensors"),
            "architecture": parity.TINY,
        },
        "pickscore": {"checkpoint": str(folder / "model.safetensors"), "architecture": tables},
        "imagereward": {"checkpoint": str(folder), "vocabulary": str(folder), "architecture": BLIP},
    }


def released_names(state):
    """Return weights by the names of the released checkpoint.

    The names are written out here, and not derived from the scorer's own rules.
    """
    rules = (
        ("visual_encoder.embeddings.patch_embedding", "blip.visual_encoder.patch_embed.proj"),
        ("visual_encoder.embeddings.class_embedding", "blip.visual_encoder.cls_token"),
        ("visual_encoder.embeddings.position_embedding", "blip.visual_encoder.pos_embed"),
        ("visual_encoder.encoder.layers.", "blip.visual_encoder.blocks."),
        ("visual_encoder.post_layernorm", "blip.visual_encoder.norm"),
        ("text_encoder.", "blip.text_encoder."),
        ("mlp.", "mlp.layers."),
    )
    made = {
        "blip.vision_proj.weight": torch.zeros(2, 2),
        "blip.text_encoder.embeddings.position_ids": torch.arange(4)[None],
    }
    for name, value in state.items():
        ours, theirs = next((a, b) for a, b in rules if name.startswith(a))
        name = theirs + name.removeprefix(ours)
        for a, b in (
            (".layer_norm", ".norm"),
            ("self_attn.projection", "attn.proj"),
            ("self_attn.qkv", "attn.qkv"),
        ):
            name = name.replace(a, b) if "visual" in name else name
        made[name] = value
    return made

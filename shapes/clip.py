"""A tiny CLIP over the shapes world: open_clip's own class, the grammar's words, images with
their near misses.

It learns which caption an image was drawn for. Negatives are what make it strict: every scene of a
batch stands beside scenes that differ in one thing (a colour, a shape, colours exchanged, another
relation, another number), so that telling red from blue is not enough. Only scenes of the train
split are drawn or named.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from shapes.data import Pool
from shapes.grammar import COLOURS, RELATIONS, SHAPES, Scene, Thing, flipped
from shapes.render import SIZE, render
from shapes.text import TOKENS, byte_pairs, caption_ids, clip_tokenizer

if TYPE_CHECKING:
    import open_clip

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
GROUPS, NEAR = 48, 3  # scenes of a batch, and near misses beside each
NOISE = 24.0  # grey levels: the strongest noise on a training image
MOST_SCALE = math.log(100.0)  # of the logit scale


def model_cfg() -> dict[str, Any]:
    """open_clip's configuration of the model: 8x8 patches of 4 pixels, 0.6 M parameters."""
    return {
        "embed_dim": 64,
        "vision_cfg": {
            "image_size": SIZE,
            "layers": 4,
            "width": 96,
            "head_width": 24,
            "patch_size": 4,
        },
        "text_cfg": {
            "context_length": TOKENS,
            "vocab_size": len(byte_pairs()[0]),
            "width": 64,
            "heads": 4,
            "layers": 2,
            "hf_tokenizer_name": "shapes",  # any name: the tokenizer lies beside the weights
        },
    }


def build_clip(seed: int = 11) -> open_clip.CLIP:
    """The model with random weights."""
    import open_clip  # with timm it takes seconds, which a reader of this module need not wait

    torch.manual_seed(seed)
    return open_clip.CLIP(**model_cfg())


@cache
def near_misses(scene: Scene, splits: tuple[str, ...] = ("train",)) -> tuple[Scene, ...]:
    """Scenes of ``splits`` that differ from ``scene`` in one thing, in a fixed order."""
    found = []
    for place, thing in enumerate(scene.things):
        others = [Thing(colour, thing.shape) for colour in COLOURS] + [
            Thing(thing.colour, shape) for shape in SHAPES
        ]
        for other in others:
            things = (
                (other,) * len(scene.things)
                if scene.kind == "count"
                else _with(scene.things, place, other)
            )
            found.append(dataclasses.replace(scene, things=things))
    if scene.kind in ("two", "relation"):
        first, second = scene.things
        exchanged = (Thing(second.colour, first.shape), Thing(first.colour, second.shape))
        found.append(dataclasses.replace(scene, things=exchanged))
        found += [
            dataclasses.replace(scene, relation=relation)
            for relation in RELATIONS
            if scene.relation
        ]
        found = [other for other in found if other.things[0].colour != other.things[1].colour]
    else:
        thing = scene.things[0]
        found += [
            Scene("one", (thing,)),
            Scene("count", (thing,) * 2),
            Scene("count", (thing,) * 3),
        ]
    return tuple(
        other for other in dict.fromkeys(found) if other.split in splits and not shows(scene, other)
    )


def _with(things: tuple[Thing, ...], place: int, thing: Thing) -> tuple[Thing, ...]:
    return (*things[:place], thing, *things[place + 1 :])


@cache
def meaning(scene: Scene) -> Scene:
    """One way of telling a scene: of two objects, the way that sorts first."""
    return (
        min(scene, flipped(scene), key=lambda told: told.things)
        if scene.kind in ("two", "relation")
        else scene
    )


def shows(scene: Scene, caption: Scene) -> bool:
    """Whether an image of ``scene`` is right for ``caption``: the same scene told either way
    round, or without its relation.
    """
    return meaning(caption) in (meaning(scene), without_relation(scene))


@cache
def without_relation(scene: Scene) -> Scene:
    """What is left of a scene when nothing is said about where its objects are."""
    return meaning(Scene("two", scene.things)) if scene.kind == "relation" else meaning(scene)


def right_pairs(scenes: list[Scene]) -> torch.Tensor:
    """bool [B, B]: ``shows`` of every image (row) and every caption (column)."""
    numbers: dict[Scene, int] = {}
    told = torch.tensor([numbers.setdefault(meaning(scene), len(numbers)) for scene in scenes])
    less = torch.tensor(
        [numbers.setdefault(without_relation(scene), len(numbers)) for scene in scenes]
    )
    return (told[:, None] == told) | (less[:, None] == told)


def spoil(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Half of the images with noise, a third of them softened: what a model draws is not as clean
    as the renderer.
    """
    pixels = images.astype(np.float32)
    soft = (
        pixels + np.roll(pixels, 1, 2) + np.roll(pixels, 1, 3) + np.roll(pixels, (1, 1), (2, 3))
    ) / 4
    pixels = np.where(rng.random((len(images), 1, 1, 1)) < 1 / 3, soft, pixels)
    level = NOISE * rng.random((len(images), 1, 1, 1)) * (rng.random((len(images), 1, 1, 1)) < 0.5)
    return np.clip(np.rint(pixels + level * rng.standard_normal(images.shape)), 0, 255).astype(
        np.uint8
    )


def to_pixels(images: np.ndarray) -> torch.Tensor:
    """uint8 [B, 3, 32, 32] -> float32, normalized as the configuration says."""
    shape = (1, 3, 1, 1)
    return (
        torch.from_numpy(images).float() / 255 - torch.tensor(MEAN).reshape(shape)
    ) / torch.tensor(STD).reshape(shape)


def batches(
    seed: int, groups: int = GROUPS
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For ever: pixels [B, 3, 32, 32], token ids [B, 11], and [B, B] True where caption j is right
    for image i.
    """
    pool = Pool(seed)
    while True:
        drawn = pool.rng.choice(len(pool.scenes), groups, p=pool.chances)
        scenes = []
        for scene in (pool.scenes[i] for i in drawn):
            scenes += [scene, *beside(scene, pool.rng)]
        images = spoil(render(scenes, pool.rng), pool.rng)
        ids = caption_ids([scene.caption for scene in scenes])
        yield to_pixels(images), ids, right_pairs(scenes)


def beside(scene: Scene, rng: np.random.Generator) -> list[Scene]:
    """``NEAR`` near misses by chance; beside a relation the first one is the same objects in
    another, which is the hardest to tell.
    """
    near = near_misses(scene)
    chosen = [near[i] for i in rng.choice(len(near), min(NEAR, len(near)), replace=False)]
    turned = [other for other in near if scene.relation and other.things == scene.things]
    if turned and not any(other in turned for other in chosen):
        chosen[0] = turned[rng.integers(len(turned))]
    return chosen


def contrastive(
    image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor, right: torch.Tensor
) -> torch.Tensor:
    """CLIP's loss (arXiv 2103.00020, figure 3) on unit features [B, D]; pairs off the diagonal that
    are right too do not count as negatives.
    """
    logits = scale * image @ text.T
    also_right = right & ~torch.eye(len(right), dtype=torch.bool)
    logits = logits.masked_fill(also_right, float("-inf"))
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def loss_of(
    model: open_clip.CLIP, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """The loss of one batch."""
    pixels, ids, right = batch
    image, text = model.encode_image(pixels, normalize=True), model.encode_text(ids, normalize=True)
    return contrastive(image, text, model.logit_scale.exp(), right)


def save_clip(model: open_clip.CLIP, out: Path) -> None:
    """Write weights, configuration and tokenizer as ``open_clip.create_model("local-dir:OUT")``
    reads them.
    """
    out.mkdir(parents=True, exist_ok=True)
    preprocess = {
        "size": [SIZE, SIZE],
        "mean": MEAN,
        "std": STD,
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    }
    described = {"model_cfg": model_cfg(), "preprocess_cfg": preprocess}
    (out / "open_clip_config.json").write_text(json.dumps(described, indent=2) + "\n")
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()},
        out / "open_clip_model.safetensors",
    )
    clip_tokenizer().save_pretrained(out)

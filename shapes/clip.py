"""Tiny CLIP for the shapes grammar: open_clip's own class, trained with near-miss captions.

It learns which caption an image was rendered for. The negatives make it strict: every scene of a
batch comes with scenes that differ in one thing (a color, a shape, exchanged colors, another
relation, another number), so telling red from blue is not enough. Only scenes of the train split
are used.
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
GROUPS, NEAR = 48, 3  # scenes per batch, and near misses added to each
NOISE = 24.0  # gray levels: maximum noise on a training image
MOST_SCALE = math.log(100.0)  # upper limit of the log of the logit scale


def model_cfg() -> dict[str, Any]:
    """Return open_clip's configuration of the model: 8x8 patches of 4 pixels, 0.6 M parameters."""
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
            "hf_tokenizer_name": "shapes",  # any name works: the tokenizer is next to the weights
        },
    }


def build_clip(seed: int = 11) -> open_clip.CLIP:
    """Return the model with random weights."""
    import open_clip  # slow: imports timm, which takes seconds

    torch.manual_seed(seed)
    return open_clip.CLIP(**model_cfg())


@cache
def near_misses(scene: Scene, splits: tuple[str, ...] = ("train",)) -> tuple[Scene, ...]:
    """Return scenes of ``splits`` that differ from ``scene`` in one thing, in a fixed order."""
    candidates = []
    for index, thing in enumerate(scene.things):
        others = [Thing(colour, thing.shape) for colour in COLOURS] + [
            Thing(thing.colour, shape) for shape in SHAPES
        ]
        for other in others:
            things = (
                (other,) * len(scene.things)
                if scene.kind == "count"
                else _with(scene.things, index, other)
            )
            candidates.append(dataclasses.replace(scene, things=things))
    if scene.kind in ("two", "relation"):
        first, second = scene.things
        swapped = (Thing(second.colour, first.shape), Thing(first.colour, second.shape))
        candidates.append(dataclasses.replace(scene, things=swapped))
        candidates += [
            dataclasses.replace(scene, relation=relation)
            for relation in RELATIONS
            if scene.relation
        ]
        candidates = [
            other for other in candidates if other.things[0].colour != other.things[1].colour
        ]
    else:
        thing = scene.things[0]
        candidates += [
            Scene("one", (thing,)),
            Scene("count", (thing,) * 2),
            Scene("count", (thing,) * 3),
        ]
    return tuple(
        other
        for other in dict.fromkeys(candidates)
        if other.split in splits and not matches_caption(scene, other)
    )


def _with(things: tuple[Thing, ...], place: int, thing: Thing) -> tuple[Thing, ...]:
    return (*things[:place], thing, *things[place + 1 :])


@cache
def canonical_form(scene: Scene) -> Scene:
    """Return a canonical form of a scene.

    A scene of two objects can be described from either one; the form that sorts first is used.
    """
    return (
        min(scene, flipped(scene), key=lambda form: form.things)
        if scene.kind in ("two", "relation")
        else scene
    )


def matches_caption(scene: Scene, caption: Scene) -> bool:
    """Return True if an image of ``scene`` is correct for ``caption``.

    The caption may describe the scene from either object, or without its relation.
    """
    return canonical_form(caption) in (canonical_form(scene), without_relation(scene))


@cache
def without_relation(scene: Scene) -> Scene:
    """Return the canonical form of a scene without its relation."""
    return (
        canonical_form(Scene("two", scene.things))
        if scene.kind == "relation"
        else canonical_form(scene)
    )


def match_matrix(scenes: list[Scene]) -> torch.Tensor:
    """Return bool [B, B]: ``matches_caption`` for every image (row) and caption (column)."""
    numbers: dict[Scene, int] = {}
    meanings = torch.tensor(
        [numbers.setdefault(canonical_form(scene), len(numbers)) for scene in scenes]
    )
    reduced = torch.tensor(
        [numbers.setdefault(without_relation(scene), len(numbers)) for scene in scenes]
    )
    return (meanings[:, None] == meanings) | (reduced[:, None] == meanings)


def augment(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Add noise to half of the images and blur a third of them.

    A model's images are not as clean as rendered ones.
    """
    pixels = images.astype(np.float32)
    blurred = (
        pixels + np.roll(pixels, 1, 2) + np.roll(pixels, 1, 3) + np.roll(pixels, (1, 1), (2, 3))
    ) / 4
    pixels = np.where(rng.random((len(images), 1, 1, 1)) < 1 / 3, blurred, pixels)
    level = NOISE * rng.random((len(images), 1, 1, 1)) * (rng.random((len(images), 1, 1, 1)) < 0.5)
    return np.clip(np.rint(pixels + level * rng.standard_normal(images.shape)), 0, 255).astype(
        np.uint8
    )


def to_pixels(images: np.ndarray) -> torch.Tensor:
    """Convert uint8 [B, 3, 32, 32] to float32, normalized by ``MEAN`` and ``STD``."""
    shape = (1, 3, 1, 1)
    return (
        torch.from_numpy(images).float() / 255 - torch.tensor(MEAN).reshape(shape)
    ) / torch.tensor(STD).reshape(shape)


def batches(
    seed: int, groups: int = GROUPS
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield endless batches (pixels, token ids, correct pairs).

    Shapes: pixels [B, 3, 32, 32], ids [B, 11], and bool [B, B] that is True if caption j is correct
    for image i.
    """
    pool = Pool(seed)
    while True:
        drawn = pool.rng.choice(len(pool.scenes), groups, p=pool.chances)
        scenes = []
        for scene in (pool.scenes[i] for i in drawn):
            scenes += [scene, *sample_near_misses(scene, pool.rng)]
        images = augment(render(scenes, pool.rng), pool.rng)
        ids = caption_ids([scene.caption for scene in scenes])
        yield to_pixels(images), ids, match_matrix(scenes)


def sample_near_misses(scene: Scene, rng: np.random.Generator) -> list[Scene]:
    """Return ``NEAR`` random near misses of a scene, or fewer if there are fewer.

    For a scene with a relation, at least one of them has the same objects in another relation,
    which is the hardest to distinguish.
    """
    near = near_misses(scene)
    chosen = [near[i] for i in rng.choice(len(near), min(NEAR, len(near)), replace=False)]
    other_relations = [other for other in near if scene.relation and other.things == scene.things]
    if other_relations and not any(other in other_relations for other in chosen):
        chosen[0] = other_relations[rng.integers(len(other_relations))]
    return chosen


def contrastive(
    image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor, right: torch.Tensor
) -> torch.Tensor:
    """Return CLIP's loss (arXiv 2103.00020, figure 3) for unit-norm features [B, D].

    Correct pairs off the diagonal do not count as negatives.
    """
    logits = scale * image @ text.T
    also_right = right & ~torch.eye(len(right), dtype=torch.bool)
    logits = logits.masked_fill(also_right, float("-inf"))
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def loss_of(
    model: open_clip.CLIP, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return the loss of one batch."""
    pixels, ids, right = batch
    image, text = model.encode_image(pixels, normalize=True), model.encode_text(ids, normalize=True)
    return contrastive(image, text, model.logit_scale.exp(), right)


def save_clip(model: open_clip.CLIP, out: Path) -> None:
    """Write the weights, configuration and tokenizer.

    ``open_clip.create_model("local-dir:OUT")`` reads this directory.
    """
    out.mkdir(parents=True, exist_ok=True)
    preprocess = {
        "size": [SIZE, SIZE],
        "mean": MEAN,
        "std": STD,
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    }
    configuration = {"model_cfg": model_cfg(), "preprocess_cfg": preprocess}
    (out / "open_clip_config.json").write_text(json.dumps(configuration, indent=2) + "\n")
    save_file(
        {name: value.contiguous() for name, value in model.state_dict().items()},
        out / "open_clip_model.safetensors",
    )
    clip_tokenizer().save_pretrained(out)

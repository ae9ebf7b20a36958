"""The tiny CLIP: its negatives, its training, and reading it with open_clip and with the scorer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.load import load
from configs.rewards import Scorer as ScorerConfig
from rewards import build
from rewards.shapes import ShapesScorer
from shapes import prompts
from shapes.checksum import checksum
from shapes.clip import (
    augment,
    batches,
    build_clip,
    contrastive,
    loss_of,
    match_matrix,
    matches_caption,
    near_misses,
    save_clip,
    to_pixels,
)
from shapes.clip_build import accuracy, train_clip
from shapes.grammar import all_scenes, flipped, parse, scenes_of
from shapes.render import render

SHIPPED = Path(prompts.__file__).parent / "clip"
needs_clip = pytest.mark.skipif(
    not SHIPPED.is_dir(), reason="shapes/clip is not built: make shapes-clip"
)


def test_an_image_matches_equivalent_captions():
    scene = parse("a red circle left of a blue square")
    right = [
        "a red circle left of a blue square",
        "a blue square right of a red circle",
        "a red circle and a blue square",
    ]
    wrong = [
        "a red circle right of a blue square",
        "a blue square left of a red circle",
        "a red square left of a blue circle",
    ]
    assert all(
        matches_caption(scene, parse(caption))
        for caption in [*right, "a blue square and a red circle"]
    )
    assert not any(matches_caption(scene, parse(caption)) for caption in wrong)
    # an image without a relation matches no relation
    assert not matches_caption(parse("a red circle and a blue square"), scene)
    assert not matches_caption(parse("two red circles"), parse("a red circle"))


def test_near_misses_are_similar_wrong_captions_of_the_train_split():
    for scene in all_scenes()[::13]:
        near = near_misses(scene)
        assert len(near) == len(set(near))
        assert scene not in near
        assert flipped_or_same(scene) not in near
        assert all(other.split == "train" and not matches_caption(scene, other) for other in near)
    near = [scene.caption for scene in near_misses(parse("a red circle"))]
    assert "a yellow circle" in near and "a red cross" in near and len(near) >= 5 + 3
    scene = next(scene for scene in scenes_of("train", "relation") if scene.relation == "above")
    # the other relations
    assert sum(other.things == scene.things for other in near_misses(scene)) == 3


def flipped_or_same(scene):
    return flipped(scene) if scene.kind in ("two", "relation") else scene


def test_the_match_matrix_is_correct_for_every_pair():
    scenes = [
        *scenes_of("train", "relation")[:6],
        *scenes_of("train", "two")[:6],
        *scenes_of("train", "count")[:3],
    ]
    scenes += [flipped(scene) for scene in scenes[:12]]
    mask = match_matrix(scenes)
    assert mask.tolist() == [
        [matches_caption(scene, caption) for caption in scenes] for scene in scenes
    ]
    assert mask.diagonal().all() and mask.sum() > len(scenes)


def test_the_contrastive_loss_of_known_values():
    """Two pairs at scale s with cosines [[1, 0], [0, 1]]: log(1 + e^-s) each way.

    A second pair that also matches adds no loss.
    """
    eye = torch.eye(2)
    right = torch.eye(2, dtype=torch.bool)
    assert contrastive(eye, eye, torch.tensor(2.0), right).item() == pytest.approx(
        math.log(1 + math.exp(-2))
    )
    assert contrastive(
        eye, eye, torch.tensor(2.0), torch.ones(2, 2, dtype=torch.bool)
    ).item() == pytest.approx(0.0, abs=1e-6)


def test_augmented_images_stay_close():
    images = render(scenes_of("train", "one")[:8] * 8, np.random.default_rng(0))
    spoiled = augment(images, np.random.default_rng(1))
    off = np.abs(spoiled.astype(float) - images).mean((1, 2, 3))
    assert spoiled.dtype == np.uint8 and (off == 0).any() and (off > 2).any() and off.max() < 24


def test_training_clip_learns_saves_and_resumes(tmp_path):
    """A new model is at chance, log(batch); a few steps lower the loss, and training continues
    after a stop.
    """
    batch = next(batches(1, groups=4))
    model = build_clip()
    with torch.no_grad():
        chance = loss_of(model, batch).item()
    assert chance == pytest.approx(math.log(len(batch[0])), abs=0.6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(25):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
    assert loss.item() < 0.7 * chance
    lines: list[str] = []
    train_clip(5.0, tmp_path, lines.append, most_steps=1)
    once = json.loads((tmp_path / "clip.json").read_text())
    average = train_clip(5.0, tmp_path, lines.append, most_steps=2)
    assert not any(parameter.requires_grad for parameter in average.parameters())
    assert (once["step"], json.loads((tmp_path / "clip.json").read_text())["step"]) == (1, 2)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write a hardly trained model in the form in which it is shipped."""
    out = tmp_path_factory.mktemp("clip")
    model = build_clip(3).eval()
    save_clip(model, out)
    return model, out


def test_stock_open_clip_and_our_scorer_read_it(written):
    """open_clip, with its own transform and tokenizer, computes the same cosine as the scorer."""
    import open_clip
    from PIL import Image

    model, out = written
    stock, _, transform = open_clip.create_model_and_transforms(f"local-dir:{out}")
    stock.eval()
    assert all(
        torch.equal(a, b)
        for a, b in zip(stock.state_dict().values(), model.state_dict().values(), strict=True)
    )
    scenes = scenes_of("train", "relation")[:6]
    captions = [scene.caption for scene in scenes]
    images = render(scenes, np.random.default_rng(0))
    stacked = torch.stack(
        [transform(Image.fromarray(image.transpose(1, 2, 0))) for image in images]
    )
    assert torch.allclose(stacked, to_pixels(images), atol=1e-6)
    with torch.no_grad():
        image = stock.encode_image(stacked, normalize=True)
        text = stock.encode_text(
            open_clip.get_tokenizer(f"local-dir:{out}")(captions), normalize=True
        )
    scorer = build(ScorerConfig(name="clipscore", settings={"checkpoint": str(out)}), device="cpu")
    scores = scorer(images, captions, [{}] * 6)
    assert np.allclose(scores, (image * text).sum(1).numpy(), atol=1e-6) and scores.std() > 1e-3
    found = accuracy(model, "tune")
    # no kind of negative is at chance
    assert set(found) == {"two", "relation", "count"} and max(found.values()) < 0.6


def test_the_preset_learns_from_clip_and_is_evaluated_by_rule():
    config = load("quickstart_clip")
    (scorer,), (held_out,) = config.rewards.scorers, config.rewards.evaluation_scorers
    assert (scorer.name, scorer.settings, held_out.name) == (
        "clipscore",
        {"checkpoint": "shapes/clip"},
        "shapes",
    )


@needs_clip
def test_the_shipped_clip_is_small_and_ranks_correct_captions_first():
    files = [path for path in SHIPPED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3_000_000
    assert {path.suffix for path in files} <= {".json", ".safetensors"}
    assert checksum(SHIPPED) in (SHIPPED.parent / "README.md").read_text()
    scorer = build(
        ScorerConfig(name="clipscore", settings={"checkpoint": "shapes/clip"}), device="cpu"
    )
    scenes = [
        scene for kind in ("two", "relation", "count") for scene in scenes_of("test", kind)[::4]
    ]
    images = render(scenes, np.random.default_rng(5))
    own = scorer(images, [scene.caption for scene in scenes], [{}] * len(scenes))
    wrong = [near_misses(scene, ("train", "tune", "test"))[0] for scene in scenes]
    other = scorer(images, [scene.caption for scene in wrong], [{}] * len(scenes))
    assert (own > other).mean() > 0.8
    held_out = ShapesScorer()
    assert held_out(images, [scene.caption for scene in scenes], [{}] * len(scenes)).mean() > 0.9

"""The shapes data: grammar and split, rendering, reward."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from rewards.shapes import PARTS, ShapesScorer, connected, to_size
from shapes import prompts
from shapes.data import Pool
from shapes.grammar import KINDS, SPLITS, Scene, Thing, all_scenes, flipped, parse, scenes_of
from shapes.render import Layout, arrange, cells, draw, render


def scored(images: np.ndarray, scenes: list[Scene]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    scorer = ShapesScorer()
    total = scorer(
        images, [scene.caption for scene in scenes], [scene.metadata() for scene in scenes]
    )
    return total, scorer.parts


def drawn(*things: tuple[int, int, float, float, float]) -> np.ndarray:
    """Render one image of (color, shape, x, y, radius) on grey 128."""
    rows = [*things, *[(0, 0, 0.0, 0.0, 1.0)] * (3 - len(things))]
    values = np.array(rows, dtype=np.float32)[None]
    kinds = values[..., :2].astype(np.int64)
    grey = np.array([128.0], dtype=np.float32)
    return draw(
        Layout(
            np.array([len(things)]),
            kinds[..., 0],
            kinds[..., 1],
            values[..., 2:4],
            values[..., 4],
            grey,
        )
    )


# grammar and split


def test_every_caption_parses_back_to_its_scene():
    scenes = all_scenes()
    # 24 objects; 24 * 20 ordered pairs of different colour
    assert len(scenes) == 24 + 480 + 4 * 480 + 48
    assert len({scene.caption for scene in scenes}) == len(scenes)
    for scene in scenes:
        assert parse(scene.caption) == scene
        assert Scene.from_metadata(json.loads(json.dumps(scene.metadata()))) == scene
    assert parse("A red circle  to the left of a blue square.") == parse(
        "a red circle left of a blue square"
    )


@pytest.mark.parametrize(
    "caption",
    ["", "a red dog", "four red circles", "a red circle beside a blue square", "two red circle"],
)
def test_captions_outside_the_grammar_are_refused(caption):
    with pytest.raises(ValueError, match="not a caption"):
        parse(caption)


def test_impossible_scenes_are_refused():
    red = Thing("red", "circle")
    for kind, things, relation in (
        ("one", (red, red), None),
        ("relation", (red, red), None),
        ("two", (red, red), "above"),
    ):
        with pytest.raises(ValueError, match="invalid scene"):
            Scene(kind, things, relation)
    with pytest.raises(ValueError, match="no such object"):
        Thing("pink", "circle")
    with pytest.raises(ValueError, match="metadata"):
        Scene.from_metadata({"objects": [{"colour": "red"}], "kind": "one"})


def test_split_is_over_combinations():
    units = {split: {s.unit for kind in KINDS for s in scenes_of(split, kind)} for split in SPLITS}
    for a, b in (("train", "tune"), ("train", "test"), ("tune", "test")):
        assert not units[a] & units[b]
    assert [len(units[split]) for split in SPLITS] == [24 + 160 + 30, 20 + 6, 60 + 12]
    for scene in scenes_of("test", "relation"):
        assert flipped(scene).split == "test" and Scene("two", scene.things).split == "test"
    assert {scene.split for scene in Pool(0).scenes} == {"train"}
    seen = {str(thing) for scene in Pool(0).scenes for thing in scene.things}
    assert len(seen) == 24  # every single object is in the train split


@pytest.mark.parametrize("split", SPLITS)
def test_prompt_files_equal_generated_ones(split):
    written = (prompts.FOLDER / f"{split}.jsonl").read_text()
    assert written == prompts.text(split)
    rows = [json.loads(line) for line in written.splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == sum(prompts.ROWS[split].values())
    for row in rows:
        assert Scene.from_metadata(row) == parse(row["prompt"])
        assert parse(row["prompt"]).split == split
    if split == "test":
        assert len(rows) >= 128
        # the first captions of any length are a fair mix
        assert {row["kind"] for row in rows[:20]} == {"two", "relation", "count"}


# renderer


def test_covered_area_equals_the_outlines_area():
    # On grey 128 the tint of a pixel is its coverage times the color, so the coverage sums to the
    # area. Anti-aliasing by distance is exact on straight edges parallel to an axis, and within a
    # few percent elsewhere.
    for shape, area in (
        (0, math.pi * 36),
        (1, (2 * 0.92 * 6) ** 2),
        (2, 2 * 36),
        (3, (8 * 0.36 - 4 * 0.36**2) * 36),
    ):
        image = drawn((0, shape, 16.0, 16.0, 6.0)).astype(np.float64)[0]
        cover = (image[0] - 128) / (215 - 128)
        assert cover.sum() == pytest.approx(area, rel=0.04), shape


def test_images_follow_relation_number_and_seed():
    scenes = [scene for kind in KINDS for scene in scenes_of("train", kind)[:40]]
    layout = arrange(scenes, np.random.default_rng(5))
    for row, scene in enumerate(scenes):
        (x0, y0), (x1, y1) = layout.centre[row, :2]
        holds = {"left of": x0 < x1, "right of": x0 > x1, "above": y0 < y1, "below": y0 > y1}
        assert scene.relation is None or holds[scene.relation]
        for k in range(len(scene.things)):
            centre, radius = layout.centre[row, k], layout.radius[row, k]
            assert (centre - radius >= 0).all() and (centre + radius <= 32).all()
    one, two, other = (render(scenes, np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert np.array_equal(one, two)
    assert not np.array_equal(one, other)
    assert np.array_equal(one, draw(layout))


def test_cells_describe_the_layout():
    kinds = np.array([[[4, 1], [0, 0], [0, 0]]])
    place = (np.full((1, 3, 2), 8.0), np.full((1, 3), 4.5))
    layout = Layout(np.array([1]), kinds[..., 0], kinds[..., 1], *place, np.array([99.0]))
    label = cells(layout, 4)[0]
    # a blue square over pixels 3.9 to 12.1: cells 1 and 2
    assert label[1:3, 1:3].tolist() == [[1 + 4 * 4 + 1] * 2] * 2
    assert (label > 0).sum() == 4


# reward


def test_true_images_score_high_and_shuffled_captions_low():
    scenes = [scene for kind in KINDS for scene in scenes_of("test", kind)[::3]] + scenes_of(
        "train", "one"
    )
    images = render(scenes, np.random.default_rng(1))
    total, parts = scored(images, scenes)
    assert total.dtype == np.float32 and total.mean() >= 0.95 and parts["strict"].mean() >= 0.98
    order = np.random.default_rng(2).permutation(len(scenes))
    wrong, _ = scored(images, [scenes[i] for i in order])
    assert wrong.mean() <= 0.2
    rough = np.random.default_rng(3).normal(0, 12, images.shape)
    noisy, _ = scored(np.clip(images + rough, 0, 255).astype(np.uint8), scenes)
    assert 0.8 < noisy.mean() < total.mean()  # the reward is graded, not all or nothing


RED_LEFT = "a red circle left of a blue square"
GOOD = ((0, 0, 8.0, 16.0, 5.0), (4, 1, 24.0, 16.0, 5.0))


@pytest.mark.parametrize(
    ("things", "lowered", "value"),
    [
        (GOOD, (), 1.0),
        (((2, 0, 8.0, 16.0, 5.0), GOOD[1]), ("colours",), 0.5),  # green circle
        (((0, 2, 8.0, 16.0, 5.0), GOOD[1]), ("shapes",), 0.5),  # red triangle
        (
            ((0, 0, 24.0, 16.0, 5.0), (4, 1, 8.0, 16.0, 5.0)),
            ("positions",),
            0.0,
        ),  # on the wrong side
        ((*GOOD, (1, 0, 16.0, 5.0, 4.0)), ("counts",), 0.5),  # one object too many
        (
            GOOD[:1],
            ("objects", "colours", "shapes", "counts"),
            0.5,
        ),  # one object missing, and its relation with it
    ],
)
def test_each_mistake_lowers_its_part_of_the_reward(things, lowered, value):
    scorer = ShapesScorer()
    total = scorer(drawn(*things), [RED_LEFT], [{}])
    for part in PARTS:
        expected = (
            value if part in lowered else (0.0 if part == "positions" and len(things) == 1 else 1.0)
        )
        assert scorer.parts[part][0] == pytest.approx(expected, abs=0.02), part
    assert (total[0] > 0.97) == (not lowered)


def test_relation_is_graded_by_its_angle():
    scores = []
    for drop in (0.0, 11.0, 15.0):
        things = ((0, 0, 8.0, 16.0 - drop / 2, 4.0), (4, 1, 22.0, 16.0 + drop / 2, 4.0))
        scores.append(float(ShapesScorer()(drawn(*things), [RED_LEFT], [{}])[0]))
    assert scores[0] > scores[1] > scores[2] > 0.2


def test_reward_reads_any_image():
    noise = np.random.default_rng(0).integers(0, 256, (3, 3, 100, 77), dtype=np.uint8)
    for images in (
        np.zeros((3, 3, 32, 32), np.uint8),
        np.full((3, 3, 1, 1), 255, np.uint8),
        noise,
        noise[:, :, :5, :9],
    ):
        total = ShapesScorer()(images, [RED_LEFT] * 3, [{}] * 3)
        assert total.shape == (3,) and np.isfinite(total).all() and (total < 0.1).all()
    assert ShapesScorer()(np.zeros((0, 3, 32, 32), np.uint8), [], []).shape == (0,)
    good = drawn(*GOOD)
    large = good.repeat(3, 2).repeat(3, 3)
    # averaging inverts a threefold repeat, up to FP32 rounding
    assert np.allclose(to_size(large), good, atol=1e-3)
    assert ShapesScorer()(large, [RED_LEFT], [{}])[0] > 0.97


def test_reward_does_not_depend_on_the_batch_and_stays_in_range():
    scenes = scenes_of("train", "two")[:24]
    rng = np.random.default_rng(4)
    images = np.clip(render(scenes, rng) + rng.normal(0, 20, (24, 3, 32, 32)), 0, 255).astype(
        np.uint8
    )
    together, _ = scored(images, scenes)
    alone = np.concatenate([scored(images[i : i + 1], scenes[i : i + 1])[0] for i in range(24)])
    assert np.array_equal(together, alone)
    assert (together >= 0).all() and (together <= 1).all() and len(np.unique(together)) > 12


def test_invalid_calls_are_refused():
    good = drawn(*GOOD)
    with pytest.raises(ValueError, match="uint8"):
        ShapesScorer()(good.astype(np.float32), [RED_LEFT], [{}])
    with pytest.raises(ValueError, match="numbers must be equal"):
        ShapesScorer()(good, [RED_LEFT] * 2, [{}])
    with pytest.raises(ValueError, match="not a caption"):
        ShapesScorer()(good, ["a photo of a dog"], [{}])


def test_connected_regions_equal_scipys():
    ndimage = pytest.importorskip("scipy.ndimage")
    kind = np.random.default_rng(7).integers(-1, 2, (6, 32, 32))
    ours = connected(kind)
    assert np.array_equal(ours >= 0, kind >= 0)
    for b in range(6):
        for value in (0, 1):
            theirs, count = ndimage.label(kind[b] == value)
            pairs = set(
                zip(
                    ours[b][kind[b] == value].tolist(),
                    theirs[kind[b] == value].tolist(),
                    strict=True,
                )
            )
            assert len(pairs) == count == len({a for a, _ in pairs})  # a bijection
    # no label occurs in two images
    assert len(np.unique(ours[0])) + len(np.unique(ours[1])) - 2 == len(np.unique(ours[:2])) - 1

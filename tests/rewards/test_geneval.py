"""The GenEval scorer, with a random Mask2Former and the shipped CLIP instead of the published
models.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.rewards import Scorer as ScorerConfig
from rewards import build, check_settings, model_bytes
from rewards.base import ScorerSetupError, check
from rewards.geneval import GenEvalScorer, _alone, _found, _upsampled
from rewards.geneval_rules import Detection
from shapes.grammar import parse
from shapes.render import render
from tests.rewards.detectors import make_detector
from tests.test_shapes_clip import needs_clip

pytestmark = needs_clip
CLIP = "shapes/clip"
NAMES = ("circle", "mouse", "dog")


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    return make_detector(tmp_path_factory.mktemp("detector"), NAMES)


@pytest.fixture(scope="module")
def scorer(detector):
    return GenEvalScorer(str(detector), CLIP, threshold=0.0, counting_threshold=1.0, device="cpu")


def asks(name: str, count: int = 1, tag: str = "single_object", **more) -> dict:
    return {"tag": tag, "include": [{"class": name, "count": count, **more}]}


def test_geneval_scores_images_end_to_end(scorer):
    """With a threshold of 0 every object is detected; with 1, the threshold for counting, none
    is.
    """
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 40, 56), dtype=np.uint8)
    rows = [asks("dog"), asks("dog", tag="counting"), asks("computer mouse")]
    scores = scorer(images, ["a dog", "one dog", "a mouse"], rows)
    assert check(scores, 3)[1] is None
    found = scorer.detect(images, [0.0] * 3)
    assert scores.tolist() == [float("dog" in found[0]), 0.0, float("computer mouse" in found[2])]
    assert scorer.parts["correct"].tolist() == scores.tolist() and set(scores) == {0.0, 1.0}
    for name, group in found[0].items():
        assert name in {"circle", "computer mouse", "dog"}
        assert [each.score for each in group] == sorted((e.score for e in group), reverse=True)
        for each in group:
            left, top, right, bottom = each.box
            assert each.mask is not None and each.mask.shape == (40, 56)
            assert 0 <= left < right <= 56 and 0 <= top < bottom <= 40


def test_objects_are_found_from_known_queries(scorer):
    """Two queries, with masks of known certainty; scores are products of both, computed by hand."""
    logits = torch.full((2, 4), -20.0)
    logits[0, 2] = 20.0  # the first is a dog with certainty
    logits[1, 0] = logits[1, 3] = 5.0  # the second is a circle, or nothing
    masks = torch.full((2, 8, 10), -30.0)
    masks[0, 2:5, 1:4] = 30.0
    masks[1, 0, 9] = float(torch.logit(torch.tensor(0.75)))
    with torch.inference_mode():
        found = scorer._objects(logits, masks, 0.3)
    assert {name: [each.box for each in group] for name, group in found.items()} == {
        "dog": [(1.0, 2.0, 4.0, 5.0)],
        "circle": [(9.0, 0.0, 10.0, 1.0)],
    }
    # sums are divided by sizes + 1e-6
    assert found["dog"][0].score == pytest.approx(1.0, abs=2e-6)
    assert found["circle"][0].score == pytest.approx(0.5 * 0.75, abs=2e-6)
    assert set(scorer._objects(logits, masks, 0.4)) == {"dog"}


def test_masks_exclude_padding():
    """An image of 4 x 8 in the upper half of 8 x 8: its masks are not squeezed with the padding."""
    masks = torch.full((1, 8, 8), 5.0)
    masks[:, 4:] = -5.0
    used = torch.zeros(8, 8, dtype=torch.bool)
    used[:4] = True
    whole = _upsampled(masks, used, (40, 80))
    torch.testing.assert_close(whole, torch.full((1, 40, 80), 5.0))


def test_an_object_is_cropped_onto_gray():
    image = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
    mask = np.zeros((4, 5), bool)
    mask[1, 2] = mask[2, 1] = True
    shown = _alone(image, _found(mask, 0.5))
    assert shown.shape == (3, 2, 2)
    assert shown[:, 0, 1].tolist() == image[:, 1, 2].tolist()
    assert shown[:, 0, 0].tolist() == [0x99] * 3


@pytest.mark.parametrize("color", ["red", "green", "blue"])
def test_clip_classifies_the_color_of_an_object(scorer, color):
    """The shipped CLIP knows the colors of its shapes, and tells those of several objects apart."""
    (image,) = render([parse(f"a {color} circle")], np.random.default_rng(0))
    whole = Detection((0.0, 0.0, 32.0, 32.0), 1.0)
    assert scorer.color_names(image, "circle", [whole, whole]) == [color, color]


def test_invalid_settings_are_one_line(detector, tmp_path):
    def refused(**settings) -> str:
        made = ScorerConfig(name="geneval", settings={"clip": CLIP, "device": "cpu", **settings})
        with pytest.raises(ScorerSetupError) as error:
            check_settings(made)
            build(made)
        (line,) = str(error.value).splitlines()
        return line

    assert "threshold is 2: use a number from 0 to 1" in refused(threshold=2)
    assert "contains none of model.safetensors" in refused(detector=str(tmp_path))
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in detector.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    first = min(weights)
    del weights[first]
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    assert f"1 weights are missing, such as {first}" in refused(detector=str(broken))
    (broken / "config.json").write_text(json.dumps({"model_type": "clip"}))
    assert "not a Mask2Former model of transformers" in refused(detector=str(broken))


def test_bytes_of_a_local_detector_are_counted(detector):
    made = GenEvalScorer(str(detector), CLIP, device="cpu")
    held = [*made.detector.parameters(), *made.colors.model.parameters()]
    settings = {"detector": str(detector), "clip": CLIP}
    counted = model_bytes(ScorerConfig(name="geneval", settings=settings))
    assert counted == sum(each.numel() for each in held) * 4
    assert model_bytes(ScorerConfig(name="geneval", settings={"clip": CLIP})) is None

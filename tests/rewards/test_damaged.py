"""Damaged files of scorers: one line that names the file, before any image is scored.

``tools/fuzz/scorers.py`` makes such files at random; here is one of each kind that it found.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.rewards import Scorer as ScorerConfig
from policy.families.files import SHAPES_DIRECTORY
from rewards import ScorerError, ScorerSetupError, build, check_settings, model_bytes
from rewards.combine import WeightedScorer
from rewards.paired import cosine
from tests.rewards.detectors import make_detector
from tests.rewards.learned import made
from tests.rights import open_to_all
from tools.fuzz.damage import as_unprivileged_user, linked

CLIP = SHAPES_DIRECTORY.parent / "clip"
MODEL, DESCRIPTION = "open_clip_model.safetensors", "open_clip_config.json"


def another(folder: Path, name: str, data: bytes | None) -> Path:
    """Copy the small CLIP, with one file replaced or removed."""
    there = linked(CLIP, folder / "clip")
    (there / name).unlink()
    if data is not None:
        (there / name).write_bytes(data)
    return there


def refused(name: str, **settings: object) -> str:
    with pytest.raises(ScorerSetupError) as caught:
        build(ScorerConfig(name=name, settings=settings), device="cpu")
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda weight: weight * float("nan"), "contains values that are not finite"),
        (lambda weight: weight.to(torch.int8), "'logit_scale' is torch.int8, not torch.float32"),
    ],
    ids=["nan", "int8"],
)
def test_non_finite_weights_are_refused(settings, tmp_path, value, message):
    """Otherwise they would give no score, or the score of rounded weights."""
    state = load_file(settings["pickscore"]["checkpoint"])
    state["logit_scale"] = value(state["logit_scale"])
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ScorerSetupError, match=message):
        made(settings, "pickscore", checkpoint=str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_cfg": 3}, "model_cfg = 3: a table is expected"),
        (
            {"model_cfg": {"embed_dim": 2**31}},
            "embed_dim = 2147483648: expected a positive integer",
        ),
        (
            {"model_cfg": {"embed_dim": 8, "vision_cfg": {"layers": 10**6}}},
            "layers = 1000000: expected a",
        ),
        (
            {"preprocess_cfg": {"std": [0.5, 0, 0.5]}},
            "std = [0.5, 0, 0.5]: expected a finite number for",
        ),
        (
            {"preprocess_cfg": {"mean": [[], 0, 0]}},
            "mean = [[], 0, 0]: expected a finite number for each",
        ),
    ],
)
def test_an_invalid_model_description_is_refused(tmp_path, change, message):
    """There is no traceback, no model that takes an hour to build, and no division of an image by
    zero.
    """
    recorded = json.loads((CLIP / DESCRIPTION).read_text()) | change
    there = another(tmp_path, DESCRIPTION, json.dumps(recorded).encode())
    assert message in refused("clipscore", checkpoint=str(there))


def test_an_incomplete_tokenizer_is_refused(tmp_path):
    """It used to be noticed only when the first text was padded."""
    there = another(tmp_path, "tokenizer_config.json", None)
    line = refused("clipscore", checkpoint=str(there))
    assert "tokenizer.json and tokenizer_config.json do not describe a tokenizer" in line


def test_an_unreadable_file_is_refused(tmp_path):
    there = another(tmp_path, DESCRIPTION, b"{}")
    (there / DESCRIPTION).chmod(0)
    open_to_all(tmp_path)
    with as_unprivileged_user():
        assert "not a JSON object" in refused("clipscore", checkpoint=str(there))
    for name in ("x" * 5000, "~nobody-of-this-name/x.pt"):
        with pytest.raises(ScorerSetupError):
            check_settings(ScorerConfig(name="clipscore", settings={"checkpoint": name}))
    (tmp_path / "locked").mkdir(mode=0)
    scorer = ScorerConfig(name="clipscore", settings={"checkpoint": str(tmp_path / "locked" / "x")})
    with (
        as_unprivileged_user(),
        pytest.raises(ScorerSetupError, match="cannot be read .Permission denied."),
    ):
        check_settings(scorer)


def test_an_incomplete_detector_is_refused(tmp_path):
    """transformers would draw the missing weights at random, and every image would score as
    empty.
    """
    detector = make_detector(tmp_path / "detector", ["person", "dog"])
    file = detector / "model.safetensors"
    state = load_file(file)
    name = "class_predictor.weight"
    whole = state.pop(name)
    save_file(state, file, metadata={"format": "pt"})
    line = refused("geneval", detector=str(detector), clip=str(CLIP))
    assert f"1 weights are missing, such as {name}" in line
    save_file(state | {name: whole * float("inf")}, file, metadata={"format": "pt"})
    line = refused("geneval", detector=str(detector), clip=str(CLIP))
    assert "'class_predictor.weight' contains values that are not finite" in line


@pytest.mark.parametrize("body", [b"[]", b'{"model_type": "mask2former", "dim_feedforward": []}'])
def test_an_invalid_detector_configuration_is_refused(tmp_path, body):
    """Bytes are counted before anything is loaded."""
    detector = make_detector(tmp_path / "detector", ["person", "dog"])
    (detector / "config.json").write_bytes(body)
    settings = {"detector": str(detector), "clip": str(CLIP)}
    with pytest.raises(ScorerSetupError, match="config.json does not describe a Mask2Former"):
        model_bytes(ScorerConfig(name="geneval", settings=settings))
    assert "not a Mask2Former model of transformers" in refused("geneval", **settings)


def test_the_cosine_of_a_zero_vector_is_not_a_score():
    """Weights of zeros used to give every image the same reward, 0."""
    found = cosine(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[4.0, 3.0], [1.0, 0.0]]))
    assert found[0] == pytest.approx(0.96) and torch.isnan(found[1])


def test_an_exception_of_a_scorer_is_one_line_with_its_place():
    """The place is in the scorer's own code, not in the library that it calls."""

    def raises(images, prompts, metadata):
        raise ValueError("first\nsecond")

    def calls_a_library(images, prompts, metadata):
        return np.stack([])

    def explains(images, prompts, metadata):
        raise ScorerError("the server is away")

    scorers = {"x": raises, "y": calls_a_library, "z": explains}
    made = WeightedScorer(scorers, dict.fromkeys(scorers, 1.0))
    x, y, z = made.attempt(np.zeros((1, 3, 2, 2), np.uint8), [""], [{}]).failures
    line = raises.__code__.co_firstlineno + 1
    assert x == f"scorer 'x' raised ValueError: first (test_damaged.py:{line})"
    line = calls_a_library.__code__.co_firstlineno + 1
    assert y.endswith(f"need at least one array to stack (test_damaged.py:{line})")
    assert z == "scorer 'z' raised ScorerError: the server is away"

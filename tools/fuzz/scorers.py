"""Target for the files that learned scorers load, one of them damaged."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from configs.rewards import Rewards, Scorer
from rewards import ScorerSetupError, check_settings, model_bytes
from rewards.combine import WeightedScorer
from tools.fuzz.damage import Change, as_unprivileged_user, changes, linked
from tools.fuzz.invariants import InvariantViolation, allowed_errors
from tools.fuzz.target import Target

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 3, 40, 56), dtype=np.uint8)
PROMPTS = ["word40 word7", "a red circle", ""]
TOLD: list[dict[str, Any]] = [
    {"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red"}]},
    {"tag": "counting", "include": [{"class": "tv remote", "count": 2}]},
    {"tag": "single_object", "include": [{"class": "person", "count": 1}]},
]
CHECKED = ("hpsv3",)
"""Scorers whose package is not installed here: their files are checked but not loaded."""
CASES = ("clipscore", "hpsv2", "pickscore", "imagereward", "geneval", "geneval, clip", "hpsv3")


@functools.cache
def directories() -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return (directory of small files, other settings) of every case.

    The directories are temporary and removed when the process ends.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import CLIPConfig, CLIPModel

    from bench.rewards import some_vocabulary
    from policy.families.files import SHAPES_DIRECTORY
    from rewards.imagereward import BlipReward
    from tests.rewards import parity, peers
    from tests.rewards.conftest import released_names
    from tests.rewards.detectors import make_detector

    root = Path(_temporary_folder().name)
    clip = SHAPES_DIRECTORY.parent / "clip"
    tables, blip = (
        peers.transformers_config(parity.TINY),
        parity.blip_architecture(parity.TINY_BLIP),
    )
    pick = CLIPModel(CLIPConfig(**tables))
    reward = BlipReward(blip["vision"], blip["text"])
    for seed, model in enumerate((pick, reward)):
        peers.randomise(model, seed)
    for name in ("pickscore", "imagereward", "hpsv3"):
        (root / name).mkdir()
    save_file(pick.state_dict(), root / "pickscore" / "model.safetensors")
    torch.save(released_names(reward.state_dict()), root / "imagereward" / "ImageReward.pt")
    (root / "imagereward" / "vocab.txt").write_text(some_vocabulary())
    save_file({"a": torch.ones(3)}, root / "hpsv3" / "HPSv3.safetensors")
    detector = make_detector(root / "detector", ["person", "dog", "tv", "remote"])
    return {
        "clipscore": (clip, {"checkpoint": "."}),
        "hpsv2": (clip, {"checkpoint": "."}),
        "pickscore": (root / "pickscore", {"checkpoint": ".", "architecture": tables}),
        "imagereward": (
            root / "imagereward",
            {"checkpoint": ".", "vocabulary": ".", "architecture": blip},
        ),
        "geneval": (detector, {"detector": ".", "clip": str(clip)}),
        "geneval, clip": (clip, {"detector": str(detector), "clip": "."}),
        "hpsv3": (root / "hpsv3", {"checkpoint": "."}),
    }


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="sol-rl-fuzz-")


def scorer_files(folder: Path, example: tuple[str, Change]) -> None:
    """Check the settings, count the bytes, build the scorer and score images, as a run does."""
    case, change = example
    name = case.partition(",")[0]
    source, settings = directories()[case]
    copy = linked(source, folder / "scorer")
    change.make(copy)
    scorer = Scorer(
        name=name,
        settings={key: str(copy) if value == "." else value for key, value in settings.items()},
    )
    locked = as_unprivileged_user() if change.how == "locked" else contextlib.nullcontext()
    with allowed_errors(ScorerSetupError), locked:
        check_settings(scorer)
        model_bytes(scorer)
        if name not in CHECKED:
            check_scores(WeightedScorer.from_config(Rewards(scorers=(scorer,)), device="cpu"))


def check_scores(scorer: WeightedScorer) -> None:
    """Score ``IMAGES``: every score must be finite or come with a one-line explanation.

    Raises Wrong otherwise, or if all images have the same score (GenEval excepted).
    """
    attempt = scorer.attempt(IMAGES, PROMPTS, TOLD)
    (scores,) = attempt.scores.values()
    if not np.isfinite(scores).all() and not attempt.failures:
        raise InvariantViolation(f"{scores}, but no failure is reported")
    if any(not line.strip() or "\n" in line for line in attempt.failures):
        raise InvariantViolation(f"not a line each: {attempt.failures}")
    if (
        not attempt.failures
        and len(set(scores.tolist())) == 1
        and scorer.scorers.keys() != {"geneval"}
    ):
        raise InvariantViolation(f"all images have the score {scores[0]}")


def targets() -> dict[str, Target]:
    """Return the target for the files of scorers."""
    cases = st.sampled_from(CASES).flatmap(
        lambda case: st.tuples(st.just(case), changes(directories()[case][0]))
    )
    return {"scorer files": Target(cases, scorer_files, cost=5)}

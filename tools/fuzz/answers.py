"""Targets for the settings of scorers and for their scores, from Python and over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from rewards import SCORERS, check_settings
from rewards.base import ScorerError, ScorerSetupError, check
from rewards.server import decode
from tools.fuzz.inputs import json_values, words
from tools.fuzz.invariants import InvariantViolation, allowed_errors, time_limit
from tools.fuzz.target import Target


def scorer_settings(folder: Path, example: tuple[str, dict[str, object]]) -> None:
    """Check a scorer's name and settings as a run does before it starts."""
    from configs.rewards import Scorer

    with allowed_errors(ScorerSetupError):
        check_settings(Scorer(name=example[0], settings=example[1]))


def server_answer(folder: Path, body: bytes) -> None:
    """Decode a body that a reward server returned with status 200."""
    with allowed_errors(ScorerError):
        scores = decode(body, 3)
        if scores.shape != (3,) or scores.dtype != np.float32:
            raise InvariantViolation(f"{scores.dtype} {scores.shape}")


def scorer_answer(folder: Path, answer: object) -> None:
    """Check what a scorer in Python returned.

    Scores must be finite or missing (NaN), and missing scores must come with an explanation.
    """
    with time_limit():
        scores, problem = check(answer, 3)
    if scores.shape != (3,) or np.isinf(scores).any():
        raise InvariantViolation(f"{answer!r} became {scores}")
    if np.isnan(scores).any() and not problem:
        raise InvariantViolation(f"{answer!r} lacks a score, but no failure is reported")


def targets() -> dict[str, Target]:
    """Return the targets for scorer settings and scorer answers."""
    return {
        "scorer settings": Target(
            st.tuples(
                st.sampled_from([*SCORERS, "a:b", ":", "x.y:z"]) | st.text(max_size=8),
                st.dictionaries(
                    st.sampled_from(
                        ["url", "timeout_s", "retries", "checkpoint", "device", "model"]
                    )
                    | st.text(max_size=5),
                    json_values | words,
                    max_size=3,
                ),
            ),
            scorer_settings,
        ),
        "server answer": Target(
            st.one_of(
                st.binary(max_size=60),
                json_values.map(lambda v: json.dumps(v).encode()),
                json_values.map(lambda v: json.dumps({"scores": v}).encode()),
                st.lists(json_values, min_size=3, max_size=3).map(
                    lambda v: json.dumps({"scores": v}).encode()
                ),
            ),
            server_answer,
        ),
        "scorer answer": Target(
            json_values | st.lists(st.floats() | st.integers(), min_size=3, max_size=3),
            scorer_answer,
        ),
    }

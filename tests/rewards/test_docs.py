"""docs/rewards.md: its snippets run, and its statements agree with the code."""

from __future__ import annotations

import io
import json
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from configs.load import parse
from configs.rewards import Scorer as ScorerConfig
from rewards import SCORERS, build, check_settings
from rewards.server import encode
from rewards.unifiedreward import FORMS, MAX_RATING

TEXT = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_documented_scorer_runs(tmp_path, monkeypatch):
    source = next(code for code in snippets("python") if "class Brightness" in code)
    assert len([line for line in source.splitlines() if line.strip()]) <= 10
    (tmp_path / "my_scorers.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_scorers", raising=False)
    (settings,) = [
        tree for text in snippets("toml") if "Brightness" in text for tree in [tomllib.loads(text)]
    ]
    scorer = build(ScorerConfig(**settings["rewards"]["scorers"][0]))
    images = np.stack([np.zeros((3, 4, 4), np.uint8), np.full((3, 4, 4), 51, np.uint8)])
    assert scorer(images, ["", ""], [{}, {}]).tolist() == pytest.approx([0.0, 0.4])


def test_the_documented_server_code_runs():
    source = next(code for code in snippets("python") if "np.load" in code)
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 5), dtype=np.uint8)
    names = {
        "np": np,
        "io": io,
        "json": json,
        "body": encode("npz", images, ["a", "\u4e00"], [{}, {"n": 1}]),
    }
    exec(source, names)
    assert np.array_equal(names["images"], images)
    assert names["request"] == {"prompts": ["a", "\u4e00"], "metadata": [{}, {"n": 1}]}


@pytest.mark.parametrize("text", snippets("toml"))
def test_every_documented_table_is_a_valid_configuration(text):
    tree = tomllib.loads(text)
    labels = tree.get("services", {}).get("scorers", {})
    tree.setdefault("rewards", {}).setdefault("scorers", [{"name": "shapes"}])
    known = {row.get("alias") or row["name"] for row in tree["rewards"]["scorers"]}
    tree["rewards"]["scorers"] += [
        {"name": "http", "alias": label} for label in labels if label not in known
    ]
    if not any(row.get("required", True) for row in tree["rewards"]["scorers"]):
        tree["rewards"]["scorers"].append({"name": "shapes"})
    prompts = {"train": "shapes/prompts/train.jsonl", "test": "shapes/prompts/test.jsonl"}
    assert parse({"name": "doc", "model": {"path": "shapes"}, "prompts": prompts} | tree)


def test_a_served_unifiedreward_gets_the_prompt_of_the_scorer():
    (text,) = (each for each in snippets("toml") if "Coherence" in each)
    (row,) = tomllib.loads(text)["rewards"]["scorers"]
    recorded, form = row["settings"], FORMS["axes"]
    assert recorded["rubric"] == form.prompt and recorded["after"] == list(form.marks.values())
    assert (recorded["low"], recorded["high"]) == (form.low, MAX_RATING)
    check_settings(ScorerConfig(**row))


def not_described() -> set[str]:
    """Return the built-in scorers that the text does not name."""
    return SCORERS.keys() - set(re.findall(r"`([a-z0-9_]+)`", TEXT))


def test_every_built_in_scorer_is_described():
    assert not not_described()

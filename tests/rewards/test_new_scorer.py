"""A new scorer is one file and one row; plan, preflight, docs and report then know it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from analysis.report.data import read_run
from analysis.report.rewards import scores_of, verdicts
from configs.load import ConfigError
from configs.rewards import Scorer as ScorerConfig
from planning.assumptions import Device
from planning.plan import make_plan
from planning.preflight import check_scorers
from planning.scoring import score_seconds
from rewards import SCORERS, build
from tests.analysis.test_report_rewards import UP, learned
from tests.cluster.runs import tiny_config
from tests.rewards.test_docs import not_described


@pytest.fixture(autouse=True)
def row(monkeypatch):
    """Add the row of the scorer."""
    monkeypatch.setitem(SCORERS, "redness", "tests.rewards.redness:Redness")


def configured(model, root, **settings):
    scorers = [{"name": "jpeg_compressibility"}, {"name": "redness", "settings": settings}]
    return tiny_config(model, root, "new", rewards={"scorers": scorers})


def test_a_custom_scorer_is_built_and_scores():
    red = np.zeros((2, 3, 4, 4), np.uint8)
    red[1, 0] = 51
    scores = build(ScorerConfig(name="redness", settings={"gain": 2.0}))(red, ["", ""], [{}, {}])
    assert scores.tolist() == pytest.approx([0.0, 0.4])


def test_the_plan_counts_the_bytes_of_a_custom_scorer(tiny_sd3_dir, tmp_path):
    memory = make_plan(configured(tiny_sd3_dir, tmp_path)).memory["reward"]
    assert memory == {"scorer jpeg_compressibility": 0, "scorer redness": 4000}


def test_the_plan_counts_the_operations_of_a_custom_scorer(tiny_sd3_dir, tmp_path):
    """Two operations per pixel at half of 100 TFLOP/s, and 4 kB through 2 TB/s; jpeg has none."""
    config = configured(tiny_sd3_dir, tmp_path)
    device = Device("none of the table", 100.0, 100.0, 80.0, utilisation=0.5, bandwidth=2.0)
    each = 2 * config.model.height * config.model.width / 50e12 + 4000 / 2e12
    found = score_seconds(config, [(3, config.model)], device)
    assert found == {"reward": pytest.approx(3 * each)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gain": -1}, "'redness': gain is -1: use a positive number"),
        ({"gian": 1}, "unexpected keyword argument 'gian'"),
        ({"table": "/no/such/red.txt"}, "'redness': table: checkpoint .* not found"),
    ],
)
def test_preflight_uses_the_checks_of_a_custom_scorer(tiny_sd3_dir, tmp_path, settings, message):
    check_scorers(configured(tiny_sd3_dir, tmp_path))
    with pytest.raises(ConfigError, match=message):
        check_scorers(configured(tiny_sd3_dir, tmp_path, **settings))


def test_a_new_scorer_must_be_documented():
    assert not_described() == {"redness"}


def test_the_report_describes_a_held_out_custom_scorer(tmp_path):
    run = read_run(learned(tmp_path / "r", {"shapes": UP, "redness": UP}, ["redness"]))
    (message,) = verdicts(run, scores_of(run))
    assert "redness, which is never trained on, rose" in message


def test_rules_and_servers_score_without_torch():
    """In a new process they are looked up, built and called."""
    code = """
import sys, numpy as np
from configs.rewards import Rewards
import rewards, rewards.cache, rewards.combine
rewards.SCORERS["redness"] = "tests.rewards.redness:Redness"
for name in sys.argv[1:]:
    settings = {"url": "http://localhost:1"} if name == "http" else {}
    scorer = {"name": name, "settings": settings}
    made = rewards.combine.WeightedScorer.from_config(Rewards(scorers=[scorer]))
    rewards.check_settings(Rewards(scorers=[scorer]).scorers[0])
    if name != "http":
        made(np.zeros((1, 3, 32, 32), np.uint8), ["a red circle"], [{}])
print("torch" in sys.modules)
"""
    names = ["shapes", "jpeg_compressibility", "jpeg_incompressibility", "http", "redness"]
    answer = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    assert answer.stdout == "False\n", answer.stderr

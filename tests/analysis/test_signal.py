"""``sol-rl signal`` on the tiny random model: rows, files, continuing, and refusals."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from analysis.measuring import backends, load_trainer
from analysis.signal import explore_rewards, measure
from analysis.signal.drawing import drawing
from analysis.signal.files import read_rows
from analysis.signal.measure import Measurement, objectives_of, run
from cli.main import main
from configs.load import ConfigError, load
from tests.cluster.runs import tiny_config, write_toml

OBJECTIVES = ("diffusion_nft", "dance_grpo,step_fraction=0.5", "dance_grpo,shared_noise=true")


@pytest.fixture
def config(tiny_sd3_dir, tmp_path):
    return tiny_config(tiny_sd3_dir, tmp_path, "signal", explore__pool_size=6, selection__keep=2)


def expected(config, **more) -> Measurement:
    settings = {"backends": ("emulated_nvfp4",), "steps": (1,), "prompts": 1, "batches": 3}
    settings |= {"pools": (2, 6), "threads": 1}
    return Measurement(objectives_of(config, OBJECTIVES), **settings | more)


def test_every_objective_is_measured_once_per_selection(config, tmp_path, monkeypatch):
    """Three objectives, one of which has nothing to select, make five rows.

    A second call measures nothing, and one more rule adds only its own row.
    """
    message: list[str] = []
    out = tmp_path / "out"
    lines = run(config, expected(config), out, message.append)
    rows = json.loads((out / "signal.json").read_text())["rows"]
    assert [(row["objective"], row["pool"], row["rule"]) for row in rows] == [
        (OBJECTIVES[0], 2, None),
        (OBJECTIVES[0], 6, "best_worst"),
        (OBJECTIVES[1], 2, None),
        (OBJECTIVES[1], 6, "best_worst"),
        (OBJECTIVES[2], 2, None),
    ]
    assert all(-1 <= row["cosine"] <= 1 and row["grad_norm"] > 0 for row in rows)
    assert f"{OBJECTIVES[2]}: one noise per prompt, so nothing can be selected: skipped" in message
    assert any("2 unselected" in line for line in lines)
    ET.fromstring((out / "signal.svg").read_text())
    monkeypatch.setattr(
        explore_rewards.ExploreRewards, "_explore", lambda *_: pytest.fail("explored again")
    )
    before = (out / "signal.json").read_text()
    run(config, expected(config), out, message.append)
    assert (out / "signal.json").read_text() == before
    run(config, expected(config, rules=("random",)), out, message.append)
    rows = json.loads((out / "signal.json").read_text())["rows"]
    assert [row["rule"] for row in rows[5:]] == ["random", "random"]


def test_batches_are_the_first_iterations_of_a_run(config, tmp_path):
    """They have the seeds of ``Exploration.seeds``, or the first of them if nothing is explored."""
    from policy.sampling.noise import stream_seed

    settings = expected(config)
    measuring = measure.GradientMeasurement(config, settings, [], tmp_path, print)
    batch = measuring.batches[2]
    assert measuring._seeds(batch, 0, measure.Choice(2, 2), config)[1] == [
        stream_seed(config.seed, "explore", 2, 0, n) for n in range(2)
    ]


def test_with_shared_noise_explored_paths_are_selected(config, tmp_path):
    """Regenerated images have exactly the rewards by which they were selected.

    Exploring is in FP32 and has as many steps, so that the paths of objectives, and their rewards,
    differ.
    """
    objectives = objectives_of(
        config, ["flow_grpo,shared_noise=true,explore.paths=true", "diffusion_nft"]
    )
    steps = config.regenerate.steps
    settings = expected(config, backends=("fp32",), steps=(steps,), pools=(6,))
    measuring = measure.GradientMeasurement(
        config, settings, list(backends(("fp32",)).values()), tmp_path, print
    )
    choice, batch = measure.Choice(2, 6, "best_worst", "fp32", steps), measuring.batches[0]
    (_, paths), (_, plain) = objectives
    (group,) = measuring._groups(load_trainer(paths), batch, choice)
    of_paths, others = (measuring.explored.rewards(c, "fp32", steps) for c in (paths, plain))
    with pytest.raises(ConfigError, match="up to step"):
        measuring.explored.rewards(paths, "fp32", steps - 1)
    extremes = [of_paths[0][0].min(), of_paths[0][0].max()]
    np.testing.assert_allclose(sorted(group.rewards), extremes, rtol=1e-3)
    assert np.abs(of_paths[0] - others[0]).max() > 1e-3


def test_the_chart_has_negative_and_positive_bars():
    rows = [
        {"objective": "a<b", "choice": "24 unselected", "cosine": -0.1, "stderr": 0.02},
        {"objective": "a<b", "choice": "best", "cosine": 0.3, "stderr": 0.04},
    ]
    root = ET.fromstring(drawing(rows, "x & y"))
    bars = [part for part in root.iter() if part.get("fill") in ("#9aa5b1", "#1f6fb2")]
    widths = [float(part.get("width", 0)) for part in bars if part.get("height") == "14"]
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batches", "2"], "--batches 2: at least 3"),
        (["--pools", "1"], "--pools 1: selection.keep = 2 seeds are to be selected from it"),
        (["--steps", "0"], "--steps 0: must be above 0"),
        (["--objective", "nft"], "objective.name = 'nft': one of"),
        (["--objective", "awm,betta=1"], "objective.betta: no such key"),
        (["--prompts", "1000"], "has only"),
        (["--backends", "fp3"], "--backends"),
        (
            ["--objective", "dance_grpo,shared_noise=true", "--pools", "6"],
            "no objective has anything to select from",
        ),
    ],
)
def test_invalid_measurements_are_one_line(config, tmp_path, capsys, options, message):
    file = write_toml(config, tmp_path)
    assert main(["signal", str(file), "--out", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "signal.json").write_text("[1]")
    with pytest.raises(ConfigError, match="not a JSON object: remove it, or give --out"):
        read_rows(tmp_path)


def test_objectives_keep_the_configurations_other_settings():
    config = load("compare_small", ["objective.beta=0.1", "model.shift=2.0"])
    found = dict(objectives_of(config, ["diffusion_nft", "flow_grpo,window.size=3,kl=0"]))
    assert found["diffusion_nft"].objective.model_dump()["beta"] == 0.1
    flow = found["flow_grpo,window.size=3,kl=0"]
    assert flow.plan.solver == "flow_sde" and flow.model.shift == 2.0


def test_settings_of_exploring_are_measured_as_they_are_configured():
    """Such settings, and thresholds of the audit, were refused in the name of another arm."""
    exploring = ["explore.height=16", "explore.width=16", "explore.decoder=tiny"]
    config = load("compare_small", [*exploring, "explore_ahead=1", "audit.min_sign_agreement=0.5"])
    shared = "flow_grpo,shared_noise=true"
    found = dict(objectives_of(config, ["diffusion_nft", shared, f"{shared},kl=0"]))
    assert found["diffusion_nft"].explore == config.explore
    # seeds that share their initial noise are not selected, so nothing is explored
    assert found[shared].arm == "diffusionnft" and found[shared].explore.height is None


def test_paths_are_explored_in_the_steps_that_are_measured():
    config = load("compare_small", ["explore.steps=2", "regenerate.steps=8"])
    (label,) = given = ["flow_grpo,window.size=6,explore.paths=true"]
    assert dict(objectives_of(config, given))[label].explore.steps == 8

"""A run's name is taken once the run has results; a start that failed leaves it free."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.load import ConfigError, load
from records.rundir import RunDirectory


def created(root: Path, *changes: str) -> RunDirectory:
    config = load("quickstart", [f"run_root={root}", *changes])
    rundir = RunDirectory.of(config)
    rundir.create(config)
    return rundir


def test_a_run_that_computed_nothing_is_replaced(tmp_path):
    failed = created(tmp_path, "seed=1")
    failed.event("run_failed", why="a scorer could not be built")
    (failed.images / "step_000000").mkdir()
    (failed.path / "evaluations").mkdir()
    # killed before its first row
    (failed.path / "evaluations" / "step_000000.json").write_text("{}")
    (failed.path / "mine.txt").write_text("a note")
    again = created(tmp_path, "seed=2")
    assert again.path == failed.path and again.configuration().seed == 2
    assert again.events() == []
    assert list(again.images.iterdir()) == []
    assert not (again.path / "evaluations").exists()
    assert (again.path / "mine.txt").read_text() == "a note"


@pytest.mark.parametrize("what", ["row", "checkpoint", "no lock"])
def test_a_run_with_results_keeps_its_name(tmp_path, what):
    config = load("quickstart", [f"run_root={tmp_path}"])
    rundir = created(tmp_path)
    rundir.event("run_started")
    if what == "row":
        rundir.metric({"kind": "evaluation", "iteration": 0})
    elif what == "checkpoint":
        (rundir.checkpoints / "step_000001").mkdir()
    else:
        rundir.lock_unsupported = "the file system has no locks"  # another driver may be using it
    kept = rundir.config_file.read_bytes()
    with pytest.raises(ConfigError, match="a run of this name exists: --resume continues it"):
        rundir.create(config)
    assert rundir.config_file.read_bytes() == kept and len(rundir.events()) == 1


def test_a_directory_that_is_not_a_run_is_not_changed(tmp_path):
    images = tmp_path / load("quickstart").name / "images"
    images.mkdir(parents=True)
    (images / "holiday.png").write_text("mine")
    rundir = created(tmp_path)
    assert (images / "holiday.png").exists()
    assert json.loads(rundir.config_file.read_text())["prompts"].keys() == {"train", "test"}

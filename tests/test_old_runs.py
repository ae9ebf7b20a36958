"""Run directories of released versions, in ``tests/data/runs/VERSION``: commands read them, or
refuse them.

A refusal is one line that names the version that can read the run. The runs were made by ``sol-rl
train quickstart`` with the settings in their ``config.json``: two iterations, and a small LoRA of
rank 1 on one projection.
"""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from analysis.report.data import read_run
from cli.main import main
from learner.trainer import Trainer
from records.rundir import RunDirectory
from tests.cluster.runs import main_here

RUNS = sorted((Path(__file__).parent / "data" / "runs").glob("*/*"))
NAMES = [f"{path.parent.name}/{path.name}" for path in RUNS]
each_run = pytest.mark.parametrize("kept", RUNS, ids=NAMES)


def copy_of(kept: Path, root: Path) -> Path:
    """Return a writable copy, in a run root of its own."""
    there = Path(shutil.copytree(kept, root / "runs" / kept.name))
    tree = json.loads((there / "config.json").read_text())
    tree["config"]["run_root"] = str(root / "runs")
    (there / "config.json").write_text(json.dumps(tree))
    return there


def test_the_current_version_has_a_stored_run():
    assert RUNS and sum(f.stat().st_size for f in RUNS[-1].rglob("*") if f.is_file()) < 400_000


@each_run
def test_report_compare_and_export_read_an_old_run(kept, tmp_path, capsys):
    run = copy_of(kept, tmp_path)
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").stat().st_size > 10_000
    assert main(["compare", "--runs", str(run), "--out", str(tmp_path / "compared")]) == 0
    assert main(["export", str(run), str(tmp_path / "lora"), "--weights", "current"]) == 0
    (file,) = (tmp_path / "lora").glob("*.safetensors")
    ours = load_file(next(run.glob("checkpoints/step_*/adapter.safetensors")))
    exported = load_file(file)
    assert len(exported) == len(ours) > 0
    capsys.readouterr()


def test_quantized_modules_of_an_old_run_are_reported():
    (kept,) = (run for run in RUNS if (run / "quantisation.json").exists())
    rows = json.loads((kept / "quantisation.json").read_text())
    found = [row["quantized"] for row in read_run(kept).quantization]
    assert found == [row["quantised"] for row in rows] and {True, False} == set(found)


@each_run
def test_a_learner_continues_from_an_old_checkpoint(kept, tmp_path):
    """The loaded state would be saved with the same bits."""
    run = copy_of(kept, tmp_path)
    trainer = Trainer(RunDirectory(run).configuration())
    (step,) = run.glob("checkpoints/step_*")
    extra = trainer.load(step)
    assert trainer.done == extra["iteration"] == 2
    trainer.save(tmp_path / "again" / step.name, extra)
    for name in ("adapter", "ema", "old", "optimizer"):
        file = f"{name}.safetensors"
        assert (tmp_path / "again" / step.name / file).read_bytes() == (step / file).read_bytes()


@pytest.mark.slow
@each_run
def test_an_old_run_is_resumed_and_evaluated(kept, tmp_path, ray_here):
    """The run was stopped after two of three iterations."""
    run = copy_of(kept, tmp_path)
    started = json.loads((run / "config.json").read_text())
    started["config"]["iterations"] = 3
    (run / "config.json").write_text(json.dumps(started))
    plain = tmp_path / "again.toml"
    plain.write_text(toml(started["config"]))
    assert main_here("train", plain, "--resume") == 0
    assert sorted(path.name for path in run.glob("checkpoints/step_*")) == ["step_000003"]
    assert main_here("evaluate", run) == 0


def toml(tree: dict) -> str:
    """Return a configuration as the text of a TOML file."""

    def value(item: object) -> str:
        if isinstance(item, dict):
            inner = ", ".join(f"{k} = {value(v)}" for k, v in item.items() if v is not None)
            return "{" + inner + "}"
        if isinstance(item, list):
            return "[" + ", ".join(map(value, item)) + "]"
        return json.dumps(item)

    return "".join(f"{key} = {value(item)}\n" for key, item in tree.items() if item is not None)


@each_run
@pytest.mark.parametrize("command", [["report"], ["evaluate"], ["export"], ["compare", "--runs"]])
def test_a_run_of_an_unreadable_version_is_one_line(kept, command, tmp_path, capsys):
    run = copy_of(kept, tmp_path)
    tree = json.loads((run / "config.json").read_text())
    tree["versions"]["sol-rl"] = "9.1"
    tree["config"]["explore"]["entangled"] = True
    (run / "config.json").write_text(json.dumps(tree))
    more = [str(tmp_path / "out")] if command == ["export"] else []
    assert main([*command, str(run), *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "written by Sol-RL 9.1, which can read it; this is 0.1.0: explore.entangled: no such"
        in line
    )

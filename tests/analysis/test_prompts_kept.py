"""A run keeps digests of its prompts; resuming or comparing it with others is refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from analysis.compare import runner
from analysis.compare.command import compare_existing
from cli.main import main
from configs.load import ConfigError, load
from planning.preflight import check_resumable
from records.rundir import RunDirectory
from tests.analysis.fake_train import write
from tests.analysis.page import page_of
from tests.cluster.runs import tiny_config, write_toml

FAKE = Path(__file__).parent / "fake_train.py"
SECONDS = {"explore": 2.0, "regenerate": 1.0, "update": 4.0, "publish": 0.5, "iteration": 8.0}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two prompt files in the working directory, which tests name without a directory."""
    (tmp_path / "a.txt").write_text("a cat\na dog\n")
    (tmp_path / "b.txt").write_text("a fox\na hen\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(root: Path, name: str = "r", seed: int = 0, train: str = "a.txt"):
    """Write a synthetic run with the digests that a real one keeps."""
    changes = [
        f"run_root={root}",
        f"name={name}",
        f"seed={seed}",
        f"prompts.train={train}",
        "prompts.test=b.txt",
    ]
    config = load("compare_small", changes)
    return config, RunDirectory(write(config, [0.1, 0.2], SECONDS))


@pytest.mark.parametrize(("name", "key"), [("a.txt", "train"), ("b.txt", "test")])
def test_a_changed_prompt_file_is_refused_before_anything_starts(
    files, tiny_sd3_dir, capsys, name, key
):
    config = tiny_config(tiny_sd3_dir, files, "r", prompts__train="a.txt", prompts__test="b.txt")
    RunDirectory.of(config).create(config)
    (files / name).write_text("a hen\na fox\n")
    assert main(["train", str(write_toml(config, files)), "--resume"]) == 2
    message = capsys.readouterr().err
    assert (
        f"--resume: prompts.{key} = '{name}' changed since" in message and message.count("\n") == 1
    ), message


def test_runs_with_equal_or_unknown_prompts_continue(files):
    config, rundir = started(files)
    (files / "a.txt").write_text("\na cat\n  a dog\n")
    check_resumable(config, rundir)
    shutil.move(rundir.path, files / "elsewhere")
    check_resumable(config, RunDirectory(files / "elsewhere"))
    (files / "b.txt").write_text("a fox\n")
    with pytest.raises(ConfigError, match=r"prompts.test = 'b.txt'"):
        check_resumable(config, RunDirectory(files / "elsewhere"))
    old = RunDirectory(files / "elsewhere")
    old.config_file.write_text(
        json.dumps(
            {
                key: value
                for key, value in json.loads(old.config_file.read_text()).items()
                if key != "prompts"
            }
        )
    )
    check_resumable(config, old)


def test_runs_over_other_prompts_of_the_same_name_are_not_compared(files):
    (_, one) = started(files, "one")
    (_, same) = started(files, "same", 1)
    (_, varied) = started(files, "varied", 0, "b.txt")
    compare_existing([one.path, same.path, varied.path], None, files / "out")
    (files / "a.txt").write_text("a cow\n")
    _, other = started(files, "other", 2)
    with pytest.raises(
        ConfigError, match=r"prompts.train = 'a.txt': .*other and .*one used different prompts"
    ):
        compare_existing([one.path, same.path, other.path], None, files / "out")
    compare_existing([varied.path], None, files / "out")
    (files / "b.txt").write_text("a hen\na fox\n")
    _, later = started(files, "later", 3)
    with pytest.raises(ConfigError, match=r"prompts.test = 'b.txt'"):
        compare_existing([varied.path, later.path], None, files / "out")


def test_a_comparison_does_not_continue_with_other_prompts(files, monkeypatch, capsys):
    monkeypatch.setattr(runner, "TRAIN", (sys.executable, str(FAKE)))
    monkeypatch.setenv("PYTHONPATH", str(FAKE.parents[2]))

    def compare(*more: str) -> int:
        names = ["prompts.train=a.txt", "prompts.test=b.txt", "iterations=2"]
        return main(
            [
                "compare",
                "quickstart",
                "--seeds",
                "1",
                "--out",
                "out",
                *(part for name in names for part in ("--set", name)),
                *more,
            ]
        )

    assert compare() == 0
    (files / "b.txt").write_text("a hen\n")
    assert compare() == 0  # all runs exist already: only tables are written
    assert compare("--seeds", "2") == 2
    assert "prompts.test = 'b.txt' changed since" in capsys.readouterr().err
    assert (files / "out" / "calls.txt").read_text().count("\n") == 1


def test_the_report_shows_the_digests(files):
    _, rundir = started(files)
    assert f"prompts.train xxh3 {rundir.prompts()['train']}" in page_of(rundir.path).text

"""Running a comparison: each run has its own process, continues where it stopped, and may fail
alone.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from analysis.compare import runner
from cli.main import main
from tests.cluster.processes import finish, start
from tests.cluster.runs import tiny_config, write_toml

FAKE = Path(__file__).parent / "fake_train.py"


@pytest.fixture
def out(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(runner, "TRAIN", (sys.executable, str(FAKE)))
    return tmp_path / "out"


def compare(out: Path, *more: str) -> int:
    return main(
        [
            "compare",
            "quickstart",
            "--arms",
            "sol_rl,diffusionnft",
            "--seeds",
            "2",
            "--set",
            "iterations=3",
            "--out",
            str(out),
            *more,
        ]
    )


def calls(out: Path) -> list[str]:
    return [line.strip() for line in (out / "calls.txt").read_text().splitlines()]


ALL = ["sol_rl-seed0", "diffusionnft-seed0", "sol_rl-seed1", "diffusionnft-seed1"]


def test_every_cell_is_run_with_every_seed_and_only_once(out, capsys):
    assert compare(out) == 0
    message = capsys.readouterr().out
    assert calls(out) == ALL  # cells change fastest
    assert "[4/4] diffusionnft, seed 1: held-out reward 0.5100 -> 0.5400" in message
    assert "| sol_rl       |         2 | 0.5350 ± 0.0050 (+0.0300 ± 0.0000) |" in message
    config = json.loads((out / "diffusionnft-seed1" / "config.json").read_text())["config"]
    assert (config["arm"], config["seed"], config["iterations"], config["name"]) == (
        "diffusionnft",
        1,
        3,
        "diffusionnft-seed1",
    )
    assert compare(out) == 0
    assert calls(out) == ALL
    assert "[2/4] diffusionnft, seed 0: finished before" in capsys.readouterr().out
    # another baseline changes the table, but needs no more runs
    assert compare(out, "--baseline", "diffusionnft") == 0 and calls(out) == ALL


def test_a_dead_run_does_not_end_the_others_and_is_resumed(out, capsys, monkeypatch):
    monkeypatch.setenv("FAKE_TRAIN", json.dumps({"sol_rl-seed0": "crash"}))
    assert compare(out) == 3
    text = capsys.readouterr()
    assert calls(out) == ALL
    assert "1 of 4 runs did not finish" in text.err
    assert "SIGKILL" in text.err
    assert "1 of 2" in text.out and (out / "compare.html").exists()
    monkeypatch.delenv("FAKE_TRAIN")
    assert compare(out) == 0
    assert calls(out) == [*ALL, "sol_rl-seed0 --resume"]


def test_an_invalid_cell_is_tried_once(out, capsys, monkeypatch):
    monkeypatch.setenv("FAKE_TRAIN", json.dumps({"sol_rl-seed0": "usage"}))
    assert compare(out) == 3
    assert calls(out) == [name for name in ALL if name != "sol_rl-seed1"]
    assert "model.path: there is no such model" in capsys.readouterr().err


def test_runs_of_another_configuration_are_not_mixed_in(out, capsys):
    assert compare(out) == 0
    assert compare(out, "--set", "explore.steps=3") == 2
    assert "explore.steps: 6 -> 3" in capsys.readouterr().err
    # with a linear schedule, fewer iterations are a different training
    assert compare(out, "--set", "iterations=2") == 2
    assert calls(out) == ALL


def test_refused_cells_are_listed_and_not_run(out, capsys):
    code = main(
        [
            "compare",
            "quickstart",
            "--arms",
            "naive_quant,sol_rl",
            "--objectives",
            "flow_grpo",
            "--set",
            "iterations=3",
            "--out",
            str(out),
        ]
    )
    text = capsys.readouterr().out
    assert code == 0 and calls(out) == ["sol_rl-seed0"]
    assert "refused: naive_quant: arm: 'naive_quant' with objective 'flow_grpo'" in text
    assert any(
        line.startswith("| naive_quant ") and "refused" in line for line in text.splitlines()
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["quickstart", "--runs", "x"],
        ["--runs", "x", "--seeds", "2"],
        ["--runs", "x", "--vary", "a=1"],
    ],
)
def test_a_command_that_mixes_training_and_reading_is_refused(arguments, capsys):
    assert main(["compare", *arguments]) == 2
    assert "or --runs DIR ... alone" in capsys.readouterr().err


def test_a_signal_reaches_the_run_and_a_leftover_run_keeps_the_lock(out):
    code = (
        "import sys; from analysis.compare import runner; from cli.main import main;"
        f"runner.TRAIN = (sys.executable, {str(FAKE)!r});"
        f"sys.exit(main(['compare', 'quickstart', '--set', 'iterations=3', '--out', {str(out)!r}]))"
    )
    environment = {**os.environ, "FAKE_TRAIN": json.dumps({"sol_rl-seed0": "wait"})}

    def begin() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        deadline = time.monotonic() + 60
        while not (out / "waiting").exists() or not (out / "waiting").read_text():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        return process

    process = begin()
    again = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert again.returncode == 2
    assert "another comparison, or one of its runs, is active here" in again.stderr
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "stopped by SIGINT during sol_rl-seed0" in errors

    (out / "waiting").unlink()
    process = begin()
    child = int((out / "waiting").read_text())
    process.kill()
    process.communicate(timeout=60)
    again = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert again.returncode == 2 and "or one of its runs" in again.stderr
    os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_two_real_cells_are_trained_and_compared(tmp_path, tiny_sd3_dir):
    """Three updates each on the tiny model; evaluations before training are equal bit for bit."""
    file = write_toml(tiny_config(tiny_sd3_dir, tmp_path, "tiny", evaluate__every=1), tmp_path)
    out = tmp_path / "out"
    code, message, errors = finish(
        start(
            "compare",
            str(file),
            "--arms",
            "sol_rl,diffusionnft",
            "--out",
            str(out),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ),
        seconds=1500,
    )
    assert code == 0, errors + message
    cells = {cell["name"]: cell for cell in json.loads((out / "compare.json").read_text())["cells"]}
    assert set(cells) == {"sol_rl", "diffusionnft"}
    starts = {cell["runs"][0]["scores"]["reward/eval_mean"][0][2] for cell in cells.values()}
    assert len(starts) == 1
    for cell in cells.values():
        (points,) = cell["curves"].values()
        assert [point["iteration"] for point in points] == [0, 1, 2, 3]
        assert (
            points[0]["seconds"]["mean"]
            == 0
            < points[1]["seconds"]["mean"]
            < points[3]["seconds"]["mean"]
        )
        assert cell["stages"]["iteration"]["mean"] > 0
    assert (
        cells["diffusionnft"]["stages"]["publish"]["mean"]
        == 0
        < cells["sol_rl"]["stages"]["explore"]["mean"]
    )


def test_children_import_from_the_tree_that_holds_the_packages(tmp_path):
    assert (runner.ROOT / "pyproject.toml").is_file()
    with runner._at_work(tmp_path) as lock, runner._Child(lock) as child:
        code = child.run(
            [sys.executable, "-c", "import os; print(os.environ['PYTHONPATH'])"], tmp_path / "log"
        )
    assert code == 0
    assert (tmp_path / "log").read_text().strip().split(os.pathsep)[0] == str(runner.ROOT)


def test_a_signal_during_process_creation_is_forwarded(tmp_path, monkeypatch):
    made = subprocess.Popen

    def signalled(*arguments, **how):
        process = made(*arguments, **how)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(runner.subprocess, "Popen", signalled)
    with runner._at_work(tmp_path) as lock, runner._Child(lock) as child:
        sleeps = [sys.executable, "-c", "import time; time.sleep(30)"]
        assert child.run(sleeps, tmp_path / "log") == -signal.SIGTERM
        assert child.signal == "SIGINT"

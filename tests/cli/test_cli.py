"""The command line on invalid input: one line with what to fix, the exit code of the contract, no
partial output.
"""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import AuthenticationError

from cli.main import main
from cli.train import summary
from configs.load import load
from configs.schema import RunConfig
from records import storage
from records.rundir import RunDirectory
from tests.cluster.runs import main_here, tiny_config, write_toml


@pytest.fixture
def config_file(tmp_path, tiny_sd3_dir) -> Path:
    return write_toml(tiny_config(tiny_sd3_dir, tmp_path, "bad"), tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("explore.stepz=3", "did you mean 'steps'"),
        ("selection.keep=10", "10 samples cannot be kept out of explore.pool_size = 8"),
        ("selection.keep=3", "3 is odd"),
        ("model.path=/no/such/model", "no directory '/no/such/model'"),
        ("prompts.train=/no/such/file.txt", "cannot be read"),
        ("rewards.scorers=[{name = 'shpes'}]", "did you mean 'shapes'"),
        ("rewards.scorers=[{name = 'tests.nothing:X'}]", "there is no module 'tests.nothing'"),
        (
            "rewards.scorers=[{name = 'no_such_package.scorers:X'}]",
            "cannot be imported (No module named 'no_such_package')",
        ),
        (
            "rewards.scorers=[{name = 'clipscore', settings = {checkpoint = 'shapes/none'}}]",
            "checkpoint 'shapes/none'",
        ),
        (
            (
                "rewards.scorers=[{name = 'http', settings = {url = 'http://127.0.0.1:9', encoding"
                " = 'xml'}}]"
            ),
            "encoding is 'xml'",
        ),
        (
            (
                "rewards.evaluation_scorers=[{name = 'hpsv2', settings = {checkpoint ="
                " '/no/such.pt'}}]"
            ),
            "checkpoint '/no/such.pt'",
        ),
    ],
)
def test_bad_configuration_is_one_line_and_exit_code_2(config_file, capsys, override, message):
    assert main(["train", str(config_file), "--set", override]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1, errors
    assert not (config_file.parent / "runs").exists()


def test_an_unimportable_built_in_scorer_is_one_line(config_file, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rewards.jpeg", None)
    assert main(["train", str(config_file)]) == 2
    errors = capsys.readouterr().err
    assert "'jpeg_compressibility' cannot be imported (" in errors and errors.count("\n") == 1, (
        errors
    )


def test_an_empty_prompt_file(config_file, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("\n")
    assert (
        main(["train", str(config_file), "--set", f"prompts.train={tmp_path / 'empty.txt'}"]) == 2
    )
    assert "contains no prompt" in capsys.readouterr().err


def test_a_directory_that_is_not_a_pipeline_is_one_line(config_file, tmp_path, capsys):
    assert main(["train", str(config_file), "--set", f"model.path={tmp_path}"]) == 2
    assert "no model_index.json" in capsys.readouterr().err


def test_resuming_a_missing_run_is_one_line(config_file, capsys):
    assert main(["train", str(config_file), "--resume"]) == 2
    assert "no run of this name to resume: leave out --resume" in capsys.readouterr().err


def test_auto_resume_continues_a_run_only_if_it_has_results(config_file, tmp_path, monkeypatch):
    rundir = RunDirectory.of(load(str(config_file)))
    asked: list[bool] = []

    def trained(config: RunConfig, resume: bool) -> RunDirectory:
        asked.append(resume)
        return rundir

    monkeypatch.setattr("cluster.driver.train.train", trained)
    command = ["train", str(config_file), "--auto-resume"]
    assert main(command) == 0
    rundir.create(load(str(config_file)))
    assert main(command) == 0  # it ended before it had computed anything
    rundir.metric({"kind": "evaluation"})
    assert main(command) == main(command[:2]) == main([*command[:2], "--resume"]) == 0
    assert asked == [False, False, True, False, True]
    with pytest.raises(SystemExit):
        main([*command, "--resume"])


@pytest.mark.parametrize("access", ["stat", "listdir"])
def test_auto_resume_waits_for_storage(config_file, monkeypatch, capsys, access):
    """Otherwise it would fail for good, or start a new run in place of the old one."""
    rundir = RunDirectory.of(load(str(config_file)))
    rundir.create(load(str(config_file)))
    (rundir.checkpoints / "step_000001").mkdir()
    left, real = [errno.ESTALE] * 2, getattr(os, access)

    def away(path: Any, *args: Any, **named: Any) -> Any:
        if left and str(path).startswith(str(rundir.path)):
            raise OSError(left.pop(), "Stale file handle", str(path))
        return real(path, *args, **named)

    monkeypatch.setattr(storage, "PAUSE_S", 0.0)
    monkeypatch.setattr(os, access, away)
    asked: list[bool] = []
    monkeypatch.setattr(
        "cluster.driver.train.train", lambda _, resume: asked.append(resume) or rundir
    )
    assert main(["train", str(config_file), "--auto-resume"]) == 0
    assert asked == [True] and not left
    assert f"{rundir.path}: continuing\n" in capsys.readouterr().out


def test_a_run_root_that_cannot_be_written(ray_here, config_file, capsys):
    assert main_here("train", config_file, "--set", "run_root=/proc/sol-rl") == 2
    errors = capsys.readouterr().err
    assert "cannot be written" in errors and errors.count("\n") == 1, errors


@pytest.mark.parametrize(
    ("address", "message"),
    [("10.0.0.1:6379", "cannot be joined"), ("", "did not start on this machine")],
)
def test_a_ray_that_does_not_start_is_one_line(monkeypatch, config_file, capsys, address, message):
    def late(**how):
        assert how["address"] == ("auto" if address else "local")
        raise Exception("The current node timed out during startup. This could\nhave many causes")

    monkeypatch.setattr("ray.init", late)
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert main(["train", str(config_file)]) == 3
    errors = capsys.readouterr().err
    assert errors.startswith("run failed: Ray")
    assert message in errors
    assert "timed out during startup" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("where", ["refused there", "none here"])
def test_a_cluster_that_requires_a_token_is_reported(monkeypatch, config_file, capsys, where):
    """Ray reports a refusal by the cluster only in the text of the underlying error."""

    def refused(**how):
        if where == "none here":
            raise AuthenticationError("Token authentication is enabled but there is no token")
        cause = (
            "GcsClient\nray.exceptions.AuthenticationError: RPC error: InvalidAuthToken: missing"
        )
        raise ConnectionError("Failed to connect to Ray cluster") from RuntimeError(cause)

    monkeypatch.setattr("ray.init", refused)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("cluster.jobs.live_runs.require_listener", lambda address: None)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert main(["train", str(config_file)]) == 3
    assert main(["doctor", str(config_file), "--address", "h:1"]) == 2
    run, doctor = capsys.readouterr().err.splitlines()
    assert "cannot be joined: this cluster requires a token: export RAY_AUTH_MODE=token" in run
    assert doctor.startswith("--address h:1: this cluster requires a token: ")


def test_a_full_disk_ends_the_run_with_the_last_checkpoint_whole(
    ray_here, tmp_path, tiny_sd3_dir, capsys
):
    disk = tmp_path / "small"
    disk.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(disk)], capture_output=True
        ).returncode
    ):
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        file = write_toml(tiny_config(tiny_sd3_dir, tmp_path, "full", run_root=str(disk)), tmp_path)
        code, errors = main_here("train", file), capsys.readouterr().err
        assert code == 3, errors
        assert "No space left" in errors.splitlines()[-1] and "--resume" in errors.splitlines()[-1]
        whole = [
            path
            for path in (disk / "full" / "checkpoints").glob("step_*")
            if not (path / "state.json").is_file()
        ]
        assert whole == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_resuming_a_run_that_cannot_be_read_is_one_line(config_file, tmp_path, capsys):
    run = tmp_path / "runs" / "unreadable"
    run.mkdir(parents=True)
    (run / "config.json").symlink_to("config.json")
    chosen = ["--set", f"run_root={run.parent}", "--set", f"name={run.name}"]
    assert main(["train", str(config_file), "--resume", *chosen]) == 2
    assert "no readable run (OSError)" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "evaluate", "export"])
def test_a_directory_that_is_not_a_run_is_one_line(tmp_path, capsys, command):
    assert main([command, str(tmp_path), *(["out"] if command == "export" else [])]) == 2
    assert "no readable run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (["--help"], 0),
        (["train", "quickstart", "--set", "explore.stepz=3"], 2),
        (["plan", "quickstart", "--set", "explore.stepz=3"], 2),
        (["submit", "quickstart", "--set", "explore.stepz=3"], 2),
        (["fidelity", "quickstart", "--set", "explore.stepz=3"], 2),
        (["compare", "quickstart", "--set", "explore.stepz=3"], 2),
        (["export", "/no/such/run", "out"], 2),
        (["scale"], 2),
    ],
)
def test_help_and_typos_answer_before_torch_and_ray_are_imported(given, code):
    text = (
        "import sys\nfrom cli.main import main\n"
        f"try:\n    code = main({given!r})\nexcept SystemExit as end:\n    code = end.code\n"
        "print(code, sorted({'torch', 'ray', 'diffusers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == f"{code} []", done.stdout + done.stderr


def test_config_prints_what_a_run_would_use(capsys):
    assert main(["config", "quickstart", "--set", "explore.steps=4"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["explore"]["steps"] == 4 and shown["plan"]["explore"]["steps"] == 4
    assert main(["config", "--list"]) == 0
    assert "quickstart" in capsys.readouterr().out.splitlines()


def test_the_summary_pairs_first_and_last_evaluation():
    rows = [
        {"kind": "evaluation", "iteration": 0, "reward/eval_mean": 0.5, "eval/stderr": 0.01},
        {
            "kind": "evaluation",
            "iteration": 3,
            "reward/eval_mean": 0.6,
            "eval/stderr": None,
            "eval/gain": 0.1,
            "eval/gain_stderr": 0.02,
        },
    ]
    assert [line.split(":")[1].split()[0] for line in summary(rows)] == [
        "0.5000",
        "0.6000",
        "+0.1000",
    ]
    assert "n/a" in summary(rows)[1]
    damaged = {"iteration": 1}  # a row that a kill truncated and that a resume kept
    assert summary([damaged, *rows]) == summary(rows)


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff\xfe", b'{"config": 3}'])
def test_an_invalid_run_directory_is_one_line(tmp_path, capsys, content):
    (tmp_path / "config.json").write_bytes(content)
    assert main(["report", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path}: no readable run")


def test_an_existing_name_is_refused_before_ray_starts(config_file, tmp_path, capsys, monkeypatch):
    (tmp_path / "runs" / "bad" / "checkpoints" / "step_000001").mkdir(parents=True)
    (tmp_path / "runs" / "bad" / "config.json").write_text("{}")
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was started"))
    assert main(["train", str(config_file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a run of this name exists: --resume continues it" in line


def test_held_out_prompts_among_training_prompts_are_refused(config_file, capsys, monkeypatch):
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was started"))
    assert main(["train", str(config_file), "--set", "prompts.allow_overlap=false"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "4 of 4 held-out prompts are among prompts.train, such as 'red circle'" in line


def test_more_actors_than_the_machine_holds_are_refused_at_once(config_file, capsys, monkeypatch):
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray was started"))
    assert main(["train", str(config_file), "--set", "services.rollout.actors=100000"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("services.rollout.actors = 100000: this machine has")

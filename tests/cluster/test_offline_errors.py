"""``sol-rl evaluate``, ``export`` and ``train --resume`` on unusable runs: one line, and nothing is
started.

The exit code is that of the contract.
"""

import asyncio
import json

import pytest

from cli.main import main
from cluster.driver import offline, train
from cluster.driver.checkpoints import read_driver_state
from learner.trainer import Trainer
from records.errors import InputsLost, StateLost
from records.rundir import RunDirectory
from tests.cluster.runs import tiny_config, write_toml
from tests.rights import open_to_all
from tools.fuzz.damage import as_unprivileged_user


@pytest.fixture
def trained(tiny_sd3_dir, tmp_path) -> RunDirectory:
    config = tiny_config(tiny_sd3_dir, tmp_path, "trained")
    rundir = RunDirectory.of(config)
    rundir.create(config)
    Trainer(config).save(rundir.checkpoints / "step_000002", {})
    return rundir


@pytest.fixture
def nothing_starts(monkeypatch):
    for module in (offline, train):
        monkeypatch.setattr(module, "join_or_start_ray", lambda config: pytest.fail("started"))


def message(capsys) -> str:
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"path": "/no/such/model"}, "model.path: no directory '/no/such/model'"),
        ({"family": "flux"}, "but family 'flux' is a FluxPipeline"),
        ({"width": 40}, "model.width: 40 pixels"),
    ],
)
def test_evaluate_refuses_a_missing_or_different_model(trained, capsys, change, expected):
    body = json.loads(trained.config_file.read_text())
    body["config"]["model"] |= change
    trained.config_file.write_text(json.dumps(body))
    assert main(["evaluate", str(trained.path)]) == 2
    assert expected in message(capsys)
    assert not (trained.path / "evaluations").exists()


def test_an_unreadable_model_is_one_line(trained, tmp_path, nothing_starts, capsys):
    closed = tmp_path / "model"
    closed.mkdir(mode=0o700)
    body = json.loads(trained.config_file.read_text())
    body["config"]["model"]["path"] = str(closed)
    trained.config_file.write_text(json.dumps(body))
    open_to_all(tmp_path)
    for folder in (tmp_path / "runs", trained.path):
        folder.chmod(0o777)
    closed.chmod(0)
    with as_unprivileged_user():
        assert main(["evaluate", str(trained.path)]) == 2
    closed.chmod(0o755)
    assert message(capsys).endswith("model_index.json: cannot be read (Permission denied)")


def test_exporting_a_damaged_checkpoint_is_one_line(trained, tmp_path, capsys):
    (trained.checkpoints / "step_000002" / "ema.safetensors").write_bytes(b"junk")
    assert main(["export", str(trained.path), str(tmp_path / "lora")]) == 3
    assert (
        message(capsys).startswith("run failed: checkpoint ") and not (tmp_path / "lora").exists()
    )


def test_exporting_to_an_unwritable_path_is_one_line(trained, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["export", str(trained.path), str(tmp_path / "file" / "lora")]) == 2
    assert message(capsys).endswith(
        "lora: cannot be written (Not a directory): give another directory"
    )


def test_exporting_to_a_read_only_directory_is_one_line(trained, tmp_path, capsys):
    there = tmp_path / "lora"
    there.mkdir(mode=0o555)
    open_to_all(tmp_path)
    with as_unprivileged_user():
        assert main(["export", str(trained.path), str(there)]) == 2
    assert message(capsys).endswith(
        "lora: cannot be written (Permission denied): give another directory"
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("old.safetensors", lambda body: body[:-1]),
        ("state.json", lambda body: body.replace(b'"extra": {', b'"extra": {"iteration": "two",')),
        ("state.json", lambda body: body.replace(b'"extra"', b'"other"')),
        ("state.json", lambda body: b'{"format": 1, "files": [], "state": {}}'),
    ],
)
def test_a_damaged_checkpoint_is_reported_before_ray_starts(
    trained, tmp_path, monkeypatch, capsys, name, change
):
    """It used to be reported after Ray and, for ``evaluate``, all actors had started."""
    from cluster.driver import offline, train

    for module in (offline, train):
        monkeypatch.setattr(module, "join_or_start_ray", lambda config: pytest.fail("started"))
    file = trained.checkpoints / "step_000002" / name
    file.write_bytes(change(file.read_bytes()))
    config = write_toml(trained.configuration(), tmp_path)
    assert main(["train", str(config), "--resume"]) == 3
    assert message(capsys).startswith("run failed: checkpoint ")
    if name != "state.json":
        assert main(["evaluate", str(trained.path)]) == 3
        assert message(capsys).startswith("run failed: checkpoint ")


def test_an_unreadable_file_during_a_run_is_named(tiny_sd3_dir, tmp_path, monkeypatch, capsys):
    """The file is an image to edit, on another disk; the message used to name the run's
    directory.
    """

    class Breaks:
        def __init__(self, *given):
            raise OSError(2, "No such file or directory", "/data/source.png")

    config = write_toml(tiny_config(tiny_sd3_dir, tmp_path, "broken"), tmp_path)
    monkeypatch.setattr(train, "join_or_start_ray", lambda config: False)
    monkeypatch.setattr(train, "choose_cluster_layout", lambda config, tell: config)
    monkeypatch.setattr(train, "find_room", lambda config, tell: asyncio.sleep(0, []))
    monkeypatch.setattr(train, "check_store", lambda config, nodes: None)
    monkeypatch.setattr(train, "Session", Breaks)
    monkeypatch.setattr(train.ray, "shutdown", lambda: None)
    assert main(["train", str(config)]) == 3
    assert message(capsys).startswith(
        "run failed: /data/source.png: No such file or directory: fix"
    )


@pytest.mark.parametrize("body", [[1, 2], "x", None, {"train": 3}])
def test_invalid_prompt_digests_are_one_line(trained, tmp_path, nothing_starts, capsys, body):
    kept = json.loads(trained.config_file.read_text())
    trained.config_file.write_text(json.dumps(kept | {"prompts": body}))
    config = write_toml(trained.configuration(), tmp_path)
    assert main(["train", str(config), "--resume"]) == 2
    assert "config.json: 'prompts' does not contain the digests" in message(capsys)


def test_a_renamed_checkpoint_is_refused(trained, tmp_path, nothing_starts, capsys):
    saved = trained.checkpoints / "step_000002"
    Trainer(trained.configuration()).save(saved, {"iteration": 2})
    assert read_driver_state(saved)["iteration"] == 2
    saved.rename(trained.checkpoints / "step_000007")
    config = write_toml(trained.configuration(), tmp_path)
    assert main(["train", str(config), "--resume"]) == 3
    assert message(capsys).endswith(
        "step_000007' is of iteration 2 by its state.json: give it back its name, step_000002"
    )


@pytest.mark.parametrize("closed", ["", "step_000002"])
def test_an_unreadable_checkpoint_directory_does_not_count_as_empty(
    trained, tiny_sd3_dir, tmp_path, nothing_starts, capsys, closed
):
    """Otherwise the run would return to its beginning."""
    config = write_toml(trained.configuration(), tmp_path)
    open_to_all(tmp_path)
    open_to_all(tiny_sd3_dir)
    for folder in (tmp_path / "runs", trained.path):
        folder.chmod(0o777)
    there = trained.checkpoints / closed
    there.chmod(0)
    with as_unprivileged_user():
        assert main(["train", str(config), "--resume"]) == 3
        assert message(capsys).endswith(" cannot be read (Permission denied)")
        for command in (["evaluate", trained.path], ["export", trained.path, tmp_path / "l"]):
            assert main([str(part) for part in command]) == 2
            assert message(capsys).endswith(" cannot be read (Permission denied)")
    there.chmod(0o755)


def test_evaluate_refuses_an_unwritable_directory_before_it_starts(trained, nothing_starts, capsys):
    (trained.path / "evaluations").write_text("")
    assert main(["evaluate", str(trained.path)]) == 2
    assert message(capsys).endswith(
        "evaluations: cannot be written (File exists): evaluate needs to write its results there"
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            StateLost("the learner was lost: it died"),
            "the learner was lost: it died: repeat the eval",
        ),
        (InputsLost("images went with their node"), "images went with their node: repeat the eval"),
        (OSError(28, "No space left on device", "/runs/events.jsonl"), "events.jsonl: No space"),
    ],
)
def test_a_failed_evaluation_is_one_line(trained, monkeypatch, capsys, error, expected):
    async def breaks(*given):
        raise error

    monkeypatch.setattr(offline, "join_or_start_ray", lambda config: None)
    monkeypatch.setattr(offline, "_evaluate_all", breaks)
    monkeypatch.setattr(offline.ray, "shutdown", lambda: None)
    assert main(["evaluate", str(trained.path)]) == 3
    assert expected in message(capsys)


def test_an_unreadable_held_out_evaluation_is_one_line(
    trained, tiny_sd3_dir, tmp_path, nothing_starts, monkeypatch, capsys
):
    open_to_all(tiny_sd3_dir)
    monkeypatch.setattr(train, "read_driver_state", lambda path: None)
    config = write_toml(trained.configuration(), tmp_path)
    folder = trained.path / "evaluations"
    folder.mkdir()
    open_to_all(tmp_path)
    for each in (tmp_path / "runs", trained.path):
        each.chmod(0o777)
    folder.chmod(0)
    with as_unprivileged_user():
        assert main(["train", str(config), "--resume"]) == 3
    folder.chmod(0o755)
    assert "step_000000.json cannot be read (PermissionError" in message(capsys)


@pytest.mark.parametrize("body", [b"{", b'{"rewards": [[1.0]]}', b'{"rewards": "x"}'])
def test_a_damaged_evaluation_is_reported_before_ray_starts(
    trained, tmp_path, monkeypatch, capsys, body
):
    """It used to be a traceback at the first evaluation after the resume."""
    from cluster.driver import train

    monkeypatch.setattr(train, "read_driver_state", lambda path: None)
    monkeypatch.setattr(train, "join_or_start_ray", lambda config: pytest.fail("started"))
    file = trained.path / "evaluations" / "step_000000.json"
    file.parent.mkdir()
    file.write_bytes(body)
    config = write_toml(trained.configuration(), tmp_path)
    assert main(["train", str(config), "--resume"]) == 3
    assert f"{file} cannot be read" in message(capsys)

"""Files of other nodes: they may appear late, and a directory may not be shared at all."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from actors.learner import LearnerActor
from cluster.driver.checkpoints import Checkpoints, Position
from configs.load import ConfigError, load
from learner.checkpoint import STATE, CheckpointError
from records import shared, storage
from records.rundir import RunDirectory
from records.shared import appears, require_shared


@pytest.fixture
def rundir(tmp_path):
    rundir = RunDirectory(tmp_path / "run")
    rundir.create(load("quickstart"))
    return rundir


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(shared, "PAUSE_S", 0.01)
    monkeypatch.setattr(shared, "TRIES", 0)
    monkeypatch.setattr(storage, "_expected", set())


def test_a_file_may_appear_later(tmp_path, monkeypatch):
    file = tmp_path / "directory" / "file"
    assert not appears(file)
    file.parent.mkdir()
    timer = threading.Timer(0.05, file.touch)
    timer.start()
    monkeypatch.setattr(shared, "TRIES", 6000)
    assert appears(file)
    timer.join()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOTCONN])
def test_storage_that_is_away_does_not_count_as_a_missing_file(tmp_path, monkeypatch, number):
    """ESTALE: another node has replaced a directory that this one still remembers."""
    monkeypatch.setattr(storage, "PAUSE_S", 0.0)
    (tmp_path / "file").touch()
    stat, left = os.stat, [1, 1, 1]

    def away(path: Any, **named: Any) -> Any:
        if left:
            left.pop()
            raise OSError(number, os.strerror(number))
        return stat(path, **named)

    monkeypatch.setattr(os, "stat", away)
    assert appears(tmp_path / "file") and not left


def test_a_learner_without_the_runs_directory_is_not_ready(tmp_path, rundir):
    learner: Any = LearnerActor.__new__(LearnerActor)
    learner._run_directory = rundir.path
    learner._trainer = SimpleNamespace(
        device=None,
        trainable_parameters=7,
        left_out=5,
        config=SimpleNamespace(learner_compile_key=None),
    )
    assert (learner.ready().trainable, learner.ready().left_out) == (7, 5)
    # the directory exists here too, with checkpoints, but it is not the driver's
    storage._expected.clear()
    rundir.config_file.unlink()
    here = socket.gethostname()
    with pytest.raises(ConfigError) as raised:
        learner.ready()
    assert str(raised.value) == (
        f"{rundir.path} on {here} is not the driver's run directory (it has no config.json): mount"
        " the same directory on all nodes and set run_root to it"
    )


def test_a_run_directory_that_cannot_be_written_is_refused(rundir, monkeypatch):
    require_shared(rundir.path)
    # root may write to any directory, so the system's answer is replaced
    monkeypatch.setattr(os, "access", lambda path, mode: path != rundir.checkpoints)
    with pytest.raises(ConfigError, match=rf"^{rundir.checkpoints} cannot be written on "):
        require_shared(rundir.path)


def test_a_learner_waits_for_its_run_directory_from_then_on(rundir, monkeypatch):
    monkeypatch.setattr(storage, "RETRY_S", 0.0)
    require_shared(rundir.path)
    rundir.config_file.unlink()
    with pytest.raises(FileNotFoundError):
        storage.exists(rundir.metrics_file)


def test_an_empty_directory_that_an_object_store_does_not_show_is_created(rundir):
    rundir.checkpoints.rmdir()
    require_shared(rundir.path)
    assert rundir.checkpoints.is_dir()


@pytest.mark.parametrize("visible", [True, False])
def test_a_checkpoint_counts_as_saved_when_the_driver_sees_it(rundir, visible):
    path = rundir.checkpoints / "step_000003"

    async def save(iteration: int, to: str, state: Any) -> None:
        assert to == str(path)
        path.mkdir()
        if visible:
            (path / STATE).touch()

    services: Any = SimpleNamespace(
        learner=SimpleNamespace(save=save), weights=SimpleNamespace(chosen=None)
    )
    monitor: Any = SimpleNamespace(state={})
    checkpoints = Checkpoints(rundir, services, monitor, Position(next_iteration=3))
    if visible:
        asyncio.run(checkpoints.save())
    else:
        with pytest.raises(CheckpointError, match="step_000003' does not exist for the driver"):
            asyncio.run(checkpoints.save())
    assert checkpoints.up_to_date == visible
    assert [row["event"] for row in rundir.events()] == ["checkpoint_saved"] * visible

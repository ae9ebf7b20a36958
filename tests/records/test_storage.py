"""Storage that is away for a while: calls are repeated, and files end as if it had not been."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.driver.held_out import HeldOut
from configs.load import load
from learner import checkpoint
from learner.checkpoint import CheckpointError
from records import atomic, storage, timeline
from records.errors import RunFailed
from records.extremes import save_extremes
from records.images import save_images
from records.rundir import RunDirectory
from records.storage import AWAY, exists, expect, outages_told, retried


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(storage, "PAUSE_S", 0.001)
    monkeypatch.setattr(storage, "LONGEST_PAUSE_S", 0.002)


class Outage:
    """Make ``os.NAME`` raise ``number`` for its first ``times`` calls."""

    def __init__(self, monkeypatch: Any, name: str, times: int, number: int = errno.ENOTCONN):
        self.left, self.number, self.real = times, number, getattr(os, name)
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number), str(args[0]))
        return self.real(*args, **named)


@pytest.mark.parametrize("number", sorted(AWAY))
def test_a_file_is_written_when_its_storage_answers_again(tmp_path, monkeypatch, number):
    outage = Outage(monkeypatch, "replace", 3, number)
    told: list[dict[str, Any]] = []
    with outages_told(lambda **fields: told.append(fields)):
        atomic.write_text(tmp_path / "file", "content")
        atomic.write_text(tmp_path / "other", "without an outage")
    assert outage.left == 0
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "file": "content",
        "other": "without an outage",
    }
    (row,) = told
    assert 0 <= row["seconds"] < 60
    assert row["why"].endswith(f": {os.strerror(number)}")
    atomic.write_text(tmp_path / "later", "")
    assert len(told) == 1  # the listener has left


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS])
def test_what_waiting_cannot_fix_is_raised_at_once(tmp_path, monkeypatch, number):
    outage = Outage(monkeypatch, "replace", 2, number)
    with pytest.raises(OSError) as raised:
        atomic.write_text(tmp_path / "file", "content")
    assert (raised.value.errno, outage.left) == (number, 1)
    assert list(tmp_path.iterdir()) == []


def test_storage_that_stays_away_ends_with_its_last_error(monkeypatch):
    monkeypatch.setattr(storage, "RETRY_S", 0.02)
    calls = []

    @retried
    def away() -> None:
        calls.append(1)
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        away()
    assert len(calls) > 1


@pytest.mark.parametrize("written", [0, 3, 8])
def test_lines_are_appended_once_whatever_an_attempt_has_written(tmp_path, monkeypatch, written):
    """The attempt writes a part or all of the line, then can neither go on nor undo it."""
    file = tmp_path / "rows"
    file.write_text("first\n")

    class Broken:
        """A file of which the first attempt writes ``written`` bytes."""

        def __init__(self, real: Any):
            self.real = real

        def __enter__(self) -> Broken:
            return self

        def __exit__(self, *_: object) -> None:
            self.real.close()
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

        def seek(self, *args: int) -> int:
            return self.real.seek(*args)

        def write(self, data: bytes) -> int:
            self.real.write(data[:written])
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

        def truncate(self, size: int) -> None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    opened, real = [], Path.open

    def open_file(path: Path, *args: Any, **named: Any) -> Any:
        opened.append(path)
        there = real(path, *args, **named)
        return Broken(there) if len(opened) < 3 else there

    monkeypatch.setattr(Path, "open", open_file)
    told: list[dict[str, Any]] = []
    with outages_told(lambda **fields: told.append(fields)):
        atomic.append(file, "second\n")
        atomic.append(file, "third\n")
    assert [row["why"] for row in told] == [f"{file}: Transport endpoint is not connected"]
    assert len(opened) == 4
    assert file.read_bytes() == b"first\nsecond\nthird\n"


@pytest.mark.parametrize("name", ["rename", "mkdir", "fsync", "listdir"])
def test_a_checkpoint_is_written_and_read_across_an_outage(tmp_path, monkeypatch, name):
    tensors = {"a": {"x": torch.arange(3.0)}}
    checkpoint.write(tmp_path / "step_000001", tensors, {"n": 1})
    Outage(monkeypatch, name, 2)
    checkpoint.write(tmp_path / "step_000002", tensors, {"n": 2})
    # the same step again, as after a return to an earlier checkpoint
    checkpoint.write(tmp_path / "step_000002", tensors, {"n": 3})
    Outage(monkeypatch, "listdir", 2)
    newest = checkpoint.latest_checkpoint(tmp_path)
    assert newest == tmp_path / "step_000002"
    files, state = checkpoint.read(tmp_path / "step_000002")
    assert state == {"n": 3} and torch.equal(files["a"]["x"], tensors["a"]["x"])
    Outage(monkeypatch, name, 2)
    checkpoint.prune(tmp_path, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["step_000002"]


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    checkpoint.write(tmp_path / "step_000001", {}, {})
    monkeypatch.setattr(storage, "RETRY_S", 0.0)
    Outage(monkeypatch, "listdir", 99, errno.ESTALE)
    with pytest.raises(CheckpointError, match=r"^checkpoints: .* cannot be read \(Stale file"):
        checkpoint.latest_checkpoint(tmp_path)


# ---- a mount that is replaced


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunDirectory:
    """A run directory with a checkpoint and an evaluation."""
    monkeypatch.setattr(storage, "_expected", set())
    run = RunDirectory(tmp_path / "mount" / "run")
    run.create(load("quickstart"))
    run.metric({"kind": "evaluation", "iteration": 0})
    HeldOut(load("quickstart"), run, [])._write(0, {"rewards": []})
    checkpoint.write(run.checkpoints / "step_000001", {}, {"n": 1})
    run.timeline_file.touch()
    expect(run.config_file)
    return run


class Unmounted:
    """A run directory that is elsewhere until the third pause of a call that waits for it."""

    def __init__(self, run: RunDirectory, monkeypatch: Any):
        self.path, self.pauses = run.path, 0
        self.elsewhere = run.path.with_name("elsewhere")
        os.rename(self.path, self.elsewhere)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, _: float) -> None:
        self.pauses += 1
        assert not self.path.exists()  # nothing is written in its place
        if self.pauses == 3:
            os.rename(self.elsewhere, self.path)


IMAGES = np.zeros((1, 1, 3, 8, 8), np.uint8)
CALLS: dict[str, Callable[[RunDirectory], Any]] = {
    "a row": lambda run: run.metric({"iteration": 1}),
    "a file": lambda run: atomic.write_text(run.path / "report.html", "report"),
    "images": lambda run: save_images(run.images, 0, ["a cat"], IMAGES),
    "a checkpoint": lambda run: checkpoint.write(run.checkpoints / "step_000002", {}, {}),
    "the newest checkpoint": lambda run: checkpoint.latest_checkpoint(run.checkpoints),
    "a checkpoint's state": lambda run: checkpoint.read(run.checkpoints / "step_000001")[1],
    "rows": lambda run: run.metrics(),
    "the timeline": lambda run: timeline.remove_after(run.timeline_file, 0.0),
    "an evaluation": lambda run: HeldOut(load("quickstart"), run, [])._write(1, {}),
    "whether evaluated": lambda run: HeldOut(load("quickstart"), run, [])._done(0),
    "whether a file exists": lambda run: [exists(run.lock_file), exists(run.config_file)],
}
"""What driver and learner do with the run directory."""


@pytest.mark.parametrize("name", CALLS)
def test_a_run_directory_that_is_not_mounted_is_waited_for(run, monkeypatch, name):
    """Otherwise files would be written below its mount, and what is missing would be taken for
    what has not happened.
    """
    call = CALLS[name]
    expected = call(run)
    before = contents(run.path)
    told: list[str] = []
    unmounted = Unmounted(run, monkeypatch)
    with outages_told(lambda *, seconds, why: told.append(why)):
        assert call(run) == expected
    assert unmounted.pauses == 3 and not unmounted.elsewhere.exists()
    assert set(told) == {f"{run.path} is gone, or its storage is not mounted"}
    added = {"metrics.jsonl": 1} if name == "a row" else {}
    assert {
        file: lines - before[file]
        for file, lines in contents(run.path).items()
        if lines != before[file]
    } == added


@pytest.mark.parametrize("name", ["rows", "whether evaluated", "the evaluation before"])
@pytest.mark.parametrize("access", ["open", "stat"])
def test_what_was_written_is_read_across_an_outage(run, monkeypatch, name, access):
    """Each file is away for the first two times that it is opened, or asked for."""
    held_out = HeldOut(load("quickstart"), run, [])
    call = {
        "rows": run.metrics,
        "whether evaluated": lambda: held_out._done(0),
        "the evaluation before": lambda: pytest.raises(RunFailed, held_out.before).match("shape"),
    }[name]
    expected, failed = call(), Counter[str]()
    owner = Path if access == "open" else os
    real = getattr(owner, access)

    def fails_first(path: Any, *args: Any, **named: Any) -> Any:
        failed[str(path)] += 1
        if failed[str(path)] < 3:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path, *args, **named)

    monkeypatch.setattr(owner, access, fails_first)
    assert call() == expected
    assert failed and min(failed.values()) >= 3


NOT_REPEATED: dict[str, Callable[[RunDirectory], Any]] = {
    "the best images": lambda run: save_extremes(run.images, 1, [], 4),
    "a directory": lambda run: replaced(run.path / "directory"),
    "what an update failed on": lambda run: checkpoint.save_tensors(
        run.path / "failure" / "file", {}, {}
    ),
}


def replaced(path: Path) -> None:
    with atomic.replace_directory(path):
        pass


@pytest.mark.parametrize("name", NOT_REPEATED)
def test_nothing_else_is_written_in_place_of_a_run_directory(run, name):
    NOT_REPEATED[name](run)
    shutil.rmtree(run.path)
    with pytest.raises(FileNotFoundError):
        NOT_REPEATED[name](run)
    assert list(run.path.parent.iterdir()) == []


def test_images_can_be_kept_where_an_object_store_does_not_show_their_empty_directory(run):
    run.images.rmdir()
    save_extremes(run.images, 1, [], 4)
    assert (run.images / "iteration_000001").is_dir()


def test_a_relative_run_directory_is_waited_for_wherever_the_process_is(run, monkeypatch):
    monkeypatch.setattr(storage, "RETRY_S", 0.0)
    storage._expected.clear()
    monkeypatch.chdir(run.path.parent)
    expect(Path("run") / "config.json")
    monkeypatch.chdir("/")
    run.config_file.unlink()
    with pytest.raises(FileNotFoundError):
        exists(run.path / "nothing")


def contents(directory: Path) -> dict[str, int]:
    """Return the number of lines of every file."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes().count(b"\n") for path in files}


@pytest.mark.parametrize("name", [name for name in CALLS if name != "the newest checkpoint"])
def test_a_run_directory_that_stays_away_is_not_written_anew(run, monkeypatch, name):
    monkeypatch.setattr(storage, "RETRY_S", 0.0)
    shutil.rmtree(run.path)
    with pytest.raises((FileNotFoundError, CheckpointError)):
        CALLS[name](run)
    assert list(run.path.parent.iterdir()) == []


def test_files_that_are_missing_in_a_run_directory_are_not_waited_for(run, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited"))
    shutil.rmtree(run.checkpoints)
    assert checkpoint.latest_checkpoint(run.checkpoints) is None
    assert not exists(run.path / "nothing") and not exists(run.config_file / "below a file")
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(run.path / "nothing")
    # a directory that is not the run's
    run.config_file.unlink()
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(run.path.with_name("running") / "nothing")

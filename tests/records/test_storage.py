"""Storage that is away for a while: calls are repeated, and files end as if it had not been."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from learner import checkpoint
from learner.checkpoint import CheckpointError
from records import atomic, storage
from records.storage import AWAY, outages_told, retried


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

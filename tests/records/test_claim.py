"""Claims of drivers on a run directory, for storage whose locks do not reach other machines."""

from __future__ import annotations

import errno
import itertools
import os
import re
from pathlib import Path
from typing import Any

import pytest

from configs.load import ConfigError, load
from records import claim, storage
from records.claim import Claim
from records.rundir import RunDirectory
from records.timeline import Timeline, span_of


@pytest.fixture(autouse=True)
def fresh_looks(monkeypatch):
    monkeypatch.setattr(claim, "LOOK_S", -1.0)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("claim-*"))


def test_the_newest_of_three_drivers_has_the_directory(tmp_path):
    claims: list[Claim] = []
    for number in (1, 2, 3):
        claims.append(Claim(tmp_path))
        (name,) = names(tmp_path)  # those of earlier drivers are removed
        assert name.startswith(f"claim-{number:06d}-")
        assert [each.lost for each in claims] == [True] * (number - 1) + [False]
    assert f"process {os.getpid()} on " in claims[0].holder()


def test_the_same_driver_wins_for_both_of_two_that_claim_at_once(tmp_path, monkeypatch):
    tokens = itertools.cycle(["0000000b", "0000000a"])
    monkeypatch.setattr(claim.secrets, "token_hex", lambda size: next(tokens))
    monkeypatch.setattr(claim, "_claims", lambda directory: [])
    first, second = Claim(tmp_path), Claim(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(claim, "LOOK_S", -1.0)
    assert names(tmp_path) == ["claim-000001-0000000a", "claim-000001-0000000b"]
    assert (first.lost, second.lost) == (False, True)
    Claim(tmp_path)
    assert first.lost


def test_other_names_are_no_claims(tmp_path):
    mine = Claim(tmp_path)
    for name in (
        "claim-9",
        "claim-000009-xyz",
        "claim-000009-0123456789",
        ".claim-000009-01234567",
    ):
        (tmp_path / name).touch()
    assert not mine.lost
    (tmp_path / "claim-000009-01234567").touch()
    assert mine.lost
    assert mine.holder() == "another driver"  # as on storage that is about to show its content


def test_a_look_counts_for_a_while_and_a_loss_for_good(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(claim, "LOOK_S", 1.0)
    monkeypatch.setattr(claim.time, "monotonic", lambda: now[0])
    mine = Claim(tmp_path)
    assert not mine.lost
    newer = tmp_path / "claim-000002-00000000"
    newer.touch()
    assert not mine.lost
    now[0] += 1.1
    assert mine.lost
    newer.unlink()
    now[0] += 1.1
    assert mine.lost


def test_a_look_is_repeated_while_storage_is_away(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "PAUSE_S", 0.0)
    mine, listed, left = Claim(tmp_path), Path.iterdir, [1, 1]

    def away(path: Path) -> Any:
        if left:
            left.pop()
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", away)
    assert not mine.lost and not left


def test_a_driver_that_lost_its_run_records_nothing_more(tmp_path, monkeypatch):
    rundir = RunDirectory(tmp_path / "run")
    rundir.create(load("quickstart"))
    rundir.require_claim()  # without a claim, as when a run is only read
    rundir.claim()
    timeline = Timeline(rundir.timeline_file, append=rundir.append_spans)

    def record() -> None:
        rundir.event("node_lost")
        rundir.metric({"iteration": 1})
        rundir.selection(1, 1, [])
        timeline.record(span_of("rollout", 0, 0, "explore", 0, 0.0, 1.0, "done"))
        timeline.write()

    def contents() -> list[str]:
        return [file.read_text() for file in sorted(rundir.path.glob("*.jsonl"))]

    record()
    rundir.require_claim()
    before = contents()
    assert [text.count("\n") for text in before] == [1, 1, 1, 1]
    RunDirectory(rundir.path).claim()
    monkeypatch.setattr("records.timeline.MAX_FILE_BYTES", 1)
    record()
    assert contents() == before
    assert rundir.lost
    line = (
        rf"{re.escape(str(rundir.path))}: process {os.getpid()} on \S+ since .* UTC has started a"
        r" run here while this one was active: .* given away .*: this one ends"
    )
    with pytest.raises(ConfigError, match=line):
        rundir.require_claim()

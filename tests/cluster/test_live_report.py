"""The report of a running run: when it is written, and that its failures are only events."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from analysis.report.__main__ import main
from cluster.driver import live_report
from cluster.driver.live_report import PROGRAM, LiveReport
from tests.analysis.synthetic import write_run
from tests.cluster.runs import run_here, tiny_config

COUNT = "import sys, pathlib; pathlib.Path(sys.argv[1], 'count').open('a').write(sys.argv[2])"
FAIL = COUNT + "; print('first'); sys.exit('DiskFull: no room')"
ABORT = COUNT + "; import os; os.abort()"
HANG = "import signal; signal.sigwait([signal.SIGUSR1])"


class RecordingReport:
    """A ``LiveReport``, with its events and notes."""

    def __init__(self, run: Path, every_s: float, *program: str):
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.notes: list[str] = []
        self.recorded = asyncio.Event()
        self.live = LiveReport(run, every_s, self.event, self.notes.append, program)

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))
        self.recorded.set()


@pytest.fixture(autouse=True)
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_report, "REST", 0)


async def until(file: Path, text: str) -> None:
    async with asyncio.timeout(60):
        while not file.exists() or not file.read_text(encoding="utf-8").startswith(text):
            await asyncio.sleep(0.02)


def test_the_report_is_written_after_evaluations_and_at_intervals(tmp_path: Path):
    async def go() -> None:
        one = RecordingReport(tmp_path, 3600, sys.executable, "-c", COUNT)
        one.live.begin()
        one.live.due()
        await until(tmp_path / "count", "3600")
        await one.live.close()
        one = RecordingReport(tmp_path, 0.01, sys.executable, "-c", COUNT)
        one.live.begin()
        await until(tmp_path / "count", "36000.010.010.01")
        await one.live.close()
        assert one.events == []

    asyncio.run(go())


def test_interval_zero_disables_the_live_report(tmp_path: Path):
    async def go() -> set[asyncio.Task[Any]]:
        one = RecordingReport(tmp_path, 0, sys.executable, "-c", COUNT)
        one.live.begin()
        one.live.due()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await one.live.close()
        return others

    assert asyncio.run(go()) == set()


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ((sys.executable, "-c", FAIL), "DiskFull: no room"),
        ((sys.executable, "-c", ABORT), "exit -6"),
    ],
)
def test_a_repeated_failure_is_reported_once(tmp_path: Path, program: tuple[str, ...], why: str):
    async def go() -> RecordingReport:
        one = RecordingReport(tmp_path, 0.01, *program)
        one.live.begin()
        await until(tmp_path / "count", 3 * "0.01")
        await one.live.close()
        return one

    one = asyncio.run(go())
    assert one.events == [("report_failed", {"why": why})]
    assert one.notes == [f"the report is not updated during the run: {why}"]


@pytest.mark.parametrize(
    ("program", "longest_s", "why"),
    [
        (("/nowhere/python",), 60, "No such file or directory"),
        ((sys.executable, "-c", HANG), 0.2, "it took longer than 0.2 s"),
    ],
)
def test_a_missing_or_slow_report_program_is_a_failure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: tuple[str, ...],
    longest_s: float,
    why: str,
):
    monkeypatch.setattr(live_report, "LONGEST_S", longest_s)

    async def go() -> RecordingReport:
        one = RecordingReport(tmp_path, 0.01, *program)
        one.live.begin()
        async with asyncio.timeout(60):
            await one.recorded.wait()
        await one.live.close()
        return one

    assert asyncio.run(go()).events == [("report_failed", {"why": why})]


def test_the_live_report_continues_after_errors(tmp_path: Path):
    async def go() -> RecordingReport:
        one = RecordingReport(tmp_path, 0.01)

        async def write() -> str:
            one.written = getattr(one, "written", 0) + 1
            if one.written > 3:
                one.recorded.set()
            raise KeyError(one.written)

        def full(name: str, **fields: Any) -> None:
            raise OSError(28, "No space left on device")

        one.live._write, one.live._event = write, full
        one.live.begin()
        async with asyncio.timeout(60):
            await one.recorded.wait()
        await one.live.close()
        return one

    message = "the report is not updated during the run: KeyError: "
    assert asyncio.run(go()).notes[:3] == [f"{message}{n}" for n in (1, 2, 3)]


def test_the_program_writes_a_page_that_reloads(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=3, ending=None)

    async def go() -> None:
        one = RecordingReport(run, 40, *PROGRAM)
        one.live.begin()
        one.live.due()
        await until(run / "report.html", "<!doctype html>")
        await one.live.close()
        assert one.events == []

    asyncio.run(go())
    assert 'data-reload="10" data-late="180"' in (run / "report.html").read_text()
    assert not list(run.glob(".report*"))


@pytest.mark.parametrize(("parents", "reloads"), [([7, 7], True), ([7, 1], False)])
def test_a_page_does_not_reload_if_the_driver_ended_meanwhile(
    tmp_path: Path, monkeypatch, parents: list[int], reloads: bool
):
    run = write_run(tmp_path / "r", iterations=3, ending=None)
    monkeypatch.setattr("os.getppid", iter(parents).__next__)
    monkeypatch.setattr("os.nice", lambda _: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(str(run), "40") == 0
    assert ("data-reload" in (run / "report.html").read_text()) == reloads


def test_the_final_page_of_a_run_does_not_reload(ray_here, tiny_sd3_dir, tmp_path):
    config = tiny_config(
        tiny_sd3_dir, tmp_path, "reported", logging__report_every_s=3600, iterations=1
    )
    run = run_here(config)
    assert not [event for event in run.events() if event["event"] == "report_failed"]
    text = (run.path / "report.html").read_text()
    assert "<script" not in text and "refresh" not in text and "finished" in text

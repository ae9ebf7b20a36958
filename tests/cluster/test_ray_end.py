"""Ray on this machine that ends during a run: the run ends with the reason, not without a word."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from unittest.mock import Mock

import pytest

from cluster.driver import train
from cluster.driver.connect import ends_with_ray
from cluster.runtime import local_ray, ray_end


@pytest.fixture
def start() -> Iterator[object]:
    """Return a function that starts a process which waits, under the name of a program of Ray."""
    started = list[subprocess.Popen[bytes]]()

    def make(name: str, script: str = "read _") -> subprocess.Popen[bytes]:
        arguments = [f"/opt/ray/{name}", "-c", script]
        process = subprocess.Popen(arguments, executable="/bin/sh", stdin=subprocess.PIPE)
        started.append(process)
        return process

    yield make
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, "SIGKILL"),
        (signal.SIGBUS, "SIGBUS: /dev/shm, where it keeps objects, may be full"),
    ],
)
def test_the_first_needed_process_to_end_is_named_once(start, number, how):
    raylet, gcs, monitor = start("raylet"), start("gcs_server"), start("log_monitor")
    reasons: queue.Queue[str] = queue.Queue()
    with ray_end.watched([raylet, gcs, monitor], reasons.put):
        monitor.kill()
        monitor.wait()
        gcs.send_signal(number)
        assert reasons.get(timeout=60) == f"Ray's gcs_server on this machine ended ({how})"
        raylet.kill()
        raylet.wait()
    assert reasons.empty()
    assert gcs.wait(60) == -number  # its exit code was left for Ray


def test_an_exit_code_is_named(start):
    reasons: queue.Queue[str] = queue.Queue()
    raylet = start("raylet", "read _; exit 7")
    with ray_end.watched([raylet], reasons.put):
        raylet.stdin.close()
        assert reasons.get(timeout=60) == "Ray's raylet on this machine ended (code 7)"


def test_a_process_of_an_earlier_ray_is_not_watched(start):
    ended, raylet, threads = Mock(), start("raylet"), threading.active_count()
    raylet.kill()
    raylet.wait()
    with ray_end.watched([raylet], ended):
        assert threading.active_count() <= threads
    ended.assert_not_called()


def test_rays_own_end_after_the_run_is_not_a_failure(start):
    ended, raylet = Mock(), start("raylet")
    with ray_end.watched([raylet], ended):
        pass
    raylet.kill()
    raylet.wait()
    ended.assert_not_called()


def test_the_processes_of_the_last_start_are_known(start, monkeypatch):
    from ray._private import services

    monkeypatch.setattr(local_ray, "_running", [])
    monkeypatch.setattr(services, "ConsolePopen", lambda *a, **named: start("raylet"))
    local_ray.retried_start(lambda: services.ConsolePopen(["raylet"]))
    assert [ray_end.name_of(process) for process in local_ray.running()] == ["raylet"]


@pytest.mark.parametrize("full_disk", [False, True])
def test_a_run_ends_with_its_ray_whatever_can_be_written(start, full_disk, monkeypatch, capsys):
    report, codes = Mock(), queue.Queue[int]()
    monkeypatch.setattr(os, "_exit", codes.put)
    # the real ``os._exit`` leaves no time to raise
    monkeypatch.setattr(threading, "excepthook", lambda error: None)
    raylet, rundir, before = start("raylet"), Mock(path="RUN"), {*threading.enumerate()}
    monkeypatch.setattr(train.subprocess, "Popen", report)
    monkeypatch.setattr(local_ray, "_running", [raylet])
    rundir.event.side_effect = OSError("no space left") if full_disk else None
    record = partial(train._record_end, rundir)
    with ends_with_ray(False, "continue with --resume", record):
        raylet.kill()
        assert codes.get(timeout=60) == 3
    for thread in {*threading.enumerate()} - before:
        thread.join(60)
    rundir.event.assert_called_once_with(
        "run_failed", why="Ray's raylet on this machine ended (SIGKILL)"
    )
    reported = [call.args[0][-2:] for call in report.mock_calls]
    assert reported == ([] if full_disk else [["RUN", "0"]])
    assert capsys.readouterr().err == (
        "run failed: Ray's raylet on this machine ended (SIGKILL); continue with --resume\n"
    )


def test_the_end_is_recorded_if_nobody_reads_standard_error(start, monkeypatch):
    codes, recorded = queue.Queue[int](), queue.Queue[str]()
    monkeypatch.setattr(os, "_exit", codes.put)
    monkeypatch.setattr(sys, "stderr", Mock(write=Mock(side_effect=BrokenPipeError)))
    raylet = start("raylet")
    monkeypatch.setattr(local_ray, "_running", [raylet])
    with ends_with_ray(False, "continue with --resume", recorded.put):
        raylet.kill()
        assert codes.get(timeout=60) == 3
    assert recorded.get(timeout=0) == "Ray's raylet on this machine ended (SIGKILL)"


def test_the_ray_of_a_cluster_is_not_watched(start, monkeypatch):
    """Its raylet is not a child of the driver."""
    monkeypatch.setattr(local_ray, "_running", [start("raylet")])
    threads = threading.active_count()
    with ends_with_ray(True, "continue with --resume"):
        assert threading.active_count() <= threads

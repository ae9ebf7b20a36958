"""Ray on this machine that ends during a run: the run ends with the reason, not without a word."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from cluster.driver import train
from cluster.driver.connect import UNWATCHED, ends_with_ray
from cluster.runtime import ray_end
from tests.cluster.head import ROOT

NODE = "5f1c0e"
Start = Callable[..., subprocess.Popen[bytes]]


def command(name: str, *options: str, script: str = "read _") -> list[str]:
    """Return the arguments of a process that waits, under the name of a program of Ray."""
    return [f"/opt/ray/{name}", "-c", script, *options]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts ``command``, of node ``NODE`` unless it has options."""
    started = list[subprocess.Popen[bytes]]()

    def make(name: str, *options: str, script: str = "read _") -> subprocess.Popen[bytes]:
        arguments = command(name, *(options or (f"--node_id={NODE}",)), script=script)
        process = subprocess.Popen(arguments, executable="/bin/sh", stdin=subprocess.PIPE)
        started.append(process)
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.001)  # Linux shows it a little after the call of exec has succeeded
        return process

    yield make
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def on_node(monkeypatch) -> None:
    """Let this process be connected to node ``NODE``."""
    context = Mock(get_node_id=lambda: NODE)
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)


def names() -> list[str]:
    """Return the names of the processes of ``NODE``."""
    found = ray_end.processes_of(NODE)
    for process in found:
        os.close(process.descriptor)
    return sorted(process.name for process in found)


def test_the_needed_processes_of_a_node_are_found(start):
    start("raylet")
    start("gcs_server", "--log_dir=/x", f"--node-id={NODE}")
    start("raylet", "--node_id=another")
    start("log_monitor")
    start("raylet", "--labels=", "read")
    assert names() == ["gcs_server", "raylet"]


def test_a_gcs_that_can_be_started_again_is_not_needed(start):
    """With its state in Redis, drivers wait for it."""
    start("gcs_server", f"--node-id={NODE}", "--redis_address=10.0.0.1")
    assert names() == []


def test_a_process_that_ends_while_it_is_looked_at_is_left_out(tmp_path, start):
    raylet = start("raylet")
    raylet.kill()
    raylet.wait()
    for number, text in ((raylet.pid, f"/ray/raylet\0--node_id={NODE}\0"), (2**22 + 1, None)):
        (tmp_path / str(number)).mkdir()
        if text:
            (tmp_path / str(number) / "cmdline").write_text(text, encoding="utf-8")
    assert ray_end.processes_of(NODE, tmp_path) == []


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, "SIGKILL"),
        (signal.SIGBUS, "SIGBUS: /dev/shm, where it keeps objects, may be full"),
    ],
)
def test_the_first_needed_process_to_end_is_named_once(start, number, how):
    raylet, gcs = start("raylet"), start("gcs_server")
    reasons: queue.Queue[str] = queue.Queue()
    with ray_end.watched(ray_end.processes_of(NODE), reasons.put):
        gcs.send_signal(number)
        assert reasons.get(timeout=60) == f"Ray's gcs_server on this machine ended ({how})"
        raylet.kill()
        raylet.wait()
    assert reasons.empty()
    assert gcs.wait(60) == -number  # its exit code was left for Ray


def test_an_exit_code_is_named(start):
    reasons: queue.Queue[str] = queue.Queue()
    raylet = start("raylet", script="read _; exit 7")
    with ray_end.watched(ray_end.processes_of(NODE), reasons.put):
        raylet.stdin.close()
        assert reasons.get(timeout=60) == "Ray's raylet on this machine ended (code 7)"


def test_the_ray_of_a_cluster_is_watched_too(start):
    """Its raylet was started by another process, so that its exit code cannot be known."""
    reasons: queue.Queue[str] = queue.Queue()
    child = command("raylet", f"--node_id={NODE}")
    script = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen({child!r}, executable='/bin/sh', stdin=0)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    pipe = subprocess.PIPE
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, cwd=ROOT)
    assert parent.stdin and parent.stdout
    pid = int(parent.stdout.readline())
    while not names():  # until the child has replaced its program
        time.sleep(0.01)
    with ray_end.watched(ray_end.processes_of(NODE), reasons.put):
        with pytest.raises(queue.Empty):
            reasons.get(timeout=0.2)
        os.kill(pid, signal.SIGKILL)
        assert reasons.get(timeout=60) == "Ray's raylet on this machine ended"
    parent.communicate(timeout=60)


def test_rays_own_end_after_the_run_is_not_a_failure(start):
    ended, raylet = Mock(), start("raylet")
    before = {*threading.enumerate()}
    with ray_end.watched(ray_end.processes_of(NODE), ended):
        pass
    raylet.kill()
    raylet.wait()
    for thread in {*threading.enumerate()} - before:
        thread.join(60)
    ended.assert_not_called()


@pytest.mark.parametrize("full_disk", [False, True])
def test_a_run_ends_with_its_ray_whatever_can_be_written(
    start, on_node, full_disk, monkeypatch, capsys
):
    report, codes = Mock(), queue.Queue[int]()
    monkeypatch.setattr(os, "_exit", codes.put)
    # the real ``os._exit`` leaves no time to raise
    monkeypatch.setattr(threading, "excepthook", lambda error: None)
    raylet, rundir, before = start("raylet"), Mock(path="RUN"), {*threading.enumerate()}
    monkeypatch.setattr(train.subprocess, "Popen", report)
    rundir.event.side_effect = OSError("no space left") if full_disk else None
    record = partial(train._record_end, rundir)
    with ends_with_ray("continue with --resume", record):
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


def test_the_end_is_recorded_if_nobody_reads_standard_error(start, on_node, monkeypatch):
    codes, recorded = queue.Queue[int](), queue.Queue[str]()
    monkeypatch.setattr(os, "_exit", codes.put)
    monkeypatch.setattr(sys, "stderr", Mock(write=Mock(side_effect=BrokenPipeError)))
    raylet = start("raylet")
    with ends_with_ray("continue with --resume", recorded.put):
        raylet.kill()
        assert codes.get(timeout=60) == 3
    assert recorded.get(timeout=0) == "Ray's raylet on this machine ended (SIGKILL)"


def test_a_ray_that_cannot_be_watched_is_named(on_node, caplog):
    with ends_with_ray("continue with --resume"):
        assert caplog.messages == [UNWATCHED]

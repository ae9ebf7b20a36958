"""Ray's start on this machine, which may take longer than Ray itself waits."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import services
from ray._private.utils import validate_socket_filepath

from cluster.runtime import local_ray, socket_paths


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Let time pass only in ``sleep``; the item is the time in seconds."""
    now = [50.0]
    monkeypatch.setattr(
        local_ray,
        "time",
        SimpleNamespace(
            monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
        ),
    )
    return now


def node_after(clock: list[float], seconds: float) -> Any:
    """Return a function that finds the node once this time has passed."""
    due = clock[0] + seconds

    def get_node(address: str, node: str) -> dict[str, str]:
        if clock[0] < due:
            raise RuntimeError("no such node")
        return {"address": address, "node": node}

    return get_node


def process(code: int | None) -> Any:
    return SimpleNamespace(poll=lambda: code)


@pytest.mark.parametrize(("seconds", "warned"), [(0.0, False), (15.0, False), (200.0, True)])
def test_a_slow_start_is_waited_for_and_told_once(clock, caplog, seconds, warned):
    started = [process(None), process(0)]
    with caplog.at_level(logging.WARNING):
        found = local_ray._registered_node(node_after(clock, seconds), started, "head", "n")
    assert found == {"address": "head", "node": "n"}
    assert clock[0] - 50.0 == pytest.approx(seconds, abs=local_ray.LOOK_S)
    assert [record.message for record in caplog.records] == [
        "Ray has not started after 20 s: waiting up to 280 s"
    ] * warned


def test_a_start_that_takes_too_long_fails(clock):
    with pytest.raises(RuntimeError, match="no such node"):
        local_ray._registered_node(node_after(clock, 1e6), [process(None)], "head", "n")
    assert clock[0] - 50.0 == pytest.approx(local_ray.START_S, abs=2 * local_ray.LOOK_S)


@pytest.mark.parametrize(
    ("code", "more", "log_file"),
    [
        (1, [], r"them\)$"),
        (-6, ["--session_dir=/tmp/r/s"], "; its log is /tmp/r/s/logs/raylet.err$"),
        (1, ["--session-dir=/tmp/r/s"], "; its log is /tmp/r/s/logs/raylet.err$"),
    ],
)
def test_a_process_that_ended_is_not_waited_for(clock, code, more, log_file):
    args = ["/ray/raylet", "--x=1", *more]
    ended = SimpleNamespace(poll=lambda: code, returncode=code, args=args)
    why = rf"^Ray's raylet ended at its start with code {code} \(.*{log_file}"
    with pytest.raises(local_ray.ProcessEnded, match=why):
        local_ray._registered_node(node_after(clock, 60), [process(None), ended], "head", "n")
    assert clock[0] == 50.0


@pytest.mark.parametrize("failures", [0, 1, 3, 4])
def test_a_start_is_repeated_without_what_the_last_one_left(monkeypatch, caplog, failures):
    """Processes of a failed start are killed, and those of the last one stay."""
    before, left = (services.ConsolePopen, services.get_node), []

    def unregistered(*_):
        raise RuntimeError("no such node")

    def init(address, **options):
        assert address == "local" and (options["num_cpus"], options["num_gpus"]) == (3, 2)
        left.append(services.ConsolePopen(["sleep", "1000"]))
        assert os.getpgid(left[-1].pid) == left[-1].pid != os.getpgid(0)
        if len(left) <= failures:
            services.ConsolePopen(["false"]).wait()
            services.get_node("head", "n")

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr(services, "get_node", unregistered)
    repeated = min(failures, local_ray.TRIES - 1)
    try:
        if failures < local_ray.TRIES:
            local_ray.start_ray(3, num_gpus=2)
        else:
            with pytest.raises(local_ray.ProcessEnded, match="Ray's false ended"):
                local_ray.start_ray(3, num_gpus=2)
        killed = [-9] * failures
        assert [each.poll() for each in left] == killed + [None] * (failures < local_ray.TRIES)
    finally:
        for each in left:
            each.kill()
            each.wait()
    assert sum("starting Ray again" in each.message for each in caplog.records) == repeated
    assert (services.ConsolePopen, services.get_node) == (before[0], unregistered)


@pytest.mark.parametrize(
    ("length", "own", "expected"),
    [(39, None, None), (40, None, "/tmp/ray"), (40, "/tmp/short", None)],
)
def test_a_temporary_directory_that_is_too_long_is_not_used(
    length, own, expected, monkeypatch, caplog
):
    """A job's directory may be. That of RAY_TMPDIR takes precedence in Ray itself."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("ray.init", lambda **options: given.append(options))
    monkeypatch.setenv("TMPDIR", "/" + (length - 1) * "x")
    if own is None:
        monkeypatch.delenv("RAY_TMPDIR", raising=False)
    else:
        monkeypatch.setenv("RAY_TMPDIR", own)
    local_ray.start_ray(3)
    assert given[0].get("_temp_dir") == expected
    warned = "has 40 bytes, and Ray's sockets need a directory of at most 39: Ray's files are in"
    assert [warned in each.message for each in caplog.records] == ([True] if expected else [])


def test_the_longest_directory_has_room_for_the_sockets_of_ray(ray_here):
    """A socket's path names the session, and that the process id of the driver: at most 2^22."""
    node = ray._private.worker.global_worker.node
    session = Path(node.raylet_socket_name).parts[-3]
    below = Path("/ray", session.rpartition("_")[0] + "_4194304", "sockets", "plasma_store")
    longest = "/" + (socket_paths.LONGEST_OF_RAY - 1) * "x"
    validate_socket_filepath(f"{longest}{below}")
    with pytest.raises(OSError, match="AF_UNIX"):
        validate_socket_filepath(f"{longest}x{below}")


@pytest.mark.parametrize("extra", [0, 1])
def test_a_socket_has_the_longest_path_that_the_kernel_accepts(tmp_path, monkeypatch, extra):
    below = len("/sol-rl/socket")
    directory = tmp_path / ("x" * (socket_paths.LONGEST - below - len(str(tmp_path)) - 1 + extra))
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    chosen = socket_paths.short_directory(below)
    assert chosen == (socket_paths.FALLBACK if extra else str(directory))
    with socket.socket(socket.AF_UNIX) as listener:
        path = directory / "sol-rl" / "socket"
        path.parent.mkdir()
        if extra:
            with pytest.raises(OSError, match="too long"):
                listener.bind(str(path))
        else:
            listener.bind(str(path))

"""Ray's start on this machine, which may take longer than Ray itself waits."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import services

from cluster.runtime import local_ray


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

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


@pytest.mark.parametrize("code", [1, -9])
def test_a_process_that_failed_is_not_waited_for(clock, code):
    with pytest.raises(RuntimeError, match="no such node"):
        local_ray._registered_node(
            node_after(clock, 60), [process(None), process(code)], "head", "n"
        )
    assert clock[0] == 50.0


def test_a_start_has_groups_of_its_own_and_leaves_ray_as_it_was(monkeypatch):
    """A process that Ray starts is not in this one's group, and is watched."""
    before = services.ConsolePopen, services.get_node

    def init(address, **options):
        assert address == "local" and (options["num_cpus"], options["num_gpus"]) == (3, 2)
        child = services.ConsolePopen(["false"])
        assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
        child.wait()
        services.get_node("head", "n")

    def unregistered(*_):
        raise RuntimeError("no such node")

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr(services, "get_node", unregistered)
    with pytest.raises(RuntimeError, match="no such node"):
        local_ray.start_ray(3, num_gpus=2)
    assert (services.ConsolePopen, services.get_node) == (before[0], unregistered)

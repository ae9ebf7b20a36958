"""Ray's start on this machine, which may take longer than Ray itself waits."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import services

from cluster.driver import connect


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Let time pass only in ``sleep``; the item is the time in seconds."""
    now = [50.0]
    monkeypatch.setattr(
        connect,
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
        found = connect._registered_node(node_after(clock, seconds), started, "head", "n")
    assert found == {"address": "head", "node": "n"}
    assert clock[0] - 50.0 == pytest.approx(seconds, abs=connect.LOOK_S)
    assert [record.message for record in caplog.records] == [
        "Ray has not started after 20 s: waiting up to 300 s"
    ] * warned


def test_a_start_that_takes_too_long_fails(clock):
    with pytest.raises(RuntimeError, match="no such node"):
        connect._registered_node(node_after(clock, 1e6), [process(None)], "head", "n")
    assert clock[0] - 50.0 == pytest.approx(connect.START_S, abs=2 * connect.LOOK_S)


@pytest.mark.parametrize("code", [1, -9])
def test_a_process_that_failed_is_not_waited_for(clock, code):
    with pytest.raises(RuntimeError, match="no such node"):
        connect._registered_node(node_after(clock, 60), [process(None), process(code)], "head", "n")
    assert clock[0] == 50.0


def test_ray_waits_as_before_after_the_start():
    before = services.ConsolePopen, services.get_node
    with pytest.raises(ValueError), connect._our_start():
        assert services.get_node.func is connect._registered_node  # pyright: ignore
        raise ValueError
    assert (services.ConsolePopen, services.get_node) == before

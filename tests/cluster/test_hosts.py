"""Processes that outlive a run: only those of members do."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import ray

from tests.cluster.hosts import stop_and_keep


def test_an_actor_that_is_still_starting_ends_with_its_run(monkeypatch):
    """Otherwise it would hold its share of a node for ever."""

    async def leave() -> None:
        pass

    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    handle: Any = SimpleNamespace(leave=SimpleNamespace(remote=leave))
    pool: Any = SimpleNamespace(
        members=[
            SimpleNamespace(handle=handle, info=SimpleNamespace(node="here")),
            SimpleNamespace(handle=None, info=SimpleNamespace(node="there")),
        ]
    )
    starting: Any = object()
    idle: list[Any] = []

    async def stop() -> None:
        ray.kill(starting)
        ray.kill(handle)

    asyncio.run(stop_and_keep([pool], stop, lambda pool: idle))
    assert killed == [starting] and idle == [(handle, "here")]
    ray.kill(handle)
    assert killed == [starting, handle]

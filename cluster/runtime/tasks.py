"""Helpers for groups of asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import TypeVar

Value = TypeVar("Value")


async def run_together(*coroutines: Coroutine[None, None, Value]) -> list[Value]:
    """Run all concurrently and return their values in order.

    If one raises, the others are cancelled and have ended before its exception is raised, so that
    none continues in the background.
    """
    if len(coroutines) == 1:  # the most frequent case, without the overhead of a group
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        # the first one is the cause; later ones may result from the cancellation
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def cancel_all(tasks: Collection[asyncio.Task[Value]]) -> None:
    """Cancel all tasks and wait until all have ended, whatever their outcome."""
    for task in tasks:
        task.cancel()
    if tasks:
        # not ``gather``, which could not be cancelled while a task does not end
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it


class BackgroundTasks:
    """Tasks that run in the background until they are done or ``end`` is called.

    The exception of a task is raised where the task is awaited, if anywhere.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self, coroutine: Coroutine[None, None, Value]) -> asyncio.Task[Value]:
        """Run ``coroutine`` as a task."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)  # the event loop holds tasks only by weak references
        task.add_done_callback(self._ended)
        return task

    async def end(self) -> None:
        """Cancel all tasks and wait until none is running."""
        await cancel_all(list(self._tasks))

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it

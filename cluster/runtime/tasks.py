"""Several coroutines of which one may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import TypeVar

Value = TypeVar("Value")


async def run_together(*coroutines: Coroutine[None, None, Value]) -> list[Value]:
    """Run all; returns their values, in order. When one raises, the others are cancelled, and have
    ended before its exception is raised: none works on in the background.
    """
    if len(coroutines) == 1:  # the usual case, in which a group would take longer than its task
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        # the first failure comes first; those after it may be effects of cancelling
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def cancel_all(tasks: Collection[asyncio.Task[Value]]) -> None:
    """Cancel what still runs, and return when all have ended, however."""
    for task in tasks:
        task.cancel()
    if tasks:
        # not ``gather``: who waits for it could not stop waiting for a task that does not end
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not complain


class BackgroundTasks:
    """Tasks that run beside the one that started them, until they are done or ``end`` is called.

    A task's failure is raised where the task is awaited, if it is.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def start(self, coroutine: Coroutine[None, None, Value]) -> asyncio.Task[Value]:
        """Run ``coroutine`` as a task."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)  # the event loop itself holds tasks by weak references only
        task.add_done_callback(self._ended)
        return task

    async def end(self) -> None:
        """Cancel all; none runs any more on return."""
        await cancel_all(list(self._tasks))

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not complain

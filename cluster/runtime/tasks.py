"""Several coroutines of which one may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import TypeVar

Value = TypeVar("Value")


async def run_together(*coroutines: Coroutine[None, None, Value]) -> list[Value]:
    """All values, in order. When one raises, the others are cancelled, and have ended before its
    exception is raised: none works on in the background.
    """
    if len(coroutines) == 1:  # as most often, and a group takes longer than what is in it
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        # the group has the first failure first; what cancelling brought about does not matter
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def cancel_all(tasks: Collection[asyncio.Task[Value]]) -> None:
    """Cancel what still runs, and return when all have ended, however."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class BackgroundTasks:
    """Tasks that run beside the one that started them, until they are done or ``end`` is called.

    A failure is kept for the one who awaits the task; one that is not awaited is passed over.
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

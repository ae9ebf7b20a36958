"""Several coroutines of which one may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")


async def all_or_none(*coroutines: Coroutine[Any, Any, Value]) -> list[Value]:
    """All values, in order. When one raises, the others are cancelled and have ended before it is
    raised: nobody works on behind.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await end_all(tasks)
        raise


async def end_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel what still runs, and return when all have ended, however."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Beside:
    """Tasks that run beside the one that started them, until they are done or ``end`` is called.

    A failure is kept for whoever awaits the task; one that nobody awaits any more is passed over.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, coroutine: Coroutine[Any, Any, Value]) -> asyncio.Task[Value]:
        """Run ``coroutine`` as a task."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def end(self) -> None:
        """Cancel all; none runs any more on return."""
        await end_all(list(self._tasks))

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not complain

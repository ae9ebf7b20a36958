"""Several coroutines of which one may fail."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")


async def all_or_none(*coroutines: Coroutine[Any, Any, Value]) -> list[Value]:
    """All values, in order. When one raises, the others are cancelled and have ended before it is raised: nobody works on behind."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise

"""Several coroutines, one of which fails."""

import asyncio

import pytest

from cluster.runtime.tasks import run_together


def test_run_together_cancels_all_tasks_after_a_failure():
    left = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            left.append("gone")

    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise ValueError("no")

    async def work() -> list[str]:
        with pytest.raises(ValueError, match="no"):
            await run_together(slow(), fails(), slow())
        return list(left)

    assert asyncio.run(work()) == ["gone", "gone"]

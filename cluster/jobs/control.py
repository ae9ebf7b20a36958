"""How a running job is asked and told things: a board in the cluster, where runs pin their state
and read requests.

One small named actor per cluster, made by the first run that needs it and again when it is gone. It
holds nothing that a run could miss. An actor and not a file in the run directory, because whoever
reaches the cluster reaches it, with or without the run's disk, and because it ends with the runs:
nobody obeys a file that was left behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

NAME, NAMESPACE = "sol-rl-board", "sol-rl"
PERIOD_S = 1.0
SILENT_S = 30.0
"""A run that has said nothing for so long is not running any more."""


class Board:
    """The actor. Runs are known by a key that is unique in the cluster."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[float, dict[str, Any]]] = {}
        self._requests: dict[str, list[tuple[int, dict[str, int]]]] = {}
        self._outcomes: dict[int, tuple[bool, str]] = {}
        self._count = 0

    def exchange(
        self, run: str, state: dict[str, Any], outcomes: dict[int, tuple[bool, str]]
    ) -> list[tuple[int, dict[str, int]]]:
        """A run tells its state and what came of requests (done or refused, in words); it gets the
        new ones.
        """
        self._states[run] = (time.monotonic(), state)
        self._outcomes |= outcomes
        return self._requests.pop(run, [])

    def leave(self, run: str) -> None:
        """The run ends."""
        self._states.pop(run, None)
        self._requests.pop(run, None)

    def runs(self) -> dict[str, dict[str, Any]]:
        """The state of every run that lives."""
        now = time.monotonic()
        return {run: state for run, (told, state) in self._states.items() if now - told < SILENT_S}

    def request(self, run: str, sizes: dict[str, int]) -> int:
        """Ask a run for other pool sizes, by service; returns the request's number."""
        self._count += 1
        self._requests.setdefault(run, []).append((self._count, sizes))
        return self._count

    def outcome(self, request: int) -> tuple[bool, str] | None:
        """(done, words) once the run has dealt with a request."""
        return self._outcomes.get(request)


def board() -> Any:
    """The cluster's board, made where there is none. Needs a Ray connection."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options: dict[str, Any] = {
        "name": NAME,
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "num_cpus": 0,
    }
    return ray.remote(Board).options(scheduling_strategy=here, **options).remote()


class Link:
    """A run's end of the board: tells ``state()`` every second, and carries out what is asked
    through ``act``.

    ``act(sizes)`` returns (done, words). That the board cannot be reached never disturbs a run: it
    is made anew.
    """

    def __init__(
        self,
        run: str,
        state: Callable[[], dict[str, Any]],
        act: Callable[[dict[str, int]], Awaitable[tuple[bool, str]]],
    ) -> None:
        self._run, self._state, self._act = run, state, act
        self._outcomes: dict[int, tuple[bool, str]] = {}
        self._acts: set[asyncio.Task[None]] = set()
        self._board: Any = None

    async def live(self) -> None:
        """Exchange until cancelled."""
        from ray.exceptions import RayError

        while True:
            told = dict(self._outcomes)
            try:
                if self._board is None:
                    self._board = await asyncio.to_thread(board)
                answer = self._board.exchange.remote(self._run, self._state(), told)
                async with asyncio.timeout(
                    10 * PERIOD_S
                ):  # wait_for may swallow a cancellation that comes with the answer
                    requests = await asyncio.wrap_future(answer.future())
            except (RayError, TimeoutError, ValueError):
                self._board = None
            else:
                for number in told:
                    del self._outcomes[number]
                for number, sizes in requests:
                    self._start(number, sizes)
            await asyncio.sleep(PERIOD_S)

    async def leave(self) -> None:
        """Stop what was asked and is not done yet, and take the run off the board."""
        from ray.exceptions import RayError

        for act in self._acts:
            act.cancel()
        await asyncio.gather(*self._acts, return_exceptions=True)
        if self._board is not None:
            try:
                async with asyncio.timeout(5):
                    await asyncio.wrap_future(self._board.leave.remote(self._run).future())
            except (RayError, TimeoutError):
                self._board = None

    def _start(self, number: int, sizes: dict[str, int]) -> None:
        async def act() -> None:
            self._outcomes[number] = await self._act(sizes)

        task = asyncio.create_task(act())
        self._acts.add(task)
        task.add_done_callback(self._acts.discard)

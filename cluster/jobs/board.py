"""The board: a named actor to which every run on a cluster reports its state, and through which it
is asked to scale.

There is one board per cluster. The first run that needs it creates it, and it is created again when
it is lost: no run depends on what it holds. It is an actor and not a file in the run's directory
for two reasons: who can reach the cluster can reach the board, with or without the run's disk; and
the board ends with the cluster, so that no run obeys a file of an earlier one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from cluster.runtime import template
from cluster.runtime.tasks import BackgroundTasks
from records.errors import described

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from records.rundir import Event

NAME, NAMESPACE = "sol-rl-board", "sol-rl"
PERIOD_S = 1.0
SILENT_S = 30.0
"""A run that has reported nothing for this long is no longer running."""


class ActorState(TypedDict):
    """One actor of a run, as `sol-rl status` shows it."""

    actor: str  # "rollout-0.1": member 0, its second actor
    state: str  # "serving", "starting", "leaving" or "benched"
    version: int | None  # of the policy that is loaded there
    tasks: int  # answered
    busy: float  # share of the time since the last report with a task in hand
    restarts: int
    host: str | None
    pid: int | None
    node: str  # the first letters of Ray's node id


class ServiceState(TypedDict):
    """One service of a run."""

    kind: str
    waiting: int  # tasks in the queue
    reissued: int  # retries since the run started
    starting: int  # actors that are being added
    actors: list[ActorState]


class RunState(TypedDict):
    """A run as it is now: JSON types only."""

    run: str
    arm: str
    directory: str
    iteration: int
    iterations: int
    version: int | None
    stages: dict[str, list[int]]  # by stage: [done, total]
    left_s: float | None
    held_out: list[float]
    restored: int
    row: dict[str, float]  # some metrics of the last iteration
    services: list[ServiceState]


Sizes = dict[str, int]
"""Actors wanted, by service."""
Outcome = tuple[bool, str]
"""Whether a request was carried out, and the run's answer in words."""


class Board:
    """The actor. A run is known by a key that is unique in the cluster."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[float, RunState]] = {}
        self._requests: dict[str, list[tuple[int, Sizes]]] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._count = time.time_ns()  # a board after this one gives other numbers

    def exchange(
        self, run: str, state: RunState, outcomes: Mapping[int, Outcome]
    ) -> list[tuple[int, Sizes]]:
        """Store a run's state and the outcomes of its requests; returns the requests without one.

        An answer may be lost on its way, so a request is told until its outcome is.
        """
        self._states[run] = (time.monotonic(), state)
        self._outcomes |= outcomes
        waiting = [each for each in self._requests.get(run, []) if each[0] not in outcomes]
        self._requests[run] = waiting
        return waiting

    def leave(self, run: str) -> None:
        """Forget a run."""
        self._states.pop(run, None)
        self._requests.pop(run, None)

    def runs(self) -> dict[str, RunState]:
        """The state of every run that has reported within ``SILENT_S``, by key."""
        now = time.monotonic()
        return {run: state for run, (told, state) in self._states.items() if now - told < SILENT_S}

    def request(self, run: str, sizes: Sizes) -> int:
        """Ask a run for other pool sizes; returns the number of the request."""
        self._count += 1
        self._requests.setdefault(run, []).append((self._count, sizes))
        return self._count

    def outcome(self, request: int) -> Outcome | None:
        """The outcome of a request; None until the run has reported it."""
        return self._outcomes.get(request)


def board() -> ActorProxy[Board]:
    """The cluster's board, created where there is none. Needs a Ray connection."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # soft, and without a share of a CPU: it must live on a cluster that is full, or loses nodes
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    actor = ray.remote(Board).options(
        name=NAME,
        namespace=NAMESPACE,
        # several runs may create it at the same moment
        get_if_exists=True,
        num_cpus=0,
        scheduling_strategy=here,
        runtime_env=template.forked(),
    )
    return actor.remote()


class Link:
    """A run's connection to the board: reports ``state()`` every second, and carries out requests
    with ``act(sizes)``. A board that cannot be reached is created again. Whatever fails here is an
    event, and disturbs no run.
    """

    def __init__(
        self,
        run: str,
        state: Callable[[], RunState],
        act: Callable[[Sizes], Awaitable[Outcome]],
        event: Event = lambda name, /, **fields: None,
    ) -> None:
        self._run, self._state, self._act, self._event = run, state, act, event
        self._taken: set[int] = set()  # requests that are carried out, or whose outcome is not told
        self._outcomes: dict[int, Outcome] = {}
        self._acts = BackgroundTasks()
        self._board: ActorProxy[Board] | None = None
        self._failures = 0  # exchanges in a row
        self._told = False  # of these failures

    async def live(self) -> None:
        """Exchange with the board until cancelled."""
        while True:
            # what comes while the board is asked is told the next time, and not forgotten with
            # these
            told = dict(self._outcomes)
            try:
                if self._board is None:
                    # in a thread: the cluster is asked, and the run must not wait for it
                    self._board = await asyncio.to_thread(board)
                answer = self._board.exchange.remote(self._run, self._state(), told)
                # not wait_for: it may swallow a cancellation that comes together with the answer
                async with asyncio.timeout(10 * PERIOD_S):
                    requests = await asyncio.wrap_future(answer.future())
                self._received(requests, told)
                self._failures, self._told = 0, False
            except Exception as error:  # also a defect: no run ends for what nothing in it needs
                self._board = None
                self._failed(error)
            await asyncio.sleep(PERIOD_S)

    def _failed(self, error: Exception) -> None:
        """Tell of it, once until the board answers again; not of a board that was lost and is
        there again the next time.
        """
        from ray.exceptions import RayError

        self._failures += 1
        passing = isinstance(error, RayError | TimeoutError | ValueError) and self._failures == 1
        if not passing and not self._told:
            self._told = True
            with contextlib.suppress(OSError):  # a full disk, which ends the run by itself
                self._event("board_failed", why=described(error))

    def _received(self, requests: Sequence[tuple[int, Sizes]], told: Iterable[int]) -> None:
        """Begin what is requested for the first time; the board knows these outcomes."""
        for number in told:
            del self._outcomes[number]
            self._taken.discard(number)
        for number, sizes in requests:
            if number not in self._taken:
                self._taken.add(number)
                self._acts.start(self._carry_out(number, sizes))

    async def leave(self) -> None:
        """Cancel the requests that are not done yet, and take the run off the board."""
        await self._acts.end()
        if self._board is not None:
            try:
                async with asyncio.timeout(5):
                    await asyncio.wrap_future(self._board.leave.remote(self._run).future())
            except Exception as error:  # the board forgets a silent run by itself
                self._board = None
                self._failed(error)

    async def _carry_out(self, number: int, sizes: Sizes) -> None:
        try:
            self._outcomes[number] = await self._act(sizes)
        except Exception as error:  # a defect; the one who asked is told
            self._outcomes[number] = False, described(error)

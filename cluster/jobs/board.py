"""The board: a named actor to which runs on a cluster report their state and that relays requests.

There is one board per cluster. The first run that needs it creates it, and it is created again if
it is lost, because no run depends on what it stores. It is an actor rather than a file in the run
directory for two reasons: everybody who can reach the cluster can reach the board, also without the
run's disk; and the board ends with the cluster, so that no run obeys a file of an earlier one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from cluster.runtime import template
from cluster.runtime.tasks import BackgroundTasks
from records.errors import error_summary

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from records.rundir import Event

NAME, NAMESPACE = "sol-rl-board", "sol-rl"
PERIOD_S = 1.0
STATE_SHARE = 0.005
"""Share of the driver's time for its state, which takes 14 ms with 3,000 actors: if this is not
enough for a state in every period, they are sent less often, but in every tenth.
"""
SILENT_S = 30.0
"""A run that has reported nothing for this long is no longer running."""


class ActorState(TypedDict):
    """State of one actor of a run, as `sol-rl status` shows it."""

    actor: str  # "rollout-0.1": member 0, its second actor
    state: str  # "serving", "starting", "leaving" or "benched"
    version: int | None  # of the policy that is loaded there
    tasks: int  # answered
    busy: float  # share of the time since the last report during which it had a task
    restarts: int
    host: str | None
    pid: int | None
    node: str  # the first letters of Ray's node id


class ServiceState(TypedDict):
    """State of one service of a run."""

    kind: str
    waiting: int  # tasks in the queue
    reissued: int  # retries since the run started
    starting: int  # actors that are being added
    actors: list[ActorState]


class RunState(TypedDict):
    """Present state of a run, in JSON types only."""

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
"""Requested number of actors, by service."""
Outcome = tuple[bool, str]
"""Outcome of a request: True if it was carried out, and the run's message."""


class Board:
    """The board's actor. Runs are identified by a key that is unique in the cluster."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[float, RunState]] = {}
        self._requests: dict[str, list[tuple[int, Sizes]]] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._count = time.time_ns()  # so that a later board does not reuse request numbers

    def exchange(
        self, run: str, state: RunState | None, outcomes: Mapping[int, Outcome]
    ) -> list[tuple[int, Sizes]]:
        """Store a run's state and outcomes of requests; return the requests without an outcome.

        ``state`` None keeps the last one. An answer may be lost, so a request is repeated until
        its outcome is known.
        """
        if state is None and run in self._states:
            state = self._states[run][1]
        if state is not None:
            self._states[run] = (time.monotonic(), state)
        self._outcomes |= outcomes
        waiting = [row for row in self._requests.get(run, []) if row[0] not in outcomes]
        self._requests[run] = waiting
        return waiting

    def leave(self, run: str) -> None:
        """Forget a run."""
        self._states.pop(run, None)
        self._requests.pop(run, None)

    def runs(self) -> dict[str, RunState]:
        """Return the states of all runs that have reported within ``SILENT_S``, by key."""
        now = time.monotonic()
        return {run: state for run, (at, state) in self._states.items() if now - at < SILENT_S}

    def request(self, run: str, sizes: Sizes) -> int:
        """Request other pool sizes from a run; return the number of the request."""
        self._count += 1
        self._requests.setdefault(run, []).append((self._count, sizes))
        return self._count

    def outcome(self, request: int) -> Outcome | None:
        """Return the outcome of a request, or None until the run has reported it."""
        return self._outcomes.get(request)


def board() -> ActorProxy[Board]:
    """Return the cluster's board; create it if there is none. Needs a Ray connection."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # no CPU share: it must run on a full cluster. Hard affinity: it is lost only with the driver's
    # node; with soft affinity Ray puts an actor without resources on any node
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Board).options(
        name=NAME,
        namespace=NAMESPACE,
        # several runs may create it at the same time
        get_if_exists=True,
        num_cpus=0,
        scheduling_strategy=this_node,
        runtime_env=template.fork_runtime_env(),
    )
    return actor.remote()


class Link:
    """A run's connection to the board.

    Reports ``state()`` every second, or less often if it takes long, and carries out requests with
    ``act(sizes)``. A board that cannot be reached is created again. Failures are recorded as events
    and do not affect the run.
    """

    def __init__(
        self,
        run: str,
        state: Callable[[], RunState],
        act: Callable[[Sizes], Awaitable[Outcome]],
        event: Event = lambda name, /, **fields: None,
    ) -> None:
        self._run, self._state, self._act, self._event = run, state, act, event
        self._taken: set[int] = set()  # requests that were started, until their outcome is reported
        self._outcomes: dict[int, Outcome] = {}
        self._acts = BackgroundTasks()
        self._board: ActorProxy[Board] | None = None
        self._state_due = 0.0
        self._failures = 0  # consecutive failed exchanges
        self._reported = False  # True if an event reports these failures

    async def live(self) -> None:
        """Exchange with the board until cancelled."""
        while True:
            # a copy: outcomes that are added during the exchange are sent with the next one
            sent = dict(self._outcomes)
            try:
                if self._board is None:
                    # in a thread, so that the run does not wait for the cluster's answer
                    self._board, self._state_due = await asyncio.to_thread(board), 0.0
                answer = self._board.exchange.remote(self._run, self._state_if_due(), sent)
                # not wait_for, which may swallow a cancellation that coincides with the answer
                async with asyncio.timeout(10 * PERIOD_S):
                    requests = await asyncio.wrap_future(answer.future())
                self._received(requests, sent)
                self._failures, self._reported = 0, False
            except Exception as error:  # even a defect must not end the run, which needs no board
                self._board = None
                self._failed(error)
            await asyncio.sleep(PERIOD_S)

    def _state_if_due(self) -> RunState | None:
        now, cpu_s = time.monotonic(), time.thread_time()
        if now < self._state_due:
            return None
        state = self._state()
        cpu_s = time.thread_time() - cpu_s
        self._state_due = now + min(cpu_s / STATE_SHARE, 9.5 * PERIOD_S)
        return state

    def _failed(self, error: Exception) -> None:
        """Record an event, once until the board answers again.

        A first failure that suggests a lost board is not recorded: the next exchange creates it.
        """
        from ray.exceptions import RayError

        self._failures += 1
        passing = isinstance(error, RayError | TimeoutError | ValueError) and self._failures == 1
        if not passing and not self._reported:
            self._reported = True
            with contextlib.suppress(OSError):  # a full disk ends the run elsewhere
                self._event("board_failed", why=error_summary(error))

    def _received(self, requests: Sequence[tuple[int, Sizes]], sent: Iterable[int]) -> None:
        """Forget the outcomes that the board has received, and start new requests."""
        for number in sent:
            del self._outcomes[number]
            self._taken.discard(number)
        for number, sizes in requests:
            if number not in self._taken:
                self._taken.add(number)
                self._acts.start(self._carry_out(number, sizes))

    async def leave(self) -> None:
        """Cancel unfinished requests and remove the run from the board."""
        await self._acts.end()
        if self._board is not None:
            try:
                async with asyncio.timeout(5):
                    await asyncio.wrap_future(self._board.leave.remote(self._run).future())
            except Exception as error:  # the board drops a silent run by itself
                self._board = None
                self._failed(error)

    async def _carry_out(self, number: int, sizes: Sizes) -> None:
        try:
            self._outcomes[number] = await self._act(sizes)
        except Exception as error:  # a defect, which the requester learns of
            self._outcomes[number] = False, error_summary(error)

"""Run iterations of the real ring in virtual time and measure all services and GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeAlias

from rich.console import Console

from cluster.driver.iteration import Metrics
from cluster.driver.loop import Ring
from cluster.runtime import clock
from cluster.runtime.garbage import fewer_collections
from configs.prompts import Prompt
from configs.schema import RunConfig
from records.progress import Progress
from records.timeline import Span
from simulator.services import Board, Hardware, SimulatedServices

WARM = 2
"""Warm-up iterations if exploring is ahead: nothing was explored before the first one."""
Around: TypeAlias = Callable[[], AbstractContextManager[object]]
Record: TypeAlias = Callable[[Span], None]


def forget(span: Span) -> None:
    """Ignore a span: the default of ``record``."""


@dataclass(frozen=True)
class Part:
    """A GPU, or all cores: its actors, and the share of the time in which no call used it."""

    name: str
    kind: str
    actors: Mapping[str, int]
    idle: float


@dataclass(frozen=True)
class Simulated:
    """Results of a simulation: means over its iterations, in seconds of virtual time.

    ``explore`` is the time until every seed is selected, ``rollout`` the time until all samples to
    train on are available. ``idle``: by service, the share of its actors' time without work.
    ``driver``: the share of time in which the driver sends. ``calls``: calls per iteration.
    ``spans`` are those of the last iteration, in seconds from its beginning to ``spans_end``;
    ``timeline`` has all spans as a run would record them.
    """

    iteration: float
    explore: float
    rollout: float
    update: float
    publish: float
    idle: Mapping[str, float]
    parts: Sequence[Part]
    driver: float
    calls: float
    work: float  # of all calls of an iteration, in seconds of a core or GPU that is busy alone
    spans: Sequence[Span] = field(repr=False)  # not in the repr, because asyncio logs task results
    spans_end: float
    timeline: Sequence[Span] = field(repr=False)

    @property
    def mean_idle(self) -> float:
        """Mean idle share of all GPUs, or of the cores."""
        return sum(part.idle for part in self.parts) / len(self.parts) if self.parts else 0.0


def simulate(
    config: RunConfig,
    hardware: Hardware,
    count: int = 1,
    around: Around = nullcontext,
    record: Record = forget,
) -> Simulated:
    """Simulate ``count`` iterations of a run, after warm-up, and return their means.

    ``config`` has its layout written out. Waiting takes no real time; only the driver's own code
    does. Each measured iteration runs in the context manager that ``around`` returns. ``record`` is
    called with every span when it ends.
    """
    with fewer_collections(), asyncio.Runner(loop_factory=clock.VirtualLoop) as runner:
        return runner.run(_simulate(config, hardware, count, around, record))


async def _simulate(
    config: RunConfig, hardware: Hardware, count: int, around: Around, record: Record
) -> Simulated:
    timeline: list[Span] = []

    def on_span(span: Span) -> None:
        timeline.append(span)
        record(span)

    board, warm = Board(hardware), WARM if config.explore_ahead else 0
    # one more iteration than is run, so that the last one also explores ahead
    services, ring = _ring(config, warm + count + 1, board, on_span)
    await services.start()
    await ring.begin(0)
    for index in range(warm):
        await ring.iteration(index)
    before = _Moment.of(services)
    rows: list[Metrics] = []
    last = before.at
    for index in range(warm, warm + count):
        last = clock.now()
        with around():
            rows.append((await ring.iteration(index))[0])
    after = _Moment.of(services)
    await ring.close()
    await services.stop()
    return _simulated(rows, before, after, last, board, timeline)


@dataclass(frozen=True)
class _Moment:
    """Cumulative counters at one moment, in seconds."""

    at: float
    used: Sequence[float]  # busy time of each GPU, or of the cores
    sending: float  # time in which the driver sent
    work: Mapping[str, float]  # by service
    capacity: float
    alive: Mapping[str, int]  # actors, by service

    @classmethod
    def of(cls, services: SimulatedServices) -> _Moment:
        """Return the counters of ``services`` now."""
        transport = services.transport
        alive = {pool.kind: pool.alive for pool in services.pools}
        used, sending = services.board.used(), transport.driver_busy_s
        return cls(clock.now(), used, sending, transport.work.copy(), transport.capacity_s, alive)


def _simulated(
    rows: Sequence[Metrics],
    before: _Moment,
    after: _Moment,
    last: float,
    board: Board,
    timeline: Sequence[Span],
) -> Simulated:
    """Return the results of the iterations between two moments; the last one began at ``last``."""
    seconds, count = after.at - before.at, len(rows)
    work = {kind: done - before.work.get(kind, 0.0) for kind, done in after.work.items()}
    spans = [span for span in timeline if span.ended - clock.START > before.at]
    return Simulated(
        iteration=seconds / count,
        explore=_mean(rows, "time/explore_s"),
        rollout=_mean(rows, "time/explore_s") + _mean(rows, "time/regenerate_s"),
        update=_mean(rows, "time/update_s"),
        publish=_mean(rows, "time/publish_s"),
        idle={
            kind: max(0.0, 1 - work.get(kind, 0.0) / (actors * seconds))
            for kind, actors in after.alive.items()
        },
        parts=[
            Part(part.name, kind, actors, max(0.0, 1 - (until - since) / seconds))
            for (part, kind, actors), since, until in zip(
                board.parts, before.used, after.used, strict=True
            )
        ],
        driver=(after.sending - before.sending) / seconds,
        calls=sum(span.started - clock.START < after.at for span in spans) / count,
        work=(after.capacity - before.capacity) / count,
        spans=[_since(each, last, after.at) for each in spans if each.ended - clock.START > last],
        spans_end=after.at - last,
        timeline=timeline,
    )


def _ring(
    config: RunConfig, iterations: int, board: Board, record: Record
) -> tuple[SimulatedServices, Ring]:
    """Return the services and the ring of a run with ``iterations`` iterations."""
    # simulated scores are random: they neither repeat nor agree
    rewards = config.rewards.model_copy(update={"deterministic": False})
    unlimited = {"min_tau": None, "min_sign_agreement": None, "action": "warn"}
    audit = config.audit.model_copy(update=unlimited)
    config = config.model_copy(
        update={"iterations": iterations, "rewards": rewards, "audit": audit}
    )
    services = SimulatedServices(config, board, _nothing, record)
    prompts = [Prompt(f"prompt {n}") for n in range(config.prompts.per_iteration)]
    progress = Progress(console=Console(quiet=True), clock=clock.now)
    return services, Ring(config, services, prompts, progress, _nothing)


def _nothing(*args: object, **fields: object) -> None:
    """Ignore an event."""


def _mean(rows: Sequence[Metrics], key: str) -> float:
    return sum(float(row[key]) for row in rows) / len(rows)


def _since(span: Span, began: float, ended: float) -> Span:
    """Return a span in seconds since ``began``, clipped to ``began`` .. ``ended``."""
    first = max(0.0, span.started - clock.START - began)
    return span._replace(started=first, ended=min(span.ended - clock.START, ended) - began)

"""Iterations of the real ring in virtual time, and what every service and GPU did meanwhile."""

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
"""Iterations before those that count where exploring is ahead: the first has nothing before it."""
Around: TypeAlias = Callable[[], AbstractContextManager[object]]
Record: TypeAlias = Callable[[Span], None]


def forget(span: Span) -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class Part:
    """A GPU, or all cores: who is on it, and the share of the time in which nobody used it."""

    name: str
    kind: str
    actors: Mapping[str, int]
    idle: float


@dataclass(frozen=True)
class Simulated:
    """Means over some iterations, in seconds of virtual time.

    ``explore`` and ``rollout``: until every seed is chosen, and until all samples to train on are
    there. ``idle``: by service, the share of its actors' time without work. ``driver``: the share
    in which the driver sends. ``spans`` are of the last iteration, from when it
    began to ``spans_end``; ``timeline`` has all of them, as a run would write them down.
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
    work: float  # of all calls of an iteration, seconds of a core or GPU that is busy alone
    spans: Sequence[Span] = field(repr=False)  # asyncio writes out what a task returns
    spans_end: float
    timeline: Sequence[Span] = field(repr=False)

    @property
    def mean_idle(self) -> float:
        """Of all GPUs."""
        return sum(part.idle for part in self.parts) / len(self.parts) if self.parts else 0.0


def simulate(
    config: RunConfig,
    hardware: Hardware,
    count: int = 1,
    around: Around = nullcontext,
    record: Record = forget,
) -> Simulated:
    """``count`` iterations of a run with its layout written out, from where they are all alike.
    Takes no time but that of the driver's own code. ``around`` each of them a context is entered;
    ``record`` is told what every actor did, as it is done.
    """
    with fewer_collections(), asyncio.Runner(loop_factory=clock.VirtualLoop) as runner:
        return runner.run(_simulate(config, hardware, count, around, record))


async def _simulate(
    config: RunConfig, hardware: Hardware, count: int, around: Around, record: Record
) -> Simulated:
    timeline: list[Span] = []

    def keep(span: Span) -> None:
        timeline.append(span)
        record(span)

    board, warm = Board(hardware), WARM if config.explore_ahead else 0
    # one more than are run: the last one has exploring ahead beside it too
    services, ring = _ring(config, warm + count + 1, board, keep)
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
    """What had been done until then, in seconds."""

    at: float
    used: Sequence[float]  # of each GPU, or of the cores
    sending: float  # of the driver
    work: Mapping[str, float]  # by service
    capacity: float
    alive: Mapping[str, int]  # actors, by service

    @classmethod
    def of(cls, services: SimulatedServices) -> _Moment:
        """Now."""
        carries = services.transport
        alive = {pool.kind: pool.alive for pool in services.pools}
        used, sending = services.board.used(), carries.driver_busy_s
        return cls(clock.now(), used, sending, carries.work.copy(), carries.capacity_s, alive)


def _simulated(
    rows: Sequence[Metrics],
    before: _Moment,
    after: _Moment,
    last: float,
    board: Board,
    timeline: Sequence[Span],
) -> Simulated:
    """Of the iterations between two moments, of which the last one began at ``last``."""
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
    """The services and the ring of so many iterations."""
    rewards = config.rewards.model_copy(update={"deterministic": False})  # they are drawn
    config = config.model_copy(update={"iterations": iterations, "rewards": rewards})
    services = SimulatedServices(config, board, _nothing, record)
    prompts = [Prompt(f"prompt {n}") for n in range(config.prompts.per_iteration)]
    progress = Progress(console=Console(quiet=True), clock=clock.now)
    return services, Ring(config, services, prompts, progress, _nothing)


def _nothing(*args: object, **fields: object) -> None:
    """Events are of no interest."""


def _mean(rows: Sequence[Metrics], key: str) -> float:
    return sum(float(row[key]) for row in rows) / len(rows)


def _since(span: Span, began: float, ended: float) -> Span:
    """Seconds since ``began``, up to ``ended``."""
    first = max(0.0, span.started - clock.START - began)
    return span._replace(started=first, ended=min(span.ended - clock.START, ended) - began)

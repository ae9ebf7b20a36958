"""Pools that change size while a run works: by its own rule, or because somebody asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from cluster.driver.autoscale import Autoscaler, Meter
from cluster.driver.iteration import Metrics
from cluster.driver.services import ActorServices
from configs.load import ConfigError
from configs.schema import RunConfig
from records.errors import described
from records.progress import Progress
from records.rundir import RunDirectory


class Scaling:
    """Measures the pools iteration by iteration, and scales them."""

    def __init__(
        self, config: RunConfig, services: ActorServices, rundir: RunDirectory, progress: Progress
    ):
        self._services, self._rundir, self._progress = services, rundir, progress
        self._meter = Meter(services.pools)
        self._autoscaler = Autoscaler(config.services.autoscale, config.services.rollout)
        self._explores = config.plan.explore is not None
        self.running: asyncio.Task[tuple[bool, str]] | None = None  # what the rule asked for

    def begin_iteration(self) -> None:
        """Measure from now on."""
        self._meter.begin()

    def metrics(self, seconds: float) -> Metrics:
        """Of an iteration that took so many seconds."""
        return {**self._meter.row(seconds)}

    def follow_rule(self, row: Mapping[str, float | str]) -> None:
        """Begin to scale the rollout pool if its rule says so after an iteration's ``row``."""
        if not self._explores or (self.running is not None and not self.running.done()):
            return
        size = self._services.rollout_pool.alive
        wanted = self._autoscaler.size_after(size, row)
        if wanted != size:
            self.running = asyncio.create_task(self._by_rule({"rollout": wanted}))

    async def _by_rule(self, sizes: dict[str, int]) -> tuple[bool, str]:
        try:
            return await self.scale(sizes, partly=True)
        except Exception as error:  # nobody waits for it to raise anything
            self._rundir.event("scaling_refused", asked=sizes, why=described(error))
            return False, described(error)

    async def scale(self, sizes: dict[str, int], partly: bool = False) -> tuple[bool, str]:
        """Bring pools to other sizes while they work, ``partly`` where that is all there is room
        for; (done, what came of it in words).
        """
        said: list[str] = []
        try:
            for kind, size in sizes.items():
                said.append(await self._services.scale(kind, size, partly))
        except ConfigError as error:
            self._rundir.event("scaling_refused", asked=sizes, why=str(error))
            return False, "; ".join([*said, str(error)])
        self._progress.note("; ".join(said))
        return True, "; ".join(said)

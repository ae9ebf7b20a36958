"""Change the size of pools during a run, by the autoscaling rule or on request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from cluster.driver.autoscale import Autoscaler, Meter
from cluster.driver.iteration import Metrics
from cluster.driver.services import ActorServices
from configs.load import ConfigError
from configs.schema import RunConfig
from records.errors import error_summary
from records.progress import Progress
from records.rundir import RunDirectory


class Scaling:
    """Measures the load of the pools in each iteration, and scales them."""

    def __init__(
        self, config: RunConfig, services: ActorServices, rundir: RunDirectory, progress: Progress
    ):
        self._services, self._rundir, self._progress = services, rundir, progress
        self._meter = Meter(services.pools)
        self._autoscaler = Autoscaler(config.services.autoscale, config.services.rollout)
        self._explores = config.plan.explore is not None
        self.running: asyncio.Task[tuple[bool, str]] | None = None  # scaling by the rule

    def begin_iteration(self) -> None:
        """Start measuring an iteration."""
        self._meter.begin()

    def metrics(self, seconds: float) -> Metrics:
        """Return the load metrics of an iteration that took ``seconds``."""
        return {**self._meter.row(seconds)}

    def follow_rule(self, row: Mapping[str, float | str]) -> None:
        """Start to scale the rollout pool if the rule requires it after an iteration's ``row``."""
        if not self._explores or (self.running is not None and not self.running.done()):
            return
        size = self._services.rollout_pool.alive
        requested = self._autoscaler.size_after(size, row)
        if requested != size:
            self.running = asyncio.create_task(self._scale_by_rule({"rollout": requested}))

    async def _scale_by_rule(self, sizes: dict[str, int]) -> tuple[bool, str]:
        try:
            return await self.scale(sizes, partly=True)
        except Exception as error:  # no caller awaits this task and would see it
            self._rundir.event("scaling_refused", asked=sizes, why=error_summary(error))
            return False, error_summary(error)

    async def scale(self, sizes: dict[str, int], partly: bool = False) -> tuple[bool, str]:
        """Change the size of pools while they work; return (success, report in words).

        With ``partly`` pools grow by as many actors as there is room for.
        """
        messages: list[str] = []
        try:
            for kind, size in sizes.items():
                messages.append(await self._services.scale(kind, size, partly))
        except ConfigError as error:
            self._rundir.event("scaling_refused", asked=sizes, why=str(error))
            return False, "; ".join([*messages, str(error)])
        self._progress.note("; ".join(messages))
        return True, "; ".join(messages)

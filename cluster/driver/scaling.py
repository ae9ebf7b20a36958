"""Change the size of pools during a run, by the rule or on request, and report unused GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from cluster.driver.autoscale import Autoscaler, Meter
from cluster.driver.iteration import Metrics
from cluster.driver.services import ActorServices
from configs.load import ConfigError
from configs.schema import RunConfig
from records.errors import error_summary
from records.progress import Progress
from records.rundir import Event, RunDirectory


class UnusedGpus:
    """Reports GPUs that joined the cluster after the start of the run and that no job uses.

    They are reported after the second iteration in a row, as an actor may be about to start there,
    and again only if they become more.
    """

    def __init__(self, config: RunConfig, event: Event, note: Callable[[str], None]):
        self._event, self._note = event, note
        self._last = self._reported = 0
        self._uses = [
            *["`sol-rl scale` adds rollout actors"] * (config.plan.explore is not None),
            *["a stop and --resume choose a new layout"] * (config.layout is not None),
        ]

    def observe(self, gpus: int) -> None:
        """Take note of the number of such GPUs after an iteration."""
        unused, self._last = min(gpus, self._last), gpus
        if unused <= self._reported:
            return
        self._reported = unused
        self._event("gpus_unused", gpus=unused)
        line = f"no job uses {unused} GPUs that joined the cluster after the start"
        self._note("; ".join([line, *self._uses]))


class Scaling:
    """Measures the load of the pools in each iteration, and scales them."""

    def __init__(
        self, config: RunConfig, services: ActorServices, rundir: RunDirectory, progress: Progress
    ):
        self._services, self._rundir, self._progress = services, rundir, progress
        self._meter = Meter(services.pools)
        self._autoscaler = Autoscaler(config.services.autoscale, config.services.rollout)
        self._explores = config.plan.explore is not None
        self._unused_gpus = UnusedGpus(config, rundir.event, progress.note)
        self.running: asyncio.Task[tuple[bool, str]] | None = None  # scaling by the rule

    def begin_iteration(self) -> None:
        """Start measuring an iteration."""
        self._meter.begin()

    def metrics(self, seconds: float) -> Metrics:
        """Return the load metrics of an iteration that took ``seconds``."""
        return {**self._meter.row(seconds)}

    def end_iteration(self, row: Mapping[str, float | str]) -> None:
        """Look for new nodes after an iteration, and apply the rule to its metrics ``row``."""
        self._services.refresh_nodes()
        self._unused_gpus.observe(self._services.places.joined_gpus)
        self._follow_rule(row)

    def _follow_rule(self, row: Mapping[str, float | str]) -> None:
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

"""One training run from the first actor to the report: start or resume, iterate, evaluate,
checkpoint, stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray

from analysis.report.page import build_report
from cluster.driver.autoscale import Autoscaler, Meter
from cluster.driver.held_out import HeldOut
from cluster.driver.iteration import Iteration
from cluster.driver.layout import on_this_cluster
from cluster.driver.loop import Ring
from cluster.driver.services import Services, check_run_root, join_or_start_ray
from cluster.driver.status import Reporter
from cluster.driver.stopping import Stopping, unless_stopped
from cluster.driver.store import check_store
from cluster.jobs.control import Link
from cluster.runtime.nodes import find_room
from configs.load import ConfigError
from configs.prompts import Prompt, read_prompts
from configs.schema import RunConfig
from learner.checkpoint import CheckpointError, latest_checkpoint, read
from learner.schedules import stop_reason
from planning.layouts.resolve import as_started, keep_layout
from planning.preflight import check_model, check_resumable, check_scorers
from records.errors import InputsLost, RunFailed, StateLost, Stopped
from records.progress import Progress
from records.rundir import RunDirectory, write_json
from records.sinks import Sinks, check_sinks
from records.timeline import Timeline


def train(config: RunConfig, resume: bool) -> RunDirectory:
    """Train to the end of ``config``; returns the finished run's directory.

    Raises:
        ConfigError: something about the configuration or the command is wrong, or another driver
            has the run; nothing was started.
        RunFailed: the run cannot go on.
        Stopped: a signal asked it to stop; it says whether there is a checkpoint.
    """
    train_prompts, test_prompts = (
        read_prompts(config.prompts.train),
        read_prompts(config.prompts.test),
    )
    check_model(config)
    check_scorers(config)
    check_sinks(config)
    rundir = RunDirectory.of(config)
    with contextlib.ExitStack() as alone:
        if resume:
            started = rundir.configuration()
            check_resumable(as_started(config, started), rundir)
            config = keep_layout(config, started)
            alone.enter_context(rundir.held())
        joined = join_or_start_ray(config)
        try:
            check_run_root(config, joined)
            config = on_this_cluster(config, partial(print, flush=True))
            check_store(
                config,
                asyncio.run(unless_stopped(find_room(config, tell=partial(print, flush=True)))),
            )
            if not resume:
                alone.enter_context(rundir.held())
                rundir.create(config)
            session = Session(
                config, rundir, train_prompts, test_prompts[: config.evaluate.prompts]
            )
            asyncio.run(session.run(resume))
        except CheckpointError as error:
            raise RunFailed(str(error)) from None
        except OSError as error:
            raise RunFailed(
                f"{rundir.path}: {error.strerror or error}: mend that and continue with --resume"
            ) from None
        finally:
            ray.shutdown()
    return rundir


def run_key() -> str:
    """What tells this run from others of its name on the same cluster."""
    return ray.get_runtime_context().get_job_id()


class Session:
    """The state of one ``train`` call."""

    def __init__(
        self,
        config: RunConfig,
        rundir: RunDirectory,
        train_prompts: list[Prompt],
        test_prompts: list[Prompt],
        progress: Progress | None = None,
    ):
        self.config, self.rundir = config, rundir
        self.held_out = HeldOut(config, rundir, test_prompts)
        self.progress = progress or Progress(title=f"Sol-RL: {config.name}")
        self.services = Services(
            config, rundir, rundir.event, Timeline(rundir.timeline_file).record
        )
        self.ring = Ring(config, self.services, train_prompts, self.progress, rundir.event)
        self.sinks = Sinks(config, rundir, rundir.event)
        self.next_iteration = 0
        self.saved_iteration: int | None = None
        self.seconds_before = 0.0
        self.samples_seen = 0
        self.began = time.monotonic()
        self.restored = 0
        self.last_row: dict[str, Any] = {}
        self._stopping = Stopping(self.ring.updating)
        self._learner_is_there = (
            False  # with the state of ``next_iteration``, or between two of its updates
        )
        self._meter = Meter(self.services.pools)
        self._autoscaler = Autoscaler(config.services.autoscale, config.services.rollout)
        self._scaling: asyncio.Task[Any] | None = None
        self._link = Link(
            f"{config.name}#{run_key()}", Reporter(self, str(rundir.path)).state, self._scale
        )

    async def run(self, resume: bool) -> None:
        """Everything between the first and the last actor; events and the report are written
        whatever happens.
        """
        self._stopping.listen()
        checkpoint = self._rewind() if resume else None
        began = (
            {
                "iteration": self.next_iteration,
                "checkpoint": checkpoint.name if checkpoint else None,
            }
            if resume
            else {}
        )
        self.rundir.event(
            "run_resumed" if resume else "run_started",
            arm=self.config.arm,
            iterations=self.config.iterations,
            **began,
        )
        if why := self.rundir.unlocked:
            self.rundir.event(
                "run_not_locked", why=f"{why}: nothing keeps a second driver out of this directory"
            )
        link = asyncio.create_task(self._link.live())
        try:
            with self.progress:
                await self._train(checkpoint)
            self.rundir.event("run_finished", iterations=self.next_iteration)
        except asyncio.CancelledError:
            raise await self._stopped() from None
        except RunFailed as failure:
            self.rundir.event("run_failed", why=str(failure))
            raise
        finally:
            self._stopping.over()
            await self.ring.close()
            await self._end(link)
            await self.services.stop()
            self.sinks.close()
            self._report()

    async def _end(self, *tasks: asyncio.Task[Any]) -> None:
        """Let go of what runs beside the work."""
        beside = [task for task in (*tasks, self._scaling) if task is not None]
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await self._link.leave()

    def _report(self) -> None:
        """Write the report; a disk that has no room for it must not hide how the run itself ended."""
        try:
            build_report(self.rundir.path)
        except OSError as error:
            self.progress.note(f"report.html could not be written: {error.strerror or error}")

    async def _train(self, checkpoint: Path | None) -> None:
        self.progress.note("starting actors")
        await self.services.start()
        while True:
            try:
                return await self._continue(checkpoint)
            except (StateLost, InputsLost) as loss:
                self._learner_is_there = False
                checkpoint = await self._restore(str(loss))

    async def _restore(self, why: str) -> Path | None:
        """Put a new learner in the place of the old one and go back to the newest checkpoint, as
        ``--resume`` does.

        Everything after it is done again and comes out the same, so that a version is published
        again with the bytes it had.
        """
        limit, before = self.config.services.learner.max_restarts, self.next_iteration
        if self.restored >= limit:
            raise RunFailed(
                f"{why}; services.learner.max_restarts = {limit} returns to a checkpoint are used"
                " up: mend the cause and continue with --resume"
            )
        self.restored += 1
        began = time.monotonic()
        await self.ring.close()
        checkpoint = self._rewind(in_process=True)
        await self.services.learner.renew(why)
        seconds = round(time.monotonic() - began, 3)
        name = checkpoint.name if checkpoint else None
        self.rundir.event(
            "learner_restored",
            why=why,
            during=before,
            iteration=self.next_iteration,
            checkpoint=name,
            seconds=seconds,
        )
        self.progress.note(f"{why}: back to iteration {self.next_iteration} with a new learner")
        return checkpoint

    async def _continue(self, checkpoint: Path | None) -> None:
        """From ``checkpoint``, or from the beginning, to the end."""
        config = self.config
        if checkpoint is not None:
            await self.services.learner.call(("load", checkpoint.name), "load", str(checkpoint))
        self._learner_is_there = True
        self.progress.start(config.iterations, self.next_iteration)
        await self._evaluate_where_due()
        await self.ring.begin(self.next_iteration)
        if why := self.services.weights.why:
            self.progress.note(f"exploring in {self.services.weights.chosen} ({why})")
        await self._write_quantisation_table()
        why_stop = self._why_stop()
        while self.next_iteration < config.iterations and why_stop is None:
            await self._iterate()
            why_stop = self._why_stop()
            if self.next_iteration % config.checkpoint.every == 0:
                await self._save()
            await self._evaluate_where_due()
        if why_stop:
            self.rundir.event("stopped_early", why=why_stop, iteration=self.next_iteration)
            self.progress.note(f"stopping: {why_stop}")
        await self._save()
        await self._evaluate_where_due(last=True)

    async def _iterate(self) -> None:
        index = self.next_iteration
        self._meter.begin()
        metrics, it = await self.ring.iteration(index)
        self.next_iteration = index + 1
        self._record(it, {**metrics, **self._meter.row(metrics["time/iteration_s"])})
        if self.ring.guard.backend != self.ring.guard.backend_before:
            await self._write_quantisation_table()

    def _why_stop(self) -> str | None:
        """Of the newest iteration, so that a run which goes on there is stopped where it was to
        stop.
        """
        return (
            stop_reason(self.config.stop, self.last_row, self.last_row["seconds"] / 60)
            if self.last_row
            else None
        )

    def _record(self, it: Iteration, metrics: dict[str, Any]) -> None:
        self.samples_seen += self.config.selection.keep * self.config.prompts.per_iteration
        row = {
            "kind": "iteration",
            "iteration": it.index,
            "seconds": self._seconds(),
            "samples_seen": self.samples_seen,
            **metrics,
        }
        self.sinks.row(row)
        if it.chosen:
            self.rundir.selection(it.index, it.version, it.selected)
        self.progress.iteration_finished(row)
        self.last_row = row
        self.services.look_at_nodes()
        self._autoscale(row)

    # ---- size

    def _autoscale(self, row: dict[str, Any]) -> None:
        if self.config.plan.explore is None or (
            self._scaling is not None and not self._scaling.done()
        ):
            return
        size = self.services.rollout.alive
        wanted = self._autoscaler.size_after(size, row)
        if wanted != size:
            self._scaling = asyncio.create_task(self._scale({"rollout": wanted}, partly=True))

    async def _scale(self, sizes: dict[str, int], partly: bool = False) -> tuple[bool, str]:
        """Bring pools to other sizes while they work, ``partly`` where that is all there is room
        for; (done, what came of it in words).
        """
        said = []
        try:
            for kind, size in sizes.items():
                said.append(await self.services.scale(kind, size, partly))
        except ConfigError as error:
            self.rundir.event("scaling_refused", asked=sizes, why=str(error))
            return False, "; ".join([*said, str(error)])
        self.progress.note("; ".join(said))
        return True, "; ".join(said)

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.began

    async def _evaluate_where_due(self, last: bool = False) -> None:
        """Score the held-out prompts; also where a loss or a kill cut that short, before the run
        goes on from there.
        """
        if self.held_out.due(self.next_iteration, last):
            row = await self.held_out.evaluate(self.services, self.next_iteration, self._seconds())
            self.sinks.row(row)
            self.progress.evaluation_finished(row)

    # ---- checkpoints

    async def _save(self) -> None:
        if self.saved_iteration == self.next_iteration:
            return
        extra = {
            "iteration": self.next_iteration,
            "time": time.time(),
            "seconds": self._seconds(),
            "samples_seen": self.samples_seen,
            "guard": self.ring.guard.state,
            "backend": self.services.weights.chosen,
        }
        path = self.rundir.checkpoints / f"step_{self.next_iteration:06d}"
        await self.services.learner.call(("save", self.next_iteration), "save", str(path), extra)
        self.saved_iteration = self.next_iteration
        self.rundir.event("checkpoint_saved", iteration=self.next_iteration, path=path.name)

    async def _stopped(self) -> Stopped:
        """The learner's weights stand between two updates whenever the work was cancelled: save
        them. The end, in words.
        """
        why = None
        if self._learner_is_there and self.saved_iteration != self.next_iteration:
            why = await self._stopping.save(self._save(), self.config.services.learner.deadline_s)
        if why:
            self.rundir.event("checkpoint_missed", iteration=self.next_iteration, why=why)
        self.rundir.event(
            "run_stopped", signal=self._stopping.signal, iteration=self.next_iteration
        )
        without = f", without its checkpoint ({why})" if why else ""
        return Stopped(
            f"stopped by {self._stopping.signal} before iteration {self.next_iteration}{without};"
            " continue with --resume"
        )

    def _rewind(self, in_process: bool = False) -> Path | None:
        """The newest whole checkpoint, with everything that was recorded after it forgotten; None:
        from the beginning.

        ``in_process``: the run goes on, so its clock does too, and its events stay.
        """
        path = latest_checkpoint(self.rundir.checkpoints)
        extra = (
            read(path)[1]["extra"]
            if path
            else {"iteration": 0, "seconds": 0.0, "samples_seen": 0, "time": 0.0}
        )
        if path is None and not in_process:
            self.progress.note("no checkpoint yet: starting from the beginning")
        self.next_iteration = extra["iteration"]
        self.saved_iteration = extra["iteration"] if path else None
        self.samples_seen = extra["samples_seen"]
        self.ring.guard.restore(extra.get("guard", {}))
        if not in_process:
            self.seconds_before = extra["seconds"]
            self.services.weights.chosen = extra.get("backend")
        self.rundir.truncate(self.next_iteration, math.inf if in_process else extra["time"])
        self.last_row = next(
            (row for row in reversed(self.rundir.metrics()) if row["kind"] == "iteration"), {}
        )
        return path

    async def _write_quantisation_table(self) -> None:
        """``quantisation.json``: every module of the denoiser, whether explorers run it quantised,
        and why.
        """
        if self.config.plan.explore is not None:
            table = await self.services.learner.call(("quantisation",), "quantisation")
            write_json(self.rundir.path / "quantisation.json", table)

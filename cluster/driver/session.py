"""A training session, from the first actor to the report: begin, iterate, evaluate, save, stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from functools import partial
from pathlib import Path

import ray

from analysis.report.page import build_report
from cluster.driver.actor_events import ActorEvents
from cluster.driver.checkpoints import Checkpoints, Position
from cluster.driver.cleanup import CleanupStep, reason_of, run_cleanup, traceback_field
from cluster.driver.extremes import Extremes
from cluster.driver.held_out import HeldOut
from cluster.driver.iteration import Iteration, Metrics
from cluster.driver.live_report import LiveReport
from cluster.driver.loop import Ring
from cluster.driver.scaling import Scaling
from cluster.driver.services import ActorServices
from cluster.driver.status import Reporter
from cluster.driver.stop_signals import Stopping
from cluster.jobs.board import Link
from cluster.runtime.garbage import fewer_collections
from cluster.runtime.tasks import cancel_all
from configs.prompts import Prompt
from configs.schema import RunConfig
from learner.schedules import stop_reason
from records.errors import InputsLost, RunFailed, StateLost, Stopped
from records.progress import Progress
from records.rundir import RunDirectory, write_json
from records.sinks import Sinks
from records.timeline import Timeline


class Session:
    """One ``train`` call.

    Its parts hold the progress of the run (``position``), save it, score held-out prompts, scale
    pools, and handle signals; this class defines the order in which they work.
    """

    def __init__(
        self,
        config: RunConfig,
        rundir: RunDirectory,
        train_prompts: list[Prompt],
        test_prompts: list[Prompt],
        progress: Progress | None = None,
    ):
        self.config, self.rundir = config, rundir
        self.progress = progress or Progress(title=f"Sol-RL: {config.name}")
        self.position, self._prompts = Position(), (train_prompts, test_prompts)
        self._timeline = Timeline(
            rundir.timeline_file,
            lambda why: rundir.event("timeline_ended", why=why),
            rundir.append_spans,
        )
        told = ActorEvents(rundir.event, self.progress)
        self.services = ActorServices(config, rundir, told.event, self._timeline.record)
        event, note = rundir.event, self.progress.note
        self.progress.on_closed = lambda why: rundir.event("output_closed", why=why)
        self.sinks = Sinks(config, rundir, event)
        self.extremes = Extremes(config, rundir, event, note, self.sinks.images)
        self.ring = Ring(config, self.services, train_prompts, self.progress, event, self.extremes)
        self.live_report = LiveReport(rundir.path, config.logging.report_every_s, event, note)
        self.held_out = HeldOut(config, rundir, test_prompts)
        self.checkpoints = Checkpoints(rundir, self.services, self.ring.monitor, self.position)
        self.scaling = Scaling(config, self.services, rundir, self.progress)
        self._stopping = Stopping(self.ring.updating)
        # True while the learner holds the state of ``position``, or is between two of its updates
        self._has_learner = False

    async def run(self, resume: bool) -> None:
        """Run the session; events and the report are written whatever happens.

        Raises RunFailed if the run cannot continue, Stopped if a signal ended it.
        """
        self._stopping.listen()
        checkpoint = self._begin(resume)
        reporter = Reporter(self, str(self.rundir.path))
        # the job id distinguishes this run from others of its name on the same cluster
        key = f"{self.config.name}#{ray.get_runtime_context().get_job_id()}"
        link = Link(key, reporter.state, self.scaling.scale, self.rundir.event)
        linked = asyncio.create_task(link.live())
        self.live_report.begin()
        try:
            with self.progress, fewer_collections():
                await self._train(checkpoint)
            self.rundir.event("run_finished", iterations=self.position.next_iteration)
        except asyncio.CancelledError:
            raise await self._stopped() from None
        except Exception as failure:
            with contextlib.suppress(OSError):  # a full disk may be why it failed
                self.rundir.event("run_failed", why=reason_of(failure), **traceback_field(failure))
            raise
        finally:
            await self._end(link, linked)

    async def _end(self, link: Link, linked: asyncio.Task[None]) -> None:
        self._stopping.over()
        tasks = [linked, *([self.scaling.running] if self.scaling.running else [])]
        # callers end before the pools they call: a stopped pool never answers a task
        ends: list[CleanupStep] = [
            ("exploring ahead", self.ring.close),
            ("scaling", partial(cancel_all, tasks)),
            ("leaving the board", link.leave),
            ("images", self.extremes.close),
            ("stopping actors", self.services.stop),
            # after the extremes, which send their images to the sinks
            ("sinks", self.sinks.close),
            ("closing the live report", self.live_report.close),
            ("the timeline", self._timeline.write),
            # last: the report shows what all of these have written
            ("report.html", self._write_report),
        ]
        await run_cleanup(ends, self.rundir.event, self.progress.note)

    def _write_report(self) -> None:
        if not self.rundir.lost:
            build_report(self.rundir.path)

    def _begin(self, resume: bool) -> Path | None:
        """Record the start; return the checkpoint to continue from, or None for the beginning."""
        event, config = self.rundir.event, self.config
        arm, iterations, checkpoint = config.arm, config.iterations, None
        if resume:
            checkpoint = self.checkpoints.rewind()
            if checkpoint is None:
                self.progress.note("no checkpoint yet: starting from the beginning")
            iteration, name = self.position.next_iteration, checkpoint.name if checkpoint else None
            event(
                "run_resumed", arm=arm, iterations=iterations, iteration=iteration, checkpoint=name
            )
            self._compare_replicas(iteration)
        else:
            event("run_started", arm=arm, iterations=iterations)
        if why := self.rundir.lock_unsupported:
            self.rundir.not_locked(why)
        return checkpoint

    def _compare_replicas(self, iteration: int) -> None:
        """Record that the learner has other replicas than the run started with."""
        before = self.rundir.configuration().services.learner.replicas
        now = self.config.services.learner.replicas
        if now != before:
            self.rundir.event("replicas_changed", before=before, now=now, iteration=iteration)
            self.progress.note(
                f"services.learner.replicas: {before} at the start, {now} from iteration"
                f" {iteration + 1} on: gradients are summed in another order"
            )

    async def _train(self, checkpoint: Path | None) -> None:
        self.progress.starting(sum(len(pool.members) for pool in self.services.pools))
        await self.services.encode_once(*self._prompts)
        await self.services.start()
        while True:
            try:
                return await self._continue(checkpoint)
            except (StateLost, InputsLost) as loss:
                # InputsLost: inputs of the learner were lost with another node, and some of them
                # only an earlier state of the learner could produce again
                self._has_learner = False
                checkpoint = await self._restore(str(loss))
                if isinstance(loss, InputsLost):
                    await self.services.encode_lost(*self._prompts)

    async def _restore(self, why: str) -> Path | None:
        """Replace the learner and return to the newest checkpoint, as ``--resume`` does.

        Everything after the checkpoint is repeated with the same results, so that a version is
        published again with equal bytes. As both recover in the same way, there is no second
        recovery path to test.
        """
        position, limit = self.position, self.config.services.learner.max_restarts
        before = position.next_iteration
        if position.restored >= limit:
            raise RunFailed(
                f"{why}; services.learner.max_restarts = {limit} returns to a checkpoint are"
                " exhausted: fix the cause and continue with --resume"
            )
        # counted over the session: else a learner that dies in every iteration would be restored
        # without end
        position.restored += 1
        began = time.monotonic()
        # what is explored ahead belongs to an iteration that will be started again
        await self.ring.close()
        self._timeline.write()  # records before the rewind must not be written after it
        checkpoint = self.checkpoints.rewind(in_process=True)
        await self.services.learners.renew(why)
        self.rundir.event(
            "learner_restored",
            why=why,
            during=before,
            iteration=position.next_iteration,
            checkpoint=checkpoint.name if checkpoint else None,
            seconds=round(time.monotonic() - began, 3),
        )
        self.progress.note(
            f"{why}: returning to iteration {position.next_iteration} with a new learner"
        )
        return checkpoint

    async def _continue(self, checkpoint: Path | None) -> None:
        """Train from ``checkpoint``, or from the beginning, to the end."""
        config, position = self.config, self.position
        if checkpoint is not None:
            await self.services.learner.load(checkpoint.name, str(checkpoint))
        self._has_learner = True
        self.progress.restore(position.first_reward, position.held_out)
        self.progress.start(config.iterations, position.next_iteration)
        await self.ring.begin(position.next_iteration)
        if why := self.services.weights.why:
            self.progress.note(f"exploring in {self.services.weights.chosen} ({why})")
        await self._write_quantization_table()
        why_stop = self._why_stop()
        while position.next_iteration < config.iterations and why_stop is None:
            self.rundir.require_claim()
            await self._evaluate_where_due()
            await self._iterate()
            why_stop = self._why_stop()
            # before the next evaluation, which may take long and is repeated after a loss
            if position.next_iteration % config.checkpoint.every == 0:
                await self.checkpoints.save()
        if why_stop:
            self.rundir.event("stopped_early", why=why_stop, iteration=position.next_iteration)
            self.progress.note(f"stopping: {why_stop}")
        # before the last evaluation, which a loss or a kill may cut short
        await self.checkpoints.save()
        await self._evaluate_where_due(last=True)

    async def _iterate(self) -> None:
        index = self.position.next_iteration
        self.scaling.begin_iteration()
        metrics, it = await self.ring.iteration(index)
        self._timeline.write()  # before a checkpoint: a resumed run has all records before it
        self.position.next_iteration = index + 1
        self._record(it, metrics | self.scaling.metrics(float(metrics["time/iteration_s"])))
        # the monitor changed the precision: other modules are quantized from this version on
        if self.ring.monitor.backend != self.ring.monitor.backend_before:
            await self._write_quantization_table()
        gc.collect()  # a reference in a cycle keeps its object in the store

    def _why_stop(self) -> str | None:
        """Return why the run should stop after the newest iteration, or None.

        That iteration may have been run before a resume.
        """
        row = self.position.last_row
        return stop_reason(self.config.stop, row, row["seconds"] / 60) if row else None

    def _record(self, it: Iteration, metrics: Metrics) -> None:
        position = self.position
        position.samples_seen += self.config.selection.keep * self.config.prompts.per_iteration
        row: Metrics = {
            "kind": "iteration",
            "iteration": it.index,
            "seconds": position.seconds,
            "samples_seen": position.samples_seen,
            **metrics,
        }
        self.sinks.row(row)
        if it.candidates:
            self.rundir.selection(it.index, it.version, it.selected)
        self.progress.iteration_finished(row)
        position.last_row = {k: value for k, value in row.items() if not isinstance(value, str)}
        self.scaling.end_iteration(row)

    async def _evaluate_where_due(self, last: bool = False) -> None:
        """Score the held-out prompts if an evaluation is due.

        An evaluation that a loss or a kill interrupted is due again before the run continues.
        """
        iteration = self.position.next_iteration
        if self.held_out.due(iteration, last):
            if self.config.explores_meanwhile and not last:
                self.ring.exploration.begin(iteration)
            row = await self.held_out.evaluate(self.services, iteration, self.position.seconds)
            self.sinks.row(row)
            self.progress.evaluation_finished(row)
            self.live_report.due()

    async def _stopped(self) -> Stopped:
        """Save a checkpoint if possible, and return the exception that ends the run.

        A first signal cancels the work only between two updates, so the learner's weights can be
        saved.
        """
        why, iteration = None, self.position.next_iteration
        if self._has_learner and not self.checkpoints.up_to_date:
            limit_s = self.config.services.learner.deadline_s
            why = await self._stopping.save(self.checkpoints.save(), limit_s)
        if why:
            self.rundir.event("checkpoint_missed", iteration=iteration, why=why)
        signal = self._stopping.signal
        self.rundir.event("run_stopped", signal=signal, iteration=iteration)
        without = f", without its checkpoint ({why})" if why else ""
        return Stopped(
            f"stopped by {signal} before iteration {iteration}{without}; continue with --resume"
        )

    async def _write_quantization_table(self) -> None:
        """Write ``quantization.json``: which modules rollout actors run quantized, and why.

        It has a row for every module of the denoiser.
        """
        if self.config.plan.explore is not None:
            table = await self.services.learner.quantization()
            write_json(self.rundir.path / "quantization.json", table)

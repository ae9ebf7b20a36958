"""Train a configuration to a finished run: checks before the first actor, Ray, the session."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from functools import partial

import ray

from cluster.driver.checkpoints import read_driver_state
from cluster.driver.connect import check_run_root, ends_with_ray, join_or_start_ray
from cluster.driver.held_out import HeldOut
from cluster.driver.layout import choose_cluster_layout
from cluster.driver.live_report import PROGRAM
from cluster.driver.session import Session
from cluster.driver.stop_signals import unless_stopped
from cluster.driver.store import check_store
from cluster.runtime import ray_directory
from cluster.runtime.nodes import find_room
from configs.prompts import read_prompts, refuse_overlap
from configs.schema import RunConfig
from learner.checkpoint import CheckpointError, latest_checkpoint
from planning.layouts.resolve import keep_layout
from planning.layouts.spec import as_recorded
from planning.layouts.threads import keep_threads
from planning.preflight import check_model, check_prompts, check_resumable, check_scorers
from records.errors import RunFailed, Stopped
from records.progress import status_spinner
from records.rundir import RunDirectory
from records.sinks import check_sinks
from records.storage import expect, given_up, outages_told


def train(config: RunConfig, resume: bool) -> RunDirectory:
    """Train ``config`` to its end; return the finished run's directory.

    Raises:
        ConfigError: The configuration or the command is wrong, or another driver has the run;
            nothing was started.
        RunFailed: The run cannot continue.
        Stopped: A signal stopped it; the message says if there is no checkpoint.
    """
    train_prompts = read_prompts(config.prompts.train)
    test_prompts = read_prompts(config.prompts.test)[: config.evaluate.prompts]
    refuse_overlap(config.prompts, train_prompts, test_prompts)
    rundir = RunDirectory.of(config)
    if resume:
        rundir.require_existing()
    else:
        rundir.require_new()
    check_model(config)
    check_prompts(config, [*train_prompts, *test_prompts])
    check_scorers(config)
    check_sinks(config)
    with contextlib.ExitStack() as locks:
        if resume:
            started = rundir.configuration()
            check_resumable(as_recorded(config, started), rundir)
            config = keep_threads(keep_layout(config, started), started)
            locks.enter_context(rundir.locked())
            refuse_damaged(rundir)
            HeldOut(config, rundir, test_prompts).before()
        with status_spinner("starting Ray"):
            joined = join_or_start_ray(config)
        try:
            check_run_root(config, joined)
            config = choose_cluster_layout(config, _tell)
            check_store(config, asyncio.run(unless_stopped(find_room(config, tell=_tell))))
            if not resume:
                # not earlier: locking creates the directory, and until here the run may be refused
                locks.enter_context(rundir.locked())
                rundir.create(config)
            rundir.claim()
            expect(rundir.config_file)
            if not joined and (why := ray_directory.replaced()):
                rundir.event("ray_directory_replaced", why=why)
            with (
                ends_with_ray("continue with --resume", partial(_record_end, rundir)),
                outages_told(partial(rundir.event, "storage_retried")),
            ):
                asyncio.run(Session(config, rundir, train_prompts, test_prompts).run(resume))
        except CheckpointError as error:
            raise RunFailed(str(error)) from None
        except OSError as error:
            why = f"{error.filename or rundir.path}: {error.strerror or error}"
            if signal := given_up():
                raise Stopped(f"stopped by {signal} ({why}); continue with --resume") from None
            raise RunFailed(f"{why}: fix that and continue with --resume") from None
        finally:
            ray.shutdown()  # pyright: ignore[reportUnknownMemberType]
    return rundir


def _record_end(rundir: RunDirectory, why: str) -> None:
    """Record why a run has failed whose session can no longer do so."""
    rundir.event("run_failed", why=why)
    # by a process of its own, as Ray's library may end this one at any moment
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen([*PROGRAM, str(rundir.path), "0"], start_new_session=True, **quiet)


def _tell(line: str) -> None:
    """Print a line; ignore a closed output, which the run reports once it writes events."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def refuse_damaged(rundir: RunDirectory) -> None:
    """Raise RunFailed if the checkpoint to continue from is damaged."""
    try:
        newest = latest_checkpoint(rundir.checkpoints)
        if newest is not None:
            read_driver_state(newest)
    except CheckpointError as error:
        raise RunFailed(str(error)) from None

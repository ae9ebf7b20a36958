"""Connect to the Ray cluster of a run, or start Ray on this machine."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import ray

from cluster.jobs.dashboard import TOKEN_WANTED
from cluster.jobs.live_runs import is_token_error, require_listener
from cluster.runtime import template
from configs.load import ConfigError
from configs.schema import RunConfig
from planning.layouts.limits import refuse_on_this_machine
from planning.machine import usable_cores
from planning.placement import needs_of
from records.errors import RunFailed, first_line

log = logging.getLogger(__name__)
START_S = 300.0
"""Seconds within which Ray must have started on this machine."""
SLOW_START_S = 20.0
"""Seconds after which the user is told that Ray is slow to start."""
LOOK_S = 0.1
"""Seconds between two looks at whether Ray has started."""


def join_or_start_ray(config: RunConfig) -> bool:
    """Join the cluster at RAY_ADDRESS (set in a job), or start Ray here; return True if joined.

    On one machine the CPU count passed to Ray covers every actor's share, plus one additional
    rollout actor per core for scaling: CPU shares serve to divide up clusters, and must not keep a
    small machine from running the ring.

    Raises:
        ConfigError: Nothing listens at RAY_ADDRESS, or this machine cannot hold the actors.
        RunFailed: Ray can be neither joined nor started.
    """
    joined = bool(os.environ.get("RAY_ADDRESS"))
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if joined:
        require_listener(os.environ["RAY_ADDRESS"], "RAY_ADDRESS =")
        options["address"] = "auto"
    else:
        refuse_on_this_machine(config)
        template.start(config)  # before Ray, so that both start up at the same time
        cores, rollout = usable_cores(), config.services.rollout
        extra_actors = (rollout.max_actors or rollout.actors + cores) - rollout.actors
        shares = sum(need.cpus for need in needs_of(config)) + extra_actors * rollout.cpus
        options |= {
            "address": "local",
            "num_cpus": max(cores, math.ceil(shares)),
            "include_dashboard": False,
            # otherwise Ray prestarts workers, one more than the run ever uses
            "_system_config": {"prestart_worker_first_driver": False},
        }
    try:
        with _our_start():
            ray.init(**options)  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:  # Ray has no exception class for a failed start
        if isinstance(error, OSError) and error.filename and not joined:
            raise ConfigError(
                f"Ray cannot write {error.filename} ({error.strerror}): set HOME, where it keeps"
                " its token, and RAY_TMPDIR to directories that can be written"
            ) from error
        why = TOKEN_WANTED if is_token_error(error) else first_line(error)
        failure = (
            "Ray's cluster at RAY_ADDRESS cannot be joined"
            if joined
            else "Ray did not start on this machine"
        )
        raise RunFailed(f"{failure}: {why}") from error
    return joined


@contextlib.contextmanager
def _our_start() -> Generator[None]:
    """Start Ray's processes in process groups of their own, and wait longer for them than Ray does.

    A signal to the driver's group, as ``timeout`` sends it, would otherwise end Ray at once, and
    with it the learner, before the driver has a checkpoint. They still end with the driver.
    """
    # private: Ray keeps SIGINT from its processes, but has no option for other signals, and none
    # for how long it waits for them, 30 s; a busy machine took longer
    from ray._private import services

    popen: Any = services.ConsolePopen
    get_node: Any = services.get_node  # pyright: ignore
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options, process_group=0))
        return started[-1]

    services.ConsolePopen = start  # pyright: ignore
    services.get_node = partial(_registered_node, get_node, started)
    try:
        yield
    finally:
        services.ConsolePopen, services.get_node = popen, get_node


def _registered_node(
    get_node: Callable[..., Any], started: Sequence[subprocess.Popen[bytes]], *args: Any
) -> Any:
    """Return Ray's description of this node once it is registered.

    Raises RuntimeError, as ``get_node`` does, after ``START_S`` or if a process of Ray has failed.
    """
    began, told = time.monotonic(), False
    while True:
        try:
            return get_node(*args)
        except RuntimeError:
            waited = time.monotonic() - began
            if waited > START_S or any(process.poll() for process in started):
                raise
        if waited > SLOW_START_S and not told:
            log.warning(f"Ray has not started after {waited:.0f} s: waiting up to {START_S:.0f} s")
            told = True
        time.sleep(LOOK_S)


def check_run_root(config: RunConfig, joined: bool) -> None:
    """Raise ConfigError if the run root is missing on a cluster or would be lost with the job."""
    if joined and config.run_root is None:
        raise ConfigError(
            "run_root is required on a cluster: give a writable directory that all nodes share,"
            " --set run_root=DIR"
        )
    path = os.path.abspath(config.run_root or "runs")
    if "/runtime_resources/working_dir_files/" in path:
        raise ConfigError(
            f"run_root = {path!r}: is in the job's temporary working directory and would be"
            " deleted with it; give a shared directory"
        )

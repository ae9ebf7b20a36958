"""Connect to the Ray cluster of a run, or start Ray on this machine."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable, Generator

import ray
from rich.console import Console

from cluster.jobs.dashboard import TOKEN_WANTED
from cluster.jobs.live_runs import is_token_error, require_listener
from cluster.runtime import local_ray, ray_directory, ray_end, template
from configs.load import ConfigError
from configs.schema import RunConfig
from planning.layouts.limits import refuse_on_this_machine
from planning.machine import usable_cores
from planning.placement import needs_of
from records.errors import RUN_FAILED, RunFailed, first_line

log = logging.getLogger(__name__)
UNWATCHED = (
    "Ray's processes cannot be watched from here (another container, a sandbox, or a kernel before"
    " 5.3): if they end, so does this process, without a reason and with exit code 1"
)
NO_HOME = "Could not determine home directory."
"""What ``pathlib`` raises if there is neither HOME nor an entry for the user."""


def join_or_start_ray(config: RunConfig) -> bool:
    """Join the cluster at RAY_ADDRESS (set in a job), or start Ray here; return True if joined.

    On one machine the CPU count passed to Ray covers every actor's share, plus one additional
    rollout actor per core for scaling: CPU shares serve to divide up clusters, and must not keep a
    small machine from running the ring.

    Raises:
        ConfigError: Nothing listens at RAY_ADDRESS, or this machine cannot hold the actors or
            Ray's files.
        RunFailed: Ray can be neither joined nor started.
    """
    joined = bool(os.environ.get("RAY_ADDRESS"))
    if joined:
        require_listener(os.environ["RAY_ADDRESS"], "RAY_ADDRESS =")
    else:
        refuse_on_this_machine(config)
        _refuse_environment()
        template.start(config)  # before Ray, so that both start up at the same time
    try:
        if joined:
            ray.init(address="auto", logging_level="ERROR", log_to_driver=False)  # pyright: ignore
        else:
            local_ray.start_ray(_cpus(config))
    except Exception as error:  # Ray has no exception class for a failed start
        if isinstance(error, OSError) and error.filename and not joined:
            raise ConfigError(
                f"Ray cannot write {error.filename} ({error.strerror}): set HOME, where it keeps"
                " its token, and RAY_TMPDIR to directories that can be written"
            ) from error
        if str(error) == NO_HOME:
            raise ConfigError(
                "this user has no home directory, where Ray keeps its token: set HOME to a"
                " directory that can be written"
            ) from error
        why = TOKEN_WANTED if is_token_error(error) else first_line(error)
        failure = (
            "Ray's cluster at RAY_ADDRESS cannot be joined"
            if joined
            else "Ray did not start on this machine"
        )
        raise RunFailed(f"{failure}: {why}") from error
    return joined


def _refuse_environment() -> None:
    """Raise ConfigError if Ray has no place for its sockets and logs on this machine."""
    directory = os.environ.get(ray_directory.VARIABLE, "")
    if why := ray_directory.too_long(directory):
        raise ConfigError(f"{ray_directory.VARIABLE} = {directory!r}: {why}")
    if why := ray_directory.full(ray_directory.chosen()):
        raise ConfigError(f"{why}: make room, or set {ray_directory.VARIABLE}")


@contextlib.contextmanager
def ends_with_ray(advice: str, record: Callable[[str], None] | None = None) -> Generator[None]:
    """End this process if the Ray on this machine ends within the context, and say so.

    Ray's library would end it soon, without a reason. ``record`` is called with the reason. On a
    cluster this machine is the one of the driver; its Ray runs in the same PID namespace.
    """

    def end(why: str) -> None:  # called by a thread, while the main one may wait for Ray
        try:
            with contextlib.suppress(OSError):  # a closed terminal
                print(f"run failed: {why}; {advice}", file=sys.stderr, flush=True)
                Console().show_cursor()  # hidden while progress is shown on a terminal
            if record:
                record(why)
        finally:  # whatever failed, as for a full disk
            os._exit(RUN_FAILED)

    processes = ray_end.processes_of(ray.get_runtime_context().get_node_id())
    if not processes:
        log.warning(UNWATCHED)
    with ray_end.watched(processes, end):
        yield


def _cpus(config: RunConfig) -> int:
    """Return the number of CPUs for Ray on this machine."""
    cores, rollout = usable_cores(), config.services.rollout
    extra_actors = (rollout.max_actors or rollout.actors + cores) - rollout.actors
    shares = sum(need.cpus for need in needs_of(config)) + extra_actors * rollout.cpus
    return max(cores, math.ceil(shares))


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

"""Ray on this machine, which ends with the process that started it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray

from cluster.runtime import ray_directory

T = TypeVar("T")
log = logging.getLogger(__name__)
START_S = 280.0
"""Seconds within which Ray must have started. Its own limit, 30 s, is too short on busy machines.
"""
TRIES = 4
"""Number of starts. A node ends if its agents do not start within 15 s, for which Ray has no
setting (https://github.com/ray-project/ray/issues/65983).
"""
SLOW_START_S = 20.0
"""Seconds after which a warning says that Ray is slow to start."""
LOOK_S = 0.1
"""Seconds between two looks at whether Ray has started."""


class ProcessEnded(Exception):
    """A process of Ray ended while it was being started."""


def start_ray(num_cpus: int, **options: Any) -> None:
    """Start Ray and connect this process to it; ``options`` are others of ``ray.init``.

    A signal to this process's group, as ``timeout`` sends it, does not reach Ray: it would end at
    once, and with it the learner, before the driver has a checkpoint.

    If TMPDIR is too long for Ray's sockets, Ray's files are in /tmp/ray, and a warning says so.
    """
    if why := ray_directory.replaced():
        options["_temp_dir"] = os.path.join(ray_directory.chosen(), "ray")
        log.warning(why)
    retried_start(
        lambda: ray.init(  # pyright: ignore[reportUnknownMemberType]
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            # otherwise Ray prestarts workers, more than runs use
            _system_config={"prestart_worker_first_driver": False},
            **options,
        )
    )


def retried_start(start: Callable[[], T]) -> T:
    """Return what ``start`` returns, which starts processes of Ray and waits for their node.

    Raises ProcessEnded if one of them ended in each of ``TRIES`` tries.
    """
    for left in reversed(range(TRIES)):
        with _own_process_groups() as processes, _patience(processes):
            try:
                return start()
            except ProcessEnded as error:
                _kill(processes)
                if not left:
                    raise
                log.warning(f"{error}: starting Ray again")
    raise AssertionError


@contextlib.contextmanager
def _own_process_groups() -> Generator[list[subprocess.Popen[bytes]]]:
    """Start Ray's processes in process groups of their own, and yield a list of them."""
    # private: Ray keeps SIGINT from its processes, but has no option for other signals
    from ray._private import services

    popen: Any = services.ConsolePopen
    started: list[subprocess.Popen[bytes]] = []

    def start(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options, process_group=0))
        return started[-1]

    services.ConsolePopen = start  # pyright: ignore
    try:
        yield started
    finally:
        services.ConsolePopen = popen


@contextlib.contextmanager
def _patience(started: Sequence[subprocess.Popen[bytes]]) -> Generator[None]:
    """Wait ``START_S`` for the processes ``started``."""
    # private: Ray has no option for how long it waits
    from ray._private import services

    get_node: Any = services.get_node  # pyright: ignore
    services.get_node = partial(_registered_node, get_node, started)
    try:
        yield
    finally:
        services.get_node = get_node


def _registered_node(
    get_node: Callable[..., Any], started: Sequence[subprocess.Popen[bytes]], *args: Any
) -> Any:
    """Return Ray's description of this node once it is registered.

    Raises RuntimeError, as ``get_node`` does, after ``START_S``, and ProcessEnded.
    """
    began, told = time.monotonic(), False
    while True:
        try:
            return get_node(*args)
        except RuntimeError:
            waited = time.monotonic() - began
            if waited > START_S:
                raise
            for process in started:
                if process.poll():
                    raise ProcessEnded(_why(process)) from None
        if waited > SLOW_START_S and not told:
            log.warning(f"Ray has not started after {waited:.0f} s: waiting up to {START_S:.0f} s")
            told = True
        time.sleep(LOOK_S)


def _why(process: subprocess.Popen[bytes]) -> str:
    arguments: Any = process.args
    name = Path(arguments[0]).name
    sessions = [each.partition("=")[2] for each in arguments if re.match("--session.dir=", each)]
    log_file = f"; its log is {sessions[0]}/logs/{name}.err" if sessions else ""
    return (
        f"Ray's {name} ended at its start with code {process.returncode} (on a busy machine its"
        f" agents take longer than the 15 s that it gives them){log_file}"
    )


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill the process group of each of these processes."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

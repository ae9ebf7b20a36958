"""How Ray is joined or started for a run."""

from __future__ import annotations

import math
import os
from typing import Any

import ray

from cluster.jobs.dashboard import TOKEN_WANTED
from cluster.jobs.live_runs import require_listener, wants_token
from cluster.runtime import template
from configs.load import ConfigError
from configs.schema import RunConfig
from planning.layouts.limits import refuse_on_this_machine
from planning.placement import needs_of
from records.errors import RunFailed, first_line


def join_or_start_ray(config: RunConfig) -> bool:
    """Join the cluster of RAY_ADDRESS (a job has it set), or start Ray on this machine; True when
    joined.

    On one machine the CPU count given to Ray covers every actor's share, and a rollout actor more
    per core for scaling: the shares are there to share out clusters, not to keep a small machine
    from running the ring.

    Raises:
        ConfigError: nothing listens at RAY_ADDRESS, or this machine cannot hold the actors.
        RunFailed: Ray does neither.
    """
    joined = bool(os.environ.get("RAY_ADDRESS"))
    how: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if joined:
        require_listener(os.environ["RAY_ADDRESS"], "RAY_ADDRESS =")
        how["address"] = "auto"
    else:
        refuse_on_this_machine(config)
        template.start(config)  # before Ray, so that both come up at the same time
        cores, rollout = os.cpu_count() or 1, config.services.rollout
        more = (rollout.max_actors or rollout.actors + cores) - rollout.actors
        shares = sum(need.cpus for need in needs_of(config)) + more * rollout.cpus
        how |= {
            "address": "local",
            "num_cpus": max(cores, math.ceil(shares)),
            "include_dashboard": False,
            # or it starts workers before anybody asks, one more than the run ever has work for
            "_system_config": {"prestart_worker_first_driver": False},
        }
    try:
        ray.init(**how)  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:  # Ray's failures to start have no class of their own
        why = TOKEN_WANTED if wants_token(error) else first_line(error)
        what = (
            "Ray's cluster at RAY_ADDRESS cannot be joined"
            if joined
            else "Ray did not start on this machine"
        )
        raise RunFailed(f"{what}: {why}") from error
    return joined


def check_run_root(config: RunConfig, joined: bool) -> None:
    """On a cluster the run root must be named and must outlive the job. Raises ConfigError."""
    if joined and config.run_root is None:
        raise ConfigError(
            "run_root: required on a cluster: a directory that is shared and writable, --set"
            " run_root=DIR"
        )
    path = os.path.abspath(config.run_root or "runs")
    if "/runtime_resources/working_dir_files/" in path:
        raise ConfigError(
            f"run_root = {path!r}: lies in the job's unpacked working directory and would die"
            " with it; give a shared one"
        )

"""What no machine holds, said before anything is laid out or started."""

from __future__ import annotations

import os
from collections.abc import Sequence

from configs.load import ConfigError
from configs.schema import RunConfig
from planning.placement import Node, kinds_of

ACTOR_GB = 0.25
"""Host memory of an actor's process at least: Python, torch and Ray, before it loads a model."""
PER_CORE = 64
"""Processes on a core beyond which they do not even start within ``services.start_deadline_s``."""


def refuse_too_many(
    config: RunConfig, cpus: float, gpus: float, nodes: Sequence[Node] | None = None
) -> None:
    """Raises ConfigError where a service's actors ask for more than ``nodes`` have, or more than
    ``cpus`` and ``gpus``, which are assumed.
    """
    if nodes is not None:
        cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    if nodes is not None and config.services.wait_for_nodes_s:
        return
    where = "there are" if nodes is not None else "a plan assumes at most"
    for kind in kinds_of(config):
        service = config.services.of(kind)
        for what, each, most in (("CPU", service.cpus, cpus), ("GPU", service.gpus, gpus)):
            if service.count > 1000 and service.count * each > most:
                raise ConfigError(
                    f"services.{kind}: {service.count} actors of {each:g} {what} each need"
                    f" {service.count * each:g}, {where} {most:g}: at most"
                    f" {int(most / each)} have a place"
                )


def refuse_on_this_machine(config: RunConfig) -> None:
    """Raises ConfigError where the actors of a service cannot all live on this machine."""
    cores = os.cpu_count() or 1
    gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    most = min(int(gb / ACTOR_GB), PER_CORE * cores)
    for kind in kinds_of(config):
        if (count := config.services.of(kind).count) > most:
            named = "replicas" if kind == "learner" else "actors"
            raise ConfigError(
                f"services.{kind}.{named} = {count}: this machine has {cores} cores and"
                f" {gb:.1f} GB; an actor needs {ACTOR_GB:g} GB before it loads a model, and a"
                f" core starts {PER_CORE} at most: lower it to {most} or less"
            )

"""Reject numbers of actors that no machine can hold, before anything is laid out or started."""

from __future__ import annotations

from collections.abc import Sequence

from configs.load import ConfigError
from configs.schema import RunConfig
from planning.machine import usable_cores, usable_memory
from planning.placement import Node, kinds_of

ACTOR_GB = 0.25
"""Minimum host memory of an actor process: Python, torch and Ray, before it loads a model."""
PER_CORE = 64
"""More processes per core than this do not start within ``services.start_deadline_s``."""


def refuse_too_many(
    config: RunConfig, cpus: float, gpus: float, nodes: Sequence[Node] | None = None
) -> None:
    """Raise ConfigError if the actors of a service need more CPUs or GPUs than there are.

    These are the resources of ``nodes``, or the assumed ``cpus`` and ``gpus`` without ``nodes``.
    Services of up to 1000 actors are left to placement, as are nodes that an autoscaler may add.
    """
    if nodes is not None:
        cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    if nodes is not None and config.services.wait_for_nodes_s:
        return
    where = "there are" if nodes is not None else "a plan assumes at most"
    for kind in kinds_of(config):
        service = config.services.of(kind)
        for what, each, available in (("CPU", service.cpus, cpus), ("GPU", service.gpus, gpus)):
            if service.count > 1000 and service.count * each > available:
                raise ConfigError(
                    f"services.{kind}: {service.count} actors of {each:g} {what} each need"
                    f" {service.count * each:g}, {where} {available:g}: at most"
                    f" {int(available / each)} can be placed"
                )


def refuse_on_this_machine(config: RunConfig) -> None:
    """Raise ConfigError if this machine cannot run all actors of a service."""
    cores, gb = usable_cores(), usable_memory() / 1e9
    most = min(int(gb / ACTOR_GB), PER_CORE * cores)
    for kind in kinds_of(config):
        if (count := config.services.of(kind).count) > most:
            named = "replicas" if kind == "learner" else "actors"
            raise ConfigError(
                f"services.{kind}.{named} = {count}: this machine has {cores} cores and {gb:.1f}"
                f" GB; an actor needs {ACTOR_GB:g} GB before it loads a model, and a core can start"
                f" at most {PER_CORE} actors: lower it to {most} or less"
            )

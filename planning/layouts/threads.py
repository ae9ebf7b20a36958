"""Threads of the learner on a machine without GPUs, where no number is given by hand."""

from __future__ import annotations

from configs.schema import RunConfig

MOST = 4
"""More threads than this have not been measured, and small models do not fill them."""


def with_threads(config: RunConfig, cores: int) -> RunConfig:
    """``config`` whose learner replicas share ``cores``, as rollout actors mostly wait while they
    work. What ``services.learner.threads`` says by hand stays, and so does a learner on a GPU.

    Threads fix the order of sums, so that they are part of the results and written down with them.
    """
    learner, rollout = config.services.learner, config.services.rollout
    if learner.gpus or "threads" in learner.model_fields_set:
        return config
    taken = rollout.actors * rollout.threads if config.explore_ahead else 0
    return _threads(config, max(1, min(MOST, (cores - taken) // learner.replicas)))


def keep_threads(config: RunConfig, recorded: RunConfig) -> RunConfig:
    """For what goes on from a run: its threads, where none are given by hand."""
    if "threads" in config.services.learner.model_fields_set:
        return config
    return _threads(config, recorded.services.learner.threads)


def _threads(config: RunConfig, count: int) -> RunConfig:
    learner = config.services.learner.model_copy(update={"threads": count})
    services = config.services.model_copy(update={"learner": learner})
    return config.model_copy(update={"services": services})

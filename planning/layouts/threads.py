"""Threads of the learner on a machine without GPUs, where no number is given by hand."""

from __future__ import annotations

from configs.schema import RunConfig

MOST = 4
"""More threads than this have not been measured, and small models do not fill them."""


def with_threads(config: RunConfig, cores: int) -> RunConfig:
    """``config`` whose learner replicas share ``cores``, as rollout actors mostly wait while they
    work; but where a replica regenerates what those explore meanwhile, only the cores that they
    leave. What ``services.learner`` says by hand stays, and so does a learner on a GPU.

    Threads fix the order of sums, so that they are part of the results and written down with them.
    """
    learner, rollout, plan = config.services.learner, config.services.rollout, config.plan
    if learner.gpus:
        return config
    explorers = rollout.actors * rollout.threads
    given, count = learner.model_fields_set, learner.threads
    if "threads" not in given:
        count = _each(cores - explorers * config.explore_ahead, learner.replicas, MOST)
    again = learner.regenerate_threads
    if "regenerate_threads" not in given:
        beside = explorers if plan.explore and plan.regenerate else 0
        again = _each(cores - beside, learner.replicas, count)
    return _changed(config, count, again)


def keep_threads(config: RunConfig, recorded: RunConfig) -> RunConfig:
    """For what goes on from a run: its threads, where none are given by hand."""
    ours, theirs = config.services.learner, recorded.services.learner
    given = ours.model_fields_set
    return _changed(
        config,
        (ours if "threads" in given else theirs).threads,
        (ours if "regenerate_threads" in given else theirs).regenerate_threads,
    )


def _each(cores: int, replicas: int, most: int) -> int:
    return max(1, min(most, cores // replicas))


def _changed(config: RunConfig, threads: int, again: int | None) -> RunConfig:
    found = {"threads": threads, "regenerate_threads": again}
    learner = config.services.learner.model_copy(update=found)
    services = config.services.model_copy(update={"learner": learner})
    return config.model_copy(update={"services": services})

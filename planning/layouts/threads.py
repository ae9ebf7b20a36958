"""Choose the learner's threads on a machine without GPUs, unless they are configured."""

from __future__ import annotations

from configs.schema import RunConfig

MOST = 4
"""Most threads that are chosen: more have not been measured, and small models do not use them."""


def with_threads(config: RunConfig, cores: int) -> RunConfig:
    """Return ``config`` with learner replicas that share ``cores`` evenly.

    They get all cores, because rollout actors mostly wait while replicas work. If rollout actors
    explore at the same time (``explore_ahead``, or while a replica regenerates), replicas only get
    the cores that these leave. Values set in ``services.learner``, and a learner on a GPU, stay
    unchanged.

    The number of threads determines the order of summation, and thereby results, so it is recorded
    with them.
    """
    learner, rollout, plan = config.services.learner, config.services.rollout, config.plan
    if learner.gpus:
        return config
    explorers = rollout.actors * rollout.threads
    explicit, count = learner.model_fields_set, learner.threads
    if "threads" not in explicit:
        count = _each(cores - explorers * config.explore_ahead, learner.replicas, MOST)
    regenerating = learner.regenerate_threads
    if "regenerate_threads" not in explicit:
        beside = explorers if plan.explore and plan.regenerate else 0
        regenerating = _each(cores - beside, learner.replicas, count)
    return _changed(config, count, regenerating)


def keep_threads(config: RunConfig, recorded: RunConfig) -> RunConfig:
    """Return ``config`` with the threads of the run that it continues, unless set explicitly."""
    own, previous = config.services.learner, recorded.services.learner
    explicit = own.model_fields_set
    return _changed(
        config,
        (own if "threads" in explicit else previous).threads,
        (own if "regenerate_threads" in explicit else previous).regenerate_threads,
    )


def _each(cores: int, replicas: int, most: int) -> int:
    return max(1, min(most, cores // replicas))


def _changed(config: RunConfig, threads: int, regenerate_threads: int | None) -> RunConfig:
    changes = {"threads": threads, "regenerate_threads": regenerate_threads}
    learner = config.services.learner.model_copy(update=changes)
    services = config.services.model_copy(update={"learner": learner})
    return config.model_copy(update={"services": services})

"""Bytes that a run puts into Ray's object stores, and the size that these must have."""

from __future__ import annotations

import math

import numpy as np
import torch

from configs.prompts import read_prompts
from configs.schema import RunConfig
from learner.objectives import build_objective
from planning import sizes
from planning.sizes import WireBytes
from planning.stages import pixels
from policy.families import Family

NUMBERS = {2: "two", 3: "three"}
NOTHING_SENT = WireBytes(0, 0)
SPILLS_AT = 0.8
"""Used share of an object store above which Ray spills objects to disk
(``RAY_object_spilling_threshold``).
"""


def versions_held(config: RunConfig) -> int:
    """Return the policy versions that a store holds at once.

    These are the newest one, those that chunks explored ahead may name, and the next one.
    """
    return 2 + config.explore_ahead


def versions_bytes(config: RunConfig, sent: WireBytes) -> int:
    """Return the bytes of the versions that a store holds at once.

    They share the shards that no update changes. A run that goes back to a checkpoint publishes one
    version in full again, so that there may briefly be more.
    """
    return sent.total + (versions_held(config) - 1) * sent.changing


def store_size(held: int) -> int:
    """Return the bytes with which to start a node's object store, rounded up to 100 MB.

    It fits ``held`` bytes and 10% more for images and samples below the share at which Ray spills
    to disk.
    """
    step = 10**8
    return math.ceil(held * 1.1 / SPILLS_AT / step) * step


def object_store_bytes(
    config: RunConfig, family: Family, sent: WireBytes, dtype: torch.dtype
) -> dict[str, int]:
    """Return the most bytes that an iteration puts into the object stores, by purpose.

    Each object is counted once, without copies on other nodes.
    """
    prompts, keep = config.prompts.per_iteration, config.selection.keep
    latent = 4 * int(np.prod(family.latent_shape))
    explored = config.plan.explore.pool_size if config.plan.explore else 0
    regenerated = (keep + config.audit.random_seeds) if config.plan.regenerate else 0
    objective = build_objective(config.objective, config.stop.max_kl is not None)
    # the states of the path, including its start, and the final latents
    states = config.regenerate.steps + 2 if objective.path_solver else 1
    kept = regenerated * states + (0 if config.plan.regenerate else explored)
    conditioning = sizes.conditioning_bytes(family, dtype, bool(config.guidance.stages))
    return {
        f"{NUMBERS[versions_held(config)]} versions of the weights, per node with rollout actors": (
            versions_bytes(config, sent)
        ),
        "images of an iteration, if none is scored yet": (
            3
            * prompts
            * (explored * pixels(config.explored_model) + regenerated * pixels(config.model))
        ),
        "samples to train on": prompts * kept * latent,
        "conditioning": _encoded(config) * conditioning,
    }


def _encoded(config: RunConfig) -> int:
    """Return the number of prompts whose conditioning is held at once.

    These are the prompts of the iterations that are explored or trained on, and of the next one,
    which is encoded meanwhile; with ``prompts.encode_once``, all prompts that the run uses.
    """
    count, prompts = config.iterations, config.prompts
    if not prompts.encode_once:
        return min(count, 2 + config.explore_ahead) * prompts.per_iteration
    train, test = len(read_prompts(prompts.train)), len(read_prompts(prompts.test))
    return min(train, count * prompts.per_iteration) + min(test, config.evaluate.prompts)

"""What a run puts into Ray's object stores, and how large these have to be."""

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
"""Share of an object store from which on Ray writes objects to disk
(``RAY_object_spilling_threshold``).
"""


def versions_held(config: RunConfig) -> int:
    """Versions that a store holds at once: the newest, those chunks may name, the next one."""
    return 2 + config.explore_ahead


def versions_bytes(config: RunConfig, sent: WireBytes) -> int:
    """Bytes of the versions that a store holds at once, which share what no update changes.

    A run that goes back to a checkpoint publishes one of them whole again, so that for a moment
    there may be more.
    """
    return sent.total + (versions_held(config) - 1) * sent.changing


def store_size(held: int) -> int:
    """Bytes to start a node's object store with: ``held`` and a tenth more for images and
    samples, all below the share from which on Ray spills to disk, in whole 100 MB.
    """
    step = 10**8
    return math.ceil(held * 1.1 / SPILLS_AT / step) * step


def puts(config: RunConfig, family: Family, sent: WireBytes, dtype: torch.dtype) -> dict[str, int]:
    """The most that an iteration puts into the object stores, with one copy of each object."""
    prompts, keep = config.prompts.per_iteration, config.selection.keep
    latent = 4 * int(np.prod(family.latent_shape))
    explored = config.plan.explore.pool_size if config.plan.explore else 0
    regenerated = (keep + config.audit.random_seeds) if config.plan.regenerate else 0
    objective = build_objective(config.objective, config.stop.max_kl is not None)
    # the path with its start, and the latents themselves
    states = config.regenerate.steps + 2 if objective.path_solver else 1
    kept = regenerated * states + (0 if config.plan.regenerate else explored)
    conditioning = sizes.conditioning_bytes(family, dtype, bool(config.guidance.stages))
    return {
        f"{NUMBERS[versions_held(config)]} versions of the weights, per node with rollout actors": (
            versions_bytes(config, sent)
        ),
        "images of an iteration, were none scored yet": (
            3
            * prompts
            * (explored * pixels(config.explored_model) + regenerated * pixels(config.model))
        ),
        "samples to train on": prompts * kept * latent,
        "conditioning": _encoded(config) * conditioning,
    }


def _encoded(config: RunConfig) -> int:
    """Prompts whose conditioning is held: of iterations that are explored or trained on, and of the
    next one, encoded beside them; or of all that the run uses.
    """
    count, prompts = config.iterations, config.prompts
    if not prompts.encode_once:
        return min(count, 2 + config.explore_ahead) * prompts.per_iteration
    train, test = len(read_prompts(prompts.train)), len(read_prompts(prompts.test))
    return min(train, count * prompts.per_iteration) + min(test, config.evaluate.prompts)

"""What every actor does first: threads, device, and who it is."""

from __future__ import annotations

import functools
import inspect
import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import ray

from actors.messages import ActorInfo
from configs.load import parse
from configs.schema import RunConfig
from configs.services import Service
from records.errors import OutOfMemoryError

if TYPE_CHECKING:
    import torch

Tree: TypeAlias = dict[str, object]
"""A configuration as plain JSON types: unlike pydantic's models it needs no code to be read."""


def begin(tree: Tree, kind: str) -> tuple[RunConfig, Service]:
    """(the run's configuration, the settings of this kind of actor).

    Results must not depend on which process computes them, so the global random generators are
    seeded with a constant: where one is used by accident, results are equal and not random.
    """
    run = parse(tree)
    random.seed(0)
    np.random.seed(0)
    return run, run.services.of(kind)


def begin_torch(run: RunConfig, kind: str) -> torch.device:
    """Seed torch too, fix its threads, and pick the device. An actor that needs no torch leaves
    this out, and starts in a fraction of the time.

    The number of threads fixes the order of sums: it is part of the configuration, not of the node.
    The memory of a GPU is limited to the service's share, but not in a layout: its shares say who
    lies where, and it has looked at the memory of all of them together; nor where rollout actors
    and learner take turns, each with what the other has left. Raises RuntimeError for a share of a
    GPU where there is no CUDA.
    """
    import torch

    from policy.device import allow_tf32, device_for

    service = run.services.of(kind)
    torch.set_num_threads(service.threads)
    turns = kind in ("rollout", "learner") and run.services.takes_turns
    device = device_for(kind, service.gpus, limited=run.layout is None and not turns)
    torch.manual_seed(0)
    allow_tf32(device, service.tf32)
    return device


def identity(device: torch.device | None = None) -> ActorInfo:
    """Who this actor is and on which device; the caller adds what is told of its kind."""
    node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else None
    who = ActorInfo(os.getpid(), os.uname().nodename, node)
    if device is None:
        return who
    from policy.device import describe

    return replace(who, **describe(device))


Actor = TypeVar("Actor", bound=type)


def on_device(kind: str, change: str) -> Callable[[Actor], Actor]:
    """A class whose methods raise OutOfMemoryError, one line, where its GPU has no more room.

    ``kind`` is the service, ``change`` what to lower.
    """

    def wrapped(method: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(method)
        def call(*args: object, **named: object) -> object:
            try:
                return method(*args, **named)
            except Exception as error:
                if type(error).__name__ != OUT_OF_MEMORY:  # torch may not be there
                    raise
                from policy.device import out_of_memory

                raise OutOfMemoryError(
                    f"{kind} {method.__name__.strip('_')}: the GPU is out of memory:"
                    f" {out_of_memory(error)}: lower {change}, or give services.{kind} a larger"
                    " share of a GPU or a larger GPU, then continue with --resume"
                ) from None

        return call

    def changed(actor: Actor) -> Actor:
        for name, method in list(vars(actor).items()):
            if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
                setattr(actor, name, wrapped(method))
        return actor

    return changed


OUT_OF_MEMORY = "OutOfMemoryError"
"""What torch calls it."""

"""What every actor does first: threads, device, and who it is."""

from __future__ import annotations

import functools
import inspect
import os
import platform
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import ray

from actors.messages import ActorInfo
from configs.load import parse
from configs.schema import RunConfig
from configs.section import Tree
from records.errors import OutOfMemoryError

if TYPE_CHECKING:
    import torch


def begin(tree: Tree) -> RunConfig:
    """The run's configuration; seeds the global random generators. It comes as plain JSON types,
    which unlike pydantic's models need no code to be read.

    Results must not depend on which process computes them: nothing should draw from a global
    generator, and where something does by accident, every process draws the same.
    """
    random.seed(0)
    np.random.seed(0)
    return parse(tree)


def begin_torch(run: RunConfig, kind: str) -> torch.device:
    """Seed torch, fix its number of threads, and pick the device. An actor that needs no torch does
    not call this, and starts in a fraction of the time.

    The number of threads fixes the order of sums, so it is part of the configuration and does not
    depend on the node. An actor may take its service's share of the GPU's memory, with two
    exceptions: a layout has already fitted the actors of a GPU into its memory together, and where
    rollout actors and learner take turns, each takes what the other has left. Raises RuntimeError
    for a share of a GPU where there is no CUDA.
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
    """Process, host, node and device of this actor; the caller adds what its kind tells."""
    node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else None
    who = ActorInfo(os.getpid(), os.uname().nodename, node, allocator=allocator())
    if device is None:
        return who
    from policy.device import describe

    return replace(who, **describe(device))


def allocator(mapped: Path = Path("/proc/self/maps")) -> str | None:
    """The library that hands out this process's host memory, as "jemalloc" or "glibc 2.36"."""
    if mapped.exists() and "libjemalloc" in mapped.read_text():
        return "jemalloc"
    return " ".join(platform.libc_ver()).strip() or None


Actor = TypeVar("Actor", bound=type)


def on_device(kind: str, change: str) -> Callable[[Actor], Actor]:
    """Decorates an actor's class: where its GPU has no more memory, its methods raise
    OutOfMemoryError, in one line that names the service ``kind`` and the settings to ``change``.
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
"""The name of torch's exception."""

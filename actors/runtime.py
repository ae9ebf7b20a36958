"""Initialization that all actors share: configuration, threads, device and identity."""

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
from actors.object_store import directory_on_disk
from configs.load import parse
from configs.schema import RunConfig
from configs.section import Tree
from records.errors import OutOfMemoryError

if TYPE_CHECKING:
    import torch


def load_config(tree: Tree) -> RunConfig:
    """Seed the global random generators; return the run's configuration.

    ``tree`` has plain JSON types, because these, unlike pydantic's models, are unpickled without
    running code. Results must not depend on the process that computes them: nothing should draw
    from a global generator, and if something does by accident, all processes draw the same.
    """
    random.seed(0)
    np.random.seed(0)
    return parse(tree)


def setup_torch(run: RunConfig, kind: str) -> torch.device:
    """Seed torch, set its number of threads, and return the device.

    An actor that needs no torch does not call this and starts in a fraction of the time. The number
    of threads determines the order of sums, so it is configured and does not depend on the node.
    An actor's memory is limited to its service's share of the GPU, with two exceptions: a layout
    has already fitted all actors of a GPU into its memory, and actors that take turns use the
    memory that the others have left. Raises RuntimeError if the service has a share of a GPU but
    CUDA is not available.
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
    """Return process, host, node and device of this actor; services add their own fields."""
    node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else None
    who = ActorInfo(
        os.getpid(),
        os.uname().nodename,
        node,
        allocator=allocator(),
        store_on_disk=directory_on_disk(),
    )
    if device is None:
        return who
    from policy.device import describe

    return replace(who, **describe(device))


def allocator(mapped: Path = Path("/proc/self/maps")) -> str | None:
    """Return the allocator of this process's host memory, such as "jemalloc" or "glibc 2.36"."""
    if mapped.exists() and b"libjemalloc" in mapped.read_bytes():
        return "jemalloc"
    return " ".join(platform.libc_ver()).strip() or None


Actor = TypeVar("Actor", bound=type)


def on_device(kind: str, change: str) -> Callable[[Actor], Actor]:
    """Decorate an actor's class so that its methods report exhausted GPU memory in one line.

    They raise OutOfMemoryError, which names the service ``kind`` and the settings to ``change``.
    """

    def wrapped(method: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(method)
        def call(*args: object, **named: object) -> object:
            try:
                return method(*args, **named)
            except Exception as error:
                if type(error).__name__ != OUT_OF_MEMORY:  # by name, as torch may not be imported
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

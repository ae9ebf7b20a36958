"""What every actor does first: threads, device, and who it is."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import ray

from actors.messages import ActorInfo
from configs.load import parse
from configs.schema import RunConfig
from configs.services import Service

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


def begin_torch(service: Service) -> torch.device:
    """Seed torch too, fix its threads, and pick the device. An actor that needs no torch leaves
    this out, and starts in a fraction of the time.

    The number of threads fixes the order of sums: it is part of the configuration, not of the node.
    """
    import torch

    torch.set_num_threads(service.threads)
    torch.manual_seed(0)
    device = torch.device("cuda" if service.gpus and torch.cuda.is_available() else "cpu")
    if device.type == "cuda":  # on a CPU the same switch means other roundings
        torch.set_float32_matmul_precision("high" if service.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = service.tf32
    return device


def identity() -> ActorInfo:
    """Who this actor is; the caller adds what is told of its kind."""
    node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else None
    return ActorInfo(os.getpid(), os.uname().nodename, node)

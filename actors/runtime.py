"""What every actor does first: threads, and who it is."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import ray
import torch

from configs.load import parse
from configs.schema import RunConfig
from configs.services import Service


def begin(config: dict[str, Any], kind: str) -> tuple[RunConfig, Service, torch.device]:
    """Set this process's threads and draw its device.

    Results must not depend on which process computes them: threads are fixed by the configuration,
    and the global random generators are seeded with a constant so that an accidental use of them
    would show as equal, not as noise.
    """
    run = parse(config)
    service: Service = run.services.of(kind)
    torch.set_num_threads(service.threads)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    device = (
        torch.device("cuda") if service.gpus and torch.cuda.is_available() else torch.device("cpu")
    )
    return run, service, device


def identity(**more: Any) -> dict[str, Any]:
    """Process id, host, Ray node and device facts that an ``actor_started`` event carries."""
    node = {"node": ray.get_runtime_context().get_node_id()} if ray.is_initialized() else {}
    return {"pid": os.getpid(), "host": os.uname().nodename, **node, **more}

"""What variables an actor's process is born with."""

from __future__ import annotations

import os

from configs.services import Service

GPU_ENVIRONMENT = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # batches of several sizes leave no gaps
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # a silent replica raises where it is waited for
}
"""Of actors with a share of a GPU."""


def environment(service: Service) -> dict[str, str]:
    """Variables that an actor is born with. Those of the driver's own go before ours on GPUs."""
    found = {"OMP_NUM_THREADS": str(service.threads)}
    if service.gpus:  # read when CUDA starts
        found |= {name: os.environ.get(name, value) for name, value in GPU_ENVIRONMENT.items()}
    return found

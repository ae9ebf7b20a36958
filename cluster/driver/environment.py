"""Environment variables of an actor's process."""

from __future__ import annotations

import os

from configs.services import Service

GPU_ENVIRONMENT = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # batches of several sizes leave no gaps
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # waiting for a silent replica raises an exception
}
"""Variables of actors with a share of a GPU."""


def environment(service: Service) -> dict[str, str]:
    """Return the environment variables that an actor is started with.

    Values of ``GPU_ENVIRONMENT`` that are set in the driver's environment take precedence.
    """
    variables = {"OMP_NUM_THREADS": str(service.threads)}
    if service.gpus:  # read when CUDA starts
        variables |= {name: os.environ.get(name, value) for name, value in GPU_ENVIRONMENT.items()}
    return variables

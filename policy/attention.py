"""Which attention kernels passes with a gradient may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def sound_gradients(device: torch.device) -> Iterator[None]:
    """Within the block attention on CUDA does without cuDNN, which torch prefers on Hopper.

    Its backward pass gives gradients that are NaN, or reads memory that is not its own (seen on an
    H200 with torch 2.11, docs/gpu.md; torch's issue 196678). Forward passes of a density that is
    trained belong in the block too: other kernels round otherwise. Nothing changes on a CPU.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)

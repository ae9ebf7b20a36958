"""Selection of the attention kernels for passes with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_cudnn_attention(device: torch.device) -> Iterator[None]:
    """Disable cuDNN attention on CUDA within the context; torch prefers it on Hopper.

    Its backward pass returns NaN gradients or reads memory out of bounds (seen on an H200 with
    torch 2.11, docs/gpu.md; PyTorch issue 196678). Run forward passes whose density is trained
    within the context too, because other kernels round differently. Does nothing on a CPU.
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

"""torch.compile, or one clear line where it cannot work."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any, cast

import torch
from torch import nn


def compiler_missing(device: torch.device) -> str | None:
    """What torch.compile lacks on this device, or None: a C++ compiler for a CPU, Triton for a GPU."""
    if device.type == "cuda":
        return (
            None
            if importlib.util.find_spec("triton")
            else "torch.compile needs the package triton on a GPU, which is not installed"
        )
    compiler = os.environ.get("CXX", "g++")
    return (
        None
        if shutil.which(compiler)
        else f"torch.compile needs a C++ compiler on a CPU, and there is no {compiler!r} (variable CXX)"
    )


def compiled(module: nn.Module, device: torch.device) -> nn.Module:
    """``module`` compiled for the shapes that it is called with, one by one; weights are shared, and may change in place.

    Nothing is compiled before the first call. Raises ValueError where it could not be.
    """
    missing = compiler_missing(device)
    if missing is not None:
        raise ValueError(f"compile: {missing}: install it or set compile = false")
    return cast("Any", torch.compile(module, dynamic=False))

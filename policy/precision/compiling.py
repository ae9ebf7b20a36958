"""torch.compile, or one clear line where it cannot work: never eager in its place."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

SHAPES = 64
"""Shapes of inputs that one module is compiled for. torch's own limit is 8, where each size of a
batch counts, and beyond it torch would run eagerly without a word.
"""


class CompileFailed(RuntimeError):
    """torch.compile could not compile, or was called with more shapes than ``SHAPES``."""


def compiler_missing(device: torch.device) -> str | None:
    """What torch.compile lacks here, or None: a C++ compiler for a CPU, Triton for a GPU."""
    if device.type == "cuda":
        found, missing = importlib.util.find_spec("triton"), "on a GPU, which is not installed"
        return None if found else f"torch.compile needs the package triton {missing}"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler):
        return None
    return (
        f"torch.compile needs a C++ compiler on a CPU, and there is no {compiler!r} (variable CXX)"
    )


def compiled(module: nn.Module, device: torch.device) -> nn.Module:
    """``module`` compiled for each shape that it is called with; the weights are shared.

    Weights may change in place. Nothing is compiled before the first call, which belongs in
    ``compile_failures``. Raises ValueError where it could not be.
    """
    import torch._dynamo

    missing = compiler_missing(device)
    if missing is not None:
        raise ValueError(f"compile: {missing}: install it or set compile = false")
    settings: Any = torch._dynamo.config
    if settings.disable:
        raise ValueError(
            "compile: the environment variable TORCH_COMPILE_DISABLE turns it off: unset it or set"
            " compile = false"
        )
    # for this whole process: where torch would go on eagerly, it is to fail
    settings.suppress_errors, settings.fail_on_recompile_limit_hit = False, True
    settings.recompile_limit = SHAPES
    return cast("nn.Module", torch.compile(module, dynamic=False))


@contextlib.contextmanager
def compile_failures(key: str) -> Iterator[None]:
    """Turns errors of compiling into CompileFailed, one line that names the setting ``key``."""
    try:
        yield
    except Exception as error:
        # importing it takes seconds, and it is there if anything was compiled
        found = sys.modules.get("torch._dynamo.exc")
        if found is not None and isinstance(error, found.FailOnRecompileLimitHit):
            raise CompileFailed(
                f"{key}: called with more than {SHAPES} shapes: use batches of fewer sizes, or set"
                f" {key} = false"
            ) from error
        if found is not None and isinstance(error, found.TorchDynamoException):
            inner = getattr(error, "inner_exception", None) or error
            why = " ".join([f"{type(inner).__name__}:", *str(inner).strip().splitlines()[:1]])
            raise CompileFailed(
                f"{key}: torch.compile failed: {why}: fix that or set {key} = false"
            ) from error
        raise

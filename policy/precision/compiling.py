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
"""Shapes of inputs that one module is compiled for; torch's own limit of 8 counts each size of a
batch, and then runs eagerly.
"""


class CompileFailed(RuntimeError):
    """torch.compile could not compile, or was called with more shapes than ``SHAPES``."""


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
        else (
            f"torch.compile needs a C++ compiler on a CPU, and there is no {compiler!r} (variable"
            " CXX)"
        )
    )


def compiled(module: nn.Module, device: torch.device) -> nn.Module:
    """``module`` compiled for the shapes that it is called with, one by one; weights are shared,
    and may change in place.

    Nothing is compiled before the first call, which belongs in ``compile_failures``. Raises
    ValueError where it could not be. Where torch would go on eagerly it is told to fail, in all of
    this process.
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
    settings.suppress_errors, settings.fail_on_recompile_limit_hit, settings.recompile_limit = (
        False,
        True,
        SHAPES,
    )
    return cast("Any", torch.compile(module, dynamic=False))


@contextlib.contextmanager
def compile_failures(key: str) -> Iterator[None]:
    """Turns what goes wrong while compiling into CompileFailed, one line that names the setting
    ``key``.
    """
    try:
        yield
    except Exception as error:
        found = sys.modules.get(
            "torch._dynamo.exc"
        )  # not imported, which takes seconds, unless something was compiled
        if found is not None and isinstance(error, found.FailOnRecompileLimitHit):
            raise CompileFailed(
                f"{key}: called with more than {SHAPES} shapes: use batches of fewer sizes, or set"
                f" {key} = false"
            ) from error
        if found is not None and isinstance(error, found.TorchDynamoException):
            inner = getattr(error, "inner_exception", None) or error
            why = " ".join([f"{type(inner).__name__}:", *str(inner).strip().splitlines()[:1]])
            raise CompileFailed(
                f"{key}: torch.compile failed: {why}: mend that or set {key} = false"
            ) from error
        raise

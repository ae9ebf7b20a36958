"""Wrapper of torch.compile that raises a one-line error instead of falling back to eager mode."""

from __future__ import annotations

import contextlib
import copy
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from policy.experts import Experts
from policy.precision import kernels
from records.errors import error_summary

SHAPES = 64
"""Number of input shapes that one module may be compiled for.

torch's own limit is 8, each batch size counts, and beyond it torch would silently run eagerly.
"""


class CompileFailed(RuntimeError):
    """torch.compile could not compile, or was called with more shapes than ``SHAPES``."""


def compiler_missing(device: torch.device) -> str | None:
    """Return why torch.compile cannot run, or None.

    It needs a C++ compiler on a CPU and Triton on a GPU.
    """
    if device.type == "cuda":
        why = kernels.triton_unusable()
        return None if why is None else f"torch.compile needs Triton on a GPU: {why}"
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler):
        return None
    return (
        f"torch.compile needs a C++ compiler on a CPU, but there is no {compiler!r} (variable CXX)"
    )


class _Trained(nn.Module):
    """A block for passes with gradients, whose compiled attention does not use cuDNN kernels.

    cuDNN's backward pass is incorrect (``policy.attention``). The restriction is part of the traced
    graph because torch's global switches are in no guard and no cache key: torch could otherwise
    reuse a graph that was compiled with other kernels.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with sdpa_kernel(
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        ):
            return self.block(*inputs, **named)


def block_of(module: nn.Module) -> nn.Module:
    """Return the original of a block from ``compiled``; return any other module unchanged."""
    module = getattr(module, "_orig_mod", module)
    return module.block if isinstance(module, _Trained) else module


def compiled(
    module: nn.Module, device: torch.device, key: str = "compile", trains: bool = False
) -> nn.Module:
    """Return ``module`` compiled for each input shape, with shared weights.

    If the module has lists of blocks, each block is compiled separately: equal blocks share one
    graph, so the first call takes only as long as compiling one block of each kind. Compilation
    happens in that call, which belongs in ``compile_failures``. Set ``trains`` for passes with
    gradients and for passes that are compared with them.

    Changes torch's settings for the whole process, so that torch raises an error where it would
    fall back to eager mode. Raises ValueError, which names the setting ``key``, if compilation is
    not possible.
    """
    # imported here: it takes 1.5 CPU seconds, which only compilation needs
    import torch._dynamo

    missing = compiler_missing(device)
    if missing is not None:
        raise ValueError(f"{key}: {missing}: install it or set {key} = false")
    reasons = {
        str(reason) for part in module.modules() if (reason := getattr(part, "not_compiled", None))
    }
    if reasons:
        raise ValueError(f"{key}: {reasons.pop()}, or set {key} = false")
    settings: Any = torch._dynamo.config
    if settings.disable:
        raise ValueError(
            f"{key}: the environment variable TORCH_COMPILE_DISABLE disables it: unset it or set"
            f" {key} = false"
        )
    # asked in compiled passes; not a decorator there, because it imports torch._dynamo
    torch.compiler.assume_constant_result(kernels.triton_unusable)
    # otherwise torch silently runs eagerly: with different bits, and several times slower
    settings.suppress_errors = False
    settings.fail_on_recompile_limit_hit = True
    settings.recompile_limit = SHAPES
    return _by_block(module, trains) or _compile(module, trains)


def _compile(module: nn.Module, trains: bool) -> nn.Module:
    if not trains:
        return cast("nn.Module", torch.compile(module, dynamic=False))
    # round where eager mode rounds: graphs with and without gradients fuse different operations,
    # and a ratio of their densities must not depend on that
    options: dict[str, Any] = {"emulate_precision_casts": True}
    return cast("nn.Module", torch.compile(_Trained(module), dynamic=False, options=options))


def _by_block(module: nn.Module, trains: bool) -> nn.Module | None:
    """Return ``module`` with compiled blocks in its block lists, or None if it has no such list.

    Only the module and its lists are shallow copies. The original stays eager, as training needs
    it, and later changes of its blocks and weights affect the copy too.
    """
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    has_blocks = False
    for name, part in module.named_children():
        if isinstance(part, nn.ModuleList) and len(part):
            has_blocks = True
            twin._modules[name] = nn.ModuleList(_compile(block, trains) for block in part)
        elif isinstance(module, Experts):
            has_blocks = True
            twin._modules[name] = _by_block(part, trains) or _compile(part, trains)
    return twin if has_blocks else None


def computing(device: torch.device, backend: str) -> str:
    """Return device, kernels and versions in one line; equal lines mean bit-identical results."""
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{processor()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{backend} on {where}, torch {torch.__version__}, eager"


def processor() -> str:
    """Return the model name of this machine's CPU as in Linux, or its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


@contextlib.contextmanager
def compile_failures(key: str) -> Iterator[None]:
    """Turn compilation errors into CompileFailed with one line that names the setting ``key``."""
    try:
        yield
    except Exception as error:
        # not imported, which takes seconds: it is loaded already if anything was compiled
        errors = sys.modules.get("torch._dynamo.exc")
        if errors is not None and isinstance(error, errors.FailOnRecompileLimitHit):
            raise CompileFailed(
                f"{key}: called with more than {SHAPES} shapes: use batches of fewer sizes, or set"
                f" {key} = false"
            ) from error
        if errors is not None and isinstance(error, errors.TorchDynamoException):
            inner = getattr(error, "inner_exception", None) or error
            raise CompileFailed(
                f"{key}: torch.compile failed ({error_summary(inner)}): fix it,"
                f" or set {key} = false"
            ) from error
        raise

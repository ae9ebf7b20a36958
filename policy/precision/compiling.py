"""torch.compile, or one clear line where it cannot work: never eager in its place."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
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
from records.errors import described

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


class _Trained(nn.Module):
    """A block for passes with gradients: its attention does without cuDNN's kernels, whose backward
    pass is unsound, and says so in its graph. What torch's own switches allow is part of no guard
    and of no cache's key: a graph that was made elsewhere would be taken for this one.
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
    """The block itself, of one that ``compiled`` made; any other module as it is."""
    module = getattr(module, "_orig_mod", module)
    return module.block if isinstance(module, _Trained) else module


def compiled(
    module: nn.Module, device: torch.device, key: str = "compile", trains: bool = False
) -> nn.Module:
    """``module`` compiled for each shape that it is called with; the weights are shared.

    Where there are lists of blocks each block is compiled, not the whole: equal blocks share one
    graph, so that the first call takes as long as one block of each kind. Nothing is compiled
    before that call, which belongs in ``compile_failures``. Raises ValueError, naming the setting
    ``key``, where it could not be. Where torch would go on eagerly it is told to fail, in all of
    this process. ``trains``: for a pass with gradients, and those that are compared with it.
    """
    # here: it takes 1.5 CPU seconds, which only those need who compile
    import torch._dynamo

    missing = compiler_missing(device)
    if missing is not None:
        raise ValueError(f"{key}: {missing}: install it or set {key} = false")
    refused = {
        str(why) for part in module.modules() if (why := getattr(part, "not_compiled", None))
    }
    if refused:
        raise ValueError(f"{key}: {refused.pop()}, or set {key} = false")
    settings: Any = torch._dynamo.config
    if settings.disable:
        raise ValueError(
            f"{key}: the environment variable TORCH_COMPILE_DISABLE turns it off: unset it or set"
            f" {key} = false"
        )
    # else torch runs what it cannot compile eagerly: other bits, several times slower
    settings.suppress_errors = False
    settings.fail_on_recompile_limit_hit = True
    settings.recompile_limit = SHAPES
    return _by_block(module, trains) or _graphs(module, trains)


def _graphs(module: nn.Module, trains: bool) -> nn.Module:
    if not trains:
        return cast("nn.Module", torch.compile(module, dynamic=False))
    # rounded where eager passes round: graphs with and without gradients fuse other operations, and
    # a ratio of their densities must not see that
    options: dict[str, Any] = {"emulate_precision_casts": True}
    return cast("nn.Module", torch.compile(_Trained(module), dynamic=False, options=options))


def _by_block(module: nn.Module, trains: bool) -> nn.Module | None:
    """``module`` with compiled blocks in its lists of blocks, or None where it has no such list.

    Only the module itself and its lists are copies, without weights: the original stays eager, as
    training needs it, and whatever is done to its blocks and weights later shows here too.
    """
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    found = False
    for name, part in module.named_children():
        if isinstance(part, nn.ModuleList) and len(part):
            found = True
            twin._modules[name] = nn.ModuleList(_graphs(block, trains) for block in part)
        elif isinstance(module, Experts):
            found = True
            twin._modules[name] = _by_block(part, trains) or _graphs(part, trains)
    return twin if found else None


def computing(device: torch.device, backend: str) -> str:
    """Device, kernels and versions in one line: equal lines compute equal bits."""
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{processor()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{backend} on {where}, torch {torch.__version__}, eager"


def processor() -> str:
    """The model of this machine's CPU, as Linux names it, or its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


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
            raise CompileFailed(
                f"{key}: torch.compile failed: {described(inner)}: fix that or set {key} = false"
            ) from error
        raise

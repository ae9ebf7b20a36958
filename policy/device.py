"""The device of a process: found or missed in one line, described, limited to its share."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

DRIVER = Path("/proc/driver/nvidia/version")
TOOLKIT = Path("/usr/local/cuda/version.json")
NOT_FOUND = "none found"


def driver() -> str:
    """The version of NVIDIA's kernel driver."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", DRIVER.read_text())
    except OSError:
        return NOT_FOUND
    return found[0] if found else NOT_FOUND


def toolkit() -> str:
    """The version of the CUDA toolkit of this machine or image."""
    if stated := os.environ.get("CUDA_VERSION"):
        return stated
    try:
        return str(json.loads(TOOLKIT.read_text())["cuda"]["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return NOT_FOUND


def torch_release() -> tuple[int, int]:
    """torch's version, such as (2, 13)."""
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)


def torch_cuda() -> str:
    """The CUDA version that torch was built for."""
    return torch.version.cuda or "none, a build for CPUs"


def no_cuda() -> str | None:
    """Why torch has no CUDA device here, in one line, or None where it has."""
    if torch.cuda.is_available():
        return None
    return (
        f"torch sees no CUDA device: driver {driver()}, CUDA toolkit {toolkit()}, torch"
        f" {torch.__version__} for CUDA {torch_cuda()}"
    )


def device_for(kind: str, gpus: float, limited: bool = True) -> torch.device:
    """The device of a process of service ``kind`` with this share of a GPU; 0: the CPU.

    ``limited``: its memory is no more than the share, so that processes on one GPU cannot take each
    other's.
    Raises RuntimeError where there is no CUDA: a CPU is never taken in a GPU's place.
    """
    if not gpus:
        return torch.device("cpu")
    if (missing := no_cuda()) is not None:
        raise RuntimeError(
            f"services.{kind}.gpus = {gpus:g}, but {missing}: install a driver and a torch that fit"
            f" each other, or set services.{kind}.gpus = 0"
        )
    if limited and gpus < 1:
        torch.cuda.set_per_process_memory_fraction(gpus)
    return torch.device("cuda")


def tf32_allowed() -> bool:
    """Whether FP32 products may use TF32 tensor cores in this process."""
    return torch.get_float32_matmul_precision() != "highest"


def allow_tf32(device: torch.device, allowed: bool) -> None:
    """Let FP32 products use TF32, or not. On a CPU nothing: the switch means other roundings."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has done what was asked of it; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(device: torch.device) -> dict[str, str]:
    """What runs of different devices are told apart by; ``capability`` as "9.0"."""
    if device.type != "cuda":
        return {"device": device.type, "torch": torch.__version__}
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "device": torch.cuda.get_device_name(device),
        "capability": f"{major}.{minor}",
        "torch": torch.__version__,
        "cuda": torch_cuda(),
        "driver": driver(),
        "gpu": str(torch.cuda.get_device_properties(device).uuid),
    }


def out_of_memory(error: BaseException) -> str | None:
    """What was asked for and what is held, where a GPU ran out of memory; None for other errors."""
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    what = f"{asked[1]} more were asked for" if asked else "more was asked for than is free"
    if not torch.cuda.is_available():
        return what
    free, total = torch.cuda.mem_get_info()
    held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return (
        f"{what}; this process holds {held / 1e9:.1f} GB and {(reserved - held) / 1e9:.1f} GB in"
        f" gaps, {free / 1e9:.1f} of the GPU's {total / 1e9:.1f} GB are free"
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many threads on the CPU: they fix the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def tf32(device: torch.device, allowed: bool) -> Iterator[None]:
    """Products in FP32 with TF32 or without."""
    before = tf32_allowed()
    allow_tf32(device, allowed)
    try:
        yield
    finally:
        allow_tf32(device, before)

"""The compute device of a process: selection, memory limit, versions and error messages."""

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
    """Return the version of NVIDIA's kernel driver, or ``NOT_FOUND``."""
    try:
        match = re.search(r"\b\d+\.\d+(\.\d+)?\b", DRIVER.read_text(encoding="utf-8"))
    except OSError:
        return NOT_FOUND
    return match[0] if match else NOT_FOUND


def toolkit() -> str:
    """Return the CUDA toolkit version of this machine or container image, or ``NOT_FOUND``."""
    if version := os.environ.get("CUDA_VERSION"):
        return version
    try:
        return str(json.loads(TOOLKIT.read_text(encoding="utf-8"))["cuda"]["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return NOT_FOUND


def torch_release() -> tuple[int, int]:
    """Return (major, minor) of torch's version, such as (2, 13)."""
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)


def torch_cuda() -> str:
    """Return the CUDA version that torch was built for."""
    return torch.version.cuda or "none (CPU build)"


def cuda_unavailable_reason() -> str | None:
    """Return a one-line reason why torch has no CUDA device, or None if it has one."""
    if torch.cuda.is_available():
        return None
    return (
        f"torch sees no CUDA device: driver {driver()}, CUDA toolkit {toolkit()}, torch"
        f" {torch.__version__} for CUDA {torch_cuda()}"
    )


def device_for(kind: str, gpus: float, limited: bool = True) -> torch.device:
    """Return the device for a process of service ``kind`` with ``gpus`` GPUs; the CPU if 0.

    If ``limited`` and ``gpus`` is a fraction, cap the process's GPU memory at that fraction, so
    that processes on one GPU cannot take each other's memory.
    Raises RuntimeError if GPUs are configured but CUDA is missing: there is no fallback to the CPU.
    """
    if not gpus:
        return torch.device("cpu")
    if (reason := cuda_unavailable_reason()) is not None:
        raise RuntimeError(
            f"services.{kind}.gpus = {gpus:g}, but {reason}: install compatible versions of the"
            f" driver and of torch, or set services.{kind}.gpus = 0"
        )
    if limited and gpus < 1:
        torch.cuda.set_per_process_memory_fraction(gpus)
    return torch.device("cuda")


def tf32_allowed() -> bool:
    """Return True if FP32 matrix products may use TF32 tensor cores in this process."""
    return torch.get_float32_matmul_precision() != "highest"


def allow_tf32(device: torch.device, allowed: bool) -> None:
    """Allow or forbid TF32 in FP32 matrix products on a GPU; do nothing on a CPU.

    On a CPU the same switch selects other roundings.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished all queued work; return at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(device: torch.device) -> dict[str, str]:
    """Return the properties that identify a device and its software in the records of a run.

    ``capability`` is the CUDA compute capability as text, such as "9.0".
    """
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
    """Return requested and allocated memory as text if a GPU ran out of memory, else None."""
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    match = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    what = f"{match[1]} more were requested" if match else "the request exceeds the free memory"
    if not torch.cuda.is_available():
        return what
    free, total = torch.cuda.mem_get_info()
    used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return (
        f"{what}; this process holds {used / 1e9:.1f} GB and {(reserved - used) / 1e9:.1f} GB in"
        f" allocator gaps, {free / 1e9:.1f} of the GPU's {total / 1e9:.1f} GB are free"
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use ``count`` CPU threads within the context; the number determines the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def tf32(device: torch.device, allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in FP32 matrix products within the context."""
    before = tf32_allowed()
    allow_tf32(device, allowed)
    try:
        yield
    finally:
        allow_tf32(device, before)

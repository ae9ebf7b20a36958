"""Moving frozen weights off a GPU between turns and back: seconds each way, and equal bits."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import nn

from bench.gpu_check.findings import Finding, Item
from bench.gpu_check.setting import Setting, free, loadable
from planning.assumptions import HOST_LINK_GB_S, host_link
from policy.device import synchronize
from policy.offload import Offload, frozen_tensors, release_cache
from policy.precision.accelerators import ACCELERATORS

NAME = "flux.1-dev"
ROUNDS = 3


def measure(setting: Setting) -> Iterator[Item]:
    """Move a learner of FLUX.1's size out and back a few times, and report the slowest moves."""
    device = setting.device
    with loadable(setting, NAME) as (case, family):
        model = family.load_transformer(device, setting.dtype)
        before = checksum(model)
        held = torch.cuda.memory_allocated() if setting.gpu else 0
        model.to("cpu")  # a learner with offload starts with its frozen weights in host memory
        offload = Offload(frozen_tensors(model), device)
        seconds: dict[str, list[float]] = {"back": [], "out": []}
        remaining = 0
        for _ in range(1 if setting.once else ROUNDS):
            for way, move in (("back", offload.to_device), ("out", offload.to_host)):
                synchronize(device)
                start = time.perf_counter()
                move()
                release_cache(device)
                seconds[way].append(time.perf_counter() - start)
            remaining = torch.cuda.memory_allocated() if setting.gpu else 0
        offload.to_device()
        changed = checksum(model) != before
    for way, times in seconds.items():
        yield Finding(
            f"{case.name}, {offload.nbytes / 1e9:.2f} GB {way}",
            max(times),
            "s",
            {"form": way},
            {"expected": offload.nbytes / _link(device), "GB/s": offload.nbytes / max(times) / 1e9},
        )
    bits, behind = {"form": "bits"}, {"form": "left behind"}
    yield Finding(f"{case.name}, weights differ", float(changed), "", bits)
    if setting.gpu:
        yield Finding(f"{case.name}, share left on the GPU", remaining / max(1, held), "x", behind)
    free()


def checksum(model: nn.Module) -> int:
    """Return a checksum of every byte of the frozen tensors, computed on their current device."""
    total = 0
    for number, tensor in enumerate(frozen_tensors(model), 1):
        codes = tensor.detach().contiguous().view(-1).view(torch.uint8).to(torch.int64)
        places = torch.arange(1, len(codes) + 1, device=codes.device)
        total += number * int((codes * places).sum())
    return total


def _link(device: torch.device) -> float:
    """Return the assumed bandwidth in bytes/s between the host and this device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = next((kind for kind in ACCELERATORS if kind in name), None)
    return host_link(known) if known else 1e9 * HOST_LINK_GB_S

"""Vendor specifications of GPUs: the only table that predictions and plans use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policy.precision.base import Backend

HOST_LINK_GB_S = 50.0
"""Assumed share of the 63 GB/s of PCIe 5 x16. Not measured."""


@dataclass(frozen=True)
class Accelerator:
    """Specification of a GPU.

    ``bf16`` and ``fp32`` are the peaks of dense products in TFLOP/s, ``fp32`` without TF32;
    ``quantized`` has the peaks of the wire formats that its tensor cores multiply. ``memory_gb`` is
    in GB of 1e9 bytes, ``bandwidth`` in TB/s, and ``capability`` is CUDA's compute capability.
    ``nvlink_gb_s`` is the rate in GB/s at which it receives from other GPUs of its node, as stated
    by NVIDIA; 0 without NVLink. ``host_gb_s`` is the one-way rate between it and page-locked host
    memory while all GPUs of a node transfer at once.
    """

    bf16: float
    fp32: float
    quantized: Mapping[str, float]
    memory_gb: float
    bandwidth: float
    capability: tuple[int, int]
    nvlink_gb_s: float = 0.0
    host_gb_s: float = HOST_LINK_GB_S

    def runs(self, backend: Backend) -> bool:
        """Return True if its tensor cores can run ``backend``, given the required packages."""
        return self.capability >= backend.capability

    def peak(self, wire_format: str) -> float | None:
        """Return the peak in dense TFLOP/s of this format, or None without tensor cores for it."""
        return self.bf16 if wire_format == "bf16" else self.quantized.get(wire_format)


ACCELERATORS = {
    "B200": Accelerator(2250, 75, {"fp8": 4500, "nvfp4": 9000}, 180, 8, (10, 0), 900),
    "GB200": Accelerator(2500, 80, {"fp8": 5000, "nvfp4": 10000}, 186, 8, (10, 0), 900),
    "B300": Accelerator(2250, 75, {"fp8": 4500, "nvfp4": 14000}, 270, 8, (10, 3), 900),
    "GB300": Accelerator(2500, 80, {"fp8": 5000, "nvfp4": 15000}, 279, 8, (10, 3), 900),
    "H200": Accelerator(989.5, 67, {"fp8": 1979}, 141, 4.8, (9, 0), 450),
    "H100": Accelerator(989.5, 67, {"fp8": 1979}, 80, 3.35, (9, 0), 450),
    # these two use PCIe 4
    "L40S": Accelerator(362, 91.6, {"fp8": 733}, 48, 0.864, (8, 9), host_gb_s=25),
    "RTX 4090": Accelerator(165, 82.6, {"fp8": 330}, 24, 1.008, (8, 9), host_gb_s=25),
}
"""GPUs by their name in ``services.*.accelerator``, a part of the name that CUDA reports."""


def accelerator_of(name: str) -> Accelerator | None:
    """Return the GPU with the CUDA name ``name``, such as "NVIDIA H200", or None if not listed."""
    parts = [part for part in ACCELERATORS if part in name]
    # the longest match, because "GB200" contains "B200"
    return ACCELERATORS[max(parts, key=len)] if parts else None

"""GPUs as their vendor describes them: the one table that predictions and plans start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policy.precision.base import Backend

HOST_LINK_GB_S = 50.0
"""Most of what 16 lanes of PCIe 5 carry (63). Not measured."""


@dataclass(frozen=True)
class Accelerator:
    """Peaks of dense products in TFLOP/s, memory in GB of 1e9 bytes and its bandwidth in TB/s.

    ``bf16`` is the peak of BF16, ``fp32`` that of plain FP32 products, ``quantized`` those of the
    wire formats that its tensor cores multiply, ``capability`` CUDA's compute capability.
    ``nvlink_gb_s`` are the GB per second that it receives from others of its node, as NVIDIA states
    it, 0 without NVLink; ``host_gb_s`` those between it and page-locked host memory, one way, while
    all GPUs of a node move at once.
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
        """Whether its tensor cores do, with what the backend needs installed."""
        return self.capability >= backend.capability

    def peak(self, wire_format: str) -> float | None:
        """Dense TFLOP/s in this format; None where it has no such tensor cores."""
        return self.bf16 if wire_format == "bf16" else self.quantized.get(wire_format)


ACCELERATORS = {
    "B200": Accelerator(2250, 75, {"fp8": 4500, "nvfp4": 9000}, 180, 8, (10, 0), 900),
    "GB200": Accelerator(2500, 80, {"fp8": 5000, "nvfp4": 10000}, 186, 8, (10, 0), 900),
    "B300": Accelerator(2250, 75, {"fp8": 4500, "nvfp4": 14000}, 270, 8, (10, 3), 900),
    "GB300": Accelerator(2500, 80, {"fp8": 5000, "nvfp4": 15000}, 279, 8, (10, 3), 900),
    "H200": Accelerator(989.5, 67, {"fp8": 1979}, 141, 4.8, (9, 0), 450),
    "H100": Accelerator(989.5, 67, {"fp8": 1979}, 80, 3.35, (9, 0), 450),
    # on PCIe 4
    "L40S": Accelerator(362, 91.6, {"fp8": 733}, 48, 0.864, (8, 9), host_gb_s=25),
    "RTX 4090": Accelerator(165, 82.6, {"fp8": 330}, 24, 1.008, (8, 9), host_gb_s=25),
}
"""By the name in ``services.*.accelerator``, which is a part of the name that CUDA gives."""


def accelerator_of(name: str) -> Accelerator | None:
    """What CUDA calls ``name``, such as "NVIDIA H200"; None for one that is not listed."""
    parts = [part for part in ACCELERATORS if part in name]
    # "GB200" contains "B200"
    return ACCELERATORS[max(parts, key=len)] if parts else None

"""Assumptions of a dry run: the kind of GPU, its peak rates, and how much of them is reached."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from configs.load import ConfigError
from configs.schema import RunConfig
from planning.placement import needs_of
from policy.precision.accelerators import ACCELERATORS, HOST_LINK_GB_S
from policy.precision.backends import BACKENDS, Backend, auto_backends
from policy.precision.cost import Rates, rates

if TYPE_CHECKING:
    from planning.durations import Durations

LINK_SHARE = 0.75
"""Share of the NVLink bandwidth that gathering reaches. Not measured."""


def host_link(accelerator: str) -> float:
    """Return the bytes per second between host memory and a GPU of this kind, one way."""
    known = ACCELERATORS.get(accelerator)
    return 1e9 * (known.host_gb_s if known else HOST_LINK_GB_S)


def peer_link(accelerator: str) -> float:
    """Return the bytes per second that each GPU of a node gathers from the other GPUs.

    Without NVLink the bytes pass through host memory, in and out: half the bandwidth of
    ``host_link``.
    """
    known = ACCELERATORS.get(accelerator)
    if known and known.nvlink_gb_s:
        return 1e9 * known.nvlink_gb_s * LINK_SHARE
    return host_link(accelerator) / 2


ON_CPUS = 0.4
"""Share of the given peak that CPUs are assumed to reach if no utilisation is given."""
BESIDE = 0.4
"""Share of a GPU's peak that scorers and text encoders are assumed to reach. On an H200 a scorer in
FP32 (ViT-H, 24 images) reached 0.36 while rollout actors explored.
"""


@dataclass(frozen=True)
class Assumptions:
    """Hardware parameters that a dry run has to assume.

    Peaks are dense TFLOP/s of one GPU, ``bandwidth`` is that of its memory in TB/s; None: the
    values of ``accelerator``. ``utilisation`` is the share of the peaks that matrix products reach;
    None: the measured shares (``policy.precision.cost``), or ``ON_CPUS`` for CPUs.
    """

    # None: the first one that services.rollout.accelerator allows, or B200
    accelerator: str | None = None
    peak_tflops: float | None = None
    quantized_peak_tflops: float | None = None
    bandwidth: float | None = None
    utilisation: float | None = None
    gpu_memory_gb: float | None = None
    gpus: int | None = None  # None: the number in [layout], or the GPUs of one node
    node_gpus: int = 8
    node_cpus: int = 96
    # durations of calls measured in a run, by kind of GPU; None: computed from operation counts
    measured: Mapping[str, Durations] | None = None


@dataclass(frozen=True)
class Device:
    """The assumptions, resolved for a configuration.

    ``form`` is the format in which quantized layers compute. An unknown bandwidth is infinite, so
    that moving bytes takes no time.
    """

    name: str
    tflops: float
    quantized_tflops: float
    memory_gb: float
    utilisation: float | None = None
    bandwidth: float = math.inf
    form: str = "bf16"

    def rates(self, quantized: bool = False) -> Rates:
        """Return the rates that the device reaches, with or without quantized layers."""
        form = self.form if quantized else "bf16"
        quantized_peak = self.quantized_tflops if quantized else self.tflops
        return rates(self.tflops, quantized_peak, self.bandwidth, form, self.utilisation)

    @property
    def plain(self) -> float:
        """TFLOP/s that models other than the denoiser reach in BF16."""
        return self.tflops * (self.utilisation or BESIDE)


def device_of(config: RunConfig, given: Assumptions) -> tuple[Device | None, str | None]:
    """Return (device, accelerator name) of the GPUs that the run uses.

    If no service has a GPU: (the CPUs, None) if a peak is given, else (None, None). Raises
    ConfigError for an accelerator whose peak and memory are neither listed nor given.
    """
    if not given.accelerator and not any(need.gpus for need in needs_of(config)):
        if not (peak := given.peak_tflops):
            return None, None
        quantized = given.quantized_peak_tflops or peak
        share = given.utilisation or ON_CPUS
        return Device("CPUs", peak, quantized, 0.0, share, given.bandwidth or math.inf), None
    allowed = (config.services.rollout.accelerator or "").removeprefix("in(").rstrip(")").split(",")
    candidates = [name.strip() for name in allowed if name.strip() and not name.startswith("!")]
    name = given.accelerator or next(
        (n for n in candidates if n in ACCELERATORS), candidates[0] if candidates else "B200"
    )
    known = ACCELERATORS.get(name)
    if known is None and (given.peak_tflops is None or given.gpu_memory_gb is None):
        raise ConfigError(
            f"--accelerator {name}: known are {', '.join(ACCELERATORS)}: give --peak-tflops,"
            " --quantized-peak-tflops and --gpu-memory-gb"
        )
    peak = given.peak_tflops or (known.bf16 if known else 0.0)
    memory_gb = given.gpu_memory_gb or (known.memory_gb if known else 0.0)
    quantized = given.quantized_peak_tflops or peak
    bandwidth = given.bandwidth or (known.bandwidth if known else math.inf)
    return Device(name, peak, quantized, memory_gb, given.utilisation, bandwidth), name


def with_format(
    device: Device, name: str | None, backend: Backend, peak: float | None = None
) -> Device:
    """Return the device with the format of a backend and the peak of its quantized layers.

    ``peak``, if given, replaces the peak of the format. Emulated NVFP4 and backends that the device
    does not run keep the BF16 peak.
    """
    known = ACCELERATORS.get(name or "")
    if peak is not None:
        return replace(device, quantized_tflops=peak, form=backend.wire_format)
    if known is None or backend.speedup <= 1 or not known.runs(backend):
        return replace(device, quantized_tflops=device.tflops)
    format_peak = known.peak(backend.wire_format) or known.bf16 * backend.speedup
    return replace(device, quantized_tflops=format_peak, form=backend.wire_format)


def backend_of(config: RunConfig, accelerator: str | None) -> tuple[Backend, str]:
    """Return the backend of the rollout actors and why it is used.

    "auto" is resolved for the assumed accelerator; on CPUs it is the emulation. Raises ConfigError
    if "auto" cannot be resolved because the accelerator is not listed.
    """
    if config.plan.explore is None:
        return BACKENDS["bf16"], "nothing is explored"
    name = config.plan.explore.backend
    if name != "auto":
        return BACKENDS[name], "as configured"
    if not config.services.rollout.gpus:
        return auto_backends("cpu")[0], "auto, on CPUs"
    known = ACCELERATORS.get(accelerator or "")
    if known is None:
        raise ConfigError(
            f"explore.backend: 'auto' on {accelerator} is unknown: give --set explore.backend=..."
        )
    best = next(backend for backend in auto_backends("cuda") if known.runs(backend))
    return best, f"auto, on {accelerator} with all required packages"

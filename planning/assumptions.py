"""What a dry run cannot know and has to assume: which GPUs, how quick they are, how much of that is
reached.
"""

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
"""Of what NVLink carries, what gathering reaches. Not measured."""


def host_link(accelerator: str) -> float:
    """Bytes per second between host memory and a GPU of this kind, one way."""
    known = ACCELERATORS.get(accelerator)
    return 1e9 * (known.host_gb_s if known else HOST_LINK_GB_S)


def peer_link(accelerator: str) -> float:
    """Bytes per second that each GPU of a node gathers from the others; without NVLink through
    the host's memory, in and out.
    """
    known = ACCELERATORS.get(accelerator)
    if known and known.nvlink_gb_s:
        return 1e9 * known.nvlink_gb_s * LINK_SHARE
    return host_link(accelerator) / 2


ON_CPUS = 0.4
"""Share of a peak that is given for CPUs, where nothing else is known of them."""
BESIDE = 0.4
"""Share of a GPU's peak that scorers and text encoders are taken to reach. On an H200 a scorer in
FP32 (ViT-H, 24 images) reached 0.36 beside exploring.
"""


@dataclass(frozen=True)
class Assumptions:
    """What a dry run cannot know. Peaks are dense TFLOP/s of one GPU, the bandwidth of its memory
    TB/s; None: those of ``accelerator``. ``utilisation``: the share of peaks that products reach;
    None: what was measured (``policy.precision.cost``), on CPUs ``ON_CPUS``.
    """

    # None: the first that services.rollout.accelerator allows, or B200
    accelerator: str | None = None
    peak_tflops: float | None = None
    quantized_peak_tflops: float | None = None
    bandwidth: float | None = None
    utilisation: float | None = None
    gpu_memory_gb: float | None = None
    gpus: int | None = None  # None: those of [layout], or one node's
    node_gpus: int = 8
    node_cpus: int = 96
    # what calls took in a run, by kind of GPU; None: what is counted
    measured: Mapping[str, Durations] | None = None


@dataclass(frozen=True)
class Device:
    """The assumptions, resolved for a configuration. ``form``: what quantized layers compute in.
    The bandwidth is infinite where it is not known: then bytes take no time.
    """

    name: str
    tflops: float
    quantized_tflops: float
    memory_gb: float
    utilisation: float | None = None
    bandwidth: float = math.inf
    form: str = "bf16"

    def rates(self, quantized: bool = False) -> Rates:
        """What it reaches, with quantized layers or without."""
        form = self.form if quantized else "bf16"
        quick = self.quantized_tflops if quantized else self.tflops
        return rates(self.tflops, quick, self.bandwidth, form, self.utilisation)

    @property
    def plain(self) -> float:
        """TFLOP/s that models beside the denoiser reach in BF16."""
        return self.tflops * (self.utilisation or BESIDE)


def device_of(config: RunConfig, given: Assumptions) -> tuple[Device | None, str | None]:
    """(device, its name) of the GPUs. Where no service has any: the CPUs, if a peak is given, and
    no name.
    """
    if not given.accelerator and not any(need.gpus for need in needs_of(config)):
        if not (peak := given.peak_tflops):
            return None, None
        quantized = given.quantized_peak_tflops or peak
        share = given.utilisation or ON_CPUS
        return Device("CPUs", peak, quantized, 0.0, share, given.bandwidth or math.inf), None
    wanted = (config.services.rollout.accelerator or "").removeprefix("in(").rstrip(")").split(",")
    named = [name.strip() for name in wanted if name.strip() and not name.startswith("!")]
    name = given.accelerator or next(
        (n for n in named if n in ACCELERATORS), named[0] if named else "B200"
    )
    known = ACCELERATORS.get(name)
    if known is None and (given.peak_tflops is None or given.gpu_memory_gb is None):
        raise ConfigError(
            f"--accelerator {name}: known here are {', '.join(ACCELERATORS)}: give"
            " --peak-tflops, --quantized-peak-tflops and --gpu-memory-gb"
        )
    peak = given.peak_tflops or (known.bf16 if known else 0.0)
    memory_gb = given.gpu_memory_gb or (known.memory_gb if known else 0.0)
    quantized = given.quantized_peak_tflops or peak
    bandwidth = given.bandwidth or (known.bandwidth if known else math.inf)
    return Device(name, peak, quantized, memory_gb, given.utilisation, bandwidth), name


def with_format(
    device: Device, name: str | None, backend: Backend, peak: float | None = None
) -> Device:
    """With the backend's format and its peak, or the ``peak`` that is given; emulated NVFP4 gains
    nothing.
    """
    known = ACCELERATORS.get(name or "")
    if peak is not None:
        return replace(device, quantized_tflops=peak, form=backend.wire_format)
    if known is None or backend.speedup <= 1 or not known.runs(backend):
        return replace(device, quantized_tflops=device.tflops)
    quick = known.peak(backend.wire_format) or known.bf16 * backend.speedup
    return replace(device, quantized_tflops=quick, form=backend.wire_format)


def backend_of(config: RunConfig, accelerator: str | None) -> tuple[Backend, str]:
    """The rollout actors' backend; "auto" as it would be on the accelerator assumed, on a CPU the
    emulation.
    """
    name = config.plan.explore.backend if config.plan.explore else config.explore.backend
    if name != "auto":
        return BACKENDS[name], "as configured"
    if not config.services.rollout.gpus:
        return auto_backends("cpu")[0], "auto, on CPUs"
    known = ACCELERATORS.get(accelerator or "")
    if known is None:
        raise ConfigError(
            f"explore.backend: 'auto' on {accelerator} is not known here: give --set"
            " explore.backend=..."
        )
    best = next(backend for backend in auto_backends("cuda") if known.runs(backend))
    return best, f"auto, on {accelerator} with what it needs installed"

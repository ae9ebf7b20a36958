"""Device and time limit of a section, and published architectures with random weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.architectures import Case, case_of
from bench.gpu_check.findings import Item, LeftOut
from configs.section import Tree
from policy.families import Family
from policy.families.architectures import build, published
from policy.lora import adapter_state, load_adapter_state
from policy.precision.backends import BACKENDS, Backend

ARCHITECTURES = ("sana-1.6b", "sd3.5-medium", "sd3.5-large", "flux.1-dev")
"""Smallest first: if time runs out, the largest are left out."""
FAMILIES = ("sana-1.6b", "sd3.5-medium", "flux.1-dev")
"""One architecture of each family in the paper."""
NEWER = (
    "wan2.1-t2v-1.3b",
    "sana-video-2b-480p",
    "flux.2-klein-4b",
    "z-image-turbo",
    "qwen-image",
    "flux.2-dev",
)
"""One architecture of each other family, smallest first."""
SMALL_PIXELS = 64
SMALL_DECODERS: dict[str, Tree] = {
    "AutoencoderKL": {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1},
    "AutoencoderDC": {
        "encoder_block_out_channels": [32] * 6,
        "decoder_block_out_channels": [32] * 6,
        "encoder_layers_per_block": [1] * 6,
        "decoder_layers_per_block": [1] * 6,
    },
    "AutoencoderKLFlux2": {"block_out_channels": [32, 32, 32, 32], "layers_per_block": 1},
    "AutoencoderKLQwenImage": {"base_dim": 8, "num_res_blocks": 1},
    "AutoencoderKLWan": {"base_dim": 8, "num_res_blocks": 1},
}
"""Autoencoders for machines without a GPU: the published classes with few and narrow blocks."""


@dataclass(frozen=True)
class Setting:
    """Device and time limit of a section.

    ``until``: deadline in seconds of the monotonic clock. ``once``: timed functions run only once,
    so their seconds are meaningless and show only that they run.
    """

    gpu: bool
    until: float
    once: bool = False

    @property
    def device(self) -> torch.device:
        """Device of all measurements."""
        return torch.device("cuda" if self.gpu else "cpu")

    @property
    def warm_up(self) -> int:
        """Number of warm-up rounds, which are not counted."""
        return 0 if self.once else 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of unquantized weights."""
        return torch.bfloat16 if self.gpu else torch.float32

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.until - time.monotonic()

    @property
    def architectures(self) -> tuple[str, ...]:
        """Architectures to measure; without a GPU one per family, as small ones are all alike."""
        return ARCHITECTURES if self.gpu else FAMILIES

    def case(self, name: str, pixels: int | None = None) -> Any:
        """Return a context manager of a published architecture, as ``case_of`` does.

        It has its real size on a GPU and is small otherwise.
        """
        return case_of(name, pixels if self.gpu else SMALL_PIXELS, not self.gpu)

    def quick(self) -> tuple[Backend, ...]:
        """Return the available backends with faster arithmetic than BF16; on a CPU, substitutes.

        ``te_nvfp4`` is not among them, as its layers are by default those of ``torch_nvfp4``.
        """
        names = ("torch_nvfp4", "fp8") if self.gpu else ("fp8", "emulated_nvfp4")
        chosen = (BACKENDS[name] for name in names)
        return tuple(each for each in chosen if each.unavailable_reason(self.device) is None)


def autoencoder(name: str, device: torch.device, dtype: torch.dtype, small: bool) -> nn.Module:
    """Build a published architecture's autoencoder with random weights."""
    part = published(name)["parts"]["vae"]
    if small:
        kind = part["class"].partition(".")[2]
        part = {**part, "config": {**part["config"], **SMALL_DECODERS[kind]}}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        return build(part, device, dtype)


def measure_each(
    setting: Setting,
    names: Iterable[str],
    least_s: float,
    measured: Callable[[Case, str], Iterable[Item]],
) -> Iterator[Item]:
    """Yield the items that ``measured`` returns for each architecture.

    On a GPU an architecture is left out if less than ``least_s`` seconds remain.
    """
    for name in names:
        if setting.gpu and setting.left < least_s:
            yield LeftOut(name, "no time was left")
            continue
        with setting.case(name) as case:
            yield from measured(case, name)
        free()


@contextmanager
def loadable(
    setting: Setting, name: str, pixels: int | None = None
) -> Iterator[tuple[Case, Family]]:
    """Yield a case and its family, which "loads" random weights for learner and explorer."""
    with setting.case(name, pixels) as case:

        def load(part: str, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
            # built on the measured device: a CPU needs minutes for 12 billion random weights
            if part == "vae":
                return autoencoder(name, setting.device, dtype, not setting.gpu)
            with torch.random.fork_rng(devices=[setting.device] if setting.gpu else []):
                torch.manual_seed(0)
                return build(case.part, setting.device, dtype)

        case.family.load = load
        yield case, case.family


def change(transformer: nn.Module) -> None:
    """Change the adapter "current" as an update would, so that B is no longer zero."""
    generator = torch.Generator().manual_seed(0)
    state = {
        key: value + 0.01 * torch.randn(value.shape, generator=generator)
        for key, value in adapter_state(transformer, "current").items()
    }
    load_adapter_state(transformer, "current", state)


def free() -> None:
    """Release unreferenced memory to the device."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

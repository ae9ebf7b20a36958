"""Timing of alternatives as ratios.

The alternatives run alternately, so that a busy or throttling machine slows all of them equally.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from configs.schema import RunConfig


@dataclass(frozen=True)
class Options:
    """Settings of a benchmark."""

    config: RunConfig
    repeats: int = 5
    pack_bytes: int = 2**26
    # (bytes of a version, numbers of explorers)
    broadcasts: tuple[tuple[int, tuple[int, ...]], ...] = ((10**9, (1, 2, 4)),)
    batch: int = 24  # images of a sampling step
    # published architectures, with random weights
    architectures: tuple[str, ...] = ("sd3.5-medium", "flux.1-dev", "sana-1.6b")
    backends: tuple[str, ...] = ()  # empty: all that the device supports
    pixels: int | None = None  # per side; None: as published
    small: bool | None = None  # few narrow blocks of the same types; None: if there is no GPU
    compile: bool = False
    keep: str | None = None  # directory for measurements of benchmarks that take minutes


@dataclass(frozen=True)
class Ratio:
    """Time of ``what`` divided by that of ``base``.

    ``value`` is the median over paired repeats; ``low`` and ``high`` are the extremes.
    """

    what: str
    base: str
    value: float
    low: float
    high: float
    seconds: float  # median of `what`
    base_seconds: float  # median of `base`
    goal: float | None = None  # upper limit of ``value``
    note: str = ""
    unit: str = "s"  # of ``seconds`` and ``base_seconds``

    @classmethod
    def of(
        cls,
        times: Mapping[str, list[float]],
        what: str,
        base: str,
        goal: float | None = None,
        note: str = "",
    ) -> Ratio:
        """Compute the ratio from paired lists of seconds by name."""
        ratios = [a / b for a, b in zip(times[what], times[base], strict=True)]
        value, low, high = statistics.median(ratios), min(ratios), max(ratios)
        seconds, base_seconds = (statistics.median(times[name]) for name in (what, base))
        return cls(what, base, value, low, high, seconds, base_seconds, goal, note)

    def line(self) -> str:
        """Format the ratio as one line of text."""
        goal = (
            ""
            if self.goal is None
            else f"  goal <= {self.goal:g}: {'met' if self.value <= self.goal else 'NOT met'}"
        )
        return (
            f"{self.what} / {self.base} = {self.value:.3f} [{self.low:.3f}, {self.high:.3f}] "
            f" ({_amount(self.seconds, self.unit)} /"
            f" {_amount(self.base_seconds, self.unit)}){goal}{self.note and '  ' + self.note}"
        )


def interleave(
    cases: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Time all cases alternately; return ``repeats`` seconds per case.

    The order alternates between forward and reverse. ``warm_up`` rounds are discarded first.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(warm_up + repeats):
        names = list(cases)[:: 1 if turn % 2 else -1]
        for name in names:
            start = time.perf_counter()
            cases[name]()
            seconds = time.perf_counter() - start
            if turn >= warm_up:
                times[name].append(seconds)
    return times


def machine() -> dict[str, object]:
    """Return a description of the machine and its software."""
    import torch

    from policy.precision.compiling import processor

    return {
        "cpu": processor(),
        "cores": (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


@contextmanager
def ray_for(config: RunConfig) -> Iterator[None]:
    """Use Ray as initialized by the caller, or start it for the duration of the context."""
    import ray

    if ray.is_initialized():
        yield
        return
    from cluster.driver.connect import join_or_start_ray

    join_or_start_ray(config)
    try:
        yield
    finally:
        ray.shutdown()


def silent(name: str, /, **fields: object) -> None:
    """Discard an event."""


def _amount(value: float, unit: str) -> str:
    if unit != "s":
        return f"{value:.0f} {unit}"
    return f"{value:.3f} s" if value >= 0.1 else f"{value * 1e3:.3f} ms"

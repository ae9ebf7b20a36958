"""Benchmark of packing weights to NVFP4, with and without scale search.

Times are relative to copying and to summing the same weights.
"""

from __future__ import annotations

import torch

from bench.timing import Options, Ratio, interleave
from policy.device import threads
from policy.precision.nvfp4 import quantize

COLUMNS = 1024


def measure(options: Options) -> list[Ratio]:
    """Return packing times relative to memcpy and to the sum of FP32 weights [N, 1024].

    GB/s in the notes refer to bytes read.
    """
    with threads(options.config.services.learner.threads):
        rows = max(1, options.pack_bytes // (4 * COLUMNS))
        weight = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(0))
        copy = torch.empty_like(weight)
        times = interleave(
            {
                "memcpy": lambda: copy.copy_(weight),
                "sum": weight.sum,
                "pack": lambda: quantize(weight),
                "pack with scale search": lambda: quantize(weight, search=True),
            },
            options.repeats,
        )
    return [
        Ratio.of(
            times,
            what,
            base,
            note=(
                f"{weight.nbytes / sorted(times[what])[len(times[what]) // 2] / 1e9:.2f} GB/s"
                " packed"
            ),
        )
        for what in ("pack", "pack with scale search")
        for base in ("memcpy", "sum")
    ]

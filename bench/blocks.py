"""Comparison of weight scales per 1x16 block and per 16x16 tile: ``python -m bench.blocks CONFIG``.

It runs ``sol-rl fidelity`` with both. NVIDIA uses one scale per 16x16 tile for training, where a
weight is also read transposed. Explorers do not transpose weights, so they can use a scale for
every 16 values. The wire format allows tiles, but no other backend packs them; the one here exists
only for this measurement.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from cli import main as cli
from policy.precision import nvfp4
from policy.precision.backends import BACKENDS
from policy.precision.emulated import EmulatedNVFP4
from policy.precision.nvfp4 import BLOCK


class Tiles(EmulatedNVFP4):
    """NVFP4 with one weight scale per 16x16 tile, repeated for its rows, without scale search.

    Activations are quantized as in ``EmulatedNVFP4``.
    """

    name = "nvfp4_16x16"

    def pack(self, weight: Tensor, search: bool, amax: Tensor | None = None) -> dict[str, Tensor]:
        """Return codes, scales and amax, with the scale of a tile's largest magnitude per block.

        Raises ValueError for the same weights as ``nvfp4.quantize``.
        """
        plain = nvfp4.quantize(weight, amax=amax)
        exact = weight.detach().float()
        rows = nvfp4.block_amax(exact)
        tiles = (
            torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % BLOCK))
            .unflatten(0, (-1, BLOCK))
            .amax(1)
        )
        scales = nvfp4.block_scales(
            tiles.repeat_interleave(BLOCK, 0)[: len(rows)],
            s_enc := nvfp4.encoding_scale(plain.amax),
        )
        v = nvfp4.scaled(exact, scales, s_enc)
        negative = v < 0
        return {
            "codes": nvfp4.encode(nvfp4.round_e2m1_(v), negative),
            "scales": scales.view(torch.uint8),
            "amax": plain.amax,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``sol-rl fidelity`` with these arguments and both backends; return its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    BACKENDS[Tiles.name] = Tiles()
    try:
        return cli.main(["fidelity", *argv, "--backends", EmulatedNVFP4.name, Tiles.name])
    finally:
        del BACKENDS[Tiles.name]


if __name__ == "__main__":
    raise SystemExit(main())

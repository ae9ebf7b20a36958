"""What blocks of 1x16 are worth: ``python -m bench.blocks CONFIG ...`` is ``sol-rl fidelity`` with
them, and with tiles of 16x16 beside them.

Weights with one scale per 16 x 16 tile are NVIDIA's choice for training, where a weight is also
read transposed. Explorers read it one way, so they can have a scale for every 16 values. Tiles are
legal on the wire, but no backend packs so; this one exists to be measured.
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
    """NVFP4 whose weights have one scale per 16 x 16 tile, repeated for its rows; activations as
    ever. No scale search.
    """

    name = "nvfp4_16x16"

    def pack(self, weight: Tensor, search: bool, amax: Tensor | None = None) -> dict[str, Tensor]:
        """codes, scales, amax: each block is packed at the largest magnitude of its tile.
        ValueError for what ``nvfp4`` refuses.
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
    """The exit code of ``sol-rl fidelity`` with these arguments, both kinds of blocks as its
    backends.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    BACKENDS[Tiles.name] = Tiles()
    try:
        return cli.main(["fidelity", *given, "--backends", EmulatedNVFP4.name, Tiles.name])
    finally:
        del BACKENDS[Tiles.name]


if __name__ == "__main__":
    raise SystemExit(main())

"""Tiles of 16x16 and blocks of 1x16: errors computed by hand, and rank agreement of the command."""

import json

import torch

from bench.blocks import Tiles, main
from policy.precision import nvfp4
from policy.precision.backends import BACKENDS
from tests.cluster.runs import tiny_config, write_toml

PLAIN = BACKENDS["emulated_nvfp4"]


def test_a_tile_has_one_scale_for_its_rows():
    """Rows of equal amax are packed as in blocks; a row that is small beside another of its tile
    rounds to zero.
    """
    generator = torch.Generator().manual_seed(0)
    even = torch.rand(40, 32, generator=generator) * 2 - 1  # two tiles and a half
    even[:, ::16] = 1.0
    packed, plain = Tiles().pack(even, False), PLAIN.pack(even, False)
    assert all(torch.equal(packed[part], plain[part]) for part in plain)
    uneven = even.clone()
    uneven[3] *= 0.01
    decoded = Tiles().decode(Tiles().pack(uneven, False))
    # 0.01 is below half of the smallest value, 1 / 6 / 2 of the tile's largest
    assert torch.equal(decoded[3], torch.zeros(32))
    assert PLAIN.decode(PLAIN.pack(uneven, False))[3].abs().max() > 0.009
    others = [row for row in range(40) if row != 3]
    assert torch.equal(decoded[others], PLAIN.decode(plain)[others])


def test_gaussian_weights_have_larger_errors_in_tiles():
    """The largest of 256 values is further out than that of 16: expected 3.0 and 2.0 standard
    deviations.

    Steps grow in proportion.
    """
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))

    def error(backend) -> float:
        return float((backend.decode(backend.pack(weight, False)) - weight).norm() / weight.norm())

    assert 1.1 < error(Tiles()) / error(PLAIN) < 3.0 / 2.0


def test_the_command_ranks_with_both_on_the_same_noises(tiny_sd3_dir, tmp_path):
    path = write_toml(tiny_config(tiny_sd3_dir, tmp_path, "blocks"), tmp_path)
    out = tmp_path / "out"
    assert (
        main([str(path), "--prompts", "2", "--seeds", "24", "--steps", "2", "--out", str(out)]) == 0
    )
    rows = json.loads((out / "fidelity.json").read_text())["rows"]
    assert [row["backend"] for row in rows] == ["emulated_nvfp4", "nvfp4_16x16"]
    rewards = json.loads((out / "rewards.json").read_text())["proxies"]
    assert rewards["emulated_nvfp4/2"] != rewards["nvfp4_16x16/2"]
    assert Tiles.name not in BACKENDS and nvfp4.BLOCK == 16
    assert main(["nothing"]) == 2

"""Operations and bytes by hand on small functions, and the table."""

import torch

from bench.packing import count, main, table


def test_a_toy_by_hand():
    """float32 [4, 8] is 128 bytes: a sum of rows, a product with it expanded, a view, an
    allocation, and a copy to half precision.
    """
    x = torch.ones(4, 8)

    def toy() -> torch.Tensor:
        rows = x.sum(-1, keepdim=True)  # reads 128, writes 16
        y = x.t().t() * rows.expand(4, 8)  # views are free; reads 128 and 16, writes 128
        out = torch.empty(4, 8, dtype=torch.bfloat16)
        out.copy_(y)  # reads 128, writes 64
        return out

    counted = count(toy)
    assert (counted.operations, counted.small) == (3, 0)
    assert (counted.read, counted.written) == (128 + 128 + 16 + 128, 16 + 128 + 64)


def test_in_place_reads_what_it_changes_and_out_does_not():
    x, y = torch.ones(4), torch.ones(4)
    counted = count(lambda: torch.add(x.add_(1), 1, out=y))
    assert (counted.operations, counted.read, counted.written) == (2, 16 + 16, 16 + 16)
    counted = count(lambda: torch.ones(()).zero_())
    assert (counted.operations, counted.small, counted.read, counted.written) == (2, 2, 0, 8)


def test_the_table_is_what_the_formats_run(capsys):
    """FP8 by hand: |x|, a reduction, to float32, a division, a clamp, codes, and three operations
    on a number per row.
    """
    rows = {name: (counted, moved) for name, counted, moved, _ in table()}
    counted, moved = rows["fp8, once per input"]
    assert counted.operations == 9 and round(moved) == (2 + 2) + 2 + (2 + 4) + (4 + 4) + (4 + 4) + (
        4 + 1
    )
    counted, moved = rows["torch_nvfp4, once per input"]
    assert counted.operations - counted.small > 30 and 150 < moved < 200
    assert main() == 0
    assert "torch_nvfp4, scales in cuBLAS's order, per product" in capsys.readouterr().out

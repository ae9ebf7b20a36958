"""Operations and bytes of small functions by hand; the table; the cost model against it."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from bench.__main__ import main as bench
from bench.packing import as_json, count, main, table
from policy.precision import cost


def test_bytes_of_a_known_model():
    """float32 [4, 8] is 128 bytes: a sum of rows, a product with it expanded, a view, an allocation
    and a copy to half precision.
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


def test_in_place_operations_read_their_target():
    x, y = torch.ones(4), torch.ones(4)
    counted = count(lambda: torch.add(x.add_(1), 1, out=y))
    assert (counted.operations, counted.read, counted.written) == (2, 16 + 16, 16 + 16)
    counted = count(lambda: torch.ones(()).zero_())
    assert (counted.operations, counted.small, counted.read, counted.written) == (2, 2, 0, 8)


def test_operations_of_eager_packing():
    """FP8, computed by hand: |x|, a reduction, a cast to float32, a division, a clamp, codes, and
    three operations on one number per row.
    """
    rows = {name: counted for name, form, counted in table() if form == "eager"}
    moved = (rows["fp8"].read + rows["fp8"].written) / (1024 * 3072)
    assert rows["fp8"].operations == 10
    assert round(moved) == (2 + 2) + 2 + (2 + 4) + (4 + 4) + (4 + 4) + (4 + 1)
    assert rows["nvfp4"].operations - rows["nvfp4"].small > 30


def test_kernels_move_at_most_five_bytes_per_element():
    """FP8: x, codes, and 4 bytes per row of 3072. NVFP4: x twice, codes of half a byte, one scale
    per 16.

    The results of 256 programs are written once and read by each of the 8 * 48 tiles.
    """
    found = as_json()
    assert found["fp8"]["kernels"] == 1
    assert found["fp8"]["bytes_per_element"] == pytest.approx(2 + 1 + 4 / 3072, abs=1e-4)
    assert found["nvfp4"]["kernels"] == 2
    partial = (1 + 8 * 48) * 256 * 4 / (1024 * 3072)
    expected = 2 + 2 + 0.5 + 1 / 16 + partial + 4 / (1024 * 3072)
    assert found["nvfp4"]["bytes_per_element"] == pytest.approx(expected, abs=1e-4)
    assert max(form["bytes_per_element"] for form in found.values()) <= 5
    one_read = found["nvfp4 previous_pass"]
    partial = 8 * 48 * (256 * 4 + 4) / (1024 * 3072)  # each tile writes its maximum
    expected = 2 + 0.5 + 1 / 16 + partial + 4 / (1024 * 3072)
    assert one_read["kernels"] == 1
    assert one_read["bytes_per_element"] == pytest.approx(expected, abs=1e-4)


def test_a_weight_is_read_twice_and_written_once():
    """Once for its amax. By torch it is searched in 13 passes of a dozen operations."""
    counted = as_json()["nvfp4 weights"]
    assert counted["kernels"] == 3  # the second takes the maximum of the first one's results
    assert counted["bytes_per_element"] == pytest.approx(2 + 2 + 0.5 + 1 / 16, abs=1e-3)
    assert counted["eager"]["kernels"] > 13 * 12 < counted["eager"]["bytes_per_element"] / 4


def test_the_cost_model_uses_the_counted_bytes():
    found = as_json()
    del found["nvfp4 weights"]  # not packed in a step
    one_read = found.pop("nvfp4 previous_pass")
    assert cost.PREVIOUS_PASS.kernels == one_read["kernels"]
    assert cost.PREVIOUS_PASS.bytes == pytest.approx(one_read["bytes_per_element"], abs=0.01)
    for form, row in found.items():
        for packing, counted in ((cost.FUSED[form], row), (cost.EAGER[form], row["eager"])):
            assert packing.kernels == counted["kernels"]
            assert packing.bytes == pytest.approx(counted["bytes_per_element"], abs=0.01)


def test_the_printed_plan_contains_its_findings(capsys):
    assert main(["--json"]) == 0
    message = capsys.readouterr().out
    assert json.loads(message) == as_json()
    assert bench(["packing", "--json"]) == 0
    assert capsys.readouterr().out == message
    assert main([]) == 0
    assert "nvfp4               kernels         2" in capsys.readouterr().out


def test_the_module_is_a_command_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench.packing", "--json"])
    monkeypatch.delitem(sys.modules, "bench.packing")  # of which ``runpy`` would warn
    with pytest.raises(SystemExit) as end:
        runpy.run_module("bench.packing", run_name="__main__")
    assert end.value.code == 0 and json.loads(capsys.readouterr().out) == as_json()


def test_no_module_with_a_command_line_ends_silently_when_it_is_run():
    root = Path(__file__).parent.parent.parent
    files = [file for room in ("bench", "tools") for file in (root / room).rglob("*.py")]
    silent = [
        file.name
        for file in files
        if "\ndef main(" in (text := file.read_text()) and '__name__ == "__main__"' not in text
    ]
    assert len(files) > 80 and not silent

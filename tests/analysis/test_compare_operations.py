"""Comparison against operations: costs of iterations, and gains computed by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.compare.cells import read_comparison
from analysis.compare.command import compare_existing
from analysis.compare.data import measure, summarise
from analysis.compare.operations import Operations, costs, operations_of
from analysis.compare.request import Request
from analysis.compare.statistics import gain_at
from analysis.compare.table import tables
from configs.load import ConfigError, load, parse
from tests.analysis.fake_train import write
from tests.analysis.page import Page

SECONDS = {"explore": 2.0, "regenerate": 1.0, "update": 4.0, "publish": 0.5, "iteration": 8.0}
COUNTED = {"full": Operations(10e12, 0.0), "cheap": Operations(4e12, 8e12)}


def run(root: Path, name: str, seed: int, gains: list[float]):
    config = load("compare_small", [f"run_root={root}", f"name={name}{seed}", f"seed={seed}"])
    return measure(write(config, gains, SECONDS), seed)


@pytest.fixture
def results(tmp_path):
    """Write gains of 0.04 after four updates, 0.08 for the second seed; the cheap cell gains 0.01
    more in each of five updates.
    """
    full = [run(tmp_path, "full", s, [0.01 * (s + 1) * i for i in range(1, 5)]) for s in (0, 1)]
    cheap = [
        run(tmp_path, "cheap", s, [0.01 * (s + 1) * i + 0.01 for i in range(1, 6)]) for s in (0, 1)
    ]
    return summarise([("full", "full", None, full), ("cheap", "cheap", None, cheap)], "full")


def test_operations_of_an_iteration_at_a_ratio():
    assert [COUNTED["cheap"].at(ratio) for ratio in (4, 2, 1)] == [6e12, 8e12, 12e12]
    assert COUNTED["full"].at(4) == COUNTED["full"].at(1) == 10e12


def test_gains_are_interpolated_but_not_extrapolated():
    points = [(0.0, 0.0), (10.0, 0.2), (20.0, 0.1)]
    assert gain_at(points, 5.0) == pytest.approx(0.1) and gain_at(points, 15.0) == pytest.approx(
        0.15
    )
    assert (gain_at(points, 0.0), gain_at(points, 10.0), gain_at(points, 20.0)) == (
        0.0,
        0.2,
        pytest.approx(0.1),
    )
    assert gain_at(points, 20.1) is None


def test_gains_at_parts_of_the_baselines_operations(results):
    """Mean gains are 0.015 per update, and 0.01 more in the cheap cell.

    The baseline ends after 40e12 operations with 0.06. At 4x the cheap cell reaches that 5 of 15
    thousandths before its fourth update, after 3 + 1/3 times 6e12. Three quarters of 40e12 are its
    five updates: 0.06 and 0.11, less 0.04 and 0.08.
    """
    found = costs(results, "full", COUNTED, (4.0, 1.0))
    full, cheap = found["full"][0], found["cheap"][0]
    assert (full.iteration, full.relative, cheap.iteration) == (10e12, 1.0, 6e12)
    assert cheap.relative == pytest.approx(0.6)
    assert full.reach[1.0] == pytest.approx(40e12) and full.reach[0.5] == pytest.approx(20e12)
    assert cheap.reach[1.0] == pytest.approx((3 + 1 / 3) * 6e12)
    early = cheap.against[0.75]
    assert (early.mean, early.error, early.count) == (
        pytest.approx(0.025, abs=1e-12),
        pytest.approx(0.005, abs=1e-12),
        2,
    )
    assert cheap.against[1.0].count == 0  # 40e12 are 6.7 updates, but it has five
    assert full.against[1.0].mean == pytest.approx(0.0, abs=1e-12)
    dear = found["cheap"][1]  # 12e12 an iteration: 2.5 updates are 30e12
    assert dear.against[0.75].mean == pytest.approx(((0.035 - 0.04) + (0.06 - 0.08)) / 2, abs=1e-12)


def test_the_tables_and_the_page_have_a_part_for_each_ratio(results):
    found = tables(results, "full", costs(results, "full", COUNTED, (4.0, 1.0)))
    assert [table.title for table in found[3:]] == [
        "Operations, quantized ones at 4x",
        "Operations, quantized ones at 1x",
    ]
    assert found[3].rows == [
        ("full", "10", "1.000", "20", "30", "40", "-0.0150 ± 0.0050", "+0.0000 ± 0.0000"),
        (
            *("cheap", "6", "0.600", "8 (0.40)", "14 (0.47)", "20 (0.50)"),
            *("+0.0250 ± 0.0050", "-"),
        ),
    ]
    assert len(tables(results, "full")) == 3


def test_a_cell_without_runs_has_no_operations(results):
    empty = replace(results[1], runs=())
    assert list(costs([results[0], empty], "full", COUNTED, (4.0,))) == ["full"]
    assert costs([replace(results[0], runs=()), results[1]], "full", COUNTED, (4.0,)) == {}


def test_operations_of_existing_runs_are_counted_on_request(tmp_path):
    for name, arm in (("a", "naive_scaling"), ("b", "diffusionnft")):
        config = load("compare_small", [f"run_root={tmp_path}", f"name={name}", f"arm={arm}"])
        write(config, [0.1, 0.2], SECONDS)
    compare_existing([tmp_path], "naive_scaling", tmp_path / "out", (4.0, 1.0))
    cells = json.loads((tmp_path / "out" / "compare.json").read_text())["cells"]
    scaling, plain = (cell["operations"] for cell in cells)
    assert [cost["ratio"] for cost in scaling] == [4, 1] and scaling[0]["relative"] == 1
    assert plain[0]["relative"] == pytest.approx(491366055936 / 883878002688)
    page = Page((tmp_path / "out" / "compare.html").read_text())
    assert len(page.all("svg")) == 4 and "Gain in held-out reward by operations" in page.text


def test_operations_of_the_shipped_arms_differ_by_their_passes():
    """Per prompt: 96 x 10 unquantized passes against 96 x 6, most of each quantized, and 24 x 10.

    Updates cost the same.
    """
    comparison = read_comparison(Request("time"))
    assert comparison.operations == (4, 2, 1) and len(comparison.seeds) == 5
    configs = {cell.name: parse(cell.tree_of(0, Path("/x"))) for cell in comparison.cells}
    counted = {name: operations_of(config) for name, config in configs.items()}
    assert counted["naive_scaling"].quantized == counted["diffusionnft"].quantized == 0
    # the same products, in six steps of one arm and ten of the other
    assert counted["naive_quant"].quantized / counted["sol_rl"].quantized == pytest.approx(10 / 6)
    assert counted["naive_quant"].at(1) == counted["naive_scaling"].at(1)
    model = {name: config.model for name, config in configs.items()}
    assert all(each == model["sol_rl"] for each in model.values())


@pytest.mark.parametrize("ratios", [(0.5,), (math.inf,), (4.0, 4.0), (math.nan,)])
def test_invalid_ratios_are_refused(ratios):
    with pytest.raises(ConfigError, match="operations: .*: expected distinct ratios"):
        read_comparison(Request("time", operations=ratios))

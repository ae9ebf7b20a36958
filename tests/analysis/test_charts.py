"""SVG charts: marks are at their values, and ticks at round numbers."""

from __future__ import annotations

import math
import re

import pytest

from analysis.report import axes, charts


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (0, "0"),
        (0.66667, "0.667"),
        (-0.05, "−0.0500"),
        (12.345, "12.3"),
        (1920, "1,920"),
        (3.0, "3"),
        (1234.5, "1,234"),
        (2.5e7, "2.50e+07"),
        (1e-6, "1.00e-06"),
        (0.9996, "1.00"),
    ],
)
def test_numbers_are_formatted(value: float | None, text: str):
    assert charts.number(value) == text


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.25, 0.5, 0.75, 1]),
        (0.31, 0.98, [0.4, 0.6, 0.8]),
        (-0.5, 1.5, [-0.5, 0, 0.5, 1, 1.5]),
        (0, 20, [0, 5, 10, 15, 20]),
        (3, 3, [3]),
    ],
)
def test_nice_ticks(low: float, high: float, ticks: list[float]):
    assert axes.nice_ticks(low, high) == pytest.approx(ticks)


def test_the_span_of_an_axis_contains_all_values_and_is_not_empty():
    assert axes.span([]) == (0.0, 1.0)
    assert axes.span([math.nan, 0.0, 0.0]) == (0.0, 1.0)
    assert axes.span([2.0]) == pytest.approx((1.8, 2.2))
    assert axes.span([0.2, 0.7], include=(0.0, 1.0)) == (0.0, 1.0)
    assert axes.span([0.0, 1.0], pad=0.1) == pytest.approx((-0.1, 1.1))


def test_a_line_has_the_coordinates_of_its_values():
    svg = charts.line_chart(
        [charts.Series("a", [(0, 0.0), (10, 1.0)])],
        include_y=(0.0, 1.0),
        label="x",
        size=(400, 210),
    )
    # left 46, right 12, top 10, bottom 34 of 400 x 210; x has a margin of 2 % on either side: (0 +
    # 0.2) / 10.4 * 342 + 46 = 52.58
    assert '<polyline class="line-1" points="52.58,176.00 381.42,10.00"/>' in svg


def test_close_ticks_have_different_labels():
    svg = charts.scatter(
        [(-0.871, -0.869), (-0.856, -0.856)],
        label="x",
        x_label="before",
        y_label="after",
        names="pq",
    )
    texts = re.findall(r'text-anchor="(?:middle|end)">(−[\d.]+)</text>', svg)
    assert len(texts) >= 6 and max(texts.count(text) for text in texts) == 2  # once on each axis
    assert "−0.865" in texts


def test_bars_stack_and_more_than_sixty_are_averaged():
    one = charts.stacked_bars(
        [charts.Stack(0, {"a": 1.0, "b": 3.0}, 4.0)], [("a", 1), ("b", 2)], label="x"
    )
    heights = [float(value) for value in re.findall(r'<rect[^>]* height="([\d.]+)"', one)]
    # each bar leaves a gap of 0.6 units
    assert heights[1] / heights[0] == pytest.approx(3, abs=0.05)
    many = charts.stacked_bars(
        [charts.Stack(i, {"a": 1.0 + (i % 2)}) for i in range(100)], [("a", 1)], label="x"
    )
    assert many.count("<rect") == 50
    assert "iteration 0: a 1.50 s" in many


def test_a_scatter_counts_above_and_below():
    svg = charts.scatter(
        [(0.1, 0.5), (0.5, 0.4), (0.3, 0.3), (math.nan, 1)],
        label="x",
        x_label="before",
        y_label="after",
        names=["<p>", "q", "r", "s"],
    )
    assert [svg.count(f'class="point fill-{colour}"') for colour in (2, 5, 8)] == [1, 1, 1]
    assert "&lt;p&gt;: 0.100 → 0.500" in svg


def test_downsampling_keeps_both_ends():
    found = charts.downsample([(float(i), 0.0) for i in range(1001)], 5)
    assert [x for x, _ in found] == [0, 250, 500, 750, 1000]

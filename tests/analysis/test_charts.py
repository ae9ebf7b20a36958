"""SVG charts: marks are at their values, and ticks at round numbers."""

from __future__ import annotations

import math
import re

import pytest

from analysis.report import axes, charts
from analysis.report.bins import bin_means, bins


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


def test_a_long_line_is_drawn_as_means_with_their_range():
    values = [(float(i), float(i % 2)) for i in range(1000)]
    values[501] = (501.0, 9.0)  # would be missed by taking every fourth point
    svg = charts.line_chart([charts.Series("a", values)], label="x", include_y=(0.0, 9.0))
    (line,) = re.findall(r'<polyline class="line-1" points="([^"]+)"', svg)
    (area,) = re.findall(r'<polygon class="band fill-1" points="([^"]+)"', svg)
    assert len(line.split()) == 300 and len(area.split()) == 600
    # y of 9 is the top of the plot, and y of 0 its bottom
    assert [point.split(",")[1] for point in area.split()].count("10.00") == 1
    assert area.split()[-1].endswith(",176.00")
    assert "a, 0 to 2: mean 0.3333, from 0 to 1" in svg
    assert ">iteration, means of 4 and their range<" in svg


def test_many_errors_are_an_area_and_few_are_bars():
    def chart(count: int) -> str:
        line = charts.Series("a", [(i, 1.0) for i in range(count)], errors=[0.5] * count)
        return charts.line_chart([line], label="x", include_y=(0.0, 2.0))

    assert chart(60).count('class="error') == 60 and "polygon" not in chart(60)
    assert 'class="error' not in chart(61)
    (area,) = re.findall(r'<polygon class="band fill-1" points="([^"]+)"', chart(61))
    # half of a unit above and below the middle of 10 to 176
    assert {point.split(",")[1] for point in area.split()} == {"51.50", "134.50"}
    assert chart(700).count("polygon") == 2 and "means of 3<" in chart(
        700
    )  # no range beside errors


@pytest.mark.parametrize(("count", "sizes"), [(0, []), (3, [1, 1, 1]), (5, [1, 2, 2])])
def test_bins_differ_in_size_by_at_most_one(count: int, sizes: list[int]):
    found = bins([(float(i), 1.0) for i in range(count)], most=3)
    assert [int(part.last - part.first) + 1 for part in found] == sizes


def test_a_bin_leaves_out_what_is_not_finite():
    (part,) = bins([(0, 1.0), (1, math.nan), (2, 5.0), (3, math.inf)], most=1)
    assert (part.first, part.last, part.x, part.y, part.low, part.high) == (0, 3, 1.5, 3, 1, 5)
    assert math.isnan(bins([(0, math.nan), (1, math.nan)], most=1)[0].y)
    assert bin_means([1.0, math.nan, 4.0, 6.0], most=2) == [1.0, 5.0]

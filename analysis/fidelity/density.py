"""Heat maps of the proxy rank against the true rank of seeds, one per backend and step count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

import numpy as np

from analysis.report.axes import figure

SIDE, GAP, LEFT, TOP, FOOT, LEGEND = 168.0, 26.0, 50.0, 66.0, 62.0, 440.0
PANELS_PER_ROW = 4
LIGHT, DARK = (247, 251, 255), (8, 48, 107)
FULL = 8.0
"""Density, relative to that of a random ranking, from which on the darkest color is used."""


def density_chart(panels: Mapping[str, np.ndarray], title: str, count: int) -> str:
    """Return an SVG of ``panels``: title -> density [true bin, proxy bin].

    Bins are sorted from best to worst, and rows sum to 1. The color shows the density relative to a
    random ranking (1), up to ``FULL``. ``count`` is N, for the labels of the axes.
    """
    columns = min(PANELS_PER_ROW, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    width, height = LEFT + max(columns * (SIDE + GAP), LEGEND), TOP + rows * (SIDE + FOOT) + 18
    body: list[str] = []
    for number, (name, density) in enumerate(panels.items()):
        row, column = divmod(number, columns)
        body.append(
            _panel(name, density, LEFT + column * (SIDE + GAP), TOP + row * (SIDE + FOOT), count)
        )
    body.append(_legend(LEFT, height - 20))
    return figure(width, height, "Proxy rank given the true rank", title, body, LEFT)


def _panel(name: str, density: np.ndarray, x: float, y: float, count: int) -> str:
    """Draw the true rank to the right and the proxy rank upwards, both improving along the axis.

    A perfect proxy gives a rising diagonal.
    """
    bins = len(density)
    cell = SIDE / bins
    parts = [
        f'<text x="{x:g}" y="{y - 6:g}" font-weight="600">{escape(name)}</text>',
        (
            f'<rect x="{x:g}" y="{y:g}" width="{SIDE:g}" height="{SIDE:g}" fill="{_colour(0)}"'
            ' stroke="#999" stroke-width="0.5"/>'
        ),
    ]
    for true in range(bins):
        for proxy in range(bins):
            relative = density[true, proxy] * bins
            if relative < 0.02:
                continue
            left, top = x + (bins - 1 - true) * cell, y + proxy * cell
            parts.append(
                f'<rect x="{left:.2f}" y="{top:.2f}" width="{cell:.2f}" height="{cell:.2f}"'
                f' fill="{_colour(relative / FULL)}"/>'
            )
    foot = y + SIDE
    parts += [
        f'<text x="{x:g}" y="{foot + 14:g}">worst ({count})</text>',
        f'<text x="{x + SIDE:g}" y="{foot + 14:g}" text-anchor="end">best (1)</text>',
        f'<text x="{x + SIDE / 2:g}" y="{foot + 28:g}" text-anchor="middle">true rank</text>',
        (
            f'<text x="{x - 6:g}" y="{y + SIDE / 2:g}" text-anchor="middle" '
            f'transform="rotate(-90 {x - 6:g} {y + SIDE / 2:g})">proxy rank (best up)</text>'
        ),
    ]
    return "".join(parts)


def _legend(x: float, y: float) -> str:
    parts = [f'<text x="{x:g}" y="{y + 10:g}">density, random = 1:</text>']
    for number in range(9):
        left = x + 118 + number * 30
        parts.append(
            f'<rect x="{left:g}" y="{y:g}" width="14" height="12" fill="{_colour(number / FULL)}"'
            ' stroke="#bbb"/>'
        )
        label = f"{number}" if number < 8 else "8 or more"
        parts.append(f'<text x="{left + 17:g}" y="{y + 10:g}">{label}</text>')
    return "".join(parts)


def _colour(share: float) -> str:
    share = min(max(share, 0.0), 1.0)
    return "#" + "".join(
        f"{round(light + (dark - light) * share):02x}"
        for light, dark in zip(LIGHT, DARK, strict=True)
    )

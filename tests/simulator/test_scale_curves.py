"""The diagram of simulated speed-ups."""

import re
from dataclasses import replace

import pytest

from tools.scale_curves import COLOURS, COUNTS, MODELS, Point, drawing, line, point


def test_point_is_a_simulation_of_the_chosen_layout():
    """There is a prompt for each GPU, and at least eight. On 4 B200, the time of SANA is close to
    an even distribution of all work.
    """
    result = point("sana", True, 4)
    assert (result.prompts, result.gpus) == (8, 4)
    assert result.bound < result.seconds < 1.25 * result.bound
    assert result.rate == 8 / result.seconds
    assert sum(result.path.values()) == pytest.approx(result.seconds, rel=0.02)
    assert line(result).startswith("sana        growing     4 GPUs     8 prompts")


def test_curves_contain_only_simulated_points():
    """One curve follows the diagonal up to 1,024 GPUs, and the other ends at 4 GPUs."""
    one_gpu = Point("sana", False, 1, 48, 1024.0, 1024.0, {}, 0.0, 0.0)
    points = [replace(one_gpu, gpus=count, seconds=1024.0 / count) for count in COUNTS]
    points += [replace(one_gpu, model="flux1", gpus=count) for count in COUNTS[:2]]
    polylines = re.findall(r'<polyline points="([^"]*)" stroke="(#\w+)"', drawing(points))
    diagonal = polylines[0][0].split()
    curves = {color: row.split() for row, color in polylines if row and color in COLOURS}
    sana, flux1 = curves[COLOURS[MODELS.index("sana")]], curves[COLOURS[MODELS.index("flux1")]]
    assert (len(curves), len(sana), len(flux1)) == (2, len(COUNTS), 2)
    assert [sana[0], sana[-1]] == diagonal and flux1[0] == sana[0]

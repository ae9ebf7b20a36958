"""Plot the simulated speed-up from 1 to 1,024 GPUs: ``python -m tools.scale_curves OUT.svg``.

Each point is a run of the real driver in virtual time on B200 GPUs, with the layout that Sol-RL
chooses for that number of GPUs. One set of points keeps the preset's number of prompts per
iteration; the other uses one prompt per GPU, but at least eight.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.driver import laid_out
from configs.load import load
from records.atomic import write_text
from simulator.outlook import critical_path, run

MODELS = ("flux1", "sd35_large", "sd35_medium", "sana")
COUNTS = (1, 4, 16, 64, 256, 1024)
COLOURS = ("#3366cc", "#dc3912", "#109618", "#990099")
WORK = ("explore", "regenerate", "update")
WIDTH, HEIGHT, EDGE = 440, 300, 48


@dataclass(frozen=True)
class Point:
    """Result of one simulation: its throughput and how an iteration spends its time."""

    model: str
    growing: bool
    gpus: int
    prompts: int
    seconds: float
    bound: float
    path: dict[str, float]
    driver: float
    idle: float

    @property
    def rate(self) -> float:
        """Throughput in prompts per second."""
        return self.prompts / self.seconds


def point(model: str, growing: bool, gpus: int) -> Point:
    """Simulate one model; if ``growing``, with one prompt per GPU but at least eight."""
    overrides = [f"prompts.per_iteration={max(8, gpus)}"] if growing else []
    config = load(f"{model}-sol_rl-hpsv2", overrides)
    scenario, choice = laid_out(config, gpus)
    result = run(scenario)
    path = critical_path(result.spans, result.spans_end)
    prompts, seconds = config.prompts.per_iteration, result.iteration
    shares = result.driver, result.mean_idle
    return Point(model, growing, gpus, prompts, seconds, choice.bound, path, *shares)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate the points that are missing from the JSON file, and draw all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="the SVG; its points are written to a JSON file next to it")
    parser.add_argument("--points", help="file for the points instead")
    options = parser.parse_args(arguments)
    points_file = Path(options.points or Path(options.out).with_suffix(".json"))
    points = (
        [Point(**row) for row in json.loads(points_file.read_text(encoding="utf-8"))]
        if points_file.exists()
        else []
    )
    known = {(each.model, each.growing, each.gpus) for each in points}
    for gpus in COUNTS:
        for model in MODELS:
            for growing in (False, True):
                if (model, growing, gpus) not in known:
                    points.append(point(model, growing, gpus))
                    write_text(points_file, json.dumps([asdict(each) for each in points], indent=1))
                    print(line(points[-1]), flush=True)
                    write_text(Path(options.out), drawing(points))
    write_text(Path(options.out), drawing(points))
    return 0


def line(at: Point) -> str:
    """Format a point as one line of text."""
    other = {work: round(s, 1) for work, s in at.path.items() if work not in WORK}
    return (
        f"{at.model:12}{'growing' if at.growing else 'fixed':8}{at.gpus:5} GPUs"
        f" {at.prompts:5} prompts {at.seconds:9.1f} s, {at.seconds / at.bound:.2f} x bound,"
        f" idle {at.idle:.0%}, driver {at.driver:.1%}, beside GPU work {other}"
    )


def drawing(points: Sequence[Point]) -> str:
    """Return an SVG with two panels: speed-up over one GPU against the number of GPUs.

    Speed-up is in prompts per second; all axes are logarithmic.
    """
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT + 40}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for panel, growing in enumerate((False, True)):
        subset = [item for item in points if item.growing == growing]
        parts += _panel(
            subset, panel * WIDTH, "prompts grow with GPUs" if growing else "48 prompts"
        )
    for index, model in enumerate(MODELS):
        x = EDGE + 110 * index
        parts.append(
            f'<rect x="{x}" y="{HEIGHT + 18}" width="12" height="12" fill="{COLOURS[index]}"/>'
        )
        parts.append(f'<text x="{x + 18}" y="{HEIGHT + 28}">{model}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(points: Sequence[Point], left: int, title: str) -> list[str]:
    span = math.log2(COUNTS[-1])

    def coordinates(gpus: float, speed: float) -> str:
        x = left + EDGE + (WIDTH - EDGE - 16) * math.log2(gpus) / span
        y = HEIGHT - EDGE - (HEIGHT - EDGE - 40) * math.log2(max(speed, 1)) / span
        return f"{x:.1f},{y:.1f}"

    parts = [f'<text x="{left + EDGE}" y="20" font-weight="bold">Speed-up, {title}</text>']
    for count in COUNTS:
        x, y = coordinates(count, 1).split(",")
        parts.append(f'<text x="{x}" y="{float(y) + 16}" text-anchor="middle">{count}</text>')
        x, y = coordinates(1, count).split(",")
        parts.append(
            f'<text x="{float(x) - 6}" y="{float(y) + 4}" text-anchor="end">{count}</text>'
        )
    ends = f"{coordinates(1, 1)} {coordinates(COUNTS[-1], COUNTS[-1])}"
    parts.append(f'<polyline points="{ends}" stroke="#bbb" stroke-dasharray="4" fill="none"/>')
    x = left + WIDTH / 2
    parts.append(f'<text x="{x}" y="{HEIGHT - 12}" text-anchor="middle">B200 GPUs</text>')
    for model, colour in zip(MODELS, COLOURS, strict=True):
        curve = sorted((p for p in points if p.model == model), key=lambda each: each.gpus)
        path = " ".join(coordinates(each.gpus, each.rate / curve[0].rate) for each in curve)
        parts.append(f'<polyline points="{path}" stroke="{colour}" stroke-width="2" fill="none"/>')
    return parts


if __name__ == "__main__":
    raise SystemExit(main())

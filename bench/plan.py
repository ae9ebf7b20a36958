"""Benchmark of simulated against measured seconds per iteration, on the tiny model.

Layouts of one machine's cores are predicted from the timeline of another layout. Machines drift, so
the calibrating layout is measured before and after each other one, and both measurements predict.
Measurements are stored in ``Options.keep`` and not repeated, so that the benchmark can be
interrupted.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.ring import NullProgress
from bench.timing import Options, Ratio, ray_for
from cluster.driver.loop import Ring
from cluster.driver.services import ActorServices
from configs.load import parse
from configs.prompts import read_prompts
from configs.schema import RunConfig
from configs.section import Tree
from records.atomic import write_text
from records.rundir import RunDirectory
from records.timeline import Span
from simulator.measured import Measured, measurements_from_spans

WORST, MEDIAN = 0.2, 0.1


@dataclass(frozen=True)
class Shape:
    """A layout: rollout actors, learner replicas, explore_ahead and images per chunk."""

    actors: int
    replicas: int
    ahead: int
    chunk: int

    @property
    def name(self) -> str:
        """Name of the layout in the table."""
        return f"{self.actors}-{self.replicas}-{self.ahead}-{self.chunk}"


CALIBRATED = Shape(2, 1, 0, 16)
"""The calibrating layout.

A prompt's 40 images make chunks of 16, 16 and 8: two sizes, as needed to fit a line.
"""
SHAPES = (
    Shape(1, 1, 0, 16),
    Shape(3, 1, 0, 16),
    Shape(1, 1, 1, 16),
    Shape(2, 1, 1, 16),
    Shape(1, 2, 0, 16),
    Shape(2, 2, 0, 16),
    Shape(2, 2, 1, 16),
    Shape(1, 1, 0, 8),
    Shape(2, 1, 0, 8),
    Shape(3, 1, 1, 8),
)
SIZES = {"per_iteration": 4, "pool_size": 40, "keep": 16}


def measure(options: Options) -> list[Ratio]:
    """Return predicted over measured seconds per layout, then a summary of errors and the drift.

    The drift is that of the calibrating layout.
    """
    base = sized(options.config)
    models, rows = [], []
    with ray_for(shaped(base, Shape(3, 2, 0, 8))):
        models.append(_model(base, options, 0))
        for place, shape in enumerate(SHAPES, start=1):
            rows.append(_stored_or_measured(base, shape, options)["seconds"])
            models.append(_model(base, options, place))
    ratios = [
        _ratio(shaped(base, shape), shape.name, seconds, around)
        for shape, seconds, around in zip(SHAPES, rows, pairwise(models), strict=True)
    ]
    return [*ratios, summary(ratios), drift([model.seconds for model in models])]


def _model(base: RunConfig, options: Options, place: int) -> Measured:
    """Learn from the calibrating layout as measured after ``place`` other layouts."""
    row = _stored_or_measured(base, CALIBRATED, options, f"-after-{place}")
    spans = [Span(**{**span, "unit": tuple(span["unit"])}) for span in row["spans"]]
    return measurements_from_spans(shaped(base, CALIBRATED), spans, row["seconds"])


def _ratio(
    config: RunConfig, name: str, seconds: Sequence[float], around: tuple[Measured, Measured]
) -> Ratio:
    """Return predicted over measured seconds; the prediction is the mean of both neighbors."""
    predicted = statistics.fmean(model.predict(config).iteration for model in around)
    times = {"predicted": [predicted] * len(seconds), f"measured {name}": list(seconds)}
    return Ratio.of(times, "predicted", f"measured {name}")


def drift(seconds: Sequence[float]) -> Ratio:
    """Return the machine's drift: slowest over fastest measurement of the calibrating layout."""
    times = {"slowest": [max(seconds)], "quickest": [min(seconds)]}
    note = f"drift of the machine: {CALIBRATED.name}, measured {len(seconds)} times"
    return Ratio.of(times, "slowest", "quickest", note=note)


def summary(ratios: Sequence[Ratio]) -> Ratio:
    """Return the median error of the predictions, with the goal of at most ``MEDIAN``."""
    errors = [abs(ratio.seconds / ratio.base_seconds - 1) for ratio in ratios]
    note = f"worst error {max(errors):.1%}, goal <= {WORST:.0%}"
    median = statistics.median(errors)
    return Ratio("error", "measured", median, min(errors), max(errors), median, 1.0, MEDIAN, note)


def sized(config: RunConfig) -> RunConfig:
    """Return the configuration, reduced so that it can be measured often.

    Threads are those of the configuration, or one, instead of a number chosen by cores, so that
    they are the same in all layouts.
    """
    tree = config.model_dump(mode="json")
    tree["prompts"]["per_iteration"] = SIZES["per_iteration"]
    tree["explore"]["pool_size"], tree["selection"]["keep"] = SIZES["pool_size"], SIZES["keep"]
    tree["audit"]["random_seeds"] = 0
    return parse(tree | {"name": f"{config.name[:80]}-bench-plan", "iterations": 1000})


def shaped(config: RunConfig, shape: Shape) -> RunConfig:
    """Return the configuration with a layout."""
    tree = config.model_dump(mode="json")
    tree["services"]["rollout"]["actors"] = shape.actors
    tree["services"]["learner"]["replicas"] = shape.replicas
    tree["explore"]["chunk_size"] = shape.chunk
    return parse(tree | {"explore_ahead": shape.ahead})


def _stored_or_measured(base: RunConfig, shape: Shape, options: Options, which: str = "") -> Tree:
    file = Path(options.keep) / f"{shape.name}{which}.json" if options.keep else None
    if file is not None and file.exists():
        return json.loads(file.read_text())
    with tempfile.TemporaryDirectory(prefix="sol-rl-bench-") as scratch:
        row = asyncio.run(_measured(shaped(base, shape), Path(scratch), options.repeats))
    print(f"plan     {shape.name}{which}: {statistics.median(row['seconds']):.2f} s", flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(row) + "\n")
    return row


async def _measured(config: RunConfig, scratch: Path, repeats: int) -> Tree:
    """Run the ring; return seconds per iteration after the warm-up, and all spans."""
    spans: list[Span] = []
    rundir = RunDirectory(scratch)
    rundir.create(config)
    services = ActorServices(config, rundir, lambda *args, **fields: None, spans.append)
    quiet: Any = NullProgress()
    prompts = read_prompts(config.prompts.train)
    ring = Ring(config, services, prompts, quiet, lambda *args, **fields: None)
    await services.start()
    try:
        await ring.begin(0)
        seconds = []
        for index in range(repeats + 1 + config.explore_ahead):
            start = time.perf_counter()
            await ring.iteration(index)
            seconds.append(time.perf_counter() - start)
        return {
            "seconds": seconds[1 + config.explore_ahead :],
            "spans": [span._asdict() for span in spans],
        }
    finally:
        await ring.close()
        await services.stop()

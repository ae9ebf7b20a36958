"""Simulated against measured seconds per iteration of the tiny model: layouts of one machine's
cores, predicted from the timeline of another layout.

Machines drift: the layout that is learned from is measured before and after each other one, and
both predict. What was measured is kept in ``Options.keep`` and not measured again, so that it can
be stopped.
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

from bench.ring import Quiet
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
from simulator.measured import Measured, learned

WORST, MEDIAN = 0.2, 0.1


@dataclass(frozen=True)
class Shape:
    """A layout: rollout actors, learner replicas, explore_ahead, images of a chunk."""

    actors: int
    replicas: int
    ahead: int
    chunk: int

    @property
    def name(self) -> str:
        """The name of the layout in the table."""
        return f"{self.actors}-{self.replicas}-{self.ahead}-{self.chunk}"


CALIBRATED = Shape(2, 1, 0, 16)
"""Chunks of 16, 16 and 8 of a prompt's 40: two sizes, so that a line can be laid."""
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
    """Predicted over measured, a row per layout; then their errors, and how much the layout that is
    learned from drifted meanwhile.
    """
    base = sized(options.config)
    models, rows = [], []
    with ray_for(shaped(base, Shape(3, 2, 0, 8))):
        models.append(_model(base, options, 0))
        for place, shape in enumerate(SHAPES, start=1):
            rows.append(_kept(base, shape, options)["seconds"])
            models.append(_model(base, options, place))
    ratios = [
        _ratio(shaped(base, shape), shape.name, seconds, around)
        for shape, seconds, around in zip(SHAPES, rows, pairwise(models), strict=True)
    ]
    return [*ratios, summary(ratios), drift([model.seconds for model in models])]


def _model(base: RunConfig, options: Options, place: int) -> Measured:
    """Learned from the calibrating layout, as it was after ``place`` others."""
    row = _kept(base, CALIBRATED, options, f"-after-{place}")
    spans = [Span(**{**span, "unit": tuple(span["unit"])}) for span in row["spans"]]
    return learned(shaped(base, CALIBRATED), spans, row["seconds"])


def _ratio(
    config: RunConfig, name: str, seconds: Sequence[float], around: tuple[Measured, Measured]
) -> Ratio:
    """Predicted over measured; the prediction is the mean of those of before and after."""
    predicted = statistics.fmean(model.predict(config).iteration for model in around)
    times = {"predicted": [predicted] * len(seconds), f"measured {name}": list(seconds)}
    return Ratio.of(times, "predicted", f"measured {name}")


def drift(seconds: Sequence[float]) -> Ratio:
    """Of the machine: the slowest over the quickest measurement of the calibrating layout."""
    times = {"slowest": [max(seconds)], "quickest": [min(seconds)]}
    note = f"drift of the machine: {CALIBRATED.name}, measured {len(seconds)} times"
    return Ratio.of(times, "slowest", "quickest", note=note)


def summary(ratios: Sequence[Ratio]) -> Ratio:
    """Errors of the layouts that were predicted: the median, of at most ``MEDIAN``."""
    errors = [abs(ratio.seconds / ratio.base_seconds - 1) for ratio in ratios]
    note = f"worst error {max(errors):.1%}, goal <= {WORST:.0%}"
    middle = statistics.median(errors)
    return Ratio("error", "measured", middle, min(errors), max(errors), middle, 1.0, MEDIAN, note)


def sized(config: RunConfig) -> RunConfig:
    """The configuration small enough to be measured often. Threads are those given, one where none
    are, and not those that a run chooses by its cores: they are alike in all layouts.
    """
    tree = config.model_dump(mode="json")
    tree["prompts"]["per_iteration"] = SIZES["per_iteration"]
    tree["explore"]["pool_size"], tree["selection"]["keep"] = SIZES["pool_size"], SIZES["keep"]
    tree["audit"]["random_seeds"] = 0
    return parse(tree | {"name": f"{config.name[:80]}-bench-plan", "iterations": 1000})


def shaped(config: RunConfig, shape: Shape) -> RunConfig:
    """The configuration in a layout."""
    tree = config.model_dump(mode="json")
    tree["services"]["rollout"]["actors"] = shape.actors
    tree["services"]["learner"]["replicas"] = shape.replicas
    tree["explore"]["chunk_size"] = shape.chunk
    return parse(tree | {"explore_ahead": shape.ahead})


def _kept(base: RunConfig, shape: Shape, options: Options, which: str = "") -> Tree:
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
    """Seconds of each iteration but the first, and all spans."""
    spans: list[Span] = []
    services = ActorServices(
        config, RunDirectory(scratch), lambda *args, **fields: None, spans.append
    )
    quiet: Any = Quiet()
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

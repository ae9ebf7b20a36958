"""Durations of calls from the timeline of a run, with what its actors took from each other undone.

A call that shares cores with others takes longer than alone. When each call ran is known, and so is
how cores are shared (``speed``), so the seconds that it would take alone are too: its work.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from configs.load import ConfigError
from configs.schema import RunConfig
from learner.dealing import Dealing
from planning.durations import Durations, Line, Summing, speed
from planning.waiting import owners
from policy.sampling.noise import stream_seed
from records.timeline import Span

SLOWEST, STEPS = 0.5, 51
"""Speeds of a core beside busy ones that are tried: from this to 1."""
NEEDED = ("update",)
REGENERATES = ("regenerate", "audit")
"""Works of a learner in which it makes what is trained on or audited, with ``regenerate_threads``.
"""
Kind = tuple[str, str]
"""(service, work)."""


@dataclass(frozen=True)
class Calibration:
    """``together``: the speed of a core while all are busy, compared with one busy alone."""

    durations: Durations
    together: float
    spans: int


def calibrated(
    config: RunConfig, spans: Sequence[Span], part_of: Callable[[Span], str], capacity: float
) -> Calibration:
    """From the spans of a run of ``config``; ``part_of`` names the GPU or the cores that a call
    used, of which there are ``capacity``. The first iteration warms up and is left out.

    Raises ConfigError when there is too little to learn from.
    """
    used = [span for span in spans if span.outcome == "done" and not _warms_up(span)]
    if not any(span.work in NEEDED for span in used):
        raise ConfigError(
            "--from: the run's timeline.jsonl has no update after the first: train for longer"
        )
    wanted = {(span.service, span.work): cores_of(config, span, capacity) for span in spans}
    tried = [1.0]
    if capacity > 1:
        tried = [SLOWEST + (1 - SLOWEST) * step / (STEPS - 1) for step in range(STEPS)]
    found = {
        together: works(spans, part_of, lambda s: wanted[s.service, s.work], capacity, together)
        for together in tried
    }
    together = min(tried, key=lambda each: _scatter(config, used, found[each]))
    return Calibration(_durations(config, used, found[together]), together, len(used))


def works(
    spans: Sequence[Span],
    part_of: Callable[[Span], str],
    wanted: Callable[[Span], float],
    capacity: float,
    together: float,
) -> dict[Span, float]:
    """Seconds of each span, had it had all that it ``wanted``, at the speed of a core that is busy
    alone.
    """
    found = dict.fromkeys(spans, 0.0)
    by_part: dict[str, list[Span]] = {}
    for span in spans:
        by_part.setdefault(part_of(span), []).append(span)
    for mine in by_part.values():
        edges = sorted({moment for span in mine for moment in (span.started, span.ended)})
        begins = sorted(mine, key=lambda span: span.started)
        active: list[Span] = []
        place = 0
        for first, second in zip(edges, edges[1:], strict=False):
            while place < len(begins) and begins[place].started <= first:
                active.append(begins[place])
                place += 1
            active = [span for span in active if span.ended > first]
            # an actor does one thing after the other, whatever its spans say
            load = sum({span.who: wanted(span) for span in active}.values())
            done = (second - first) * speed(load, capacity, together)
            for span in active:
                found[span] += done
    return found


def cores_of(config: RunConfig, span: Span, capacity: float) -> float:
    """How many it wants, or 1 where its actor is on a GPU."""
    if capacity <= 1:
        return 1.0
    if span.service == "learner" and span.work in REGENERATES:
        return float(config.services.learner.regenerating)
    return float(config.services.of(span.service).threads)


def _warms_up(span: Span) -> bool:
    numbers = [part for part in span.unit if isinstance(part, int)]
    return bool(numbers) and numbers[0] == 0


def size_of(config: RunConfig, span: Span) -> int | None:
    """Images, samples or prompts of a call; 1 where it has no size, None where it is not known."""
    if span.work == "score" and span.unit:
        return _images(config, str(span.unit[0]), span.unit[1:])
    if span.work in ("explore", "regenerate", "audit"):
        return _images(config, span.work, span.unit)
    if span.work == "update":
        return _trained_on(config, span)
    return config.prompts.per_iteration if span.work == "encode" else 1


def _trained_on(config: RunConfig, span: Span) -> int:
    """Samples of each optimizer step's busiest replica, added up: the others wait for it."""
    prompts, learner = config.prompts.per_iteration, config.services.learner
    shared = owners(prompts, config.selection.keep, learner.replicas, learner.share)
    iteration = span.unit[0] if span.unit else 0
    seed = stream_seed(config.seed, "shuffle", int(iteration))
    return Dealing.of(config.optimizer).busiest(shared, seed)


def _images(config: RunConfig, work: str, unit: Sequence[int | str]) -> int | None:
    """Images of one task; the third number of ``unit`` is that of a prompt's chunk or part."""
    part = int(unit[2]) if len(unit) > 2 else 0
    if work == "explore":
        size = config.explore.chunk_size
        return min(size, config.explore.pool_size - part * size)
    if work == "regenerate":
        size = config.regenerated_size
        return min(size, config.selection.keep - part * size)
    return None


def _points(
    config: RunConfig, spans: Iterable[Span], work: Mapping[Span, float]
) -> dict[Kind, dict[int, list[float]]]:
    """Seconds by service and work, by size."""
    found: dict[Kind, dict[int, list[float]]] = {}
    for span in spans:
        size = size_of(config, span)
        if size is not None:
            name = "generate" if span.work == "regenerate" else span.work
            sizes = found.setdefault((span.service, name), {})
            sizes.setdefault(size, []).append(work[span])
    return found


def _scatter(config: RunConfig, spans: Sequence[Span], work: Mapping[Span, float]) -> float:
    """How much calls of one kind and size differ, weighted by the time that they take."""
    total = 0.0
    for sizes in _points(config, spans, work).values():
        for values in sizes.values():
            middle = statistics.median(values)
            total += sum(abs(value - middle) for value in values) / max(middle, 1e-9) * middle
    everything = sum(work[span] for span in spans)
    return total / max(everything, 1e-9)


def _durations(config: RunConfig, spans: Sequence[Span], work: Mapping[Span, float]) -> Durations:
    points = _points(config, spans, work)

    def line(service: str, name: str) -> Line:
        return fitted(points.get((service, name), {}))

    scoring = {service for service, name in points if name == "score"}
    return Durations(
        explore=line("rollout", "explore"),
        generate=line("learner", "generate"),
        update=line("learner", "update"),
        score={service: line(service, "score") for service in sorted(scoring)},
        encode=line("encoder", "encode"),
        select=line("selector", "select"),
        export=line("learner", "export"),
        shard=line("learner", "shard"),
        load=line("rollout", "load"),
        summing=Summing(),
        call_s=0.0,  # it is in the spans
        driver_s=0.0,
    )


def fitted(sizes: Mapping[int, Sequence[float]]) -> Line:
    """A line through the medians by size, with no negative part; through 0 where there is one size
    alone.
    """
    middles = {size: statistics.median(values) for size, values in sizes.items()}
    if not middles:
        return Line()
    if len(middles) > 1:
        x, y = list(middles), list(middles.values())
        mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
        each = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
        each /= sum((a - mean_x) ** 2 for a in x)
        fixed = mean_y - each * mean_x
        if each >= 0 and fixed >= 0:
            return Line(fixed, each)
    total = sum(size * seconds for size, seconds in middles.items())
    return Line(0.0, total / sum(size**2 for size in middles))

"""Durations of calls, estimated from the timeline of a run and corrected for contention.

A call that shares cores with others takes longer than it would alone. The timeline says when each
call ran and ``speed`` models how cores are shared; from both follow the seconds that a call would
take alone, which is its work.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from configs.load import ConfigError
from configs.schema import RunConfig
from learner.step_assignment import StepAssignment
from planning.durations import Durations, Line, Summing, speed
from planning.waiting import owners
from policy.sampling.noise import stream_seed
from records.timeline import Span

SLOWEST, STEPS = 0.5, 51
"""Grid of the speeds that are tried for a core while all are busy: 51 values from 0.5 to 1."""
NEEDED = ("update",)
REGENERATES = ("regenerate", "audit")
"""Works in which a learner generates samples to train on or audit, with ``regenerate_threads``."""
Kind = tuple[str, str]
"""(service, work)."""


@dataclass(frozen=True)
class Calibration:
    """Durations estimated from ``spans`` calls.

    ``together`` is the speed of a core while all are busy, relative to one that is busy alone.
    """

    durations: Durations
    together: float
    spans: int


def calibrate(
    config: RunConfig, spans: Sequence[Span], part_of: Callable[[Span], str], capacity: float
) -> Calibration:
    """Estimate the durations of calls from the spans of a run of ``config``.

    ``part_of`` names the GPU or the set of cores that a call used; each has ``capacity`` (1 for a
    GPU, else the number of cores). Spans of the first iteration, which warms up, are not used as
    measurements, but still count as load.

    Raises ConfigError if no update after the first iteration was recorded.
    """
    used = [span for span in spans if span.outcome == "done" and not _warms_up(span)]
    if not any(span.work in NEEDED for span in used):
        raise ConfigError(
            "--from: the run's timeline.jsonl has no update after the first: train longer"
        )
    requested = {(span.service, span.work): cores_of(config, span, capacity) for span in spans}
    speeds = [1.0]
    if capacity > 1:
        speeds = [SLOWEST + (1 - SLOWEST) * step / (STEPS - 1) for step in range(STEPS)]
    work_at = {
        together: uncontended_work(
            spans, part_of, lambda s: requested[s.service, s.work], capacity, together
        )
        for together in speeds
    }
    together = min(speeds, key=lambda each: _scatter(config, used, work_at[each]))
    return Calibration(_durations(config, used, work_at[together]), together, len(used))


def uncontended_work(
    spans: Sequence[Span],
    part_of: Callable[[Span], str],
    requested: Callable[[Span], float],
    capacity: float,
    together: float,
) -> dict[Span, float]:
    """Return the work of each span: its seconds if it had run alone.

    ``requested`` gives the cores that a span uses when it runs alone (1 on a GPU), ``together`` the
    speed of a core while all are busy.
    """
    work = dict.fromkeys(spans, 0.0)
    by_part: dict[str, list[Span]] = {}
    for span in spans:
        by_part.setdefault(part_of(span), []).append(span)
    for part_spans in by_part.values():
        edges = sorted({moment for span in part_spans for moment in (span.started, span.ended)})
        by_start = sorted(part_spans, key=lambda span: span.started)
        active: list[Span] = []
        next_index = 0
        # between two neighboring edges the set of running spans, and so their speed, is constant
        for left, right in zip(edges, edges[1:], strict=False):
            while next_index < len(by_start) and by_start[next_index].started <= left:
                active.append(by_start[next_index])
                next_index += 1
            active = [span for span in active if span.ended > left]
            # an actor runs one call at a time, even where its spans overlap: count it once
            load = sum({span.who: requested(span) for span in active}.values())
            done = (right - left) * speed(load, capacity, together)
            for span in active:
                work[span] += done
    return work


def cores_of(config: RunConfig, span: Span, capacity: float) -> float:
    """Return the number of cores that a call uses, or 1 if its actor is on a GPU."""
    if capacity <= 1:
        return 1.0
    if span.service == "learner" and span.work in REGENERATES:
        return float(config.services.learner.regeneration_threads)
    return float(config.services.of(span.service).threads)


def _warms_up(span: Span) -> bool:
    numbers = [part for part in span.unit if isinstance(part, int)]
    return bool(numbers) and numbers[0] == 0


def size_of(config: RunConfig, span: Span) -> int | None:
    """Return the images, samples or prompts of a call; 1 if it has no size, None if unknown."""
    if span.work == "score" and span.unit:
        return _images(config, str(span.unit[0]), span.unit[1:])
    if span.work in ("explore", "regenerate", "audit"):
        return _images(config, span.work, span.unit)
    if span.work == "update":
        return _trained_on(config, span)
    return config.prompts.per_iteration if span.work == "encode" else 1


def _trained_on(config: RunConfig, span: Span) -> int:
    """Return the samples of each optimizer step's busiest replica, summed over the steps.

    The other replicas wait for it, so it determines how long the update lasts.
    """
    prompts, learner = config.prompts.per_iteration, config.services.learner
    shared = owners(prompts, config.selection.keep, learner.replicas, learner.share)
    iteration = span.unit[0] if span.unit else 0
    seed = stream_seed(config.seed, "shuffle", int(iteration))
    return StepAssignment.of(config.optimizer).busiest(shared, seed)


def _images(config: RunConfig, work: str, unit: Sequence[int | str]) -> int | None:
    """Return the images of one task; ``unit[2]`` is the index of the chunk or part in a prompt."""
    part = int(unit[2]) if len(unit) > 2 else 0
    if work == "explore":
        size = config.explore.chunk_size
        return min(size, config.explore.pool_size - part * size)
    if work == "regenerate":
        size = config.regeneration_task_size
        return min(size, config.selection.keep - part * size)
    return None


def _points(
    config: RunConfig, spans: Iterable[Span], work: Mapping[Span, float]
) -> dict[Kind, dict[int, list[float]]]:
    """Return the measured seconds, by (service, work) and by size."""
    points: dict[Kind, dict[int, list[float]]] = {}
    for span in spans:
        size = size_of(config, span)
        if size is not None:
            name = "generate" if span.work == "regenerate" else span.work
            by_size = points.setdefault((span.service, name), {})
            by_size.setdefault(size, []).append(work[span])
    return points


def _scatter(config: RunConfig, spans: Sequence[Span], work: Mapping[Span, float]) -> float:
    """Return the total absolute deviation of calls from the median of their kind and size.

    It is relative to the seconds of all calls. The right ``together`` minimizes it: calls of one
    kind and size then have the same work, however busy the cores were.
    """
    deviation = 0.0
    for sizes in _points(config, spans, work).values():
        for values in sizes.values():
            median = statistics.median(values)
            deviation += sum(abs(value - median) for value in values)
    total_work = sum(work[span] for span in spans)
    return deviation / max(total_work, 1e-9)


def _durations(config: RunConfig, spans: Sequence[Span], work: Mapping[Span, float]) -> Durations:
    """Fit a line to the work of each kind of call."""
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
        call_s=0.0,  # already contained in the spans
        driver_s=0.0,
    )


def fitted(sizes: Mapping[int, Sequence[float]]) -> Line:
    """Return the least-squares line through the medians by size.

    If there is only one size, or a coefficient would be negative, the line goes through 0.
    """
    medians = {size: statistics.median(values) for size, values in sizes.items()}
    if not medians:
        return Line()
    if len(medians) > 1:
        x, y = list(medians), list(medians.values())
        mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
        slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
        slope /= sum((a - mean_x) ** 2 for a in x)
        intercept = mean_y - slope * mean_x
        if slope >= 0 and intercept >= 0:
            return Line(intercept, slope)
    total = sum(size * seconds for size, seconds in medians.items())
    return Line(0.0, total / sum(size**2 for size in medians))

"""A plan with simulated seconds in the place of those of its search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from planning.layouts.choose import Candidate, Choice
from planning.layouts.lines import Findings
from planning.layouts.predict import Prediction
from planning.layouts.scenario import Scenario
from planning.make import Plan
from records.timeline import Span
from simulator.run import Around, Record, Simulated, forget, simulate
from simulator.services import Hardware

WAITING = "waiting"
"""Seconds of a critical path in which no actor worked: the driver, and calls on their way."""


def simulated(plan: Plan) -> tuple[Plan, Simulated | None]:
    """``plan`` with what the simulation says of it, its arms and one GPU more; and its iteration.
    Without GPUs as it was.
    """
    outlook, scenarios = plan.outlook, plan.scenarios
    if outlook is None or scenarios is None:
        return plan, None
    seen: dict[str, Simulated] = {}

    def of(scenario: Scenario) -> Simulated:
        key = scenario.config.model_dump_json() + repr((scenario.laid, scenario.durations))
        if key not in seen:
            seen[key] = run(scenario)
        return seen[key]

    mine = of(scenarios.mine)
    found = Findings(
        critical_path(mine.spans, mine.spans_end),
        {kind: of(scenario).iteration for kind, scenario in scenarios.more.items()},
        mine.publish,
        mine.driver,
    )
    explores = plan.config.plan.explore is not None
    outlook = replace(
        outlook,
        prediction=as_prediction(mine),
        unhidden=of(scenarios.mine.free).iteration if explores else mine.iteration,
        arms={arm: as_prediction(of(scenario)) for arm, scenario in scenarios.arms.items()},
        found=found,
        choice=_simulated_choice(outlook.choice, [of(each).iteration for each in scenarios.table]),
    )
    return replace(plan, outlook=outlook), mine


def _simulated_choice(choice: Choice | None, seconds: Sequence[float]) -> Choice | None:
    """With simulated seconds of every layout that can be, in the order of the table."""
    if choice is None:
        return None
    left = iter(seconds)

    def seen(each: Candidate) -> Candidate:
        if each.prediction is None:
            return each
        return replace(each, prediction=replace(each.prediction, iteration=next(left)))

    table = [seen(each) for each in choice.table]
    best = next((each for each in table if each.numbers == choice.best.numbers), choice.best)
    return replace(choice, best=best, table=sorted(table, key=lambda each: each.seconds))


def run(
    scenario: Scenario, count: int = 1, around: Around = nullcontext, record: Record = forget
) -> Simulated:
    """A scenario in virtual time, as ``simulate``."""
    hardware = Hardware(
        scenario.durations, scenario.laid, shards=scenario.shards, broadcast=scenario.sent
    )
    return simulate(scenario.config, hardware, count, around, record)


def as_prediction(found: Simulated) -> Prediction:
    """In the words of a prediction; GPUs that are alike are one entry, with their mean."""
    alike: dict[str, tuple[Mapping[str, int], list[float]]] = {}
    for part in found.parts:
        key = f"{part.kind} {sorted(part.actors.items())}"
        alike.setdefault(key, (part.actors, []))[1].append(part.idle)
    gpu_idle = [(len(each), sum(each) / len(each), who) for who, each in alike.values()]
    return Prediction(
        found.iteration, found.explore, found.rollout, found.update, found.idle, gpu_idle
    )


def critical_path(spans: Sequence[Span], end: float) -> dict[str, float]:
    """Seconds by work along the chain of calls that ``end`` waited for, walked back from there.

    Before each call comes the one that ended last before it began: of its own actor, or one whose
    answer it needed.
    """
    left = sorted((span for span in spans if span.outcome == "done"), key=lambda span: span.ended)
    path: dict[str, float] = {}
    at = end
    while left and at > 0:
        span = left.pop()
        if span.ended > at + 1e-6 or span.ended <= span.started:
            continue
        if at > span.ended:
            path[WAITING] = path.get(WAITING, 0.0) + at - span.ended
        path[span.shown.label] = (
            path.get(span.shown.label, 0.0) + min(span.ended, at) - span.started
        )
        at = span.started
    return dict(sorted(path.items(), key=lambda item: -item[1]))

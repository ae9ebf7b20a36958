"""Replace the analytical predictions of a plan by simulated ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from planning.layouts.choose import Candidate, Choice
from planning.layouts.predict import Prediction
from planning.layouts.report import Findings
from planning.layouts.scenario import Scenario
from planning.plan import Plan
from records.timeline import Span
from simulator.run import Around, Record, Simulated, forget, simulate
from simulator.services import Hardware

WAITING = "waiting"
"""Label for the part of a critical path in which no actor works: the driver, calls in transit."""


def simulated(plan: Plan) -> tuple[Plan, Simulated | None]:
    """Return (plan with simulated predictions, its simulated iteration).

    The run, its arms, its alternative layouts and the run with one more GPU are simulated. A plan
    without an outlook, such as one without GPUs, is returned unchanged, with None.
    """
    outlook, scenarios = plan.outlook, plan.scenarios
    if outlook is None or scenarios is None:
        return plan, None
    cache: dict[str, Simulated] = {}

    def cached_run(scenario: Scenario) -> Simulated:
        key = scenario.config.model_dump_json() + repr((scenario.assigned, scenario.durations))
        if key not in cache:
            cache[key] = run(scenario)
        return cache[key]

    own = cached_run(scenarios.mine)
    findings = Findings(
        critical_path(own.spans, own.spans_end),
        {kind: cached_run(scenario).iteration for kind, scenario in scenarios.more.items()},
        own.publish,
        own.driver,
    )
    explores = plan.config.plan.explore is not None
    outlook = replace(
        outlook,
        prediction=as_prediction(own),
        unhidden=cached_run(scenarios.mine.free).iteration if explores else own.iteration,
        arms={arm: as_prediction(cached_run(scenario)) for arm, scenario in scenarios.arms.items()},
        found=findings,
        choice=_simulated_choice(
            outlook.choice, [cached_run(each).iteration for each in scenarios.table]
        ),
    )
    return replace(plan, outlook=outlook), own


def _simulated_choice(choice: Choice | None, seconds: Sequence[float]) -> Choice | None:
    """Return the choice with simulated ``seconds`` of its possible layouts, sorted by them.

    ``seconds`` is in the order of the table, without the layouts that are impossible.
    """
    if choice is None:
        return None
    remaining = iter(seconds)

    def with_seconds(each: Candidate) -> Candidate:
        if each.prediction is None:
            return each
        return replace(each, prediction=replace(each.prediction, iteration=next(remaining)))

    table = [with_seconds(each) for each in choice.table]
    best = next((each for each in table if each.numbers == choice.best.numbers), choice.best)
    return replace(choice, best=best, table=sorted(table, key=lambda each: each.seconds))


def run(
    scenario: Scenario, count: int = 1, around: Around = nullcontext, record: Record = forget
) -> Simulated:
    """Simulate a scenario; the other arguments as in ``simulate``."""
    hardware = Hardware(
        scenario.durations, scenario.assigned, shards=scenario.shards, broadcast=scenario.sent
    )
    return simulate(scenario.config, hardware, count, around, record)


def as_prediction(found: Simulated) -> Prediction:
    """Convert a simulation to a prediction; GPUs with the same actors become one entry (mean)."""
    groups: dict[str, tuple[Mapping[str, int], list[float]]] = {}
    for part in found.parts:
        key = f"{part.kind} {sorted(part.actors.items())}"
        groups.setdefault(key, (part.actors, []))[1].append(part.idle)
    gpu_idle = [(len(each), sum(each) / len(each), actors) for actors, each in groups.values()]
    return Prediction(
        found.iteration, found.explore, found.rollout, found.update, found.idle, gpu_idle
    )


def critical_path(spans: Sequence[Span], end: float) -> dict[str, float]:
    """Return the seconds by kind of work along the critical path that leads to ``end``.

    The path is followed backwards: the predecessor of a call is the call that ended last before it
    began, an earlier call of the same actor or one whose answer it needed.
    """
    remaining = sorted(
        (span for span in spans if span.outcome == "done"), key=lambda span: span.ended
    )
    path: dict[str, float] = {}
    moment = end
    while remaining and moment > 0:
        span = remaining.pop()
        if span.ended > moment + 1e-6 or span.ended <= span.started:
            continue
        if moment > span.ended:
            path[WAITING] = path.get(WAITING, 0.0) + moment - span.ended
        path[span.display.label] = (
            path.get(span.display.label, 0.0) + min(span.ended, moment) - span.started
        )
        moment = span.started
    return dict(sorted(path.items(), key=lambda item: -item[1]))

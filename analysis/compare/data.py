"""Numbers of the runs of a comparison, and of its cells as means over run seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from analysis.compare.statistics import (
    NOTHING,
    SHARES,
    CurvePoint,
    Mean,
    mean_of,
    paired,
    speed_up,
    time_to,
)
from analysis.report.data import (
    Row,
    RunData,
    finite_or_none,
    or_nan,
    read_run,
    reason,
    step_of,
    values,
)
from configs.paths import is_dir

REWARD = "reward/eval_mean"
SCORER = "reward/eval/"
STAGES = ("explore", "regenerate", "update", "publish")
AHEAD = "time/explore_ahead_s"
SAME_BASE = 1e-3
"""Relative difference between evaluations before training above which the base models differ."""


@dataclass(frozen=True)
class Run:
    """Numbers of one run directory.

    ``scores`` maps the name of a score to its (updates, seconds, score) points. ``why`` is the
    reason for not counting the run, or None. ``within`` is the standard error of its gain,
    clustered by prompt.
    """

    seed: int
    path: Path
    why: str | None = None
    scores: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    within: float = math.nan

    def gain(self, name: str) -> float:
        """Return the last score minus the one before training."""
        points = self.scores[name]
        return points[-1][2] - points[0][2]


@dataclass(frozen=True)
class Result:
    """Numbers of a cell over its counted runs.

    ``against`` holds its gains minus the baseline's, paired by run seed. ``reach`` maps a fraction
    of the baseline's gain to the seconds of training until it is reached, or to None.
    """

    name: str
    title: str
    refused: str | None = None
    runs: tuple[Run, ...] = ()
    base: dict[str, Mean] = field(default_factory=dict)
    score: dict[str, Mean] = field(default_factory=dict)
    gain: dict[str, Mean] = field(default_factory=dict)
    against: dict[str, Mean] = field(default_factory=dict)
    within: float = math.nan
    stages: dict[str, Mean] = field(default_factory=dict)
    speed_ups: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[CurvePoint]] = field(default_factory=dict)
    reach: dict[float, float | None] = field(default_factory=dict)

    @property
    def counted(self) -> tuple[Run, ...]:
        """Runs that finished and have scores."""
        return tuple(run for run in self.runs if run.why is None)


def measure(path: Path, seed: int, why: str | None = None) -> Run:
    """Read the numbers of a run directory.

    If ``why`` is given, the run is known not to count, and that is the reason.
    """
    if why is not None or not is_dir(path):
        return Run(seed, path, why or "it was not run")
    run = read_run(path)
    scores = _scores(run)
    if run.state != "finished":
        ending = run.last_event("run_failed", "run_stopped")
        return Run(
            seed,
            path,
            f"{run.state}: {reason(ending) if ending else 'no end was recorded'}",
            scores,
        )
    if len(scores.get(REWARD, ())) < 2:
        return Run(seed, path, "it has no finite held-out reward before or after training", scores)
    within = or_nan((run.after or {}).get("eval/gain_stderr"))
    return Run(seed, path, None, scores, _stages(run.iterations), within)


def _scores(run: RunData) -> dict[str, list[tuple[int, float, float]]]:
    seconds = _training_seconds(run.iterations)
    names = dict.fromkeys(
        key for row in run.evaluations for key in row if key == REWARD or _is_scorer(key)
    )
    scores = {}
    for name in names:
        points = [
            (step_of(row), seconds.get(step_of(row), math.nan), value)
            for row in run.evaluations
            if (value := finite_or_none(row.get(name))) is not None
        ]
        if points and points[0][0] == 0:
            scores[name] = points
    scorers = [name for name in scores if name != REWARD]
    return {name: points for name, points in scores.items() if name == REWARD or len(scorers) > 1}


def _is_scorer(key: str) -> bool:
    return key.startswith(SCORER) and "/" not in key.removeprefix(SCORER)


def _training_seconds(rows: Sequence[Row]) -> dict[int, float]:
    """Return number of updates -> seconds of all iterations until then.

    Start-up and evaluations are excluded.
    """
    seconds = {0: 0.0}
    for row in rows:
        before = seconds.get(step_of(row), math.nan)
        seconds[step_of(row) + 1] = before + or_nan(row.get("time/iteration_s"))
    return seconds


def _stages(rows: Sequence[Row]) -> dict[str, float]:
    """Return mean seconds per iteration for each stage, "other", "rollout" and "iteration".

    The first of three or more iterations is left out, because it includes warm-up.
    """
    rows = rows[1:] if len(rows) > 2 else rows
    parts = {stage: mean_of(values(rows, f"time/{stage}_s")).mean for stage in STAGES}
    whole = mean_of(values(rows, "time/iteration_s")).mean
    known = math.fsum(seconds for seconds in parts.values() if math.isfinite(seconds))
    ahead = mean_of(values(rows, AHEAD) or [0.0]).mean
    rollout = parts["explore"] + parts["regenerate"] + ahead
    return {**parts, "other": max(0.0, whole - known), "rollout": rollout, "iteration": whole}


# ---- cells


def summarise(
    cells: Iterable[tuple[str, str, str | None, Sequence[Run]]], baseline: str
) -> list[Result]:
    """Return the result of every cell (name, title, why refused, runs) against ``baseline``."""
    cells = list(cells)
    by_name = {
        name: _alone(name, title, refused, tuple(runs)) for name, title, refused, runs in cells
    }
    reference = by_name[baseline]
    return [_against(by_name[name], reference) for name, *_ in cells]


def _alone(name: str, title: str, refused: str | None, runs: tuple[Run, ...]) -> Result:
    counted = [run for run in runs if run.why is None]
    names = [
        score
        for score in (counted[0].scores if counted else ())
        if all(score in run.scores for run in counted)
    ]
    stages = counted[0].stages if counted else ()
    within = [run.within for run in counted if math.isfinite(run.within)]
    return Result(
        name,
        title,
        refused,
        runs,
        base={score: mean_of([run.scores[score][0][2] for run in counted]) for score in names},
        score={score: mean_of([run.scores[score][-1][2] for run in counted]) for score in names},
        gain={score: mean_of([run.gain(score) for run in counted]) for score in names},
        within=mean_of(within).mean,
        stages={
            stage: mean_of(
                [run.stages[stage] for run in counted if math.isfinite(run.stages[stage])]
            )
            for stage in stages
        },
        curves={score: _curve([run.scores[score] for run in counted]) for score in names},
    )


def _curve(runs: Sequence[Sequence[tuple[int, float, float]]]) -> list[CurvePoint]:
    """Return the mean curve at the numbers of updates after which all runs were evaluated."""
    tables = [{updates: (seconds, score) for updates, seconds, score in points} for points in runs]
    base = [points[0][2] for points in runs]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    return [
        CurvePoint(
            updates,
            mean_of([table[updates][0] for table in tables]),
            mean_of([table[updates][1] for table in tables]),
            mean_of([table[updates][1] - start for table, start in zip(tables, base, strict=True)]),
        )
        for updates in shared
    ]


def _against(result: Result, baseline: Result) -> Result:
    """Return ``result`` with its comparison to the baseline filled in."""
    goal = baseline.gain.get(REWARD, NOTHING).mean
    curve = result.curves.get(REWARD, [])
    stages, baseline_stages = result.stages, baseline.stages
    return replace(
        result,
        against={
            name: paired(_gains(result, name), _gains(baseline, name)) for name in result.gain
        },
        speed_ups={
            part: speed_up(stages.get(part, NOTHING), baseline_stages.get(part, NOTHING))
            for part in ("rollout", "iteration")
        },
        reach={share: time_to(curve, share * goal) for share in SHARES},
    )


def _gains(result: Result, name: str) -> dict[int, float]:
    """Return run seed -> gain."""
    return {run.seed: run.gain(name) for run in result.counted if name in run.scores}


def remarks(results: Sequence[Result], baseline: str) -> list[str]:
    """Return remarks on the numbers: refused cells, uncounted runs, unequal work, other bases."""
    notes = [f"{result.title}: refused: {result.refused}" for result in results if result.refused]
    for result in results:
        notes += [
            f"{result.title}, seed {run.seed}: excluded: {run.why}"
            for run in result.runs
            if run.why is not None
        ]
    counted = [result for result in results if result.counted]
    updates = {
        result.title: sorted({run.scores[REWARD][-1][0] for run in result.counted})
        for result in counted
    }
    if len({number for each in updates.values() for number in each}) > 1:
        notes.append(
            "numbers of updates differ: "
            + "; ".join(f"{title} {', '.join(map(str, each))}" for title, each in updates.items())
        )
    reference = next(result for result in results if result.name == baseline)
    base_scores = {run.seed: run.scores[REWARD][0][2] for run in reference.counted}
    for result in counted:
        pairs = [
            (run.scores[REWARD][0][2], base_scores[run.seed])
            for run in result.counted
            if run.seed in base_scores
        ]
        if any(abs(own - other) > SAME_BASE * abs(other) for own, other in pairs):
            notes.append(
                f"{result.title}: its evaluation before training differs from the baseline's"
                " (another model, time shift or precision): compare gains, not scores"
            )
    goal = reference.gain.get(REWARD, NOTHING).mean
    if math.isfinite(goal) and goal <= 0:
        notes.append("the baseline has no gain, so there are no times to reach parts of it")
    elif counted and all(len(result.curves[REWARD]) < 3 for result in counted):
        notes.append("no evaluations during training, so no times to a gain: set evaluate.every")
    return notes

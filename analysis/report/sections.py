"""Report sections on exploration, time and training health."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from analysis.report.charts import Band, Series, Stack, line_chart, number, stacked_bars
from analysis.report.data import NO_ITERATION, Row, RunData, finite_or_none, points, step_of, values
from analysis.report.parts import Card, Cell, Group, Item, Section, Table, blocks, legend
from records.formatting import duration

STAGES = (
    ("time/explore_s", "explore", 1),
    ("time/regenerate_s", "regenerate", 2),
    ("time/update_s", "update", 3),
    ("time/publish_s", "publish", 4),
)
WITHIN = (
    ("time/explore_ahead_s", "exploring before the start of the iteration"),
    ("time/allreduce_s", "summing the replicas' gradients, part of update"),
    ("time/replica_wait_s", "waiting for the slowest replica, part of update"),
)
"""Times that are already included in those of other stages."""
HEALTH = (
    (
        "loss/policy",
        "Policy loss",
        ("loss of the objective; its level is not meaningful, but jumps are"),
    ),
    ("loss/kl", "Distance from the base", "loss/kl; a steep climb warns of reward hacking"),
    ("grad_norm", "Gradient norm", "before clipping"),
    (
        "weights/delta_cosine",
        "Update kept by FP4",
        "cosine of the weights' change and the quantized weights' change",
    ),
    ("weights/codes_changed", "FP4 codes changed", "share of codes that differ after an update"),
    ("zero_std_ratio", "Prompts without signal", "share of prompts whose rewards are all equal"),
)
MOST_ROWS = 300


def exploration(run: RunData) -> Section:
    """Return the section on proxy rewards (best, mean, worst) and the contrast of the selection."""
    title = "Exploration"
    lead = "Many cheap images per prompt, generated only to find the seeds worth training on."
    best, mean, worst = (
        points(run.iterations, f"explore/reward_{name}") for name in ("best", "mean", "worst")
    )
    if not (best or mean or worst):
        none = "This run does not explore: all seeds were trained on."
        return Section(title, lead, (), none if run.iterations else NO_ITERATION)
    lines = [
        Series("best", best, 1),
        Series("mean of all", mean, 8, dashed=True),
        Series("worst", worst, 5),
    ]
    shown = [line for line in lines if line.points]
    bands = [Band("between the best and the worst", worst, best, 1)] if best and worst else []
    which = "Mean over prompts."
    keep, pool = run.setting("selection.keep"), run.setting("explore.pool_size")
    if isinstance(keep, int) and keep and pool:
        half = keep // 2
        which = f"Mean over prompts of the {half} best and {half} worst of {pool} seeds."
    chart = line_chart(shown, bands=bands, label="Explored rewards by iteration")
    cards = [Card("Explored seeds", chart, legend(shown), note=which)]
    if contrast := points(run.iterations, "explore/contrast"):
        line = Series("contrast", contrast, 4)
        chart = line_chart([line], include_y=(0.0,), label="Contrast by iteration")
        note = "Best minus worst: the signal that exploring finds. At zero nothing can be learned."
        cards.append(Card("Contrast", chart, legend([line]), note=note))
    return Section(title, lead, [Group(cards)])


def time_spent(run: RunData) -> Section:
    """Return the section with stacked seconds per iteration and a table of totals."""
    title, stages = "Where the time went", _stages(run.iterations)
    stacks = []
    for row in run.iterations:
        parts = {label: finite_or_none(row.get(name)) or 0.0 for name, label, _ in stages}
        whole = finite_or_none(row.get("time/iteration_s"))
        if whole is not None and whole > sum(parts.values()):
            parts["other"] = whole - sum(parts.values())
        stacks.append(Stack(float(step_of(row)), parts, whole))
    if not any(any(stack.parts.values()) for stack in stacks):
        none = "No times were recorded." if run.iterations else NO_ITERATION
        return Section(title, "", (), none)
    order = [
        (label, colour)
        for label, colour in [*((label, colour) for _, label, colour in stages), ("other", 8)]
        if sum(stack.parts.get(label, 0.0) for stack in stacks) > 0
    ]
    items = blocks([(label, colour, "") for label, colour in order])
    if any(stack.whole is not None for stack in stacks):
        items.append(Item("wall-clock time", "", style="background:var(--ink)"))
    chart = stacked_bars(stacks, order, label="Seconds per iteration by stage")
    note = (
        "Stages overlap: regeneration starts while other prompts are still explored; its bar is"
        " the time after exploration."
    )
    if included := [
        f"{duration(sum(seconds))} {what}"
        for name, what in WITHIN
        if sum(seconds := values(run.iterations, name)) > 0
    ]:
        note += f" Included in other bars, so not stacked: {'; '.join(included)}."
    totals = Card("In total", table=_totals(run, stacks, order), note=_rate(run))
    return Section(title, "", [Group([Card("Per iteration", chart, items, note=note), totals])])


def health(run: RunData) -> Section:
    """Return the section with small charts of metrics that show early if training goes wrong."""
    cards = []
    for name, title, note in HEALTH:
        if curve := points(run.iterations, name):
            line = Series(name, curve, 1)
            zero = (0.0,) if name in ("loss/kl", "zero_std_ratio") else ()
            label, size = f"{title} by iteration", (340.0, 150.0)
            chart = line_chart([line], include_y=zero, label=label, size=size)
            cards.append(Card(title, chart, legend([line]), note=note))
    problems = []
    if failed := values(run.iterations, "rewards/failed"):
        problems.append(f"{_count(sum(failed), 'sample')} dropped because a scorer failed")
    if reissued := values(run.iterations, "rollout/reissued"):
        problems.append(f"{_count(reissued[-1], 'task')} retried")
    if lost := values(run.iterations, "actors/lost"):
        problems.append(f"{_count(lost[-1], 'actor')} lost")
    return Section(
        "Is training healthy?",
        "",
        [Group(cards, "cards small")] if cards else [],
        "No training metrics have been recorded yet.",
        f"{'; '.join(problems)}." if problems else "",
    )


def numbers(run: RunData) -> Table | None:
    """Return a table of all metrics for at most ``MOST_ROWS`` evenly spaced iterations, or None."""
    if not run.iterations:
        return None
    rows = run.iterations
    every = math.ceil(len(rows) / MOST_ROWS)
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if name not in ("kind", "iteration") and values(rows, name)
    ]
    body = [
        [number(step_of(row)), *(number(finite_or_none(row.get(name)), 4) for name in names)]
        for row in rows[::every]
    ]
    which = "of all iterations" if every == 1 else f"of every {every}th iteration"
    return Table(["iteration", *names], body, words=(), title=f"Numbers {which}")


# ---- helpers


def _stages(rows: Sequence[Row]) -> list[tuple[str, str, int]]:
    """Return (metric, label, color) of measured stages, including unknown ``time/<stage>_s``."""
    known = [stage for stage in STAGES if values(rows, stage[0])]
    names = {stage[0] for stage in (*STAGES, *WITHIN)} | {"time/iteration_s"}
    others = [
        name
        for name in dict.fromkeys(key for row in rows for key in row)
        if name.startswith("time/") and name.endswith("_s")
    ]
    extra = [name for name in others if name not in names and values(rows, name)]
    return known + [
        (name, name[5:-2].replace("_", " "), 5 + index % 3) for index, name in enumerate(extra)
    ]


def _totals(run: RunData, stacks: Sequence[Stack], order: Sequence[tuple[str, int]]) -> Table:
    entries = []
    for label, colour in order:
        seconds = [stack.parts.get(label, 0.0) for stack in stacks]
        entries.append((label, colour, sum(seconds), statistics.median(seconds)))
    elapsed = finite_or_none(run.iterations[-1].get("seconds"))
    iterations_s = sum(
        stack.whole if stack.whole is not None else sum(stack.parts.values()) for stack in stacks
    )
    if elapsed is not None and elapsed - iterations_s > 0.5:
        entries.append(("starting, evaluating, saving", 8, elapsed - iterations_s, math.nan))
    everything = sum(total for _, _, total, _ in entries) or 1.0
    most = max(total for _, _, total, _ in entries) or 1.0
    rows = [
        (
            label,
            Cell(f"{100 * total / everything:.0f} %", bar=(colour, 56 * total / most)),
            duration(total),
            duration(median) if math.isfinite(median) else "",
        )
        for label, colour, total, median in entries
    ]
    return Table(("stage", "share", "total", "median"), rows)


def _rate(run: RunData) -> str:
    rates = values(run.iterations, "rollout/images_per_s")
    if not rates:
        return ""
    who = ""
    if actors := values(run.iterations, "rollout/actors"):
        who = f" by {number(actors[-1])} rollout actor{'s' if actors[-1] != 1 else ''}"
    return f"{number(statistics.median(rates))} images explored per second{who} (median)."


def _count(amount: float, noun: str) -> str:
    return f"{amount:,.0f} {noun}{'' if amount == 1 else 's'}"

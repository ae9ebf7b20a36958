"""The report's sections that show numbers: each takes a run and returns the HTML of its body."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from analysis.report.charts import Band, Series, Stack, line_chart, number, stacked_bars
from analysis.report.data import Row, RunData, finite, points, values
from analysis.report.parts import Cell, blocks, card, legend, nothing, side_by_side, table
from records.progress import duration

STAGES = (("time/explore_s", "explore", 1), ("time/regenerate_s", "regenerate", 2), ("time/update_s", "update", 3),
          ("time/publish_s", "publish", 4))  # fmt: skip
WITHIN = (
    ("time/explore_ahead_s", "exploring before the iteration's turn, beside the one before"),
    ("time/allreduce_s", "adding up the replicas' gradients, in update"),
    ("time/replica_wait_s", "waiting for the slowest replica, in update"),
)
"""Seconds that other stages hold already."""
HEALTH = (
    ("loss/policy", "Policy loss", "of the objective; its level says little, jumps say much"),
    ("loss/kl", "Distance from the base", "loss/kl; a steep climb warns of reward hacking"),
    ("grad_norm", "Gradient norm", "before clipping"),
    (
        "weights/delta_cosine",
        "What FP4 keeps of an update",
        "cosine of the weights' change and the quantised weights' change",
    ),
    ("weights/codes_changed", "FP4 codes changed", "share of codes that differ after an update"),
    (
        "zero_std_ratio",
        "Prompts that teach nothing",
        "share of prompts whose rewards are all equal",
    ),
)
MOST_ROWS = 300


def exploration(run: RunData) -> str:
    """Proxy rewards of the explored noises: best, mean, worst, and the contrast that selection
    makes.
    """
    best, mean, worst = (
        points(run.iterations, f"explore/reward_{name}") for name in ("best", "mean", "worst")
    )
    if not (best or mean or worst):
        return nothing(
            "This run explored nothing: all noises were trained on."
            if run.iterations
            else "No iteration has ended yet."
        )
    lines = [
        Series("best", best, 1),
        Series("mean of all", mean, 8, dashed=True),
        Series("worst", worst, 5),
    ]
    bands = [Band("between the best and the worst", worst, best, 1)] if best and worst else []
    shown = [line for line in lines if line.points]
    keep, pool = run.setting("selection.keep"), run.setting("explore.pool_size")
    which = (
        f"Mean over prompts of the {keep // 2} best and {keep // 2} worst of {pool} noises."
        if keep and pool
        else "Mean over prompts."
    )
    cards = [
        card(
            "Explored noises",
            legend(shown) + line_chart(shown, bands=bands, label="Explored rewards by iteration"),
            which,
        )
    ]
    contrast = points(run.iterations, "explore/contrast")
    if contrast:
        line = Series("contrast", contrast, 4)
        chart = line_chart([line], include_y=(0.0,), label="Contrast by iteration")
        cards.append(
            card(
                "Contrast",
                legend([line]) + chart,
                "Best minus worst: the signal that exploring finds. At zero there is nothing to"
                " learn.",
            )
        )
    return side_by_side(cards)


def agreement(run: RunData) -> str:
    """How well the cheap ranking agrees with the full-quality one."""
    cards, rows = [], []
    names = (
        ("kendall_tau", "Kendall tau", 1),
        ("spearman_rho", "Spearman rho", 2),
        ("sign_agreement", "same side of the mean", 3),
    )
    groups = (
        (
            "audit/",
            "Selected noises",
            "These are extremes, best and worst, so agreement reads higher than over all noises.",
        ),
        (
            "audit/random_",
            "Random noises",
            "Drawn from the whole pool, whether selected or not: an unbiased estimate.",
        ),
    )
    for prefix, title, note in groups:
        lines = [
            Series(label, found, colour)
            for name, label, colour in names
            if (found := points(run.iterations, prefix + name))
        ]
        if not lines:
            continue
        chart = line_chart(
            lines, include_y=(0.0, 1.0), label=f"Rank agreement by iteration, {title.lower()}"
        )
        cards.append(card(title, legend(lines) + chart, note))
        rows += [
            (f"{label}, {title.lower()}", values(run.iterations, prefix + name))
            for name, label, _ in names
        ]
    if cards:
        spread = _spread_table([row for row in rows if row[1]])
        return side_by_side([*cards, card("Over the run", spread, _in_words(run))])
    return nothing("Nothing to compare: in this run no noise has both an explored and a full-quality reward." if run.iterations
                 else "No iteration has ended yet.")  # fmt: skip


def time_spent(run: RunData) -> str:
    """Stacked seconds per iteration and a table of totals."""
    stages = _stages(run.iterations)
    stacks = []
    for row in run.iterations:
        parts = {label: finite(row.get(name)) or 0.0 for name, label, _ in stages}
        whole = finite(row.get("time/iteration_s"))
        if whole is not None and whole > sum(parts.values()):
            parts["other"] = whole - sum(parts.values())
        stacks.append(Stack(float(row["iteration"]), parts, whole))
    if not any(any(stack.parts.values()) for stack in stacks):
        return nothing(
            "No times were recorded." if run.iterations else "No iteration has ended yet."
        )
    order = [(label, colour) for _, label, colour in stages] + [("other", 8)]
    order = [
        (label, colour)
        for label, colour in order
        if sum(stack.parts.get(label, 0.0) for stack in stacks) > 0
    ]
    items = blocks([(label, colour, "") for label, colour in order])
    measured = any(stack.whole is not None for stack in stacks)
    items += (
        '<li><span class="swatch" style="background:var(--ink)"></span>by the clock</li>'
        if measured
        else ""
    )
    chart = stacked_bars(stacks, order, label="Seconds per iteration by stage")
    note = (
        "Stages overlap: regenerating starts while other prompts are still explored; its bar is"
        " what was left to do."
    )
    if held := [
        f"{duration(sum(found))} {what}"
        for name, what in WITHIN
        if sum(found := values(run.iterations, name)) > 0
    ]:
        note += f" In other bars already, so not stacked: {'; '.join(held)}."
    return side_by_side(
        [
            card("Per iteration", f'<ul class="legend">{items}</ul>{chart}', note),
            card("In total", _totals(run, stacks, order)),
        ]
    )


def health(run: RunData) -> str:
    """Small charts of what tells early that training goes wrong."""
    cards = []
    for name, title, note in HEALTH:
        if found := points(run.iterations, name):
            line = Series(name, found, 1)
            zero = (0.0,) if name in ("loss/kl", "zero_std_ratio") else ()
            chart = line_chart(
                [line], include_y=zero, label=f"{title} by iteration", size=(340.0, 150.0)
            )
            cards.append(card(title, legend([line]) + chart, note))
    failed, reissued = (
        values(run.iterations, "rewards/failed"),
        values(run.iterations, "rollout/reissued"),
    )
    lost = values(run.iterations, "actors/lost")
    said = []
    if failed:
        said.append(f"{_count(sum(failed), 'sample')} dropped because a scorer failed")
    if reissued:
        said.append(f"{_count(reissued[-1], 'unit')} of work given out again")
    if lost:
        said.append(f"{_count(lost[-1], 'actor')} lost")
    tail = f'<p class="note">{"; ".join(said)}.</p>' if said else ""
    return (
        side_by_side(cards, small=True)
        if cards
        else nothing("No training metrics have been recorded yet.")
    ) + tail


def numbers(run: RunData) -> str:
    """Every number of every iteration, behind a fold."""
    if not run.iterations:
        return ""
    rows = run.iterations
    every = math.ceil(len(rows) / MOST_ROWS)
    shown = rows[::every]
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if name not in ("kind", "iteration") and values(rows, name)
    ]
    body = [
        [number(finite(row["iteration"])), *(number(finite(row.get(name)), 4) for name in names)]
        for row in shown
    ]
    which = "of all iterations" if every == 1 else f"of every {every}th iteration"
    found = table(["iteration", *names], body, words=())
    return f'<details class="card"><summary>Numbers {which}</summary><div>{found}</div></details>'


# ---- pieces


def _in_words(run: RunData) -> str:
    """What the mean agreement means, in pairs and signs; of the random noises where there are some."""
    prefix = "audit/random_" if values(run.iterations, "audit/random_kendall_tau") else "audit/"
    which = "random" if "random" in prefix else "selected"
    said = []
    if tau := values(run.iterations, prefix + "kendall_tau"):
        said.append(
            f"Of any two {which} noises of a prompt, the cheap pictures put"
            f" {50 + 50 * statistics.fmean(tau):.0f} % in the right order."
        )
    if sign := values(run.iterations, prefix + "sign_agreement"):
        said.append(
            f"{100 * statistics.fmean(sign):.0f} % lie on the same side of their group's mean, so"
            " the sign of their advantage was foreseen."
        )
    return " ".join(said)


def _spread_table(rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Mean, lowest and highest of each named list of numbers."""
    body = [
        (label, *map(number, (statistics.fmean(found), min(found), max(found))))
        for label, found in rows
    ]
    return table(("agreement", "mean", "lowest", "highest"), body)


def _stages(rows: Sequence[Row]) -> list[tuple[str, str, int]]:
    """The known stages that were measured, and any other ``time/<stage>_s``, each with its colour."""
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


def _totals(run: RunData, stacks: Sequence[Stack], order: Sequence[tuple[str, int]]) -> str:
    totals = [
        (label, colour, [stack.parts.get(label, 0.0) for stack in stacks])
        for label, colour in order
    ]
    entries = [
        (label, colour, sum(each), statistics.median(each)) for label, colour, each in totals
    ]
    wall = finite(run.iterations[-1].get("seconds"))
    inside = sum(
        stack.whole if stack.whole is not None else sum(stack.parts.values()) for stack in stacks
    )
    if wall is not None and wall - inside > 0.5:
        entries.append(("starting, evaluating, saving", 8, wall - inside, math.nan))
    everything = sum(total for _, _, total, _ in entries) or 1.0
    most = max(total for _, _, total, _ in entries) or 1.0
    rows = [
        (
            label,
            Cell(
                f"{100 * total / everything:.0f} %",
                front=(
                    f'<span class="bar bg-{colour}" style="width:{56 * total / most:.0f}px"></span>'
                ),
            ),
            duration(total),
            duration(each) if math.isfinite(each) else "",
        )
        for label, colour, total, each in entries
    ]
    note = ""
    if rates := values(run.iterations, "rollout/images_per_s"):
        actors = values(run.iterations, "rollout/actors")
        who = (
            f" by {number(actors[-1])} rollout actor{'s' if actors[-1] != 1 else ''}"
            if actors
            else ""
        )
        note = (
            f'<p class="note">{number(statistics.median(rates))} pictures explored per second{who}'
            " (median).</p>"
        )
    return table(("stage", "share", "total", "median"), rows) + note


def _count(amount: float, noun: str) -> str:
    return f"{amount:,.0f} {noun}{'' if amount == 1 else 's'}"

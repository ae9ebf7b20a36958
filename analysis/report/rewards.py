"""Report section on rewards: training rewards compared with held-out scorers and prompts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from analysis.compare.statistics import Mean, mean_of
from analysis.report.charts import Series, line_chart, number, scatter
from analysis.report.data import (
    Grid,
    RunData,
    finite_or_none,
    held_out_reward,
    points,
    step_of,
    values,
)
from analysis.report.parts import Card, Cell, Group, Section, Table, blocks, legend
from configs.rewards import Rewards

EVAL, UNSCORED, SPEED = "reward/eval/", "eval/unscored/", "rewards/images_per_s/"
CLEAR = 2.0  # changes below this number of standard errors are not reported as such
COLOURS = 8
Direction = Literal["rose", "fell", "did not clearly move"]


@dataclass(frozen=True)
class Score:
    """Scores of a scorer in the evaluations.

    The error of ``change`` is clustered by prompt. ``in_deviations`` holds (iteration, change since
    the base) in standard deviations of the images before training.
    """

    label: str
    role: str
    held_out: bool
    before: float | None
    after: float | None
    change: Mean
    in_deviations: Sequence[tuple[float, float]]

    @property
    def direction(self) -> Direction:
        """Direction of a significant change."""
        return direction(self.change)


def section(run: RunData) -> Section:
    """Return the section on training and held-out rewards, and every scorer before and after."""
    scores, prompts = scores_of(run), _prompts_card(run)
    groups = []
    if cards := [card for card in (_curves(run), prompts) if card]:
        groups.append(Group(cards))
    if run.after and (len(scores) > 1 or (scores and not prompts)):
        conclusions = " ".join(verdicts(run, scores))
        table = Card(
            "Every scorer, on held-out prompts", table=_table(run, scores), note=conclusions
        )
        groups.append(Group([table], layout=""))
    if len(scores) > 1:
        moved = [score for score in scores if len(score.in_deviations) > 1]
        own = [_own_card(run, score) for score in scores]
        groups.append(Group([_together(moved), *own] if moved else own))
    return Section(
        "Reward",
        "The optimized reward, on training prompts and on held-out prompts.",
        groups,
        "No rewards have been recorded yet.",
    )


def scores_of(run: RunData) -> list[Score]:
    """Return every scorer of the evaluations, those that are trained on before held-out ones."""
    roles = _roles(run)
    labels = dict.fromkeys(
        key.removeprefix(EVAL) for row in run.evaluations for key in row if key.startswith(EVAL)
    )
    known = [label for label in labels if values(run.evaluations, EVAL + label)]
    return [
        _score(run, label, *roles.get(label, ("", False)))
        for label in sorted(known, key=[*roles, *known].index)
    ]


def paired(before: Grid, after: Grid) -> Mean:
    """Return the mean change of images [prompt][noise] that have both scores.

    Its standard error is that over the means of prompts.
    """
    changes = []
    for old, new in zip(before, after, strict=False):
        if both := [y - x for x, y in zip(old, new, strict=False) if math.isfinite(x + y)]:
            changes.append(statistics.fmean(both))
    return mean_of(changes)


def direction(change: Mean) -> Direction:
    """Return the direction of a change of more than ``CLEAR`` standard errors.

    Without a known error, the change does not count as clear.
    """
    if not (math.isfinite(change.mean) and abs(change.mean) > CLEAR * change.error):
        return "did not clearly move"
    return "rose" if change.mean > 0 else "fell"


def verdicts(run: RunData, scores: Sequence[Score]) -> list[str]:
    """Describe whether held-out scorers confirm a rise of the reward, and trade-offs of others."""
    if run.after is None:
        return []
    reward, sentences = direction(run.gain), []
    for score in scores:
        if score.held_out and math.isfinite(score.change.error):
            sentences.append(
                f"The reward {reward}; {score.label}, which is never trained on,"
                f" {score.direction}{_meaning(reward, score)}."
            )
    own = [score for score in scores if not score.held_out]
    rose, fell = (
        [score.label for score in own if score.direction == which] for which in ("rose", "fell")
    )
    if rose and fell:
        sentences.append(
            f"{' and '.join(rose)} rose while {' and '.join(fell)} fell: the rise came at the"
            " expense of the other scores."
        )
    return sentences


def _meaning(reward: Direction, held_out: Score) -> str:
    if reward != "rose":
        return ""
    return {
        "rose": ": it agrees",
        "fell": ": this is typical of reward hacking",
        "did not clearly move": ": it does not confirm the rise",
    }[held_out.direction]


def _roles(run: RunData) -> dict[str, tuple[str, bool]]:
    """Return label -> (role of the scorer, True if held out), or {} if the settings are invalid."""
    try:
        rewards = Rewards.model_validate(run.setting("rewards"))
    except ValidationError:
        return {}
    trained = {
        scorer.label: (f"trained on, weight {number(scorer.weight)}", False)
        for scorer in rewards.scorers
    }
    return trained | {
        scorer.label: ("held out, never trained on", True) for scorer in rewards.evaluation_scorers
    }


def _score(run: RunData, label: str, role: str, held_out: bool) -> Score:
    before, after = (
        finite_or_none(row.get(EVAL + label)) if row else None for row in (run.before, run.after)
    )
    grids = {step: grid for step in run.scores if (grid := run.scores[step].get(label))}
    steps = [step_of(row) for row in run.evaluations]
    base = grids.get(steps[0], [])
    newest = grids.get(steps[-1], []) if len(steps) > 1 else []
    change = paired(base, newest)
    if not change.count and before is not None and after is not None:
        change = Mean(after - before, math.nan, 0)
    base_scores = [value for row in base for value in row if math.isfinite(value)]
    deviation = statistics.pstdev(base_scores) if base_scores else 0.0
    curve = (
        [
            (float(step), paired(base, grids[step]).mean / deviation)
            for step in steps
            if step in grids
        ]
        if deviation > 0
        else []
    )
    return Score(label, role, held_out, before, after, change, curve)


# ---- cards


def _curves(run: RunData) -> Card | None:
    """Return the chart of training and held-out reward, or None if nothing was scored."""
    train = points(run.iterations, "reward/train_mean")
    held_out = points(run.evaluations, "reward/eval_mean")
    lines = [Series("samples trained on", train, 1)] if train else []
    note = ""
    if held_out:
        errors = [finite_or_none(row.get("eval/stderr")) or math.nan for row in run.evaluations]
        lines.append(Series("held-out prompts", held_out, 5, errors))
        note = "Bars, or shading of many, are one standard error, clustered by prompt. "
    if not lines:
        return None
    if run.setting("selection.rule") == "best_worst" and points(run.iterations, "explore/contrast"):
        note += (
            "Samples that are trained on are half best and half worst, so their mean is not that"
            " of all images."
        )
    return Card("Reward", line_chart(lines, label="Reward by iteration"), legend(lines), note=note)


def _prompts_card(run: RunData) -> Card | None:
    """Return a scatter plot of held-out prompts, before against after, or None without rewards."""
    before, after = run.prompt_means(run.before), run.prompt_means(run.after)
    shown = list(zip(before, after, strict=False))
    pairs = [(x, y) for x, y in shown if math.isfinite(x + y)]
    if not pairs:
        return None
    names = [
        run.images.prompts.get(index, f"held-out prompt {index}") for index in range(len(shown))
    ]
    up, down = sum(y > x for x, y in pairs), sum(y < x for x, y in pairs)
    parts = [("better", 2, f"{up:,}"), ("worse", 5, f"{down:,}")]
    if up + down < len(pairs):
        parts.append(("equal", 8, f"{len(pairs) - up - down:,}"))
    label = "Held-out prompts before and after"
    chart = scatter(shown, label=label, x_label="before →", y_label="after", names=names)
    note = "A point is a prompt's mean reward over the same seeds; points above the line improved."
    return Card("Every held-out prompt", chart, blocks(parts), note=note)


def _table(run: RunData, scores: Sequence[Score]) -> Table:
    """Return the table of scores before and after training, the weighted sum first.

    Columns for unscored images and for images per second are added if there are any.
    """
    before, after = run.before, run.after
    assert before is not None and after is not None
    start, end = held_out_reward(before).mean, held_out_reward(after).mean
    rows = [["weighted sum", "what is optimized", *_cells(start, end, run.gain)]]
    rows += [
        [score.label, score.role, *_cells(score.before, score.after, score.change)]
        for score in scores
    ]
    heads = ["score", "", "before", "after", "change"]
    everything = [*run.iterations, *run.evaluations]
    lost = [0.0, *(sum(values([before, after], UNSCORED + score.label)) for score in scores)]
    speeds = [[], *(values(everything, SPEED + score.label) for score in scores)]
    if any(lost):
        heads.append("not scored")
        rows = [
            [*row, f"{count:,.0f}" if count else ""] for row, count in zip(rows, lost, strict=True)
        ]
    if any(speeds):
        heads.append("images per s")
        rows = [
            [*row, number(statistics.median(rates)) if rates else ""]
            for row, rates in zip(rows, speeds, strict=True)
        ]
    return Table(heads, rows, words=(0, 1))


def _cells(start: float | None, end: float | None, change: Mean) -> list[str | Cell]:
    known = math.isfinite(change.mean)
    tone = (
        "good-ink" if known and change.mean > 0 else "bad-ink" if known and change.mean < 0 else ""
    )
    text = f"{'+' if known and change.mean > 0 else ''}{number(change.mean)}"
    if math.isfinite(change.error):
        text += f" ± {number(change.error, 2)}"
    return [number(start, 4), number(end, 4), Cell(text, tone)]


def _together(scores: Sequence[Score]) -> Card:
    """Return the chart of the changes of all scorers on one scale."""
    lines = [
        Series(
            f"{score.label}{', held out' if score.held_out else ''}",
            score.in_deviations,
            index % COLOURS + 1,
            dashed=score.held_out,
        )
        for index, score in enumerate(scores)
    ]
    chart = line_chart(
        lines, include_y=(0.0,), label="Change of every score on held-out prompts by iteration"
    )
    note = (
        "Change on held-out prompts in standard deviations between the images before training, so"
        " that scores of different scales can be compared. Dashed: never trained on."
    )
    return Card("Changes of all scorers", chart, legend(lines), note=note)


def _own_card(run: RunData, score: Score) -> Card:
    held_out = points(run.evaluations, EVAL + score.label)
    lines = [Series(f"{score.label}, held-out prompts", held_out, 5)]
    if train := points(run.iterations, f"reward/{score.label}"):
        lines.insert(0, Series(f"{score.label}, all images of an iteration", train, 1))
    chart = line_chart(lines, label=f"{score.label} by iteration")
    return Card(f"Scorer {score.label}", chart, legend(lines), note=score.role)

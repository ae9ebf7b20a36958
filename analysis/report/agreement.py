"""Report section on rank agreement between proxy images and regenerated images."""

from __future__ import annotations

import statistics

from analysis.report.charts import Series, line_chart, number
from analysis.report.data import NO_ITERATION, RunData, points, values
from analysis.report.parts import Card, Group, Section, Table, legend

AGREEMENTS = (
    ("kendall_tau", "Kendall tau", 1),
    ("spearman_rho", "Spearman rho", 2),
    ("sign_agreement", "same side of the mean", 3),
)
AUDITS = (
    (
        "audit/",
        "Selected seeds",
        "These are extremes, best and worst, so agreement reads higher than over all seeds.",
    ),
    (
        "audit/random_",
        "Random seeds",
        "Random seeds of the whole pool, selected or not: an unbiased estimate.",
    ),
)
CHECKS = (
    ("identity_checked", "audit/identity_error", "weights loaded by a rollout actor"),
    ("", "audit/scorer_error", "images scored twice"),
)


def agreement(run: RunData) -> Section:
    """Return the section on how well proxy rewards predict the order of regenerated rewards."""
    lead = (
        "Proxy images only need to rank seeds correctly. 1 is the ranking at full quality, 0 is"
        " chance (0.5 for the same side of the mean)."
    )
    cards, rows = [], []
    for prefix, title, note in AUDITS:
        lines = [
            Series(label, samples, colour)
            for name, label, colour in AGREEMENTS
            if (samples := points(run.iterations, prefix + name))
        ]
        if not lines:
            continue
        label = f"Rank agreement by iteration, {title.lower()}"
        chart = line_chart(lines, include_y=(0.0, 1.0), label=label)
        cards.append(Card(title, chart, legend(lines), note=note))
        for name, label, _ in AGREEMENTS:
            if samples := values(run.iterations, prefix + name):
                spread = (statistics.fmean(samples), min(samples), max(samples))
                rows.append((f"{label}, {title.lower()}", *map(number, spread)))
    if cards:
        spread = Table(("agreement", "mean", "lowest", "highest"), rows)
        cards.append(Card("Over the run", table=spread, note=_in_words(run)))
    if checked := identity(run):
        cards.append(checked)
    none = (
        "Nothing to compare: no seed of this run has both an explored and a regenerated reward."
        if run.iterations
        else NO_ITERATION
    )
    groups = [Group(cards)] if cards else []
    return Section("Does the cheap ranking agree with full quality?", lead, groups, none)


def identity(run: RunData) -> Card | None:
    """Return the card of checks that computed a result twice, or None if there were none."""
    rows: list[tuple[str, ...]] = []
    for event, metric, what in CHECKS:
        if differences := values(run.iterations, metric):
            count = sum(row["event"] == event for row in run.events) or len(differences)
            rows.append((what, str(count), number(max(differences))))
    if not rows:
        return None
    note = (
        "A rollout actor and the learner generate the same seed from the same published weights:"
        " the relative difference of their results. A scorer scores the same images again in"
        " reverse order: the difference in standard deviations. 0 means identical bits."
    )
    table = Table(("computed twice", "checks", "largest difference"), rows)
    return Card("Repeated computations", table=table, note=note)


def _in_words(run: RunData) -> str:
    """Describe the mean agreement as shares of pairs and of signs.

    Uses random seeds if some were audited, or else selected seeds.
    """
    prefix = "audit/random_" if values(run.iterations, "audit/random_kendall_tau") else "audit/"
    which = "random" if "random" in prefix else "selected"
    sentences = []
    if tau := values(run.iterations, prefix + "kendall_tau"):
        sentences.append(
            f"Of any two {which} seeds of a prompt, the cheap images put"
            f" {50 + 50 * statistics.fmean(tau):.0f} % in the right order."
        )
    if sign := values(run.iterations, prefix + "sign_agreement"):
        sentences.append(
            f"{100 * statistics.fmean(sign):.0f} % lie on the same side of their group's mean, so"
            " the sign of their advantage was predicted correctly."
        )
    return " ".join(sentences)

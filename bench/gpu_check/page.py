"""HTML page of the check's results, which needs no network."""

from __future__ import annotations

from analysis.report import parts
from analysis.report.charts import Stack, stacked_bars
from analysis.report.parts import Card, Group, Section, Table, blocks
from bench.gpu_check.findings import Outcome, Results
from bench.gpu_check.sections import SECTIONS
from bench.gpu_check.tables import STAGES

COLOURS = {stage: colour for colour, stage in enumerate(STAGES, 1)}


def render(results: Results, tables: dict[str, Table]) -> str:
    """Return the page as HTML."""
    return parts.render(
        "gpu.html",
        name=str(results.machine["gpu"]) if results.gpu else "no GPU",
        what="GPU check",
        facts=[(key, str(value)) for key, value in results.machine.items()],
        claims=tables["claims"],
        sections=[_section(outcome, tables[outcome.section]) for outcome in results.outcomes],
    )


def _section(outcome: Outcome, table: Table) -> Section:
    title = f"{SECTIONS[outcome.section].title}: {outcome.state}"
    cards = [Card(table.note, table=table)] if table.rows else []
    if outcome.section == "iteration" and outcome.findings:
        cards.append(_iterations(outcome))
    left_out = "; ".join(f"{item.what}: {item.why}" for item in outcome.left_out)
    return Section(
        title,
        " ".join(filter(None, (outcome.why, f"{outcome.seconds:.0f} s."))),
        [Group([card], layout="") for card in cards],
        none="Nothing was measured.",
        note=f"Left out: {left_out}." if left_out else "",
    )


def _iterations(outcome: Outcome) -> Card:
    """Return a chart with one bar per family and its stages stacked."""
    stacks = [
        Stack(float(i), {stage: each.beside.get(stage, 0.0) for stage in STAGES}, each.value)
        for i, each in enumerate(outcome.findings, 1)
    ]
    chart = stacked_bars(stacks, list(COLOURS.items()), label="Seconds of an iteration by stage")
    names = ", ".join(
        f"{i}: {each.labels['architecture']}" for i, each in enumerate(outcome.findings, 1)
    )
    legend = blocks([(stage, colour, "") for stage, colour in COLOURS.items()])
    return Card("Seconds of an iteration", chart, legend, note=names)

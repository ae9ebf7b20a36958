"""The check as a page that opens without a network."""

from __future__ import annotations

from analysis.report import parts
from analysis.report.charts import Stack, stacked_bars
from analysis.report.parts import Card, Group, Section, Table, blocks
from bench.gpu_check.findings import Outcome, Results
from bench.gpu_check.sections import SECTIONS
from bench.gpu_check.tables import STAGES

COLOURS = {stage: colour for colour, stage in enumerate(STAGES, 1)}


def render(results: Results, tables: dict[str, Table]) -> str:
    """The page as text."""
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
    left = "; ".join(f"{each.what}: {each.why}" for each in outcome.left_out)
    return Section(
        title,
        " ".join(filter(None, (outcome.why, f"{outcome.seconds:.0f} s."))),
        [Group([card], layout="") for card in cards],
        none="Nothing was measured.",
        note=f"Left out: {left}." if left else "",
    )


def _iterations(outcome: Outcome) -> Card:
    """A bar per family, its stages stacked."""
    stacks = [
        Stack(float(at), {stage: each.beside.get(stage, 0.0) for stage in STAGES}, each.value)
        for at, each in enumerate(outcome.findings, 1)
    ]
    chart = stacked_bars(stacks, list(COLOURS.items()), label="Seconds of an iteration by stage")
    named = ", ".join(
        f"{at}: {each.labels['architecture']}" for at, each in enumerate(outcome.findings, 1)
    )
    legend = blocks([(stage, colour, "") for stage, colour in COLOURS.items()])
    return Card("Seconds of an iteration", chart, legend, note=named)

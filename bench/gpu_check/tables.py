"""Tables of the findings, as they appear in docs/performance.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from analysis.report.charts import number
from analysis.report.parts import Cell, Table
from bench.gpu_check.claims import CLAIMS, verdict
from bench.gpu_check.findings import Finding, Results
from bench.gpu_check.sections import SECTIONS

FORMS = ("packed by torch", "by kernels", "compiled")
BAR = 60.0
"""Length of the longest bar in pixels."""
NONE = "Nothing was measured."
INK = {"confirmed": "good-ink", "refuted": "bad-ink", "not checkable here": ""}


Text = Callable[[Finding], str]


def what(each: Finding) -> str:
    """Return the text of a column: the finding's name."""
    return each.what


def value(each: Finding) -> str:
    """Return the text of a column: the measured value."""
    return number(each.value)


def label(name: str) -> Text:
    """Return a column's function of a finding: this label."""
    return lambda each: each.labels[name]


def beside(name: str) -> Text:
    """Return a column's function of a finding: this number of ``beside``, empty if missing."""
    return lambda each: _optional(each, name)[0]


ARCHITECTURE, FORM = {"architecture": label("architecture")}, {"which": label("form")}
COLUMNS: dict[str, dict[str, Text]] = {
    "kernels": {
        "what": what, "measured": value, "expected": beside("expected"),
        "eager": beside("eager"), "GB/s": beside("GB/s"),
    },
    "shapes": {
        **ARCHITECTURE, "backend": label("backend"), "inputs": beside("inputs"), "refused": value,
        "what": lambda each: each.note,
    },
    "decode": {
        **ARCHITECTURE, **FORM, "FP32, s": beside("fp32 seconds"), "s": beside("seconds"),
        "times as fast": value,
    },
    "lora": {**ARCHITECTURE, **FORM, "/ bare": value, "bare, s": beside("bare seconds")},
    "compiled": {
        **ARCHITECTURE, "eager, s": beside("eager seconds"), "times as fast": value,
        "predicted": beside("predicted"), "gradient off": beside("apart"),
    },
    "weights": {"what": what, "measured": value, "": lambda each: each.unit, "GB": beside("GB")},
    "turns": {
        "what": what, "measured": value, "": lambda each: each.unit,
        "planned": beside("expected"), "GB/s": beside("GB/s"),
    },
    "memory": {
        **ARCHITECTURE, **FORM, "measured, GB": beside("measured GB"),
        "planned, GB": beside("planned GB"), "measured / planned": value,
    },
    "gradients": {**ARCHITECTURE, **FORM, "off FP32": value},
    "tests": {
        "file": what, "failed": value, "passed": beside("passed"), "skipped": beside("skipped"),
        "which": lambda each: each.note,
    },
}  # fmt: skip
"""Columns (heading to text of a cell) of the sections with one row per finding."""


def tables(results: Results) -> dict[str, Table]:
    """Return the tables by section, the claims first."""
    custom: dict[str, Callable[[list[Finding]], Table]] = {"steps": _steps, "iteration": _iteration}
    by_section = {"claims": claims(results)}
    for outcome in results.outcomes:
        plain = partial(_plain, outcome.section)
        by_section[outcome.section] = custom.get(outcome.section, plain)(outcome.findings)
    return by_section


def claims(results: Results) -> Table:
    """Return the table of the verdict on each claim with its reason."""
    rows = []
    for text, check in CLAIMS.items():
        result = verdict(results, check)
        rows.append((text, Cell(result.said, INK[result.said]), result.why))
    return Table(("claim", "verdict", "why"), rows, words=(0, 1, 2), title="Claims of docs/gpu.md")


def _table(name: str, heads: Sequence[str], rows: Sequence[Sequence[str | Cell]], **options: str):
    words = [at for at, head in enumerate(heads) if head in WORDS]
    return Table(heads, rows, words=words, title=SECTIONS[name].title, none=NONE, **options)


WORDS = ("", "architecture", "backend", "what", "format", "shape", "file", "which")


def _plain(section: str, findings: list[Finding]) -> Table:
    """Return a table with one row per finding."""
    columns = COLUMNS[section]
    rows = [tuple(text(finding) for text in columns.values()) for finding in findings]
    return _table(section, tuple(columns), rows)


def _steps(findings: list[Finding]) -> Table:
    """Return a table with a row per architecture and backend, and each form's speed as a bar.

    The length of bars is relative to the largest bound.
    """
    groups: dict[tuple[str, str], dict[str, Finding]] = {}
    for each in findings:
        if (form := each.labels["form"]) in FORMS:
            key = each.labels["architecture"], each.labels["backend"]
            groups.setdefault(key, {})[form] = each
    most = max(
        (each.beside["bound"] for group in groups.values() for each in group.values()), default=1
    )
    rows = []
    for (architecture, backend), group in groups.items():
        first = next(iter(group.values()))
        speeds = [_bar(group.get(form), most, 1 + FORMS.index(form)) for form in FORMS]
        kernel = group.get("by kernels", first)
        rows.append(
            (
                architecture,
                backend,
                *speeds,
                number(first.beside["bound"]),
                *_optional(kernel, "predicted"),
                number(first.beside["bf16 seconds"]),
            )
        )
    heads = ("architecture", "backend", *FORMS, "bound", "predicted", "BF16, s")
    note = (
        "Speed relative to BF16, which is also compiled in that column; seconds per image and step"
    )
    return _table("steps", heads, rows, note=note)


STAGES = ("explore", "select", "regenerate", "update", "pack and load")


def _iteration(findings: list[Finding]) -> Table:
    rows = [
        (each.labels["architecture"], each.labels["backend"], *_optional(each, *STAGES, "peak GB"))
        for each in findings
    ]
    note = f"Seconds. {findings[0].note}" if findings else ""
    return _table("iteration", ("architecture", "backend", *STAGES, "peak GB"), rows, note=note)


def _optional(finding: Finding, *names: str) -> list[str]:
    return [number(finding.beside[name]) if name in finding.beside else "" for name in names]


def _bar(finding: Finding | None, most: float, colour: int) -> Cell:
    if finding is None:
        return Cell("")
    span = f"{number(finding.beside['low'])} to {number(finding.beside['high'])}"
    return Cell(number(finding.value), title=span, bar=(colour, BAR * finding.value / most))

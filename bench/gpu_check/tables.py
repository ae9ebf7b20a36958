"""What was found, as the tables that docs/performance.md takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from analysis.report.charts import number
from analysis.report.parts import Cell, Table
from bench.gpu_check.claims import CLAIMS, verdict
from bench.gpu_check.findings import Finding, Results
from bench.gpu_check.sections import SECTIONS

FORMS = ("packed by torch", "by kernels", "compiled")
BAR = 60.0
"""Pixels of the longest bar."""
NONE = "Nothing was measured."
INK = {"confirmed": "good-ink", "refuted": "bad-ink", "not checkable here": ""}


def tables(results: Results) -> dict[str, Table]:
    """By section; claims first."""
    made: dict[str, Callable[[list[Finding]], Table]] = {
        "kernels": _kernels,
        "shapes": _shapes,
        "steps": _steps,
        "decode": _decode,
        "lora": _lora,
        "weights": _weights,
        "turns": _turns,
        "memory": _memory,
        "iteration": _iteration,
        "tests": _tests,
    }
    found = {"claims": claims(results)}
    for outcome in results.outcomes:
        found[outcome.section] = made[outcome.section](outcome.findings)
    return found


def claims(results: Results) -> Table:
    """What is said of each."""
    rows = []
    for claim in CLAIMS:
        said = verdict(results, claim)
        rows.append((claim.text, Cell(said.said, INK[said.said]), said.why))
    return Table(("claim", "verdict", "why"), rows, words=(0, 1, 2), title="Claims of docs/gpu.md")


def _table(name: str, heads: Sequence[str], rows: Sequence[Sequence[str | Cell]], **more: str):
    words = [at for at, head in enumerate(heads) if head in WORDS]
    return Table(heads, rows, words=words, title=SECTIONS[name].title, none=NONE, **more)


WORDS = ("", "architecture", "backend", "what", "format", "shape", "file", "which")


def _kernels(found: list[Finding]) -> Table:
    rows = [
        (each.what, number(each.value), *_optional(each, "expected", "eager", "GB/s"))
        for each in found
    ]
    return _table("kernels", ("what", "measured", "expected", "eager", "GB/s"), rows)


def _shapes(found: list[Finding]) -> Table:
    rows = [
        (each.labels["architecture"], each.labels["backend"], number(each.beside["inputs"]),
         number(each.value), each.note)
        for each in found
    ]  # fmt: skip
    heads = ("architecture", "backend", "inputs", "refused", "what")
    return _table("shapes", heads, rows)


def _steps(found: list[Finding]) -> Table:
    """A row per architecture and backend; the form's speeds as bars against the bound."""
    groups: dict[tuple[str, str], dict[str, Finding]] = {}
    for each in found:
        if (form := each.labels["form"]) in FORMS:
            key = each.labels["architecture"], each.labels["backend"]
            groups.setdefault(key, {})[form] = each
    most = max(
        (each.beside["bound"] for group in groups.values() for each in group.values()), default=1
    )
    rows = []
    for (architecture, backend), group in groups.items():
        any_of = next(iter(group.values()))
        speeds = [_bar(group.get(form), most, 1 + FORMS.index(form)) for form in FORMS]
        kernel = group.get("by kernels", any_of)
        rows.append(
            (
                architecture,
                backend,
                *speeds,
                number(any_of.beside["bound"]),
                *_optional(kernel, "predicted"),
                number(any_of.beside["bf16 seconds"]),
            )
        )
    heads = ("architecture", "backend", *FORMS, "bound", "predicted", "BF16, s")
    note = "Times as fast as BF16, which is compiled too in that column; seconds per image and step"
    return _table("steps", heads, rows, note=note)


def _decode(found: list[Finding]) -> Table:
    rows = [
        (each.labels["architecture"], each.labels["form"], number(each.beside["fp32 seconds"]),
         number(each.beside["seconds"]), number(each.value))
        for each in found
    ]  # fmt: skip
    return _table("decode", ("architecture", "which", "FP32, s", "s", "times as fast"), rows)


def _lora(found: list[Finding]) -> Table:
    rows = [
        (each.labels["architecture"], each.labels["form"], number(each.value),
         number(each.beside["bare seconds"]))
        for each in found
    ]  # fmt: skip
    return _table("lora", ("architecture", "which", "/ bare", "bare, s"), rows)


def _weights(found: list[Finding]) -> Table:
    rows = [(each.what, number(each.value), each.unit, *_optional(each, "GB")) for each in found]
    return _table("weights", ("what", "measured", "", "GB"), rows)


def _turns(found: list[Finding]) -> Table:
    rows = [
        (each.what, number(each.value), each.unit, *_optional(each, "expected", "GB/s"))
        for each in found
    ]
    return _table("turns", ("what", "measured", "", "planned", "GB/s"), rows)


def _memory(found: list[Finding]) -> Table:
    rows = [
        (each.labels["architecture"], each.labels["form"], number(each.beside["measured GB"]),
         number(each.beside["planned GB"]), number(each.value))
        for each in found
    ]  # fmt: skip
    heads = ("architecture", "which", "measured, GB", "planned, GB", "measured / planned")
    return _table("memory", heads, rows)


STAGES = ("explore", "select", "regenerate", "update", "pack and load")


def _iteration(found: list[Finding]) -> Table:
    rows = [
        (each.labels["architecture"], each.labels["backend"], *_optional(each, *STAGES, "peak GB"))
        for each in found
    ]
    note = f"Seconds. {found[0].note}" if found else ""
    return _table("iteration", ("architecture", "backend", *STAGES, "peak GB"), rows, note=note)


def _tests(found: list[Finding]) -> Table:
    rows = [
        (each.what, number(each.value), *_optional(each, "passed", "skipped"), each.note)
        for each in found
    ]
    return _table("tests", ("file", "failed", "passed", "skipped", "which"), rows)


def _optional(found: Finding, *names: str) -> list[str]:
    return [number(found.beside[name]) if name in found.beside else "" for name in names]


def _bar(found: Finding | None, most: float, colour: int) -> Cell:
    if found is None:
        return Cell("")
    span = f"{number(found.beside['low'])} to {number(found.beside['high'])}"
    return Cell(number(found.value), title=span, bar=(colour, BAR * found.value / most))

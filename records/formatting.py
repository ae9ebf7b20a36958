"""Formatting of durations and numbers for people."""

from __future__ import annotations

from collections.abc import Mapping

from records.rundir import finite_or_none


def duration(seconds: float) -> str:
    """Format ``seconds`` for people: 4.2 s, 58 s, 3 min 12 s, 1 h 02 min."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def decimals(value: float | None) -> str:
    """Format a number with three decimals, or None as a dash."""
    return "–" if value is None else f"{value:.3f}"


def plus_minus(metrics: Mapping[str, object], name: str) -> str:
    """Format the standard error ``name`` of a row of metrics.jsonl as " ± x"; empty if missing."""
    value = finite_or_none(metrics.get(name))
    return "" if value is None else f" ± {value:.3f}"

"""Events named on pages are written by the code."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT, each, text_of

PACKAGES = ("actors", "analysis", "cluster", "learner", "records")
NAMED = (
    r"\bevents?\s`([a-z_]+)`(?!\.)",
    r"`([a-z_]+)`\sin\sthe\sevents",
    r"`([a-z_]+)`\s(?:of|in)\s`events\.jsonl`",
)


@cache
def source() -> str:
    """Return the code of all files that may write events."""
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return "\n".join(file.read_text() for file in files)


def events_in(text: str) -> set[str]:
    """Return the names that a text calls events."""
    return {name for pattern in NAMED for name in re.findall(pattern, text)}


@each()
def test_every_event_that_is_named_is_written(page: Path):
    named = events_in(text_of(page).outside)
    assert {name for name in named if f'"{name}"' not in source()} == set()


def test_event_names_are_recognized_in_prose():
    text = "the event `a_b` says; (`c_d` in the events), `e_f` of\n`events.jsonl`, events `x.y`"
    assert events_in(text) == {"a_b", "c_d", "e_f"}

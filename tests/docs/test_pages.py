"""Links resolve, and prose is wrapped."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.pages import CURRENT, HISTORY, each, text_of

WIDTH = 140
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of a page; the second heading with the same words ends in -1."""
    found: set[str] = set()
    for _, line in text_of(page).lines:
        if line.startswith("#"):
            words = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            slug = words.replace(" ", "-")
            found.add(f"{slug}-1" if slug in found else slug)
    return found


def broken_links(page: Path) -> list[str]:
    """Return the relative links and anchors of a page that do not resolve."""
    broken = []
    for target in LINK.findall(text_of(page).outside):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


@each([*CURRENT, *HISTORY])
def test_every_relative_link_and_anchor_resolves(page: Path):
    assert broken_links(page) == []


def test_a_broken_link_and_a_broken_anchor_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c\n\n[a](#a-b-c) [b](#b) [c](no.md) [d](https://example.org/x)\n")
    assert broken_links(page) == ["#b", "no.md"]


def too_wide(page: Path) -> list[int]:
    """Return the numbers of lines that are too wide; tables and images cannot be broken."""
    return [
        number
        for number, line in text_of(page).lines
        if len(line) > WIDTH and " " in line.strip() and not line.startswith(("|", "!["))
    ]


@each(CURRENT)
def test_prose_is_wrapped(page: Path):
    assert too_wide(page) == []

"""Pages of documentation split into prose, tables, inline code and lines of code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HISTORY = [ROOT / "CHANGELOG.md", *sorted((ROOT / "docs" / "decisions").glob("0*.md"))]
"""Pages that may name removed things."""
CURRENT = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "shapes/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Text:
    """A page in parts: (line number, text) outside of code blocks, and the lines within them."""

    lines: list[tuple[int, str]]
    code: list[str]

    @property
    def outside(self) -> str:
        """The text without code blocks."""
        return "\n".join(line for _, line in self.lines)

    @property
    def spans(self) -> Iterator[str]:
        """Yield inline code, including spans broken over two lines."""
        for span in CODE.findall(self.outside):
            yield " ".join(span.split())

    @property
    def commands(self) -> Iterator[str]:
        """Yield commands of code blocks, with continued lines joined and comments removed."""
        for line in "\n".join(self.code).replace("\\\n", " ").splitlines():
            yield line.split(" #")[0].strip()

    @property
    def all_code(self) -> list[str]:
        """Return inline code, then the lines of code blocks."""
        return [*self.spans, *self.commands]


@cache
def text_of(page: Path) -> Text:
    """Split a page. Code blocks are fenced, or indented by four after an empty line."""
    lines: list[tuple[int, str]] = []
    code: list[str] = []
    fenced = indented = False
    before = ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif fenced:
            code.append(line)
        else:
            indented = line.startswith("    ") and (indented or not before.strip())
            (code.append(line) if indented else lines.append((number, line)))
        before = line
    return Text(lines, code)


def each(pages: Sequence[Path] = CURRENT) -> pytest.MarkDecorator:
    """Parametrize a test by page."""
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))

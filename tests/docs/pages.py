"""The pages for people to read, taken apart: prose, tables, inline code, lines of code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HISTORY = [ROOT / "CHANGELOG.md", *sorted((ROOT / "docs" / "decisions").glob("0*.md"))]
"""Pages that may name what is gone."""
CURRENT = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "shapes/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Text:
    """A page in parts: lines outside of blocks of code with their numbers, and lines within."""

    lines: list[tuple[int, str]]
    code: list[str]

    @property
    def outside(self) -> str:
        """All but blocks of code."""
        return "\n".join(line for _, line in self.lines)

    @property
    def spans(self) -> Iterator[str]:
        """Inline code, also where it is broken over two lines."""
        for span in CODE.findall(self.outside):
            yield " ".join(span.split())

    @property
    def commands(self) -> Iterator[str]:
        """Lines of blocks of code, continued ones in one, without comments."""
        for line in "\n".join(self.code).replace("\\\n", " ").splitlines():
            yield line.split(" #")[0].strip()

    @property
    def all_code(self) -> list[str]:
        """Inline code, then lines of blocks."""
        return [*self.spans, *self.commands]


@cache
def text_of(page: Path) -> Text:
    """Code are fenced blocks, and lines that are indented by four after an empty one."""
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
    """A test for every page, under its name."""
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))

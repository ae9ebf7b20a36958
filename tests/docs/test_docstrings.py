"""Names in double backticks, in docstrings and comments, exist in the code."""

from __future__ import annotations

import io
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if not {".venv", "build"} & set(path.relative_to(ROOT).parts)
]
SETTINGS = [*ROOT.glob("configs/**/*.toml"), ROOT / "pyproject.toml", ROOT / "Makefile"]
QUOTED = re.compile(r"``(?:\w+\.)*([A-Za-z]\w*)(?:\(\))?``")
OF_OTHERS = {
    "p_old",
    "PriorityQueue",
    "request_resources",
    "RAY_local_fs_capacity_threshold",
    "RAY_object_spilling_threshold",
}
"""Names of papers and libraries that the code itself never uses."""


STARTS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT}


@dataclass
class Source:
    """A file's ``prose``: (line, text) of docstrings and comments; and all other ``words``."""

    prose: list[tuple[int, str]]
    words: set[str]

    @classmethod
    def of(cls, text: str) -> Source:
        """Split the text of a file; a string with which a statement starts is a docstring."""
        source, before, depth = cls([], set()), tokenize.NEWLINE, 0
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            depth += (token.string in "([{") - (token.string in ")]}") if token.string else 0
            docstring = token.type == tokenize.STRING and before in STARTS and not depth
            if docstring or token.type == tokenize.COMMENT:
                source.prose.append((token.start[0], token.string))
            else:
                source.words.update(re.findall(r"\w+", token.string))
            before = token.type
        return source

    def unknown(self, known: set[str]) -> list[str]:
        """Return ``line: name`` of names in backticks that are not in ``known``.

        Only what looks like a name is checked: words with a capital or an underscore.
        """
        return [
            f"{line}: {name}"
            for line, text in self.prose
            for name in QUOTED.findall(text)
            if name not in known and (name.lower() != name or "_" in name.strip("_"))
        ]


@pytest.fixture(scope="module")
def sources() -> dict[str, Source]:
    """Return every file of the project, by its path from the root."""
    return {
        str(path.relative_to(ROOT)): Source.of(path.read_text(encoding="utf-8")) for path in FILES
    }


def test_every_name_in_a_docstring_exists(sources: dict[str, Source]):
    known = {word for path in sources for word in re.findall(r"\w+", path)} | OF_OTHERS
    known.update(*(source.words for source in sources.values()))
    for path in SETTINGS:
        known.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    missing = [
        f"{path}:{name}" for path, source in sources.items() for name in source.unknown(known)
    ]
    assert not missing


def test_a_name_that_is_gone_is_found():
    source = Source.of('"""Calls ``old_name`` on ``Other.FILES``."""\n\nFILES = []  # ``GONE``\n')
    assert source.unknown(source.words) == ["1: old_name", "3: GONE"]

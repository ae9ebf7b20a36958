"""Print source code statistics, separately for the code and its tests.

    python -m tools.style [--json] [ROOT]

Every measure counts a line at most once. A code line holds more than a comment or a docstring; a
comment line holds a comment, alone or after code. Lengths are in lines; the length of a function
excludes its decorators.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = {"build", "dist"}  # and folders whose name begins with a dot
DEEP = ("cluster",)  # packages whose sub-packages are also counted separately
WORDS = {
    "image": "pictures?",
    "task": "units? of work",
    "retry": "reissu(?:e|es|ing)",
    "actor or member": "workers?|whoever",
    "supervisor": "roster",
    "regenerate": "full[_-]quality",
    "unquantized or dpmpp_2m": "keep_wide|dpm2",
    "observe, check or held-out scorer": "judg(?:e|es|ed|ing)",
    "requested or ready": "wished[- ]for|manned",
    "discard": "bury|buries|buried",
    "rendezvous": "meeting[_ -]place",
    "fault-injected": "struck|strikes?",
    "compared with": "held against",
    "at random": "by lot",
    "fix": "mend|mends|mended",
    "incompatible or compatible": "misfit|admits?",
}
"""Maps the preferred term to a regular expression for the terms to avoid."""
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass
class Source:
    """Counts of one file."""

    path: str  # relative to the root, with slashes
    lines: list[str]
    functions: list[int]  # lengths
    imports: set[str]  # modules, and names imported from packages, which may be modules
    code: set[int] = field(default_factory=set)  # line numbers
    comments: set[int] = field(default_factory=set)
    untyped: set[int] = field(default_factory=set)  # lines that use the name Any

    @property
    def module(self) -> str:
        """Dotted module name: ``a.b`` for both a/b.py and a/b/__init__.py."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def read(root: Path, path: Path) -> Source:
    """Count one file. Raises SyntaxError if it is not valid Python."""
    text = path.read_text(encoding="utf-8")
    tree, docs, lengths, imports = ast.parse(text), set[int](), [], set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lengths.append((node.end_lineno or node.lineno) - node.lineno + 1)
        elif isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    source = Source(path.relative_to(root).as_posix(), text.splitlines(), lengths, imports)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        span = {*range(token.start[0], token.end[0] + 1)}
        if token.type == tokenize.COMMENT:
            source.comments |= span
        elif token.type not in LAYOUT:
            source.code |= span - docs
        if token.type == tokenize.NAME and token.string == "Any":
            source.untyped |= span
    return source


def sources(root: Path) -> list[Source]:
    """Read every Python file below ``root``, in path order, except in skipped folders."""
    return [
        read(root, path)
        for path in sorted(root.rglob("*.py"))
        if not any(p in SKIPPED or p.startswith(".") for p in path.relative_to(root).parts)
    ]


@dataclass(frozen=True)
class Report:
    """Counts over several files. Rates are per 1,000 lines; shares are fractions of 1."""

    files: int
    lines: int
    functions: int
    function_median: float
    function_p90: float
    file_median: float
    file_p90: float
    any_per_1000: float
    over_100_per_1000: float
    over_120_per_1000: float
    comment_share: float  # comment lines over code lines
    largest_room: tuple[str, float]  # (top-level package, its share of the lines)
    largest_room_apart: tuple[str, float]  # the same, with sub-packages of ``DEEP`` separate
    words: dict[str, dict[str, int]]  # preferred term -> terms found instead -> how often
    one_importer: list[str]  # modules imported by exactly one other module


def report(chosen: Sequence[Source]) -> Report:
    """Summarize ``chosen``, which must not be empty. Imports from other files are not counted."""
    sizes = [len(source.lines) for source in chosen]
    functions = [length for source in chosen for length in source.functions]
    code, comments = (
        sum(map(len, rows)) for rows in zip(*((s.code, s.comments) for s in chosen), strict=True)
    )

    def share(count: int) -> float:
        return round(1000 * count / max(1, sum(sizes)), 2)

    def over(columns: int) -> float:
        return share(sum(len(line) > columns for source in chosen for line in source.lines))

    return Report(
        files=len(chosen),
        lines=sum(sizes),
        functions=len(functions),
        function_median=statistics.median(functions or [0]),
        function_p90=p90(functions),
        file_median=statistics.median(sizes),
        file_p90=p90(sizes),
        any_per_1000=share(sum(len(source.untyped) for source in chosen)),
        over_100_per_1000=over(100),
        over_120_per_1000=over(120),
        comment_share=round(comments / max(1, code), 4),
        largest_room=_largest(chosen, 1),
        largest_room_apart=_largest(chosen, 2),
        words=_words(chosen),
        one_importer=_one_importer(chosen),
    )


def p90(values: Iterable[int]) -> int:
    """Return the 90th percentile (nearest rank) of ``values``, or 0 if there are none."""
    ordered = sorted(values)
    return ordered[-(-9 * len(ordered) // 10) - 1] if ordered else 0


def _largest(chosen: Sequence[Source], depth: int) -> tuple[str, float]:
    packages: Counter[str] = Counter()
    for source in chosen:
        parts = source.path.split("/")[:-1] or ["."]
        packages["/".join(parts[: depth if parts[0] in DEEP else 1])] += len(source.lines)
    name, lines = max(packages.items(), key=lambda item: (item[1], item[0]))
    return name, round(lines / max(1, packages.total()), 4)


def _words(chosen: Sequence[Source]) -> dict[str, dict[str, int]]:
    """Count the terms to avoid (``WORDS``). This file, which lists them, is excluded."""
    text = "\n".join("\n".join(s.lines) for s in chosen if s.path != "tools/style.py").lower()
    matches = {
        term: Counter(re.findall(rf"(?<![a-z])(?:{avoided})(?![a-z])", text))
        for term, avoided in WORDS.items()
    }
    return {term: dict(sorted(counts.items())) for term, counts in matches.items() if counts}


def _one_importer(chosen: Sequence[Source]) -> list[str]:
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for source in chosen:
        for name in source.imports - {source.module}:
            importers[name].add(source.module)
    return sorted(s.module for s in chosen if len(importers[s.module]) == 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the reports on the code and on the tests."""
    parser = argparse.ArgumentParser(prog="python -m tools.style")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    parser.add_argument(
        "--json", action="store_true", help=("print JSON, with the names of all modules")
    )
    options = parser.parse_args(arguments)
    files = sources(options.root)
    parts = {
        "code": [source for source in files if not source.path.startswith("tests/")],
        "tests": [source for source in files if source.path.startswith("tests/")],
    }
    rows = {name: asdict(report(chosen)) for name, chosen in parts.items() if chosen}
    if options.json:
        print(json.dumps(rows, indent=1))
    for name, row in rows.items() if not options.json else ():
        print(name)
        row["one_importer"] = len(row["one_importer"])
        word_counts = (item for counts in row["words"].values() for item in counts.items())
        row["words"] = ", ".join(f"{word} {count}" for word, count in word_counts) or "none"
        for key, value in row.items():
            print(f"  {key.replace('_', ' '):<26}{value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

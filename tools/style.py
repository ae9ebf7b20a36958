"""Counts on the source: ``python -m tools.style [--json] [ROOT]``, the code and its tests apart.

A line counts once per measure. Code lines hold more than a comment or a docstring; a comment line
holds a comment, beside code or alone. Lengths are in lines, a function's without its decorators.
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
DEEP = ("cluster",)  # rooms whose sub-packages are counted as rooms too
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
"""Word to use -> expression for what not to say."""
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass
class Source:
    """What is counted of one file."""

    path: str  # below the root, with slashes
    lines: list[str]
    functions: list[int]  # lengths
    imports: set[str]  # modules, and attributes of packages that may be modules
    code: set[int] = field(default_factory=set)  # numbers of lines
    comments: set[int] = field(default_factory=set)
    untyped: set[int] = field(default_factory=set)  # lines with the name Any

    @property
    def module(self) -> str:
        """``a.b`` of a/b.py and of a/b/__init__.py."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def read(root: Path, path: Path) -> Source:
    """Counts one file. Raises SyntaxError for what is no Python."""
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
    found = Source(path.relative_to(root).as_posix(), text.splitlines(), lengths, imports)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        span = {*range(token.start[0], token.end[0] + 1)}
        if token.type == tokenize.COMMENT:
            found.comments |= span
        elif token.type not in LAYOUT:
            found.code |= span - docs
        if token.type == tokenize.NAME and token.string == "Any":
            found.untyped |= span
    return found


def sources(root: Path) -> list[Source]:
    """Every Python file below ``root``, by path."""
    return [
        read(root, path)
        for path in sorted(root.rglob("*.py"))
        if not any(p in SKIPPED or p.startswith(".") for p in path.relative_to(root).parts)
    ]


@dataclass(frozen=True)
class Report:
    """Counts over some files. ``per 1,000`` is of all lines; shares are of 1."""

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
    largest_room_apart: tuple[str, float]  # the same with the sub-packages of ``DEEP`` apart
    words: dict[str, dict[str, int]]  # use this -> what was said instead, how often
    one_importer: list[str]  # modules that exactly one other imports


def report(chosen: Sequence[Source]) -> Report:
    """Counts over ``chosen``, which must not be empty; importers are looked for among them."""
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
    """The least value that nine tenths do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[-(-9 * len(ordered) // 10) - 1] if ordered else 0


def _largest(chosen: Sequence[Source], depth: int) -> tuple[str, float]:
    rooms: Counter[str] = Counter()
    for source in chosen:
        parts = source.path.split("/")[:-1] or ["."]
        rooms["/".join(parts[: depth if parts[0] in DEEP else 1])] += len(source.lines)
    name, lines = max(rooms.items(), key=lambda item: (item[1], item[0]))
    return name, round(lines / max(1, rooms.total()), 4)


def _words(chosen: Sequence[Source]) -> dict[str, dict[str, int]]:
    """What is found of ``WORDS``; this file, which lists them, is left out."""
    text = "\n".join("\n".join(s.lines) for s in chosen if s.path != "tools/style.py").lower()
    found = {
        right: Counter(re.findall(rf"(?<![a-z])(?:{wrong})(?![a-z])", text))
        for right, wrong in WORDS.items()
    }
    return {right: dict(sorted(counts.items())) for right, counts in found.items() if counts}


def _one_importer(chosen: Sequence[Source]) -> list[str]:
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for source in chosen:
        for name in source.imports - {source.module}:
            importers[name].add(source.module)
    return sorted(s.module for s in chosen if len(importers[s.module]) == 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints both reports."""
    parser = argparse.ArgumentParser(prog="python -m tools.style")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--json", action="store_true", help="for machines, with all modules named")
    options = parser.parse_args(arguments)
    found = sources(options.root)
    parts = {
        "code": [source for source in found if not source.path.startswith("tests/")],
        "tests": [source for source in found if source.path.startswith("tests/")],
    }
    rows = {name: asdict(report(chosen)) for name, chosen in parts.items() if chosen}
    if options.json:
        print(json.dumps(rows, indent=1))
    for name, row in rows.items() if not options.json else ():
        print(name)
        row["one_importer"] = len(row["one_importer"])
        said = (item for counts in row["words"].values() for item in counts.items())
        row["words"] = ", ".join(f"{word} {count}" for word, count in said) or "none"
        for key, value in row.items():
            print(f"  {key.replace('_', ' '):<26}{value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

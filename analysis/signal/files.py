"""Files of ``sol-rl signal``: rows that grow from call to call, and the table of them."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from configs.load import ConfigError
from configs.section import Tree
from records.tables import markdown

ROWS, EXPLORED = "signal.json", "explored.json"
"""Measured rows, and rewards of explored images, from which a stopped measurement goes on."""


def rows_of(out: Path) -> list[Tree]:
    """The rows that ``out`` has by now. Raises ConfigError."""
    return list(read(out / ROWS).get("rows", []))


def read(path: Path) -> Tree:
    """An object that was written before; empty where there is none. Raises ConfigError."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}): remove it, or give --out") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: no JSON object: remove it, or give --out")
    return found


def digest(what: object) -> str:
    """A name for anything that JSON can hold."""
    return xxhash.xxh3_128(json.dumps(what, sort_keys=True).encode()).hexdigest()


def title(summary: Tree) -> str:
    """A line on what the rows have in common."""
    shapes = sorted({(row["batches"], row["prompts"], row["keep"]) for row in summary["rows"]})
    said = ", ".join(f"{b} batches of {p} prompts x {k} samples" for b, p, k in shapes)
    return f"{summary['model']}, base weights; {said}"


def table(summary: Tree) -> list[str]:
    """The rows for people: an objective per line, a selection per column."""
    rows = summary["rows"]
    columns = list(dict.fromkeys(row["choice"] for row in rows))
    cells = {
        (row["objective"], row["choice"]): f"{row['cosine']:.3f} ± {row['stderr']:.3f}"
        for row in rows
    }
    names = list(dict.fromkeys(row["objective"] for row in rows))
    body = [[name, *(cells.get((name, column), "") for column in columns)] for name in names]
    return [
        f"{title(summary)}; ± standard error (jackknife over batches)",
        "",
        *markdown(["cosine between gradients", *columns], body),
    ]

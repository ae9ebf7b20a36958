"""Files of ``sol-rl signal``: rows that accumulate over calls, and their table."""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from configs.load import ConfigError
from configs.paths import exists
from configs.section import Tree
from records.tables import markdown

ROWS, EXPLORED = "signal.json", "explored.json"
"""Measured rows, and rewards of explored images; an interrupted measurement continues from both."""


def read_rows(out: Path) -> list[Tree]:
    """Return the rows in ``out``; raise ConfigError if its file cannot be read."""
    return list(read(out / ROWS).get("rows", []))


def read(path: Path) -> Tree:
    """Return the JSON object in a file, or {} if the file does not exist.

    Raises ConfigError if it cannot be read.
    """
    if not exists(path):
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}): remove it, or give --out") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object: remove it, or give --out")
    return value


def digest(what: object) -> str:
    """Return a hash of any value that JSON can represent."""
    return xxhash.xxh3_128(json.dumps(what, sort_keys=True).encode()).hexdigest()


def title(summary: Tree) -> str:
    """Return a line with the model and the batch sizes of the rows."""
    shapes = sorted({(row["batches"], row["prompts"], row["keep"]) for row in summary["rows"]})
    sizes = ", ".join(f"{b} batches of {p} prompts x {k} samples" for b, p, k in shapes)
    return f"{summary['model']}, base weights; {sizes}"


def table(summary: Tree) -> list[str]:
    """Format the rows as a table: an objective per line, a selection per column."""
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

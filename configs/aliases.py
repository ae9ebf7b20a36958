"""Renamed keys and values, whose old names are still accepted in configurations."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection

from configs.section import Tree

KEYS = {
    "explore.keep_wide": "explore.modules_to_not_convert",
    "publish.chunk_mb": "publish.shard_mb",
    "rewards.normalise": "rewards.normalize",
}
"""Old dotted key -> new dotted key, in the same table."""
VALUES: dict[str, dict[str, str]] = {
    f"{table}.solver": {"dpm2": "dpmpp_2m"} for table in ("explore", "regenerate", "evaluate")
}
"""Dotted key -> {old value: new value}."""

_said: set[str] = set()  # renames that this process has printed


def current_key(key: str) -> str:
    """Return the current name of the dotted ``key``."""
    return KEYS.get(key, key)


def refuse_duplicates(keys: Collection[str]) -> None:
    """Raise ValueError if ``keys`` contain both the old and the new name of a key."""
    for old, new in KEYS.items():
        if old in keys and new in keys:
            raise ValueError(f"{old} is now {new}, and both are given: leave {old} out")


def rename_old_keys(tree: Tree) -> Tree:
    """Return ``tree`` with current names: itself if it uses no old name, else a copy.

    Old names are reported on stderr in one line, each name once per process. Raises ValueError if
    a key is given under both names.
    """
    given = {key for key in (*KEYS, *KEYS.values(), *VALUES) if _table(tree, key) is not None}
    refuse_duplicates(given)
    renamed = copy.deepcopy(tree)
    lines = []
    for old in given & KEYS.keys():
        table, last = _table(renamed, old) or {}, old.rpartition(".")[2]
        table[KEYS[old].rpartition(".")[2]] = table.pop(last)
        lines.append(f"{old} is now {KEYS[old]}")
    for key in given & VALUES.keys():
        table, last = _table(renamed, key) or {}, key.rpartition(".")[2]
        value = table[last]
        if isinstance(value, str) and value in VALUES[key]:
            table[last] = VALUES[key][value]
            lines.append(f"{key} = {value!r} is now {table[last]!r}")
    if new := [line for line in sorted(lines) if line not in _said]:
        print("; ".join(new), file=sys.stderr)
        _said.update(new)
    return renamed if lines else tree


def _table(tree: Tree, key: str) -> Tree | None:
    """Return the table of ``tree`` that contains the dotted ``key``, or None."""
    *parents, last = key.split(".")
    node: object = tree
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    return node if isinstance(node, dict) and last in node else None

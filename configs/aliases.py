"""Keys and values that have got another name since: a configuration may still use the old one."""

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
"""Old dotted key -> the key of the same table in its place."""
VALUES: dict[str, dict[str, str]] = {
    f"{table}.solver": {"dpm2": "dpmpp_2m"} for table in ("explore", "regenerate", "evaluate")
}
"""Dotted key -> its old values, each with the value in its place."""

_said: set[str] = set()  # renames that this process has told of


def current_key(key: str) -> str:
    """The dotted key that a configuration has for ``key`` today."""
    return KEYS.get(key, key)


def refuse_both(keys: Collection[str]) -> None:
    """Raises ValueError where ``keys`` hold a key under its old and under its new name."""
    for old, new in KEYS.items():
        if old in keys and new in keys:
            raise ValueError(f"{old} is now {new}, and both are given: leave {old} out")


def current(tree: Tree) -> Tree:
    """``tree`` in today's names: itself where it uses no old one, else a copy.

    Old names are told of in one line on stderr, each once in a process. Raises ValueError where a
    key has both names.
    """
    given = {key for key in (*KEYS, *KEYS.values(), *VALUES) if _table(tree, key) is not None}
    refuse_both(given)
    found = copy.deepcopy(tree)
    lines = []
    for old in given & KEYS.keys():
        table, last = _table(found, old) or {}, old.rpartition(".")[2]
        table[KEYS[old].rpartition(".")[2]] = table.pop(last)
        lines.append(f"{old} is now {KEYS[old]}")
    for key in given & VALUES.keys():
        table, last = _table(found, key) or {}, key.rpartition(".")[2]
        value = table[last]
        if isinstance(value, str) and value in VALUES[key]:
            table[last] = VALUES[key][value]
            lines.append(f"{key} = {value!r} is now {table[last]!r}")
    if new := [line for line in sorted(lines) if line not in _said]:
        print("; ".join(new), file=sys.stderr)
        _said.update(new)
    return found if lines else tree


def _table(tree: Tree, key: str) -> Tree | None:
    """The table of ``tree`` that has the dotted ``key``, or None."""
    *parents, last = key.split(".")
    node: object = tree
    for parent in parents:
        node = node.get(parent) if isinstance(node, dict) else None
    return node if isinstance(node, dict) and last in node else None

"""Write plain values as TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping


def to_toml(tree: Mapping[str, object]) -> str:
    """Return ``tree`` as TOML, one line per top-level key; keys whose value is None are omitted."""

    def text(value: object) -> str:
        if isinstance(value, dict):
            return (
                "{"
                + ", ".join(
                    f"{json.dumps(key)} = {text(each)}"
                    for key, each in value.items()
                    if each is not None
                )
                + "}"
            )
        if isinstance(value, list | tuple):
            return "[" + ", ".join(text(each) for each in value) + "]"
        if isinstance(value, float):
            return str(value)  # inf and nan are spelled the same in TOML
        if isinstance(value, bool | int | str):
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        raise TypeError(f"{value!r}: cannot be written as TOML: {type(value).__name__}")

    return "".join(
        f"{json.dumps(key)} = {text(value)}\n" for key, value in tree.items() if value is not None
    )

"""Targets for configurations: ``--set`` of every key, and TOML files."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import strategies as st

from configs.load import load, parse
from tools.fuzz.inputs import TOML, keys, spoiled, words
from tools.fuzz.invariants import InvariantViolation, command, finite
from tools.fuzz.target import Target


def one_override(folder: Path, example: tuple[str, str]) -> None:
    """Run `config quickstart --set KEY=VALUE`; an accepted value must survive a round trip."""
    shown = command("config", "quickstart", "--set", f"{example[0]}={example[1]}")
    if shown:
        finite(json.loads(shown))
        config = load("quickstart", [f"{example[0]}={example[1]}"])
        if parse(config.model_dump(mode="json")) != config:
            raise InvariantViolation(f"{example} is not read back as written")


def toml_file(folder: Path, data: bytes) -> None:
    """Run `config FILE.toml`."""
    (folder / "x.toml").write_bytes(data)
    shown = command("config", str(folder / "x.toml"))
    if shown:
        finite(json.loads(shown))


def targets() -> dict[str, Target]:
    """Return the targets for what ``sol-rl config`` reads."""
    return {
        "set": Target(st.tuples(st.sampled_from(keys()), words), one_override),
        "toml": Target(spoiled(TOML) | st.binary(max_size=40), toml_file),
    }

"""Targets for command lines: every option of every command, with valid and hostile values."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import cast
from unittest import mock

from hypothesis import strategies as st

from cli.main import COMMANDS, _parser
from tools.fuzz.inputs import keys, words
from tools.fuzz.invariants import InvariantViolation, digest, outcome
from tools.fuzz.target import Target, copied, example_run

GOOD = {
    "config": ("quickstart",) * 6 + ("mine.toml", "no-such", "small", "flux1-sol_rl-hpsv2"),
    "set": ("seed=2", "iterations=1", "run_root=there", "arm=naive_quant",
            "services.rollout.gpus=1",
            "run_root=/nowhere/there",
            "name=x/y", "explore.backend=fp4", "model.path=nowhere"),
    "run": ("run",) * 6 + ("missing", "file", "loop", "empty", "locked", "running"),
    "out": ("out",) * 6 + ("file", "file/x", "loop", "locked", "empty", "run"),
    "prompts": ("2", "prompts.txt", "file", "empty", "missing"),
    "from": ("run", "missing", "running"), "runs": ("run", "running", "empty"),
    "address": ("127.0.0.1:1", "http://127.0.0.1:1", "https://127.0.0.1:1", "auto",
                "ray://127.0.0.1:1", "127.0.0.1:99999", "http://127.0.0.1:99999",
                "http://", "[::1]:1", "local", "host:"),
    "arms": ("sol_rl,naive_quant", "sol_rl,sol_rl"), "objectives": ("awm,flow_grpo",),
    "vary": ("explore.steps=2,4", "seed=1,2", "explore.steps"), "operations": ("4,2", "nan", "inf"),
    "baseline": ("sol_rl",), "seeds": ("48", "96"),
    "steps": ("2", "4"), "backends": ("fp32", "fp8"),
    "weights": ("ema", "merged", "base"), "checkpoint": ("2", "3"), "batches": ("3",),
    "objective": ("awm", "flow_grpo,window.size=3", "awm,x=1", "nope"), "pools": ("24", "96"),
    "rules": ("best_worst", "random"), "sizes": ("32x32", "0x0", "9999999999x1", "axb"),
    "budget": ("0.5",), "ratio": ("2",), "keep": ("12", "13"), "prune": ("2",),
    "by": ("operations",),
    "accelerator": ("B200", "H100"), "gpus": ("8",), "push": ("a/b", "../x"), "rollout": ("3",),
    "reward": ("1",), "licence": ("mit",), "threads": ("1",), "private": (), "json": (), "list": (),
}  # fmt: skip
"""Valid or nearly valid values, by option name. Other values are hostile words."""
HELD = ("run", "running", "locked")
"""Run directories that a command must not change, unless it is told to write there."""


@functools.cache
def commands() -> dict[str, list[argparse.Action]]:
    """Return the options and arguments of every command, as declared by its parser."""
    (subs,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    parsers = cast(dict[str, argparse.ArgumentParser], subs.choices)
    return {
        name: [a for a in parsers[name]._actions if not isinstance(a, argparse._HelpAction)]
        for name in COMMANDS
    }


def lines() -> st.SearchStrategy[list[str]]:
    """Strategy for a command with its arguments and up to four of its options."""
    return st.sampled_from(sorted(commands())).flatmap(_line)


def _line(name: str) -> st.SearchStrategy[list[str]]:
    actions = commands()[name]
    positionals = [_values(a) for a in actions if not a.option_strings]
    options = [a for a in actions if a.option_strings]
    chosen = (
        st.lists(st.sampled_from(options).flatmap(_option), max_size=4) if options else st.just([])
    )
    return st.tuples(st.tuples(*positionals), chosen).map(
        lambda parts: [name, *sum(parts[0], []), *sum(parts[1], [])]
    )


def _option(action: argparse.Action) -> st.SearchStrategy[list[str]]:
    option = st.just(action.option_strings[0])
    return st.builds(lambda word, values: [word, *values], option, _values(action))


def _values(action: argparse.Action) -> st.SearchStrategy[list[str]]:
    if action.nargs == 0:
        return st.just([])
    name = (action.option_strings or [action.dest])[0].lstrip("-").replace("-", "_")
    good = GOOD.get(name, ("1", "8", "x"))
    if name == "set":
        override = st.builds(lambda key, value: f"{key}={value}", st.sampled_from(keys()), words)
        return (st.sampled_from(good) | override).map(lambda value: [value])
    value = st.sampled_from(good) | st.sampled_from(good) | words
    max_count = 3 if action.nargs == "+" else 1
    min_count = 0 if action.nargs == "?" else 1
    return st.lists(value, min_size=min_count, max_size=max_count)


def inside(word: str) -> str:
    """Keep a word from naming a path outside the fuzzer's folder.

    Words that cannot create anything, such as URLs, are returned unchanged.
    """
    if word.startswith(("run_root=/nowhere", "http", "ray")):
        return word
    word = word.replace("..", "__")
    if "=" in word or "://" in word or word.startswith("-"):
        return word.replace("=/", "=")
    return word.lstrip("/~")


def command_line(folder: Path, example: Sequence[str]) -> None:
    """Run a command line: it must end with exit code 0, 2 or 3, or be about to start something.

    Runs must remain unchanged, except those that the command is told to write to.
    """
    arguments = [example[0], *map(inside, example[1:])]
    with contextlib.ExitStack() as stack:
        _furnish(folder, stack)
        before = {name: digest(folder / name) for name in HELD}
        outcome(*arguments, codes=(0, 2, 3))
        for name in HELD:
            requested = any(name in word for word in _written(arguments))
            if digest(folder / name) != before[name] and not requested:
                raise InvariantViolation(f"{arguments} changed {name}")


def _written(arguments: Sequence[str]) -> list[str]:
    """Return the words that name output paths: after --out, and the second argument of export."""
    outputs = [b for a, b in zip(arguments, arguments[1:], strict=False) if a == "--out"]
    return [*outputs, *(arguments[2:3] if arguments[0] == "export" else [])]


def _furnish(folder: Path, stack: contextlib.ExitStack) -> None:
    """Create paths of every kind in ``folder``.

    They are a run, a run that is being written, a run that cannot be read, an empty directory,
    files and a symlink loop.
    """
    if not (folder / "run").exists():
        for name in HELD:
            copied(example_run(), folder / name)
        (folder / "empty").mkdir()
        (folder / "file").write_text("a cat\n")
        (folder / "prompts.txt").write_text("a red circle\na blue square\n")
        (folder / "mine.toml").write_text('layers = ["models/shapes", "rewards/shapes"]\n')
        (folder / "loop").symlink_to("loop")
        (folder / "locked" / "config.json").chmod(0)
    lock = stack.enter_context((folder / "running" / "lock").open("a"))
    fcntl.flock(lock, fcntl.LOCK_EX)
    stack.enter_context(mock.patch.dict("os.environ", {"HF_HUB_OFFLINE": "1"}))


def targets() -> dict[str, Target]:
    """Return the target for all commands."""
    return {"commands": Target(lines(), command_line, cost=3)}

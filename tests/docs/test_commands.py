"""Commands on pages: they parse, their options exist, and their configurations are possible."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from cli.main import _parser
from configs.load import ConfigError, load, preset_names
from tests.docs.pages import ROOT, each, text_of


@cache
def known_options() -> dict[str, set[str]]:
    """Return the options of each command."""
    (subs,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {name: set(sub._option_string_actions) for name, sub in subs.choices.items()}


def sol_rl(command: str) -> list[str]:
    """Return the words after ``sol-rl``; none for other commands."""
    match = re.match(r"(?:\S*/)?sol-rl (.*)", command)
    return shlex.split(match[1]) if match else []


def refusal(words: list[str]) -> str:
    """Return the parser's error for a command, or an empty string."""
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message), contextlib.redirect_stdout(message):
            _parser().parse_args(words)
    except SystemExit as stop:
        return message.getvalue().splitlines()[-1] if stop.code else ""
    return ""


def unknown_options(words: list[str]) -> list[str]:
    """Return unknown options, or the command if it is unknown; it may be incomplete."""
    if words[0] not in known_options():
        return words[:1]
    named = {word.strip("[]").partition("=")[0] for word in words}
    return sorted({word for word in named if word.startswith("--")} - known_options()[words[0]])


@each()
def test_every_command_in_a_block_parses(page: Path):
    given = [words for line in text_of(page).commands if (words := sol_rl(line))]
    wrong = {" ".join(words): refusal(words) for words in given if "..." not in words}
    assert {line: message for line, message in wrong.items() if message} == {}


@each()
def test_every_option_in_a_sentence_exists(page: Path):
    given = [words for span in text_of(page).spans if (words := sol_rl(span))]
    wrong = {" ".join(words): unknown_options(words) for words in given}
    assert {line: bad for line, bad in wrong.items() if bad} == {}


@pytest.mark.parametrize(
    ("command", "bad"),
    [
        ("sol-rl train x --resume", []),
        ("sol-rl train x --resumed", ["--resumed"]),
        ("sol-rl scale [--rollout N]", []),
        ("sol-rl trian x", ["trian"]),
    ],
)
def test_unknown_commands_and_options_are_found(command: str, bad: list[str]):
    assert unknown_options(sol_rl(command)) == bad


def impossible(line: str) -> str:
    """Return what is wrong with the configuration of a command that names a preset, or an empty
    string.
    """
    words = sol_rl(line)
    if not words or words[0] not in ("train", "submit", "plan", "fidelity") or "..." in line:
        return ""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            options = _parser().parse_args(words)
        except SystemExit:
            return ""
    if options.config not in preset_names():
        return ""
    try:
        load(options.config, options.overrides)
    except ConfigError as error:
        return str(error)
    return ""


@each()
def test_every_configuration_that_a_command_states_is_possible(page: Path):
    wrong = {line: impossible(line) for line in text_of(page).all_code}
    assert {line: message for line, message in wrong.items() if message} == {}


def test_an_impossible_configuration_is_found():
    assert "no such key" in impossible("sol-rl train quickstart --set explore.stpes=3")


@each()
def test_every_target_of_make_exists(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join(text_of(page).all_code)
    assert set(re.findall(r"(?:^|&& )make ([a-z-]+)", code, re.MULTILINE)) - targets == set()


@each()
def test_every_module_that_is_run_is_a_command(page: Path):
    """It exists, and does not end silently when it is run."""
    named = set(re.findall(r"python -m ([a-z_.]+)", "\n".join(text_of(page).all_code)))
    for name in named:
        module = ROOT / name.replace(".", "/")
        if (ROOT / name.split(".")[0]).is_dir() and not (module / "__main__.py").exists():
            assert 'if __name__ == "__main__":' in module.with_suffix(".py").read_text(), name

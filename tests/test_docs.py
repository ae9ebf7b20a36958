"""What README, CONTRIBUTING and docs/ name exists: pages, headings, commands, options, keys, metrics,
files, tests and targets of make. And their prose is wrapped.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from cli.main import _parser
from configs.aliases import KEYS
from configs.load import ConfigError, load, preset_names
from configs.objectives import SETTINGS
from configs.schema import RunConfig
from records.metrics import METRICS, declared

ROOT = Path(__file__).parents[1]
WIDTH = 140
PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "shapes/README.md")
] + sorted((ROOT / "docs").rglob("*.md"))
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Text:
    """A page in parts: lines of prose and tables with their numbers, and lines of code."""

    prose: list[tuple[int, str]]
    code: list[str]

    @property
    def spans(self) -> Iterator[str]:
        """Inline code, also where it is broken over two lines."""
        text = "\n".join(line for _, line in self.prose)
        for span in CODE.findall(text):
            yield " ".join(span.split())

    @property
    def commands(self) -> Iterator[str]:
        """Lines of code, continued ones in one, without comments."""
        joined = "\n".join(self.code).replace("\\\n", " ")
        for line in joined.splitlines():
            yield line.split(" #")[0].strip()


@cache
def text_of(page: Path) -> Text:
    """Fenced blocks and lines that are indented by four after an empty one are code."""
    prose: list[tuple[int, str]] = []
    code: list[str] = []
    fenced = indented = False
    before = ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif fenced:
            code.append(line)
        else:
            indented = line.startswith("    ") and (indented or not before.strip())
            (code.append(line) if indented else prose.append((number, line)))
        before = line
    return Text(prose, code)


def each(pages: list[Path] = PAGES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def tracked() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name for name in listed.stdout.split("\0") if name}


# ---- links


def slugs(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    found: set[str] = set()
    for _, line in text_of(page).prose:
        if line.startswith("#"):
            words = line.lstrip("#").strip().lower()
            slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            found.add(slug if slug not in found else f"{slug}-1")
    return found


def broken_links(page: Path) -> list[str]:
    """Relative targets and anchors of a page that are not there."""
    broken = []
    for target in LINK.findall("\n".join(line for _, line in text_of(page).prose)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in slugs(file)):
            broken.append(target)
    return broken


@each()
def test_every_relative_link_and_anchor_resolves(page: Path):
    assert broken_links(page) == []


# ---- commands


@cache
def commands() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""
    (subs,) = (
        action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return dict(subs.choices)


def sol_rl(command: str) -> list[str] | None:
    """The words after ``sol-rl``; None: another command."""
    match = re.match(r"(?:\S*/)?sol-rl (.*)", command)
    return shlex.split(match[1]) if match else None


def refused(words: list[str]) -> str:
    """What the parser says about a command; empty: nothing."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            _parser().parse_args(words)
    except SystemExit as stop:
        return said.getvalue().splitlines()[-1] if stop.code else ""
    return ""


def unknown_options(words: list[str]) -> list[str]:
    """Options that the command does not have, of a command that may be a sketch of one."""
    if words[0] not in commands():
        return [words[0]] if re.fullmatch(r"[a-z]+", words[0]) else []
    known = set(commands()[words[0]]._option_string_actions)
    options = {
        word.strip("[]").partition("=")[0] for word in words if word.strip("[").startswith("--")
    }
    return sorted(options - known - {"--"})


HISTORY = [ROOT / "CHANGELOG.md", *sorted((ROOT / "docs" / "decisions").glob("*.md"))]
"""Pages that may name what is gone."""
CURRENT = [page for page in PAGES if page not in HISTORY]


@each(CURRENT)
def test_every_command_in_a_block_parses(page: Path):
    """Lines of code that are a whole ``sol-rl`` command."""
    given = [(line, words) for line in text_of(page).commands if (words := sol_rl(line))]
    wrong = {line: said for line, words in given if "..." not in words if (said := refused(words))}
    assert wrong == {}


@each(CURRENT)
def test_every_option_in_a_sentence_exists(page: Path):
    spans = [
        (span, words)
        for span in text_of(page).spans
        if "sol-rl " in span
        if (words := sol_rl(span))
    ]
    wrong = {span: bad for span, words in spans if (bad := unknown_options(words))}
    assert wrong == {}


@each(CURRENT)
def test_every_configuration_that_a_command_states_is_one(page: Path):
    """Of commands with a preset that exists, with what they ``--set``."""
    wrong = {}
    for line in [*text_of(page).commands, *text_of(page).spans]:
        words = sol_rl(line) or ["-"]
        if words[0] not in ("train", "submit", "plan", "fidelity") or "..." in line:
            continue
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                options = _parser().parse_args(words)
            except SystemExit:
                continue
        if options.config in preset_names():
            try:
                load(options.config, options.overrides)
            except ConfigError as error:
                wrong[line] = str(error)
    assert wrong == {}


@each(CURRENT)
def test_every_target_and_module_that_is_named_exists(page: Path):
    """``make NAME`` and ``python -m NAME``."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [*text_of(page).spans, *text_of(page).commands]
    named = {match[1] for line in lines for match in re.finditer(r"(?:^|&& )make ([a-z-]+)", line)}
    assert named - targets == set()
    modules = {match[1] for line in lines for match in re.finditer(r"python -m ([a-z_.]+)", line)}
    ours = {name for name in modules if (ROOT / name.split(".")[0]).is_dir()}
    files = {name: ROOT / name.replace(".", "/") for name in ours}
    missing = [
        name
        for name, path in files.items()
        if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists()
    ]
    assert missing == []


# ---- keys, metrics, presets


def fields_of(model: type[BaseModel]) -> dict[str, object]:
    """Fields with their annotations; of objectives, those of all."""
    return {name: field.annotation for name, field in model.model_fields.items()}


def inside(annotation: object) -> list[type[BaseModel]]:
    """Sections within an annotation, such as ``dict[str, ScorerService]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [each for part in getattr(annotation, "__args__", ()) for each in inside(part)]


def is_key(words: list[str], sections: list[type[BaseModel]]) -> bool:
    """Whether a path of names leads to a field. ``X`` and ``*`` are any of a table's names."""
    if not sections:
        return False
    known: dict[str, list[object]] = {}
    for section in sections:
        for name, annotation in fields_of(section).items():
            known.setdefault(name, []).append(annotation)
    first, rest = words[0], words[1:]
    here = [a for name in known if first in (name, "X", "*") for a in known[name]]
    if not rest:
        return bool(here)
    below = [section for a in here for section in inside(a)]
    if "dict[" in str(here) and is_key(rest[1:] or ["*"], below):
        return True  # a label of the user's own
    if first == "objective":
        below = list(SETTINGS.values())
    return is_key(rest, below)


TABLES = set(RunConfig.model_fields) - {"name", "seed", "arm", "iterations", "run_root"}
ELSEWHERE = {"configs/sol_rl", "policy/families/auraflow.py"}
"""Of the reference code; of the example that a page spells out."""


def keys_of(page: Path) -> set[str]:
    """What a page names as keys of the configuration."""
    lines = [*text_of(page).spans, *text_of(page).commands]
    set_ = [
        match[1] for line in lines for match in re.finditer(r"--(?:set|vary) '?([\w.<>*]+)=", line)
    ]
    plain = [
        m[1]
        for line in text_of(page).spans
        if (m := re.match(r"([a-z_]+(?:\.[\w<>*]+)+)(?: ?=|$)", line))
    ]
    found = {
        key
        for key in {*set_, *plain}
        if key.split(".")[0] in TABLES and not key.endswith((".py", ".md"))
    }
    return {re.sub(r"<\w+>", "*", key) for key in found} - set(KEYS)


@each(CURRENT)
def test_every_key_that_is_named_exists(page: Path):
    assert [key for key in sorted(keys_of(page)) if not is_key(key.split("."), [RunConfig])] == []


def default_of(key: str) -> object:
    at: object = RunConfig
    for name in key.split("."):
        if isinstance(at, type) and issubclass(at, BaseModel):
            field = at.model_fields[name]
            at = (
                field.get_default(call_default_factory=True)
                if not field.is_required()
                else field.annotation
            )
        else:
            at = getattr(at, name)
    return at


@each(CURRENT)
def test_defaults_in_brackets_are_those_of_the_code(page: Path):
    """``key (4)`` and ``key ("none")`` in the text state a default."""
    text = "\n".join(line for _, line in text_of(page).prose)
    stated = re.findall(r'`([a-z_]+(?:\.[a-z_0-9]+)+)` \((?:`?"(\w+)"`?|(\d[\d.]*))[,;)]', text)
    wrong = {}
    for key, word, number in stated:
        if key.split(".")[0] not in TABLES or "scorers" in key:
            continue
        default = default_of(key)
        if (float(number) if number else word) != default:
            wrong[key] = (word or number, default)
    assert wrong == {}


def is_metric(name: str) -> bool:
    """Whether a run logs it; a name may leave out the scorer at its end."""
    name = name.replace("<service>", "rollout")
    return declared(name) or any(key.startswith(f"{name}/<") for key in METRICS)


def is_layer(name: str) -> bool:
    return (ROOT / "configs" / "layers" / f"{name}.toml").exists()


@each(CURRENT)
def test_every_metric_that_is_named_is_declared(page: Path):
    groups = {name.split("/")[0] for name in METRICS if "/" in name}
    named = [span for span in text_of(page).spans if re.fullmatch(r"[a-z_]+(/[a-z_<>]+)+", span)]
    unknown = [
        name
        for name in named
        if name.split("/")[0] in groups and not (is_metric(name) or is_layer(name))
    ]
    assert [name for name in unknown if not (ROOT / name).exists()] == []


@each(CURRENT)
def test_every_preset_that_is_named_exists(page: Path):
    """Names such as ``flux1-sol_rl-hpsv2``; capitals, brackets and stars are places to fill in."""
    models = {name.split("-")[0] for name in preset_names() if "-" in name} | {"reference"}
    lines = [*text_of(page).spans, *text_of(page).commands]
    words = {
        word
        for line in lines
        for word in re.findall(r"[a-z0-9_]+(?:-[a-z0-9_]+)+(?![\w<*-])", line)
    }
    named = {word for word in words if word.split("-")[0] in models and word.count("-") >= 2}
    assert named - set(preset_names()) == set()


# ---- files and tests


def missing_paths(page: Path) -> list[str]:
    """Files of the tree that a page names and that are not there. A test may be named without its
    folder, and a file beside another without its own.
    """
    files = tracked()
    top = {name.split("/")[0] for name in files if "/" in name}
    tests = {Path(name).name: name for name in files if name.startswith("tests/")}
    missing = []
    for span in [*text_of(page).spans, *text_of(page).commands]:
        for word in span.split():
            name, _, test = word.partition("::")
            if name.startswith("test_") and name.endswith(".py"):
                name = tests.get(name, name)
            elif not re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", name) or name.split("/")[0] not in top:
                continue
            if (
                re.search(r"[A-Z]{4}", name)
                or name in ELSEWHERE
                or is_metric(name)
                or is_layer(name)
            ):
                continue
            if name not in files and not any(f.startswith(name.rstrip("/") + "/") for f in files):
                if not (Path(name).suffix == "" and f"{name}.py" in files):
                    missing.append(word)
            elif test and f"def {test}(" not in (ROOT / name).read_text():
                missing.append(word)
    return missing


@each(CURRENT)
def test_every_file_that_is_named_is_in_the_tree(page: Path):
    assert missing_paths(page) == []


@each(CURRENT)
def test_what_is_named_with_its_file_is_in_it(page: Path):
    """``Name.method`` (``path.py``) in a sentence or a table."""
    text = "\n".join(line for _, line in text_of(page).prose)
    named = re.findall(r"`(\w+(?:\.\w+)*)`(?: \(| in )`([\w/]+\.py)`", text)
    wrong = [
        (name, path)
        for name, path in named
        if "/" in path and (ROOT / path).exists()
        if not re.search(rf"\b{name.split('.')[-1]}\b", (ROOT / path).read_text())
    ]
    assert wrong == []


# ---- how it is set


@each([page for page in CURRENT])
def test_prose_is_wrapped(page: Path):
    """Tables and code may be wider, and what cannot be broken."""
    wide = [
        number
        for number, line in text_of(page).prose
        if len(line) > WIDTH
        and not line.startswith("|")
        and " " in line.strip()
        and not line.startswith("![")
    ]
    assert wide == []

"""Names on pages exist: configuration keys and their defaults, metrics, presets, files."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from configs.aliases import KEYS
from configs.load import preset_names
from configs.objectives import SETTINGS
from configs.schema import RunConfig
from records.metrics import METRICS, declared
from tests.docs.pages import ROOT, each, text_of

TABLES = {name for name, field in RunConfig.model_fields.items() if "." not in name}
ELSEWHERE = {"configs/sol_rl", "policy/families/auraflow.py", "config/grpo.py"}
"""Names of other projects, or of an example on a page."""


# ---- keys


def sections_in(annotation: object) -> list[type[BaseModel]]:
    """Return the sections within an annotation, such as ``dict[str, ScorerService]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [each for part in getattr(annotation, "__args__", ()) for each in sections_in(part)]


def is_key(names: list[str], sections: Sequence[type[BaseModel]]) -> bool:
    """Return True if a path of names leads to a field. ``X`` and ``*`` match any name."""
    first, *rest = names
    here = [
        field.annotation
        for section in sections
        for name, field in section.model_fields.items()
        if first in (name, "X", "*")
    ]
    if not rest or not here:
        return bool(here)
    below: Sequence[type[BaseModel]] = [
        section for annotation in here for section in sections_in(annotation)
    ]
    if first == "objective":
        below = list(SETTINGS.values())
    labels = any("dict[" in str(annotation) for annotation in here)  # a name chosen by the user
    return is_key(rest, below) or (labels and (not rest[1:] or is_key(rest[1:], below)))


def keys_of(page: Path) -> set[str]:
    """Return what a page names as configuration keys."""
    code = "\n".join(text_of(page).all_code)
    given = re.findall(r"--(?:set|vary) '?([\w.*]+)=", code)
    named = re.findall(r"^([a-z_]+(?:\.(?:[a-z_\d]+|[X*]))+)(?: =.*)?$", code, re.MULTILINE)
    files = (".py", ".md", ".json", ".jsonl", ".safetensors", ".html")
    keys = {key for key in {*given, *named} if not key.endswith(files)} - set(KEYS)
    return {key for key in keys if key.split(".")[0] in TABLES}


@each()
def test_every_key_that_is_named_exists(page: Path):
    assert [key for key in sorted(keys_of(page)) if not is_key(key.split("."), [RunConfig])] == []


@pytest.mark.parametrize(
    ("key", "there"),
    [
        ("services.X.gpus", True),
        ("services.*.tf32", True),
        ("services.scorers.mine.gpus", True),
        ("services.scorers.mine.gpu", False),
        ("objective.window.size", True),
        ("explore.keep", False),
        ("explore.steps.x", False),
    ],
)
def test_keys_are_recognized_in_prose(key: str, there: bool):
    assert is_key(key.split("."), [RunConfig]) is there


def default_of(key: str) -> object:
    """Return the default of a field by its dotted name; for a section without one, that of its
    class.
    """
    at: object = RunConfig
    for name in key.split("."):
        if not (isinstance(at, type) and issubclass(at, BaseModel)):
            at = getattr(at, name)
        elif (field := at.model_fields[name]).is_required():
            at = field.annotation
        else:
            at = field.get_default(call_default_factory=True)
    return at


def wrong_defaults(text: str) -> dict[str, tuple[str, object]]:
    """Return defaults that a sentence states wrongly, as (stated, true) by key.

    Sentences state them as ``key (4)`` or ``key ("none")``.
    """
    stated = re.findall(
        r'`([a-z_]+(?:\.[a-z_\d]+)+)`\s\((?:`?"(\w+)"`?|(\d[\d.]*))(?: by default)?[,;)]', text
    )
    wrong = {}
    for key, word, number in stated:
        if key.split(".")[0] in TABLES and is_key(key.split("."), [RunConfig]):
            default = default_of(key)
            if (float(number) if number else word) != default:
                wrong[key] = (word or number, default)
    return wrong


@each()
def test_defaults_in_brackets_are_those_of_the_code(page: Path):
    assert wrong_defaults(text_of(page).outside) == {}


def test_a_wrong_default_is_found():
    text = '`services.node_silence_s` (5): a node; `explore.decoder` (`full`), `lora.base` ("int8")'
    assert wrong_defaults(text) == {
        "services.node_silence_s": ("5", 4.0),
        "lora.base": ("int8", "full"),
    }


def undescribed(section: type[BaseModel], seen: set[type[BaseModel]]) -> list[str]:
    """Return the fields of a section, and of those below it, without a description.

    Sections need a docstring.
    """
    seen.add(section)
    found = []
    for name, field in section.model_fields.items():
        below = sections_in(field.annotation)
        if not below and not field.description and name != "name":
            found.append(f"{section.__name__}.{name}")
        found += [line for each in below if each not in seen for line in undescribed(each, seen)]
    return found


def test_every_field_is_described():
    """docs/configuration.md promises it."""
    seen: set[type[BaseModel]] = set()
    sections: list[type[BaseModel]] = [RunConfig, *SETTINGS.values()]
    assert [line for section in sections for line in undescribed(section, seen)] == []


# ---- metrics and presets


def is_metric(name: str) -> bool:
    """Return True if a run logs the metric; the scorer at its end may be omitted."""
    name = name.replace("<service>", "rollout")
    return declared(name) or any(key.startswith(f"{name}/<") for key in METRICS)


def is_layer(name: str) -> bool:
    """Return True for the name of a file in ``configs/layers``."""
    return (ROOT / "configs" / "layers" / f"{name}.toml").exists()


@each()
def test_every_metric_that_is_named_is_declared(page: Path):
    groups = {name.split("/")[0] for name in METRICS if "/" in name}
    named = [span for span in text_of(page).spans if re.fullmatch(r"[a-z_]+(/[a-z_<>]+)+", span)]
    named = [name for name in named if name.split("/")[0] in groups and not (ROOT / name).exists()]
    assert [name for name in named if not is_metric(name) and not is_layer(name)] == []


@each()
def test_every_name_of_prometheus_is_exported(page: Path):
    from records.metrics import document

    exported = set(re.findall(r"`(sol_rl_\w+)`", document()))
    named = set(re.findall(r"`(sol_rl_\w+)`", text_of(page).outside))
    assert named - exported == set()


@each()
def test_every_preset_that_is_named_exists(page: Path):
    """Such as ``flux1-sol_rl-hpsv2``; names with capitals, brackets or a star are placeholders."""
    models = {name.split("-")[0] for name in preset_names() if "-" in name}
    code = "\n".join(text_of(page).all_code)
    words = set(re.findall(r"(?<![\w./-])[a-z\d_]+(?:-[a-z\d_]+){2,}(?![\w<*-])", code))
    assert {word for word in words if word.split("-")[0] in models} - set(preset_names()) == set()


# ---- files and tests


@cache
def tracked() -> frozenset[str]:
    """Return all files of the tree, and all folders with a slash at the end."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
    folders = {f"{folder}/" for name in files for folder in map(str, Path(name).parents)}
    return frozenset(files | folders)


@cache
def named_tests() -> dict[str, list[str]]:
    """Return files of tests, which pages may name without their folder."""
    found = defaultdict(list)
    for name in tracked():
        if name.startswith("tests/"):
            found[Path(name).name].append(name)
    return found


def is_there(word: str) -> bool:
    """Return True if a path exists in the tree, and a test after ``::`` in the file."""
    name, _, test = word.partition("::")
    places = named_tests().get(name, []) if "/" not in name else [name]
    if test:
        return any(f"def {test}(" in (ROOT / place).read_text() for place in places)
    spelled = (name, f"{name.rstrip('/')}/", f"{name}.py")
    return bool(places and "/" not in name) or any(each in tracked() for each in spelled)


def looks_like_a_path(word: str) -> bool:
    """Return True if a word looks like a file or folder of this tree."""
    if re.search(r"[A-Z]{4}", word) or word in ELSEWHERE or is_metric(word) or is_layer(word):
        return False
    name = word.partition("::")[0]
    if re.fullmatch(r"test_\w+\.py", name):
        return True
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", name)) and f"{name.split('/')[0]}/" in (
        tracked() if "/" in name else ()
    )


@each()
def test_every_file_that_is_named_is_in_the_tree(page: Path):
    words = {word for line in text_of(page).all_code for word in line.split()}
    assert [w for w in sorted(words) if looks_like_a_path(w) and not is_there(w)] == []


@pytest.mark.parametrize(
    ("word", "there"),
    [
        ("policy/precision/nvfp4.py", True),
        ("policy/precision/nvfp5.py", False),
        ("test_pages.py", True),
        ("test_pages.py::test_prose_is_wrapped", True),
        ("test_pages.py::test_prose_is_wraped", False),
        ("test_of_nothing.py", False),
        ("docs/images", True),
    ],
)
def test_files_are_recognized_in_prose(word: str, there: bool):
    assert looks_like_a_path(word) and is_there(word) is there


@each()
def test_names_with_a_file_exist_in_it(page: Path):
    """Names are written as ``Name.method`` (``folder/file.py``)."""
    named = re.findall(r"`(\w+(?:\.\w+)*)`\s\(`([\w/]+/\w+\.py)`", text_of(page).outside)
    assert [
        (name, path)
        for name, path in named
        if not re.search(rf"\b{name.split('.')[-1]}\b", (ROOT / path).read_text())
    ] == []

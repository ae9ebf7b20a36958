"""Paths that are not there, and paths of which that is not known."""

from __future__ import annotations

import ast
import errno
import os
from pathlib import Path

import pytest

from configs.paths import exists, is_dir, is_file
from tests.cluster.head import ROOT

ROOMS = (
    "analysis", "cli", "cluster/driver", "cluster/jobs", "configs", "learner", "planning", "policy",
    "records", "rewards", "simulator",
)  # fmt: skip
"""What reads files of users and of runs."""


def test_what_is_at_a_path(tmp_path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    for name, target in {"to_file": file, "to_folder": folder, "to_nothing": "nothing"}.items():
        (tmp_path / name).symlink_to(target)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    found = {
        name: (exists(tmp_path / name), is_file(tmp_path / name), is_dir(tmp_path / name))
        for name in (*os.listdir(tmp_path), "none", "file/below", "a null \0 byte")
    }
    assert found == {
        "file": (True, True, False),
        "to_file": (True, True, False),
        "folder": (True, False, True),
        "to_folder": (True, False, True),
        "pipe": (True, False, False),
        "to_nothing": (False, False, False),
        "loop": (False, False, False),
        "none": (False, False, False),
        "file/below": (False, False, False),
        "a null \0 byte": (False, False, False),
    }


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOTCONN, errno.ENAMETOOLONG])
@pytest.mark.parametrize("ask", [exists, is_file, is_dir])
def test_a_path_that_cannot_be_looked_at_is_an_error(monkeypatch, number, ask):
    """Storage that does not answer is not empty; a run must not begin anew there."""

    def away(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "stat", away)
    with pytest.raises(OSError) as error:
        ask(Path("anything"))
    assert error.value.errno == number


def test_no_module_asks_pathlib():
    """Its methods hide these errors since Python 3.14."""
    hiding = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for room in ROOMS
        for file in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("exists", "is_file", "is_dir")
        if ast.unparse(node.value) != "os.path"
    ]
    assert hiding == []

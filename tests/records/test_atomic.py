"""Files and directories are complete or absent, whatever fails while they are written."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from records import atomic


def test_a_file_is_replaced_without_leftovers(tmp_path: Path):
    file = tmp_path / "a.json"
    atomic.write_json(file, {"é": 1})
    assert file.read_bytes() == b'{\n "\\u00e9": 1\n}\n'
    atomic.write_text(file, "é\n")
    assert file.read_bytes() == "é\n".encode() and os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failed_replacement_keeps_the_old_file(tmp_path: Path, error: type[BaseException]):
    file, folder = tmp_path / "file", tmp_path / "folder"
    atomic.write_text(file, "old")
    with atomic.replace_directory(folder) as beside:
        (beside / "one").write_text("old")
    with pytest.raises(error), atomic.replace_file(file) as beside:
        beside.write_text("new")
        raise error
    with pytest.raises(error), atomic.replace_directory(folder) as beside:
        (beside / "one").write_text("new")
        raise error
    assert file.read_text() == (folder / "one").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@contextlib.contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """Let writes behind ``size`` bytes fail; the kernel writes what fits, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_that_do_not_fit_leave_nothing_behind(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    atomic.append(file, '{"é": 1}\n')
    with files_limited_to(20), pytest.raises(OSError, match="too large"):
        atomic.append(file, '{"b": 2}\n{"c": 3}\n')
    assert file.read_text() == '{"é": 1}\n'
    atomic.append(file, '{"d": 4}\n')
    assert file.read_text() == '{"é": 1}\n{"d": 4}\n'


def test_a_directory_is_replaced_completely(tmp_path: Path):
    folder = tmp_path / "folder"
    for names in (("one", "two"), ("three",)):
        with atomic.replace_directory(folder) as beside:
            for name in names:
                (beside / name).write_text(name)
        assert sorted(os.listdir(folder)) == sorted(names)
    assert os.listdir(tmp_path) == ["folder"]

"""``python -m tools.style`` on a small tree whose counts are known by hand."""

from __future__ import annotations

import json

import pytest

from tools.style import main, p90

TREE = {
    "rooms/__init__.py": "",
    "rooms/one.py": '''"""Two lines
of docstring: a picture."""

from typing import Any  # why

from cluster.driver.loop import go


def f(x: Any) -> None:
    # a worker
    go(x, "Any")


async def g() -> None:
    """Nothing."""
    return None
''',
    "cluster/driver/loop.py": "import cluster.jobs.run\n\n\ndef go(*x):\n    return x\n",
    "cluster/jobs/run.py": f"short = 1\n# {'x' * 120}\n{'y' * 97} = 2\n\n\n\n\n",
    "tests/test_one.py": "from rooms import one\n\n\ndef test_f():\n    one.f(1)\n",
    ".venv/lib/other.py": "ignored = 'picture'\n",
    "build/lib/other.py": "ignored = 'picture'\n",
}
CODE = {
    "files": 4,
    "lines": 28,
    "functions": 3,
    "function_median": 3,
    "function_p90": 3,
    "file_median": 6,
    "file_p90": 16,
    "any_per_1000": 71.43,  # 2 of 28 lines; the word in a string does not count
    "over_100_per_1000": 71.43,  # 122 and 101 columns
    "over_120_per_1000": 35.71,
    "comment_share": 0.2727,  # 3 over 11: lines of docstrings count as neither
    "largest_room": ["rooms", 0.5714],  # 16 of 28
    "largest_room_apart": ["rooms", 0.5714],
    "words": {"image": {"picture": 1}, "actor or member": {"worker": 1}},
    "one_importer": ["cluster.driver.loop", "cluster.jobs.run"],
}


@pytest.fixture
def tree(tmp_path):
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_golden_values(tree, capsys):
    assert main([str(tree), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["code"] == CODE
    assert found["tests"]["lines"] == 5 and found["tests"]["words"] == {}


def test_the_rooms_within_cluster_are_counted_apart(tree, capsys):
    (tree / "cluster" / "jobs" / "more.py").write_text("x = 1\n" * 7)
    main([str(tree), "--json"])
    code = json.loads(capsys.readouterr().out)["code"]
    assert code["largest_room"] == ["cluster", 0.5429]  # 5 + 7 + 7 of 35
    assert code["largest_room_apart"] == ["rooms", 0.4571]  # 16 of 35; cluster/jobs has 14


def test_the_text_says_the_same(tree, capsys):
    main([str(tree)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "code" and "  files                     4" in lines
    assert "  words                     picture 1, worker 1" in lines
    assert "  one importer              2" in lines


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 1), (10, 9), (11, 10), (20, 18)])
def test_p90(count, expected):
    """Nine tenths of 1 .. count do not exceed it, and no smaller value has that property."""
    assert p90(range(1, count + 1)) == expected

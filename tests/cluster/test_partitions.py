"""Runs on a Ray cluster in network namespaces while the network fails (``tools.partitions``).

Invariants: the bits of an undisturbed run, and an end. ``test_network`` is the quick form: the wire
itself, and a node that is watched across it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.network import missing
from tools.partitions.__main__ import table
from tools.partitions.scenarios import SCENARIOS

ROOT = Path(__file__).parent.parent.parent
LOSES = {"head-30", "head-ever", "back", "group-30"}
"""Scenarios in which an actor cannot be kept, and the run cannot end before that is noticed."""


@pytest.mark.slow
@pytest.mark.timeout(3000)  # nine runs, two of them undisturbed, on five nodes
def test_every_network_fault_ends_with_the_same_bits(tmp_path):
    if why := missing():
        pytest.skip(why)
    command = [sys.executable, "-m", "tools.partitions", "--out", str(tmp_path / "rows")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["key"] for row in rows] == list(SCENARIOS) and all(row["same"] for row in rows)
    assert {row["key"] for row in rows if row["noticed"] is not None} >= LOSES


def test_a_row_reports_the_measured_times():
    good = {"scenario": "a", "noticed": 4.04, "replaced": None, "seconds": 27.4, "same": True}
    bad = {"scenario": "b", "noticed": None, "replaced": None, "seconds": 30, "same": False}
    rows = [good, bad | {"why": "x"}]
    assert table(rows)[2:] == ["| a | 4.0 s |  | 27 s | yes |", "| b |  |  | 30 s | NO x |"]

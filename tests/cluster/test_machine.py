"""Simulated faults of a machine take place, end, and affect one process and its children only."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.machine import MEMINFO, Machine

ROOT = Path(__file__).parent.parent.parent
WAIT = "import sys; sys.stdin.read(1); x = b'x' * (256 << 20)"
WITHIN = f"""
import subprocess, sys, time
from pathlib import Path
from tests.cluster.machine import Machine

def left():
    rows = dict(line.split(":") for line in open("{MEMINFO}").read().splitlines())
    return int(rows["MemAvailable"].split()[0]) / int(rows["MemTotal"].split()[0])

machine = Machine(Path(sys.argv[1]))
machine.prepare()
file = machine.disk / "file"
file.write_bytes(bytes(1 << 16))
machine.fill()
try:
    file.write_bytes(bytes(1 << 17))
    print("not full")
except OSError as error:
    print(error.strerror)
machine.repair()
print(file.write_bytes(bytes(1 << 17)))

print(round(left(), 2))
machine.low_memory(True)
print(round(left(), 2))
machine.repair()
print(round(left(), 2))

child = subprocess.Popen([sys.executable, "-c", {WAIT!r}], stdin=subprocess.PIPE)
machine.starve(child.pid)
child.communicate(b"x")
print(child.returncode)
machine.repair()
"""


def test_full_disks_and_memory_limits_are_simulated(tmp_path):
    if why := Machine.missing():
        pytest.skip(str(why))
    before = Path(MEMINFO).read_text(encoding="utf-8").splitlines()[0]
    command = [sys.executable, "-c", WITHIN, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split("\n") == [
        "No space left on device", str(1 << 17), "0.75", "0.01", "0.75", "-9", ""
    ], done.stderr  # fmt: skip
    assert Path(MEMINFO).read_text(encoding="utf-8").splitlines()[0] == before
    assert not any((tmp_path / "disk").iterdir())


def test_a_stopped_driver_and_clock_jumps_are_simulated(tmp_path):
    machine, real = Machine(tmp_path), time.time
    began, monotonic = time.time(), time.monotonic()
    machine.jump(-3600.0)
    assert time.time() - began < -3590
    machine.freeze(0.2)
    machine.repair()  # returns when the process continues
    assert time.monotonic() - monotonic >= 0.2 and time.time is real and machine.offset_s == 0

"""What does a run cost before it works? Seconds from the command until all actors answer, and CPU
seconds and memory of each process at the moment when all together hold most.

A process of its own does what ``sol-rl train`` does, for one iteration with next to no evaluation.
Memory is the proportional set size: a page that several processes share is divided among them, so
the sum is what the run holds. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.timing import Options, Ratio
from records.rundir import RunDirectory

SECONDS, HELD = 12.0, 1600.0  # goals, on two idle cores; MB
TEMPLATE = "cluster.runtime.template"
COMMAND = """
import json, sys
from cluster.runtime import anew
from configs.load import parse
anew.begin()
config = parse(json.load(open(sys.argv[1])))
anew.fork_template(config)
from cluster.driver.train import train
train(config, resume=False)
"""
LOOK_S = 1.0


@dataclass(frozen=True)
class Process:
    """One process of the run, when it was looked at."""

    name: str
    ours: bool  # else one of Ray's own
    cpu_s: float
    held_mb: float  # proportional set size


def measure(options: Options) -> list[Ratio]:
    """Once: seconds and megabytes, each against its goal. Prints a line per process.

    Raises RuntimeError when the run fails.
    """
    with tempfile.TemporaryDirectory(prefix="sol-rl-bench-") as scratch:
        seconds, found = _run(options, Path(scratch))
    for each in sorted(found, key=lambda process: -process.held_mb):
        whose = "run" if each.ours else "Ray"
        print(f"start    {each.name:24} {each.cpu_s:6.1f} CPU s {each.held_mb:7.0f} MB  {whose}")
    return [
        _against("all actors answer", seconds, SECONDS),
        _against("all processes", _sum(found), HELD, "MB", f"{len(found)} processes"),
        _against("those of the run", _sum(p for p in found if p.ours), HELD, "MB"),
    ]


def _against(what: str, value: float, goal: float, unit: str = "s", note: str = "") -> Ratio:
    ratio = value / goal
    return Ratio(what, "goal", ratio, ratio, ratio, value, goal, 1.0, note, unit)


def _run(options: Options, scratch: Path) -> tuple[float, list[Process]]:
    """(seconds until the first task, processes when they hold most)."""
    config = options.config.model_dump(mode="json")
    config |= {"name": "start", "run_root": str(scratch), "iterations": 1}
    config["evaluate"] |= {"prompts": 1, "noises": 1}
    (scratch / "start.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", COMMAND, str(scratch / "start.json")]
    most: list[Process] = []
    began = time.time()  # as the run's records have it
    with (scratch / "output").open("w+") as output:
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while run.poll() is None:
            before = _pids(run.pid)
            found = list(_processes(run.pid))
            # one that came or went meanwhile shared pages with some when they were looked at, and
            # not with others
            if before == _pids(run.pid):
                most = max(most, found, key=_sum)
            time.sleep(LOOK_S)
        if run.returncode:
            output.seek(0)
            raise RuntimeError(f"the run failed: {output.read()[-500:]}")
    started = [
        row["time"]
        for row in RunDirectory(scratch / "start").events()
        if row["event"] == "actor_started"
    ]
    return max(started) - began, most


def _below(pid: int) -> list[psutil.Process]:
    """The driver and everything below it; nothing once it has ended."""
    with contextlib.suppress(psutil.Error):
        driver = psutil.Process(pid)
        return [driver, *driver.children(recursive=True)]
    return []


def _pids(pid: int) -> set[int]:
    """Those that live: one that has ended may be there until it is waited for."""
    found: set[int] = set()
    for process in _below(pid):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


def _processes(pid: int) -> Iterable[Process]:
    own: list[str] = []
    for process in _below(pid):
        with contextlib.suppress(psutil.Error, OSError):
            command = process.cmdline()
            own = own or command  # the driver is the first
            # a template that is a fork of the driver has its command
            forked = process.pid != pid and command == own
            name = "template" if forked else _name(command, process.pid == pid)
            times = process.cpu_times()
            ours = name in ("driver", "template") or name.endswith(("Actor", "Board"))
            held = process.memory_full_info().pss / 2**20
            yield Process(name, ours, times.user + times.system, held)


def _name(command: list[str], driver: bool) -> str:
    if driver:
        return "driver"
    if any(TEMPLATE in part for part in command):
        return "template"
    title = command[0].removeprefix("ray::").partition(".")[0] if command else "?"
    if command and not command[0].startswith("ray::"):
        files = (part for part in command if "/ray/" in part and not part.startswith("-"))
        title = next((Path(part).name for part in files), title)
    return title.strip()


def _sum(processes: Iterable[Process]) -> float:
    return sum(process.held_mb for process in processes)

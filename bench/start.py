"""Benchmark of a run's startup: seconds until all actors answer, and the cost of each process.

The time counts from the command; CPU seconds and memory per process are those at the moment of
largest total memory. A separate process does the same as ``sol-rl train``, for one iteration with
minimal evaluation. Memory is the proportional set size: pages shared by several processes are
divided among them, so the sum is the memory of the run. Linux only.
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
from cluster.runtime import reexec
from configs.load import parse
reexec.reexec()
config = parse(json.load(open(sys.argv[1])))
reexec.fork_template(config)
from cluster.driver.train import train
train(config, resume=False)
"""
LOOK_S = 1.0


@dataclass(frozen=True)
class Process:
    """A sample of one process of the run."""

    name: str
    ours: bool  # False: one of Ray's own processes
    cpu_s: float
    held_mb: float  # proportional set size


def measure(options: Options) -> list[Ratio]:
    """Measure once; return seconds and megabytes relative to their goals.

    Prints a line per process. Raises RuntimeError if the run fails.
    """
    with tempfile.TemporaryDirectory(prefix="sol-rl-bench-") as scratch:
        seconds, processes = _run(options, Path(scratch))
    for row in sorted(processes, key=lambda process: -process.held_mb):
        owner = "run" if row.ours else "Ray"
        print(f"start    {row.name:24} {row.cpu_s:6.1f} CPU s {row.held_mb:7.0f} MB  {owner}")
    return [
        _against("all actors answer", seconds, SECONDS),
        _against("all processes", _sum(processes), HELD, "MB", f"{len(processes)} processes"),
        _against("those of the run", _sum(p for p in processes if p.ours), HELD, "MB"),
    ]


def _against(what: str, value: float, goal: float, unit: str = "s", note: str = "") -> Ratio:
    ratio = value / goal
    return Ratio(what, "goal", ratio, ratio, ratio, value, goal, 1.0, note, unit)


def _run(options: Options, scratch: Path) -> tuple[float, list[Process]]:
    """Return (seconds until all actors have started, processes at the largest total memory)."""
    config = options.config.model_dump(mode="json")
    config |= {"name": "start", "run_root": str(scratch), "iterations": 1}
    config["evaluate"] |= {"prompts": 1, "noises": 1}
    (scratch / "start.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", COMMAND, str(scratch / "start.json")]
    peak: list[Process] = []
    began = time.time()  # wall-clock time, like the records of the run
    with (scratch / "output").open("w+") as output:
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while run.poll() is None:
            pids = _pids(run.pid)
            current = list(_processes(run.pid))
            # a process that started or ended meanwhile shared pages with only some of the others
            # when they were sampled
            if pids == _pids(run.pid):
                peak = max(peak, current, key=_sum)
            time.sleep(LOOK_S)
        if run.returncode:
            output.seek(0)
            raise RuntimeError(f"the run failed: {output.read()[-500:]}")
    started = [
        row["time"]
        for row in RunDirectory(scratch / "start").events()
        if row["event"] == "actor_started"
    ]
    return max(started) - began, peak


def _tree_of(pid: int) -> list[psutil.Process]:
    """Return the driver and its descendants, or an empty list after it has ended."""
    with contextlib.suppress(psutil.Error):
        driver = psutil.Process(pid)
        return [driver, *driver.children(recursive=True)]
    return []


def _pids(pid: int) -> set[int]:
    """Return the ids of live processes; excludes zombies, which have ended but were not reaped."""
    pids: set[int] = set()
    for process in _tree_of(pid):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                pids.add(process.pid)
    return pids


def _processes(pid: int) -> Iterable[Process]:
    driver_command: list[str] = []
    for process in _tree_of(pid):
        with contextlib.suppress(psutil.Error, OSError):
            command = process.cmdline()
            driver_command = driver_command or command  # the driver is the first
            # a template forked from the driver has the same command line
            forked = process.pid != pid and command == driver_command
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

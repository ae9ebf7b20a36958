"""Faults done to a run on purpose: what is hit, how and when; whether the run ended as if
nothing had been; how long it took.

A moment is a stage of the progress display ("explored", "scored", ...: something went through it),
a method of a service ("encode", "export", ...: a call of it was made), "begin", when an iteration
starts, or "recovering": an actor was lost, in whichever iteration, and is not replaced yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import psutil

from records.progress import Progress
from records.rundir import RunDirectory
from tests.cluster.runs import adapters

SERVICES = ("rollout", "reward", "encoder", "selector", "learner")
RUN = "run"
"""What is hit by a fault that hits no actor in particular."""
Way = Literal["kill", "stop", "node", "memory", "monitor", "disk", "driver", "clock", "scale"]
WORDS: dict[str, str] = {
    "kill": "SIGKILL to",
    "stop": "SIGSTOP to",
    "node": "SIGKILL to the node of",
    "memory": "no more memory from the kernel for",
    "monitor": "Ray's memory monitors see little memory",
    "disk": "the disk is full",
    "driver": "the driver is stopped",
    "clock": "the driver's clock jumps",
    "scale": "rollout is scaled",
}
TO_ACTORS = ("kill", "stop", "node", "memory")
MONITOR_S = 20.0
"""How long memory stays low where no actor is killed for it."""
SAME = (
    "iteration",
    "kind",
    "samples_seen",
    "policy_version",
    "reward/",
    "explore/",
    "audit/",
    "rewards/failed",
    "loss/",
    "grad_norm",
    # fmt: skip
    "zero_std_ratio",
    "weights/version",
    "weights/bytes",
    "weights/delta_cosine",
    "weights/codes_changed",
    "eval/",
)
"""Metrics, or beginnings of their names, that do not depend on who computed what and when."""
WHEN_CHECKED = "audit/identity_error"
"""In the row of the iteration in which an actor was checked; one that is replaced is checked again.
"""
DIGITS = 9
"""Of float64 means that are compared: sums in another order differ in the sixteenth."""


RECOVERING = "recovering"
KILL_S = 30.0
"""Ray asks a process to end, and sends SIGKILL to one that does not answer some seconds later."""


@dataclass(frozen=True)
class Fault:
    """Actor ``actor`` of ``kind`` is hit ``delay_s`` after the ``count``-th ``moment`` of
    iteration ``iteration``. ``amount``: seconds of a stop or a jump, or the pool's new size.
    """

    kind: str
    way: Way
    iteration: int
    moment: str
    count: int = 1
    actor: int = 0
    delay_s: float = 0.0
    always: bool = False  # at this and every later such moment of the iteration
    amount: float = 0.0

    def __str__(self) -> str:
        when = f"{self.moment} {self.count} of iteration {self.iteration}"
        if self.moment == RECOVERING:
            when = "an actor was lost"
        what = f"{WORDS[self.way]} {self.kind} {self.actor}"
        if self.way not in TO_ACTORS:
            what = f"{WORDS[self.way]}{f' ({self.amount:+g})' if self.amount else ''}"
        return f"{what}, {self.delay_s:.2f} s after {when}"


class Machines(Protocol):
    """Nodes that can be taken away."""

    def remove(self, node: str, workers: Sequence[int]) -> None: ...


class MachineLike(Protocol):
    """What ``tests.cluster.machine`` does to this machine."""

    def fill(self) -> None: ...
    def low_memory(self, low: bool) -> None: ...
    def starve(self, pid: int) -> None: ...
    def freeze(self, seconds: float) -> None: ...
    def jump(self, seconds: float) -> None: ...


class FaultInjector(Progress):
    """Does the faults to the run whose display it is; what was done stands in the run's events as
    ``fault_injected``.
    """

    session: Any = None

    def __init__(
        self, *faults: Fault, machines: Machines | None = None, machine: MachineLike | None = None
    ):
        super().__init__(file=io.StringIO())
        self.faults, self.machines, self.machine = faults, machines, machine
        self.done: list[Fault] = []
        self.background: list[asyncio.Task[Any]] = []
        self.pids: list[int] = []
        self.seen: Counter[tuple[int, str]] = Counter()
        self.now = -1
        self.removal: asyncio.Future[None] | None = None
        self._listening = False

    def start(self, total_iterations: int, start_iteration: int = 0) -> None:
        super().start(total_iterations, start_iteration)
        if not self._listening:
            self._listening = True
            for pool in self.session.services.pools:
                self._listen(pool)
            event = self.session.rundir.event

            def told(name: str, **fields: Any) -> None:
                event(name, **fields)
                if name == "actor_died":
                    self._happened(RECOVERING)

            self.session.rundir.event = told

    def iteration_started(
        self, i: int, groups: int, images: int, totals: Mapping[str, int] | None = None
    ) -> None:
        super().iteration_started(i, groups, images, totals)
        self.now = i
        self._happened("begin")

    def advanced(self, stage: str, n: int = 1) -> None:
        super().advanced(stage, n)
        self._happened(stage)

    def _listen(self, pool: Any) -> None:
        perform = pool.perform

        async def told(task: Any, call: Any) -> Any:
            self._happened(call.method)
            return await perform(task, call)

        pool.perform = told

    def _happened(self, moment: str) -> None:
        self.seen[self.now, moment] += 1
        count = self.seen[self.now, moment]
        for fault in self.faults:
            due = (
                count >= fault.count
                if fault.always
                else count == fault.count and fault not in self.done
            )
            here = fault.iteration == self.now or moment == RECOVERING
            if due and here and fault.moment == moment:
                asyncio.get_running_loop().call_later(fault.delay_s, self._inject, fault)

    def _inject(self, fault: Fault) -> None:
        if fault.way not in TO_ACTORS:
            self._strike_run(fault)
            return
        pool = next(pool for pool in self.session.services.pools if pool.kind == fault.kind)
        member = next((member for member in pool.members if member.index == fault.actor), None)
        if member is None or member.handle is None or (fault in self.done and not fault.always):
            return
        self.done.append(fault)
        pid, node = member.info.pid, member.info.node
        self.pids.append(pid)
        self.session.rundir.event(
            "fault_injected",
            kind=fault.kind,
            actor=fault.actor,
            way=fault.way,
            why=str(fault),
            pid=pid,
        )
        if fault.way == "node":
            assert self.machines is not None
            there = [
                member.info.pid
                for pool in self.session.services.pools
                for member in pool.members
                if member.handle is not None and member.info.node == node
            ]
            self.removal = asyncio.get_running_loop().run_in_executor(
                None, self.machines.remove, node, there
            )
        elif fault.way == "memory":
            assert self.machine is not None
            self.machine.starve(pid)
            member.handle.eat.remote()  # as it does what it was asked before
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if fault.way == "kill" else signal.SIGSTOP)

    def _strike_run(self, fault: Fault) -> None:
        if fault in self.done:
            return
        self.done.append(fault)
        told = {"kind": fault.kind, "actor": fault.actor, "way": fault.way, "why": str(fault)}
        self.session.rundir.event("fault_injected", **told)
        if fault.way == "scale":
            scaled = self.session.scaling.scale({"rollout": int(fault.amount)})
            self.background.append(asyncio.create_task(scaled))
            return
        assert self.machine is not None
        if fault.way == "disk":
            self.machine.fill()
        elif fault.way == "driver":
            self.machine.freeze(fault.amount)
        elif fault.way == "clock":
            self.machine.jump(fault.amount)
        else:
            self.background.append(asyncio.create_task(self._low_memory()))

    async def _low_memory(self) -> None:
        """Until an actor was killed for it."""
        assert self.machine is not None
        before, pools = time.monotonic(), self.session.services.pools
        lost = sum(pool.supervisor.lost for pool in pools)
        self.machine.low_memory(True)
        try:
            while time.monotonic() < before + MONITOR_S:
                if sum(pool.supervisor.lost for pool in pools) > lost:
                    return
                await asyncio.sleep(0.05)
        finally:
            self.machine.low_memory(False)

    @property
    def left_over(self) -> list[int]:
        """Processes that were hit and still are, though Ray was given the seconds that it takes it
        to kill one that is stopped.
        """
        deadline = time.monotonic() + KILL_S
        while (
            alive := [pid for pid in self.pids if is_alive(pid)]
        ) and time.monotonic() < deadline:
            time.sleep(0.1)
        return alive


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it is more than an entry in a table."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---- what came of it


def outcome(run: RunDirectory, step: int) -> dict[str, str]:
    """SHA-256 of all that must not depend on faults: LoRA, old policy, EMA and optimiser at
    ``step``, what was selected, and the rows of the metrics, each of which counts its units once.
    """
    lora = b"".join(name.encode() + data for name, data in adapters(run, step).items())
    parts = {
        "lora": lora,
        "selections": run.selections_file.read_bytes(),
        "metrics": json.dumps(lasting(run.metrics())).encode(),
    }
    return {name: hashlib.sha256(data).hexdigest() for name, data in parts.items()}


def lasting(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of every row the metrics that do not depend on which actor computed what (``SAME``), to
    ``DIGITS`` digits.
    """

    def plain(value: Any) -> Any:
        return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value

    def lasts(key: str) -> bool:
        return key.startswith(SAME) and key != WHEN_CHECKED

    return [{key: plain(row[key]) for key in sorted(row) if lasts(key)} for row in rows]


@dataclass(frozen=True)
class Recovery:
    """Seconds after a fault until the loss was noticed, until another actor stood in the place, and
    until the work that was lost had been done: a unit answered by another actor; of the learner,
    its version published again. None: nobody missed it.
    """

    kind: str
    way: str
    noticed_s: float | None = None
    replaced_s: float | None = None
    answered_s: float | None = None


def recoveries(events: Sequence[Mapping[str, Any]]) -> list[Recovery]:
    """One per ``fault_injected`` among a run's events."""
    found = []
    for place, fault in enumerate(events):
        if fault["event"] != "fault_injected":
            continue
        later, kind = events[place:], fault["kind"]

        def since(
            name: str,
            start: float = -1.0,
            fault: Mapping[str, Any] = fault,
            later: Any = later,
            **fields: Any,
        ) -> float | None:
            for event in later:
                mine = event["event"] == name and all(
                    event.get(key) == value for key, value in fields.items()
                )
                if mine and event["time"] - fault["time"] >= start:
                    return round(event["time"] - fault["time"], 3)
            return None

        who = {"kind": kind, "actor": fault["actor"]}
        if fault["way"] not in TO_ACTORS:  # the actor that is lost first, if any
            first = next((event for event in later if event["event"] == "actor_died"), None)
            if fault["way"] != "monitor" or first is None:
                continue
            kind = first["kind"]
            who = {"kind": kind, "actor": first["actor"]}
        noticed = since("actor_died", **who)
        replaced = answered = None
        if noticed is not None:
            replaced = since("actor_replaced", noticed, **who)
            restored = since("learner_restored", noticed)
            answered = since("chunk_recovered", noticed, kind=kind) if kind != "learner" else None
            # what went with a node may send the run back to its checkpoint
            if answered is None and restored is not None:
                answered = since("version_published", restored)
        found.append(Recovery(kind, fault["way"], noticed, replaced, answered))
    return found


def recovery_table(found: Sequence[Recovery]) -> list[str]:
    """Lines of a Markdown table: medians, largest in brackets, by service and kind of fault."""
    lines = [
        "| hit | how | times | noticed | replaced | answered or restored |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind in SERVICES:
        for way in WORDS:
            mine = [each for each in found if (each.kind, each.way) == (kind, way)]
            if mine:
                cells = [
                    _cell([getattr(each, name) for each in mine])
                    for name in ("noticed_s", "replaced_s", "answered_s")
                ]
                lines.append(f"| {kind} | {way} | {len(mine)} | {' | '.join(cells)} |")
    return lines


def _cell(values: Sequence[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return "not needed"
    return f"{statistics.median(known):.1f} s" + (f" ({known[-1]:.1f} s)" if len(known) > 1 else "")

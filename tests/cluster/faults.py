"""Injected faults of a run: the target, the kind and the moment. ``outcomes`` checks the results.

A moment is a stage of the progress display ("explored", "scored", ...: an item passed it), a method
of a service ("encode", "export", ...: it was called), "begin", the start of an iteration, or
"recovering": an actor was lost, in any iteration, and is not replaced yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import psutil
from rich.console import Console

from records.progress import Progress

SERVICES = ("rollout", "reward", "encoder", "selector", "learner")
RUN = "run"
"""The target of faults that hit no particular actor."""
Way = Literal[
    "kill", "stop", "node", "gpu", "memory", "monitor", "disk", "driver", "clock", "scale", "term"
]
WORDS: dict[str, str] = {
    "kill": "SIGKILL to",
    "stop": "SIGSTOP to",
    "node": "SIGKILL to the node of",
    "gpu": "SIGKILL to all actors on the GPU of",
    "memory": "no more memory from the kernel for",
    "monitor": "Ray's memory monitors see little memory",
    "disk": "the disk is full",
    "driver": "the driver is stopped",
    "clock": "the driver's clock jumps",
    "scale": "rollout is scaled",
    "term": "SIGTERM to the driver",
}
TO_ACTORS = ("kill", "stop", "node", "gpu", "memory")
MONITOR_S = 20.0
"""Seconds for which memory stays low if no actor is killed for it."""
RECOVERING = "recovering"
KILL_S = 30.0
"""Seconds after which Ray has sent SIGKILL to a process that it asked to end and that did not
answer.
"""


@dataclass(frozen=True)
class Fault:
    """Actor ``actor`` of ``kind`` is hit ``delay_s`` after the ``count``-th ``moment`` of an
    iteration.

    ``amount``: seconds of a stop or a jump, or the new size of the pool.
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
    """Nodes that can be removed, and replaced by others."""

    def remove(self, node: str, workers: Sequence[int]) -> None: ...
    def repair(self) -> None: ...


class MachineLike(Protocol):
    """The methods of ``tests.cluster.machine`` that faults use."""

    def fill(self) -> None: ...
    def low_memory(self, low: bool) -> None: ...
    def starve(self, pid: int) -> None: ...
    def freeze(self, seconds: float) -> None: ...
    def jump(self, seconds: float) -> None: ...


class FaultInjector(Progress):
    """Progress display that injects the faults into its run.

    Injected faults are ``fault_injected`` events of the run.
    """

    session: Any = None

    def __init__(
        self,
        *faults: Fault,
        machines: Machines | None = None,
        machine: MachineLike | None = None,
        replaced_after_s: float | None = None,
    ):
        """``replaced_after_s``: seconds after which another node replaces a removed one."""
        super().__init__(console=Console(file=io.StringIO()))
        self.faults, self.machines, self.machine = faults, machines, machine
        self.replaced_after_s = replaced_after_s
        self.done: list[Fault] = []
        self.background: list[asyncio.Task[Any]] = []
        self.homes: dict[int, str] = {}  # nodes of the processes that were hit
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

            def recorded(name: str, **fields: Any) -> None:
                event(name, **fields)
                if name == "actor_died":
                    self._happened(RECOVERING)

            self.session.rundir.event = recorded

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

        async def recorded(task: Any, call: Any) -> Any:
            self._happened(call.method)
            return await perform(task, call)

        pool.perform = recorded

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
            self._inject_run(fault)
            return
        # a service may have left meanwhile, such as an encoder with ``prompts.encode_once``
        members = [
            member
            for pool in self.session.services.pools
            for member in pool.members
            if pool.kind == fault.kind
        ]
        member = next((member for member in members if member.index == fault.actor), None)
        if member is None or member.handle is None or (fault in self.done and not fault.always):
            return
        self.done.append(fault)
        pid, node = member.info.pid, member.info.node
        self.homes[pid] = node
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
            # a process that was stopped and given up earlier is on the node too
            there = [other for other, home in self.homes.items() if home == node]
            there += [
                member.info.pid
                for pool in self.session.services.pools
                for member in pool.members
                if member.handle is not None and member.info.node == node
            ]
            self.removal = asyncio.get_running_loop().run_in_executor(
                None, self.machines.remove, node, there
            )
            if self.replaced_after_s is not None:
                self.background.append(asyncio.create_task(self._replace_node()))
        elif fault.way == "gpu":  # as an error that ends all of its contexts
            self._kill_all_on(member.info.gpu)
        elif fault.way == "memory":
            assert self.machine is not None
            self.machine.starve(pid)
            member.handle.eat.remote()  # the actor first ends earlier calls
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if fault.way == "kill" else signal.SIGSTOP)

    def _kill_all_on(self, gpu: str | None) -> None:
        assert gpu is not None, "the target of the fault has no GPU"
        for pool in self.session.services.pools:
            for member in pool.members:
                if member.handle is not None and member.info.gpu == gpu:
                    self.homes[member.info.pid] = member.info.node
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(member.info.pid, signal.SIGKILL)

    def _inject_run(self, fault: Fault) -> None:
        if fault in self.done:
            return
        self.done.append(fault)
        recorded = {"kind": fault.kind, "actor": fault.actor, "way": fault.way, "why": str(fault)}
        self.session.rundir.event("fault_injected", **recorded)
        if fault.way == "scale":
            scaled = self.session.scaling.scale({"rollout": int(fault.amount)})
            self.background.append(asyncio.create_task(scaled))
            return
        if fault.way == "term":
            os.kill(os.getpid(), signal.SIGTERM)
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

    async def _replace_node(self) -> None:
        """Start another node, in this thread as Ray needs it: the driver waits meanwhile."""
        assert self.machines is not None and self.removal is not None
        await self.removal
        await asyncio.sleep(self.replaced_after_s or 0.0)
        self.machines.repair()

    async def _low_memory(self) -> None:
        """Lower the available memory until an actor was killed for it."""
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
        """Return processes that were hit and still live after the seconds in which Ray kills a
        stopped one.
        """
        deadline = time.monotonic() + KILL_S
        while (
            alive := [pid for pid in self.homes if is_alive(pid)]
        ) and time.monotonic() < deadline:
            time.sleep(0.1)
        return alive


def is_alive(pid: int) -> bool:
    """Return True if the process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

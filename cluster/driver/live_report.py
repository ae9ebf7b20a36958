"""Rewrite the report while a run is in progress, in another process that nothing waits for."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from pathlib import Path

from cluster.runtime.tasks import cancel_all
from records.errors import error_summary
from records.rundir import Event

LONGEST_S = 600.0
"""Seconds after which writing a report is aborted."""
REST = 9
"""Pause after a report, as a multiple of the time it took: at most a tenth of a core is used."""
GRACE_S = 5.0
PROGRAM = (sys.executable, "-m", "analysis.report")


class LiveReport:
    """Writes ``report.html`` every ``every_s`` seconds (0: never), and soon after ``due``."""

    def __init__(
        self,
        run: Path,
        every_s: float,
        event: Event,
        note: Callable[[str], None],
        program: tuple[str, ...] = PROGRAM,
    ):
        self._run, self._every_s, self._program = run, every_s, program
        self._event, self._note = event, note
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._last_failure = ""

    def begin(self) -> None:
        """Start to write reports."""
        if self._every_s:
            self._task = asyncio.create_task(self._write_periodically())

    def due(self) -> None:
        """Request a report without waiting for the interval to pass."""
        self._due.set()

    async def close(self) -> None:
        """Stop writing reports; on return no process writes one."""
        await cancel_all([self._task] if self._task else [])

    async def _write_periodically(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._due.wait()
            self._due.clear()
            began = time.monotonic()
            try:
                why = await self._write()
            except Exception as error:  # no caller awaits this task and would see it
                why = error_summary(error)
            if why and why != self._last_failure:  # report the same reason only once
                with contextlib.suppress(OSError):  # the disk may be full for the event as well
                    self._event("report_failed", why=why)
                self._note(f"the report is not updated during the run: {why}")
            self._last_failure = why
            await asyncio.sleep(REST * (time.monotonic() - began))

    async def _write(self) -> str:
        """Write the report; return why that failed, or an empty string."""
        command = (*self._program, str(self._run), f"{self._every_s:g}")
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
            )
        except OSError as error:
            return f"{error.strerror or error}"
        try:
            async with asyncio.timeout(LONGEST_S):
                _, stderr = await process.communicate()
        except TimeoutError:
            return f"it took longer than {LONGEST_S:g} s"
        finally:
            await _terminate(process)
        lines = stderr.decode(errors="replace").strip().splitlines()
        return "" if process.returncode == 0 else (lines or [f"exit {process.returncode}"])[-1]


async def _terminate(process: Process) -> None:
    """Terminate ``process`` so that it can clean up; kill it if it does not exit in time."""
    for stop in (process.terminate, process.kill):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE_S)

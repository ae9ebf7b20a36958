"""Run the cells of a comparison one at a time, each in its own process.

Finished runs are not repeated, interrupted runs are resumed, and a failed run does not stop the
others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.compare.cells import Cell, Comparison
from analysis.compare.groups import check_prompts
from analysis.report.data import finite_or_none, read_run, step_of
from configs.load import ConfigError, parse
from configs.paths import exists
from configs.prompts import changed_files
from configs.resume import differences
from configs.toml_text import to_toml
from planning.layouts.spec import as_recorded
from records.atomic import write_text
from records.errors import Stopped
from records.formatting import duration
from records.lock import exclusive_lock
from records.rundir import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
TRAIN = (sys.executable, "-m", "cluster", "train")
USER_ERROR = 2
Say = Callable[[str], None]


@dataclass(frozen=True)
class RunOutcome:
    """Run of the comparison after its process exited.

    ``why`` is the reason for which it did not finish, or None if it did.
    """

    cell: str
    seed: int
    path: Path
    why: str | None = None


def run_all(comparison: Comparison, out: Path, say: Say) -> list[RunOutcome]:
    """Run what is not finished.

    All cells run with one seed before the next seed starts, so that a period in which the machine
    is slow affects all cells alike.

    Raises:
        ConfigError: ``out`` cannot be written, another comparison is running there, or it contains
            runs of another configuration.
        Stopped: a signal was received; the current run was given time to write its checkpoint.
    """
    plan = [(cell, seed) for seed in comparison.seeds for cell in comparison.running]
    states = {(cell.name, seed): _state_of(cell, seed, out) for cell, seed in plan}
    _check_prompts(
        [(cell, seed) for cell, seed in plan if states[cell.name, seed] != "absent"],
        out,
        set(states.values()) == {"finished"},
    )
    ended: list[RunOutcome] = []
    config_errors: dict[str, str] = {}
    with _at_work(out, say) as lock, _Child(lock) as child:
        for number, (cell, seed) in enumerate(plan, 1):
            path, state = out / cell.run_name(seed), states[cell.name, seed]
            head = f"[{number}/{len(plan)}] {cell.title}, seed {seed}"
            if state == "finished":
                say(f"{head}: finished before")
                why = None
            elif cell.name in config_errors:
                why = config_errors[cell.name]
            else:
                say(
                    f"{head}: {'continued' if state == 'unfinished' else 'started'}; log:"
                    f" {_log(out, cell, seed)}"
                )
                started = time.monotonic()
                code, why = _train(child, cell, seed, out, state == "unfinished")
                if code == USER_ERROR and why:
                    config_errors[cell.name] = why
                say(
                    f"{head}: {_result(path) if why is None else why}"
                    f" ({duration(time.monotonic() - started)})"
                )
            ended.append(RunOutcome(cell.name, seed, path, why))
    return ended


def _state_of(cell: Cell, seed: int, out: Path) -> str:
    """Return "absent", "unfinished" or "finished".

    Raises ConfigError if the directory contains a run of another configuration, or with more
    iterations than requested.
    """
    rundir = RunDirectory(out / cell.run_name(seed))
    if not exists(rundir.config_file) or not rundir.has_results():
        return "absent"
    recorded = rundir.configuration()
    config = as_recorded(parse(cell.tree_of(seed, out)), recorded)
    if changed := differences(recorded, config):
        raise ConfigError(
            f"{rundir.path} was run with another configuration: {'; '.join(changed)}; use the same"
            " configuration, or another directory with --out"
        )
    run = read_run(rundir.path)
    done = step_of(run.after) if run.after else 0
    if done > config.iterations:
        raise ConfigError(
            f"{rundir.path} has {done} iterations, more than the requested {config.iterations}:"
            " give another --out"
        )
    finished = run.state == "finished" and (
        done == config.iterations or run.last_event("stopped_early") is not None
    )
    return "finished" if finished else "unfinished"


def _check_prompts(existing: Sequence[tuple[Cell, int]], out: Path, finished: bool) -> None:
    """Raise ConfigError if the prompts of existing runs differ.

    They must be the same in all of these runs and, unless all runs are finished, equal to the
    current files.
    """
    check_prompts(out / cell.run_name(seed) for cell, seed in existing)
    for cell, seed in () if finished else existing:
        path = out / cell.run_name(seed)
        if changed := changed_files(parse(cell.tree_of(seed, out)).prompts, read_run(path).prompts):
            raise ConfigError(
                f"{', '.join(changed)} changed since {path} was run: restore it, or give another"
                " directory with --out"
            )


def _train(child: _Child, cell: Cell, seed: int, out: Path, resume: bool) -> tuple[int, str | None]:
    """Train one run; return its exit code and the reason for a failure, or None.

    Raises Stopped if a signal was received.
    """
    file, log = out / "configs" / f"{cell.run_name(seed)}.toml", _log(out, cell, seed)
    for path in (file, log):
        path.parent.mkdir(exist_ok=True)
    write_text(file, to_toml(cell.tree_of(seed, out)))
    code = child.run([*TRAIN, str(file), *(["--resume"] if resume else [])], log)
    if child.signal:
        raise Stopped(
            f"stopped by {child.signal} during {cell.run_name(seed)}; run the same command again"
            " to continue"
        )
    if code == 0:
        return code, None
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    ending = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return code, f"{ending}: {lines[-1] if lines else 'no output'}"


def _log(out: Path, cell: Cell, seed: int) -> Path:
    return out / "logs" / f"{cell.run_name(seed)}.log"


def _result(path: Path) -> str:
    run = read_run(path)
    before, after = (
        finite_or_none(row.get("reward/eval_mean")) if row else None
        for row in (run.before, run.after)
    )
    return (
        "finished"
        if before is None or after is None
        else f"held-out reward {before:.4f} -> {after:.4f}"
    )


@contextlib.contextmanager
def _at_work(out: Path, say: Say = print) -> Iterator[int]:
    """Create and lock ``out``; yield the lock's file descriptor.

    A child process inherits the descriptor, so a child that outlives its parent keeps the lock.
    Raises ConfigError if another process holds it or ``out`` cannot be written.
    """

    def not_locked(reason: str) -> None:
        say(f"{out}: not locked ({reason}): do not run a second comparison here")

    with contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(
                exclusive_lock(
                    out / ".lock",
                    "another comparison, or one of its runs,",
                    "wait, or give another --out",
                    not_locked,
                )
            )
        except OSError as error:
            raise ConfigError(
                f"--out: {out} cannot be written ({error.strerror}): give another directory"
            ) from None
        if lock.unsupported_reason:
            not_locked(lock.unsupported_reason)
        yield lock.file


class _Child:
    """Runner of one child process at a time, which receives SIGINT and SIGTERM as SIGTERM.

    ``signal`` is the name of the last signal received, or None.
    """

    def __init__(self, lock: int):
        self.signal: str | None = None
        self._lock = lock
        self._process: subprocess.Popen[bytes] | None = None
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> _Child:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(number, self._pass_on)
                self._restore.callback(signal.signal, number, before)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore.close()

    def run(self, command: list[str], log: Path) -> int:
        """Run ``command``, append its output to ``log``, and return its exit code.

        The code is negative if a signal ended the process.
        """
        python_path = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *([python_path] if python_path else [])]),
        }
        with log.open("ab") as file:
            if self.signal:
                return -signal.SIGTERM
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(self._lock,),
                # a terminal's SIGINT reaches this process alone, which passes it on
                start_new_session=True,
            )
            try:
                # a signal that arrived while the process was being created was not forwarded
                if self.signal:
                    self._process.send_signal(signal.SIGTERM)
                return self._process.wait()
            finally:
                self._process = None

    def _pass_on(self, number: int, _frame: object) -> None:
        self.signal = signal.Signals(number).name
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

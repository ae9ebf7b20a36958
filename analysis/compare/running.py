"""Runs the cells of a comparison one at a time, each in a process of its own.

What ended is not run again, what was cut short is resumed, and a run that fails does not end the
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
from analysis.report.data import finite, read_run, step_of
from configs.load import ConfigError, parse
from configs.prompts import changed_files
from configs.resume import differences
from configs.toml_text import to_toml
from planning.layouts.spec import as_recorded
from records.atomic import write_text
from records.errors import Stopped
from records.lock import held
from records.rundir import RunDirectory
from records.words import duration

ROOT = Path(__file__).resolve().parents[2]
TRAIN = (sys.executable, "-m", "cluster", "train")
USER_ERROR = 2
Say = Callable[[str], None]


@dataclass(frozen=True)
class Ended:
    """A run of the comparison; ``why`` it did not come to its end, else None."""

    cell: str
    seed: int
    path: Path
    why: str | None = None


def run_all(comparison: Comparison, out: Path, say: Say) -> list[Ended]:
    """Run what is not finished; cells change fastest, so that a slow hour falls on all of them.

    Raises:
        ConfigError: ``out`` cannot be written, another comparison is at work there, or it holds
            runs of another configuration.
        Stopped: a signal came; the run under way was given time to write its checkpoint.
    """
    plan = [(cell, seed) for seed in comparison.seeds for cell in comparison.running]
    left = {(cell.name, seed): _is_there(cell, seed, out) for cell, seed in plan}
    _check_prompts(
        [(cell, seed) for cell, seed in plan if left[cell.name, seed] != "absent"],
        out,
        set(left.values()) == {"finished"},
    )
    ended: list[Ended] = []
    hopeless: dict[str, str] = {}
    with _at_work(out, say) as lock, _Child(lock) as child:
        for number, (cell, seed) in enumerate(plan, 1):
            path, there = out / cell.run_name(seed), left[cell.name, seed]
            head = f"[{number}/{len(plan)}] {cell.title}, seed {seed}"
            if there == "finished":
                say(f"{head}: finished before")
                why = None
            elif cell.name in hopeless:
                why = hopeless[cell.name]
            else:
                say(
                    f"{head}: {'continued' if there == 'unfinished' else 'started'}; log:"
                    f" {_log(out, cell, seed)}"
                )
                began = time.monotonic()
                code, why = _train(child, cell, seed, out, there == "unfinished")
                if code == USER_ERROR and why:
                    hopeless[cell.name] = why
                say(
                    f"{head}: {_result(path) if why is None else why}"
                    f" ({duration(time.monotonic() - began)})"
                )
            ended.append(Ended(cell.name, seed, path, why))
    return ended


def _is_there(cell: Cell, seed: int, out: Path) -> str:
    """absent, unfinished or finished. Raises ConfigError: another run is there."""
    rundir = RunDirectory(out / cell.run_name(seed))
    if not rundir.config_file.exists() or not rundir.computed():
        return "absent"
    recorded = rundir.configuration()
    config = as_recorded(parse(cell.tree_of(seed, out)), recorded)
    if changed := differences(recorded, config):
        raise ConfigError(
            f"{rundir.path} was run with another configuration: {'; '.join(changed)}; give the"
            " same, or another directory with --out"
        )
    run = read_run(rundir.path)
    done = step_of(run.after) if run.after else 0
    if done > config.iterations:
        raise ConfigError(
            f"{rundir.path} has {done} iterations, more than the {config.iterations} asked for:"
            " give another --out"
        )
    ended = run.state == "finished" and (
        done == config.iterations or run.last_event("stopped_early") is not None
    )
    return "finished" if ended else "unfinished"


def _check_prompts(there: Sequence[tuple[Cell, int]], out: Path, finished: bool) -> None:
    """Raises ConfigError where runs that are ``there`` had other prompts than each other or now."""
    check_prompts(out / cell.run_name(seed) for cell, seed in there)
    for cell, seed in () if finished else there:
        path = out / cell.run_name(seed)
        if changed := changed_files(parse(cell.tree_of(seed, out)).prompts, read_run(path).prompts):
            raise ConfigError(
                f"{', '.join(changed)}: no longer what {path} was run with: put it back, or"
                " give another directory with --out"
            )


def _train(child: _Child, cell: Cell, seed: int, out: Path, resume: bool) -> tuple[int, str | None]:
    """(exit code, None or why it did not come to its end)."""
    file, log = out / "configs" / f"{cell.run_name(seed)}.toml", _log(out, cell, seed)
    for path in (file, log):
        path.parent.mkdir(exist_ok=True)
    write_text(file, to_toml(cell.tree_of(seed, out)))
    code = child.run([*TRAIN, str(file), *(["--resume"] if resume else [])], log)
    if child.signal:
        raise Stopped(
            f"stopped by {child.signal} during {cell.run_name(seed)}; the same command again"
            " continues"
        )
    if code == 0:
        return code, None
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return code, f"{ended}: {lines[-1] if lines else 'it said nothing'}"


def _log(out: Path, cell: Cell, seed: int) -> Path:
    return out / "logs" / f"{cell.run_name(seed)}.log"


def _result(path: Path) -> str:
    run = read_run(path)
    before, after = (
        finite(row.get("reward/eval_mean")) if row else None for row in (run.before, run.after)
    )
    return (
        "finished"
        if before is None or after is None
        else f"held-out reward {before:.4f} -> {after:.4f}"
    )


@contextlib.contextmanager
def _at_work(out: Path, say: Say = print) -> Iterator[int]:
    """Lock ``out``; gives the lock's descriptor, which a child inherits: a child that survives its
    parent still holds the lock.
    """
    with contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(
                held(
                    out / ".lock",
                    "another comparison, or a run that it left,",
                    "wait, or give another --out",
                )
            )
        except OSError as error:
            raise ConfigError(
                f"--out: {out} cannot be written ({error.strerror}): give another directory"
            ) from None
        if lock.missing:
            say(f"{out}: not locked ({lock.missing}): nothing keeps a second comparison out")
        yield lock.file


class _Child:
    """Runs one process at a time, and passes SIGINT and SIGTERM on to it."""

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
        """Exit code of ``command``, negative for a signal; its output is added to ``log``."""
        known = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *([known] if known else [])]),
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
                start_new_session=True,
            )
            try:
                # one that came while the process was made has found none to pass it on to
                if self.signal:
                    self._process.send_signal(signal.SIGTERM)
                return self._process.wait()
            finally:
                self._process = None

    def _pass_on(self, number: int, _frame: object) -> None:
        self.signal = signal.Signals(number).name
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

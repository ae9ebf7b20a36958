"""Targets for run directories with one damaged file, read by every command that takes one."""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import strategies as st

from configs.prompts import read_prompts
from configs.toml_text import to_toml
from tools.fuzz.damage import Change, as_unprivileged_user, changes
from tools.fuzz.invariants import InvariantViolation, digest, outcome, time_limit
from tools.fuzz.target import Target, copied, example_run

COMMANDS = ("report", "compare", "evaluate", "export", "resume")
CODES = {"export": (0, 2, 3), "resume": (2, 3), "evaluate": (2, 3)}


def run_directory(folder: Path, example: tuple[str, Change]) -> None:
    """Run a command on a damaged run directory: it must end with exit code 0, 2 or 3.

    The run must remain unchanged, except for its report.
    """
    command, change = example
    runs = folder / "runs"
    run = copied(example_run(), runs / "small")
    other = _another(runs / "other") if command == "compare" else run
    (folder / "small.toml").write_text(_toml(str(runs)))
    change.make(run)
    before = digest(run)
    arguments = {
        "report": ["report", str(run)],
        "compare": ["compare", "--runs", str(other), str(run), "--out", str(folder / "compared")],
        "evaluate": ["evaluate", str(run)],
        "export": ["export", str(run), str(folder / "lora"), "--weights", "current"],
        "resume": ["train", str(folder / "small.toml"), "--resume"],
    }[command]
    locked = as_unprivileged_user() if change.how == "locked" else contextlib.nullcontext()
    with locked:
        code, _ = outcome(*arguments, codes=CODES.get(command, (0, 2, 3)))
    if digest(run) != before:
        raise InvariantViolation(
            f"{command} changed the run: {set(digest(run).items()) ^ set(before.items())}"
        )
    if code is None and command == "resume" and change.how != "locked":
        resume_from_checkpoint(run)


def resume_from_checkpoint(there: Path) -> None:
    """Rewind an accepted run to its checkpoint, as the driver does once Ray has started.

    Raises if the damage that the command accepted breaks this later step.
    """
    from cluster.driver.checkpoints import Checkpoints, Position
    from cluster.driver.held_out import HeldOut
    from cluster.driver.rank_monitor import RankMonitor
    from cluster.driver.services import ActorServices
    from learner.schedules import stop_reason
    from records.rundir import RunDirectory

    rundir = RunDirectory(there)
    config = rundir.configuration()
    services = cast(ActorServices, SimpleNamespace(weights=SimpleNamespace(chosen=None)))
    silent = cast(Any, lambda *_, **__: None)
    monitor = RankMonitor(config.audit, config.regenerate.precision, silent, silent)
    with (
        time_limit(),
        contextlib.suppress(OSError),
    ):  # the driver reports it in one line, exit code 3
        position = Position()
        Checkpoints(rundir, services, monitor, position).rewind()
        prompts = read_prompts(config.prompts.test)[: config.evaluate.prompts]
        held_out = HeldOut(config, rundir, prompts)
        held_out.due(position.next_iteration, last=True)
        held_out.before()
        if row := position.last_row:
            stop_reason(config.stop, row, row["seconds"] / 60)


@functools.cache
def _toml(run_root: str) -> str:
    tree: dict[str, Any] = json.loads((example_run() / "config.json").read_text())["config"]
    return to_toml(tree | {"run_root": run_root, "name": "small", "iterations": 2})


def _another(path: Path) -> Path:
    """Create the run with another seed, so that there are two runs to compare."""
    if not path.exists():
        copied(example_run(), path)
        saved = json.loads((path / "config.json").read_text())
        saved["config"]["seed"] += 1
        (path / "config.json").write_text(json.dumps(saved))
    return path


def targets() -> dict[str, Target]:
    """Return one target per command."""
    damage = changes(example_run())
    return {
        f"run, {command}": Target(
            st.tuples(st.just(command), damage), run_directory, cost=3 if command != "report" else 6
        )
        for command in COMMANDS
    }

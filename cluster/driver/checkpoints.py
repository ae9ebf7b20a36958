"""Progress of a run, saving it in checkpoints, and returning to the newest checkpoint."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, cast

from cluster.driver.rank_monitor import MonitorState, RankMonitor
from cluster.driver.services import ActorServices
from configs.section import Tree
from learner.checkpoint import (
    STATE,
    CheckpointError,
    incomplete_checkpoints,
    latest_checkpoint,
    read,
    step_directory,
    step_of,
)
from records.rundir import Row, RunDirectory, finite_or_none
from records.shared import appears
from records.storage import retried

log = logging.getLogger(__name__)
NUMBER, WORD = (int, float), (str, type(None))
KINDS = {
    "iteration": (int,),
    "time": NUMBER,
    "seconds": NUMBER,
    "samples_seen": (int,),
    "guard": (dict,),
    "backend": WORD,
}
GUARDED = {"backend": WORD, "backend_before": WORD, "below": (int, type(None))}
"""Allowed types of the fields of ``DriverState`` (``KINDS``) and of its ``guard`` (``GUARDED``)."""


class DriverState(TypedDict):
    """State of the driver that a checkpoint stores beside the learner's state."""

    iteration: int
    time: float  # seconds of the epoch
    seconds: float  # of training before the checkpoint
    samples_seen: int
    guard: MonitorState
    backend: str | None  # precision in which the run started to explore


@dataclass
class Position:
    """Progress of a run."""

    next_iteration: int = 0
    samples_seen: int = 0
    # numeric metrics of the last iteration, by name
    last_row: Mapping[str, float] = field(default_factory=dict[str, float])
    first_reward: float | None = None  # of the first iteration; None until a resume
    held_out: list[float] = field(default_factory=list[float])  # of evaluations before a resume
    seconds_before: float = 0.0  # of training, in earlier sessions
    restored: int = 0  # times the learner was lost and restored from a checkpoint
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds of training so far, over all sessions."""
        return self.seconds_before + time.monotonic() - self.began


class Checkpoints:
    """Saves a run's state in checkpoints and restores it."""

    def __init__(
        self,
        rundir: RunDirectory,
        services: ActorServices,
        monitor: RankMonitor,
        position: Position,
    ):
        self._rundir, self._services = rundir, services
        self._monitor, self._position = monitor, position
        self._saved: int | None = None

    @property
    def up_to_date(self) -> bool:
        """True if the newest checkpoint already holds the current state."""
        return self._saved == self._position.next_iteration

    async def save(self) -> None:
        """Write a checkpoint unless the newest one is up to date.

        Raises CheckpointError if it cannot be written, or does not exist for the driver, and
        ConfigError if another driver has claimed the run.
        """
        self._rundir.require_claim()
        if self.up_to_date:
            return
        position, iteration = self._position, self._position.next_iteration
        state: DriverState = {
            "iteration": iteration,
            "time": time.time(),
            "seconds": position.seconds,
            "samples_seen": position.samples_seen,
            "guard": self._monitor.state,
            "backend": self._services.weights.chosen,
        }
        path = step_directory(self._rundir.checkpoints, iteration)
        # the learner writes the driver's state with its own: the checkpoint directory is renamed
        # into place once, so it holds both or neither
        await self._services.learner.save(iteration, str(path), {**state})
        if not await asyncio.to_thread(appears, path / STATE):
            raise CheckpointError(
                f"checkpoint {str(path)!r} does not exist for the driver, but the learner has"
                " written it: mount the same directory on all nodes and set run_root to it"
            )
        self._saved = iteration
        self._rundir.event("checkpoint_saved", iteration=iteration, path=path.name)

    @retried
    def rewind(self, in_process: bool = False) -> Path | None:
        """Return to the newest complete checkpoint and discard what was recorded after it.

        Returns the checkpoint's directory, or None to start from the beginning. With
        ``in_process`` the running session continues: its clock keeps running and its events are
        kept.
        """
        path, position = latest_checkpoint(self._rundir.checkpoints), self._position
        saved: DriverState = {
            "iteration": 0, "time": 0.0, "seconds": 0.0, "samples_seen": 0, "guard": {},
            "backend": None,
        }  # fmt: skip
        if path is not None:
            # merged over the defaults: an older checkpoint may lack a field
            saved = saved | read_driver_state(path)
        position.next_iteration = saved["iteration"]
        position.samples_seen = saved["samples_seen"]
        # the checkpoint that was just read need not be written again before the next update
        self._saved = saved["iteration"] if path else None
        # the monitor too: its count of bad iterations decides the precision of later iterations
        self._monitor.restore(saved["guard"])
        if not in_process:
            position.seconds_before = saved["seconds"]
            self._services.weights.chosen = saved["backend"]
        self._rundir.truncate(saved["iteration"], math.inf if in_process else saved["time"])
        for each in incomplete_checkpoints(self._rundir.checkpoints):
            self._rundir.event("checkpoint_incomplete", path=each.name)
            log.warning(f"checkpoint {str(each)!r} lacks files: returning to the one before it")
        every = self._rundir.metrics()
        rows = [row for row in every if row.get("kind") == "iteration"]
        position.first_reward = next(iter(_finite(rows, "reward/train_mean")), None)
        evaluations = [row for row in every if row.get("kind") == "evaluation"]
        position.held_out = _finite(evaluations, "reward/eval_mean")
        timed = (row for row in reversed(rows) if finite_or_none(row.get("seconds")) is not None)
        last = next(timed, Row())
        position.last_row = {
            key: value for key, value in last.items() if finite_or_none(value) is not None
        }
        return path


def _finite(rows: Sequence[Row], name: str) -> list[float]:
    return [value for row in rows if (value := finite_or_none(row.get(name))) is not None]


def read_driver_state(path: Path) -> DriverState:
    """Return the driver's state in a checkpoint. Raises CheckpointError if it is damaged."""
    extra: object = read(path)[1].get("extra")
    if not isinstance(extra, dict) or not _has_valid_types(cast(Tree, extra)):
        raise CheckpointError(
            f"checkpoint {str(path)!r}: its {STATE} does not contain the position of the run:"
            " resume from an earlier checkpoint"
        )
    state = cast(DriverState, extra)
    iteration = state.get("iteration", step_of(path))
    # renamed by hand to a higher step it would stay the newest, and every return would end here
    if iteration != step_of(path):
        raise CheckpointError(
            f"checkpoint {str(path)!r} is of iteration {iteration} by its {STATE}: give it back its"
            f" name, {step_directory(path.parent, iteration).name}"
        )
    return state


def _has_valid_types(extra: Tree) -> bool:
    """Return True if the fields have the types of ``DriverState``; some may be missing."""
    if any(key in extra and not _is_valid(extra[key], kinds) for key, kinds in KINDS.items()):
        return False
    guard = cast(Tree, extra.get("guard", {}))
    return all(_is_valid(guard.get(key), kinds) for key, kinds in GUARDED.items())


def _is_valid(value: object, kinds: tuple[type, ...]) -> bool:
    """Return True if ``value`` has one of the types ``kinds``, and is finite and >= 0 if a number.

    Compares exact types, so that a bool is not accepted as an int.
    """
    number = isinstance(value, int | float)
    return type(value) in kinds and (not number or 0 <= value < math.inf)

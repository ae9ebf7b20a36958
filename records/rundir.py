"""The run directory: its files are written so that a kill at any time leaves them readable."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

from configs.load import ConfigError, parse
from configs.prompts import digests
from configs.schema import RunConfig
from records import extremes, lock, timeline
from records.atomic import append, write_json, write_text
from records.claim import Claim
from records.errors import RunFailed
from records.storage import exists, read_bytes, retried

Row = dict[str, Any]  # one line of a JSON-lines file
PACKAGES = ("ray", "torch", "diffusers", "transformers", "peft", "pydantic", "numpy", "safetensors")
ANOTHER_RUN = (
    "stop it, or wait until it ends, and continue it with --resume; --set name=... starts another"
)


class Event(Protocol):
    """Function that records an event with its name and fields."""

    def __call__(self, name: str, /, **fields: object) -> None: ...


class RunDirectory:
    """Paths and append-only files of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints, self.images = path / "checkpoints", path / "images"
        self.metrics_file = path / "metrics.jsonl"
        self.events_file = path / "events.jsonl"
        self.config_file = path / "config.json"
        self.selections_file, self.timeline_file = path / "selections.jsonl", path / timeline.FILE
        self.lock_file = path / "lock"
        # why the file system cannot lock out a second driver; None if it can
        self.lock_unsupported: str | None = None
        self._claim: Claim | None = None

    @classmethod
    def of(cls, config: RunConfig) -> RunDirectory:
        """Return the run directory of ``config`` without creating it."""
        return cls((Path(config.run_root or "runs") / config.name).absolute())

    def create(self, config: RunConfig) -> None:
        """Create the directory of a new run; replace a run of this name that computed nothing.

        Raises ConfigError if a run of this name has computed something or may be running, or if the
        directory cannot be written.
        """
        there = exists(self.config_file)
        if there and (self.has_results() or self.lock_unsupported):
            raise self._name_taken()
        try:
            if there:
                self._clear()
            for directory in (self.path, self.checkpoints, self.images):
                directory.mkdir(parents=True, exist_ok=True)
            kept = {
                "config": config.model_dump(mode="json"),
                "versions": versions(),
                "prompts": digests(config.prompts),
            }
            write_json(self.config_file, kept)
        except OSError as error:
            raise self._unwritable(error) from None

    def require_new(self) -> None:
        """Raise ConfigError if a run of this name has computed something.

        Called before anything is started. ``create`` checks again, as another driver may have
        created the run in the meantime.
        """
        if self.is_started():
            with self.locked():  # raises if another driver is running, which is the better reason
                raise self._name_taken()

    def require_existing(self) -> None:
        """Raise ConfigError if there is no run of this name to resume."""
        try:
            there = exists(self.config_file)
        except OSError:  # reading it will say why
            return
        if not there:
            raise ConfigError(
                f"{self.path}: no run of this name to resume: leave out --resume, or set name and"
                " run_root as it had them"
            )

    def is_started(self) -> bool:
        """Return True if a run of this name has computed something. Raises ConfigError.

        It waits for storage that is away: ``--auto-resume`` would take a run for a new one.
        """
        try:
            return exists(self.config_file) and self.has_results()
        except OSError as error:
            raise self._unwritable(error) from None

    def _name_taken(self) -> ConfigError:
        return ConfigError(
            f"{self.path}: a run of this name exists: --resume continues it, --set name=... starts"
            " another"
        )

    def has_results(self) -> bool:
        """Return True if there is a checkpoint, complete or not, or a row of metrics."""
        return bool(_names(self.checkpoints)) or (
            exists(self.metrics_file) and self.metrics_file.stat().st_size > 0
        )

    def _clear(self) -> None:
        """Remove the files of a run that computed nothing."""
        for file in (
            self.events_file,
            self.selections_file,
            self.timeline_file,
            self.path / "quantization.json",
        ):
            file.unlink(missing_ok=True)
        for directory in (self.images, self.path / "evaluations"):
            shutil.rmtree(directory, ignore_errors=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory within the context.

        Raises ConfigError if another driver holds the lock, or the directory cannot be written.
        """
        with contextlib.ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self.lock_unsupported = stack.enter_context(
                    lock.exclusive_lock(self.lock_file, "a run", ANOTHER_RUN, self.not_locked)
                ).unsupported_reason
            except OSError as error:
                raise self._unwritable(error) from None
            yield

    def claim(self) -> None:
        """Claim the directory for this driver; another driver that has it notices and ends."""
        self._claim = Claim(self.path)

    @property
    def lost(self) -> bool:
        """True if another driver has claimed the directory since: nothing is recorded any more."""
        return self._claim is not None and self._claim.lost

    def require_claim(self) -> None:
        """Raise ConfigError if another driver has claimed the directory since."""
        if self._claim is not None and self._claim.lost:
            raise ConfigError(
                f"{self.path}: {self._claim.holder()} has started a run here while this one was"
                " active: locks of this storage do not reach its machine, or this run's was given"
                " away while this machine did not reach the storage: this one ends"
            )

    def not_locked(self, why: str) -> None:
        """Record why the file system cannot lock out a second driver."""
        why = f"{why}: do not start a second driver in this directory"
        self.event("run_not_locked", why=why)

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"run_root: {self.path} cannot be written ({error.strerror}): give --set run_root=DIR"
        )

    def configuration(self) -> RunConfig:
        """Return the run's configuration. Raises ConfigError if this is no run directory."""
        try:
            kept = json.loads(self.config_file.read_text())
            tree = kept["config"]
            if not isinstance(tree, dict):
                raise TypeError(tree)
            return self._parsed(tree, kept.get("versions"))
        # ValueError: neither JSON nor text
        except (RecursionError, OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{self.path}: no readable run ({type(error).__name__}); give a directory with a"
                " config.json"
            ) from None

    def _parsed(self, tree: dict[str, object], made: object) -> RunConfig:
        """Parse the configuration ``tree``.

        Raises ConfigError, which names the version of Sol-RL that created the run if it is another.
        """
        try:
            return parse(tree)
        except ConfigError as error:
            before = made.get("sol-rl") if isinstance(made, dict) else None
            current = versions()["sol-rl"]
            if not isinstance(before, str) or before == current:
                raise
            raise ConfigError(
                f"{self.path}: written by Sol-RL {before}, which can read it; this is {current}:"
                f" {error.lines[0]}"
            ) from None

    def prompts(self) -> dict[str, str]:
        """Return the digests of the prompts that the run was started with; empty for old runs.

        Raises ConfigError if the recorded value is not a table of digests.
        """
        try:
            kept = json.loads(self.config_file.read_text()).get("prompts", {})
        except (RecursionError, OSError, ValueError, AttributeError):
            kept = None
        if not isinstance(kept, dict) or not all(isinstance(kept[key], str) for key in kept):
            raise ConfigError(
                f"{self.config_file}: 'prompts' does not contain the digests of the run's prompts:"
                " restore it, or remove 'prompts' to skip the comparison"
            )
        return kept

    def metric(self, row: Mapping[str, object]) -> None:
        """Append a row to metrics.jsonl; numbers that are not finite become null."""
        self._append_row(self.metrics_file, {key: _plain(value) for key, value in row.items()})

    def selection(
        self, iteration: int, version: int, groups: Sequence[Mapping[str, object]]
    ) -> None:
        """Append the selected indices per prompt, with the policy version that explored them."""
        self._append_row(
            self.selections_file, {"iteration": iteration, "version": version, "groups": groups}
        )

    def event(self, name: str, **fields: object) -> None:
        """Append an event to events.jsonl."""
        self._append_row(self.events_file, {"time": round(time.time(), 3), "event": name, **fields})

    def append(self, file: Path, lines: str) -> None:
        """Append lines to a file of the run, unless another driver has claimed it since."""
        if not self.lost:
            append(file, lines)

    def append_spans(self, file: Path, lines: str) -> None:
        """Append lines to the timeline; like ``append``, but its length is limited."""
        if not self.lost:
            timeline.append(file, lines)

    def _append_row(self, file: Path, row: Mapping[str, object]) -> None:
        self.append(file, json.dumps(row, default=str) + "\n")

    def metrics(self) -> list[Row]:
        """Return all rows of metrics.jsonl."""
        return list(read_jsonl(self.metrics_file))

    def events(self) -> list[Row]:
        """Return all rows of events.jsonl."""
        return list(read_jsonl(self.events_file))

    def truncate(self, iteration: int, moment: float) -> None:
        """Remove metrics and images from ``iteration`` on, and events and spans after a moment."""

        def keep(file: Path, requested: Callable[[Row], bool]) -> None:
            rows = [json.dumps(row) + "\n" for row in read_jsonl(file) if requested(row)]
            write_text(file, "".join(rows))

        def number(row: Row, key: str) -> float:
            """Return the number in a row; infinity, so that the row is removed, without one."""
            value = finite_or_none(row.get(key))
            return math.inf if value is None else value

        # an evaluation has the number of the iteration after it
        def due(row: Row) -> int:
            return iteration + (row.get("kind") == "evaluation")

        keep(self.metrics_file, lambda row: number(row, "iteration") < due(row))
        extremes.remove_from(self.images, iteration)
        keep(self.selections_file, lambda row: number(row, "iteration") < iteration)
        keep(self.events_file, lambda row: number(row, "time") <= moment)
        if math.isfinite(moment):
            timeline.remove_after(self.timeline_file, moment)


def make_output(out: Path) -> None:
    """Create the directory of ``--out``. Raises ConfigError if it cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out: {out} cannot be written ({error.strerror}): give another directory"
        ) from None


@contextlib.contextmanager
def output_errors(out: Path) -> Iterator[None]:
    """Raise RunFailed if results cannot be written to ``out`` within the context."""
    try:
        yield
    except OSError as error:
        raise RunFailed(
            f"{out}: {error.strerror or error}: give another directory with --out"
        ) from None


def versions() -> dict[str, str]:
    """Return the versions of this code and of the packages that results depend on."""
    installed = {}
    for name in ("sol-rl", *PACKAGES):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield the rows of a JSON-lines file; skip lines that are truncated or damaged."""
    if not exists(path):
        return
    for line in read_bytes(path).decode("utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


@retried
def _names(directory: Path) -> list[str]:
    """Return the names in a directory. Path.glob would leave out errors, since Python 3.13."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def finite_or_none(value: object) -> float | None:
    """Return ``value`` as a float if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an int that is too large for a float
        return None
    return number if math.isfinite(number) else None


def _plain(value: object) -> object:
    if isinstance(value, bool | str | int) or not isinstance(value, SupportsFloat):
        return value
    number = float(value)
    return number if math.isfinite(number) else None

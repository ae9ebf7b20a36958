"""What a run leaves behind, written so that a kill at any instant leaves it whole."""

from __future__ import annotations

import contextlib
import json
import math
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
from records.atomic import write_json, write_text
from records.errors import RunFailed

Row = dict[str, Any]  # of a JSON-lines file
PACKAGES = ("ray", "torch", "diffusers", "transformers", "peft", "pydantic", "numpy", "safetensors")
ANOTHER_RUN = (
    "stop it, or wait until it ends, and continue it with --resume; --set name=... starts another"
)


class Event(Protocol):
    """Writes down what happened: its name, and what there is to say of it."""

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
        # why the file system cannot keep a second driver out; None: it can
        self.unlocked: str | None = None

    @classmethod
    def of(cls, config: RunConfig) -> RunDirectory:
        """The directory of ``config``; not yet created."""
        return cls((Path(config.run_root or "runs") / config.name).absolute())

    def create(self, config: RunConfig) -> None:
        """Make a new run, in place of one of this name that computed nothing.

        Raises ConfigError when a run of this name has computed something, or may do so right now,
        or the directory cannot be written.
        """
        there = self.config_file.exists()
        if there and (self.computed() or self.unlocked):
            raise self._taken()
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
        """Raises ConfigError where a run of this name has computed something. Called before
        anything is started; ``create`` checks again, as another driver may be quicker.
        """
        try:
            if self.config_file.exists() and self.computed():
                with self.held():  # another driver at work is the better reason
                    raise self._taken()
        except OSError as error:
            raise self._unwritable(error) from None

    def _taken(self) -> ConfigError:
        return ConfigError(
            f"{self.path}: a run of this name is there: --resume continues it, --set"
            " name=... starts another"
        )

    def computed(self) -> bool:
        """Whether there is a checkpoint, whole or not, or a row of metrics."""
        return any(self.checkpoints.glob("*")) or (
            self.metrics_file.exists() and self.metrics_file.stat().st_size > 0
        )

    def _clear(self) -> None:
        """Remove what a run that computed nothing may have left."""
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
    def held(self) -> Iterator[None]:
        """Keep every other driver out. Raises ConfigError where one is at work here, or the
        directory cannot be written.
        """
        with contextlib.ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self.unlocked = stack.enter_context(
                    lock.held(self.lock_file, "a run", ANOTHER_RUN)
                ).missing
            except OSError as error:
                raise self._unwritable(error) from None
            yield

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"run_root: {self.path} cannot be written ({error.strerror}): give --set run_root=DIR"
        )

    def configuration(self) -> RunConfig:
        """The configuration of the run. Raises ConfigError: this is no run directory."""
        try:
            kept = json.loads(self.config_file.read_text())
            tree = kept["config"]
            if not isinstance(tree, dict):
                raise TypeError(tree)
            return self._parsed(tree, kept.get("versions"))
        # ValueError: no JSON, or no text
        except (RecursionError, OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{self.path}: no readable run here ({type(error).__name__}); give a directory"
                " with a config.json"
            ) from None

    def _parsed(self, tree: dict[str, object], made: object) -> RunConfig:
        """``tree`` as a configuration. Raises ConfigError, which names the version of Sol-RL that
        made the run where it is not this one.
        """
        try:
            return parse(tree)
        except ConfigError as error:
            before = made.get("sol-rl") if isinstance(made, dict) else None
            here = versions()["sol-rl"]
            if not isinstance(before, str) or before == here:
                raise
            raise ConfigError(
                f"{self.path}: made by Sol-RL {before}, which reads it; this is {here}:"
                f" {error.lines[0]}"
            ) from None

    def prompts(self) -> dict[str, str]:
        """Digests of the prompts that the run was started with; none of an old run. Raises
        ConfigError where they are none.
        """
        try:
            kept = json.loads(self.config_file.read_text()).get("prompts", {})
        except (RecursionError, OSError, ValueError, AttributeError):
            kept = None
        if not isinstance(kept, dict) or not all(isinstance(kept[key], str) for key in kept):
            raise ConfigError(
                f"{self.config_file}: 'prompts' does not say which prompts the run was started"
                " with: put it back, or take 'prompts' out and they are not compared"
            )
        return kept

    def metric(self, row: Mapping[str, object]) -> None:
        """Append one object to metrics.jsonl; a number that is not finite becomes null."""
        _append(self.metrics_file, {key: _plain(value) for key, value in row.items()})

    def selection(
        self, iteration: int, version: int, groups: Sequence[Mapping[str, object]]
    ) -> None:
        """Append the selected pool indices per prompt, and the version that explored them."""
        _append(
            self.selections_file, {"iteration": iteration, "version": version, "groups": groups}
        )

    def event(self, name: str, **fields: object) -> None:
        """Append one object to events.jsonl."""
        _append(self.events_file, {"time": round(time.time(), 3), "event": name, **fields})

    def metrics(self) -> list[Row]:
        """All rows of metrics.jsonl."""
        return list(rows_of(self.metrics_file))

    def events(self) -> list[Row]:
        """All rows of events.jsonl."""
        return list(rows_of(self.events_file))

    def truncate(self, iteration: int, moment: float) -> None:
        """Forget metrics and images from ``iteration`` on, and events and work after ``moment``."""

        def keep(file: Path, wanted: Callable[[Row], bool]) -> None:
            rows = [json.dumps(row) + "\n" for row in rows_of(file) if wanted(row)]
            write_text(file, "".join(rows))

        # the evaluation before an iteration has its number
        def number(row: Row, key: str) -> float:
            """A row that does not say when it is from is forgotten."""
            found = finite(row.get(key))
            return math.inf if found is None else found

        def due(row: Row) -> int:
            return iteration + (row.get("kind") == "evaluation")

        keep(self.metrics_file, lambda row: number(row, "iteration") < due(row))
        extremes.forget_from(self.images, iteration)
        keep(self.selections_file, lambda row: number(row, "iteration") < iteration)
        keep(self.events_file, lambda row: number(row, "time") <= moment)
        if math.isfinite(moment):
            timeline.forget_after(self.timeline_file, moment)


def make_output(out: Path) -> None:
    """Make the directory of ``--out``. Raises ConfigError where it cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out: {out} cannot be written ({error.strerror}): give another directory"
        ) from None


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raises RunFailed where what was measured cannot be written to ``out``."""
    try:
        yield
    except OSError as error:
        raise RunFailed(
            f"{out}: {error.strerror or error}: give another directory with --out"
        ) from None


def versions() -> dict[str, str]:
    """Versions of this code and of the packages that results depend on."""
    found = {}
    for name in ("sol-rl", *PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _append(path: Path, row: Mapping[str, object]) -> None:
    # closed after each row, so that a kill loses none that was written
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, default=str) + "\n")


def rows_of(path: Path) -> Iterator[Row]:
    """Rows of a JSON-lines file; a line cut short by a kill, or damaged, is passed over."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


def finite(value: object) -> float | None:
    """``value`` as a float when it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an int of more digits than a float holds
        return None
    return number if math.isfinite(number) else None


def _plain(value: object) -> object:
    if isinstance(value, bool | str | int) or not isinstance(value, SupportsFloat):
        return value
    number = float(value)
    return number if math.isfinite(number) else None

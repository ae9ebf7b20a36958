"""Sinks of metrics: every row goes to metrics.jsonl and to all other sinks.

Prometheus, TensorBoard and Weights & Biases are options of ``[logging]``. If one of them fails, an
event is recorded, the sink gets no further rows, and the run continues.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from configs.load import ConfigError
from configs.schema import RunConfig
from records.errors import error_summary
from records.extremes import Extreme, sheet
from records.metrics import declared
from records.prometheus import PrometheusExporter
from records.rundir import Event, RunDirectory, finite_or_none

Row = Mapping[str, object]
SHEET = "images/best_and_worst"
EXTRAS = ("tensorboard", "wandb")
"""Fields of ``[logging]`` that need a package; its module and its extra have the field's name."""


class Sink(Protocol):
    """Receiver of rows. Rows that a resumed run computes again are passed again, unchanged."""

    name: str

    def row(self, row: Row) -> None:
        """Take a row: ``kind`` is iteration or evaluation, ``iteration`` counts from 0."""

    def close(self) -> None:
        """Close the sink; no more rows follow."""


@runtime_checkable
class ShowsImages(Protocol):
    """A sink that also accepts images."""

    def images(self, iteration: int, shown: Sequence[Extreme]) -> None:
        """Take the best and worst images of an iteration; called in another thread than rows."""


def check_sinks(config: RunConfig) -> None:
    """Raise ConfigError with a line per option of ``[logging]`` whose package is missing."""
    enabled = [field for field in EXTRAS if getattr(config.logging, field) not in (False, "off")]
    lines = [
        f"logging.{field} = {json.dumps(getattr(config.logging, field))}: missing package"
        f" {field!r}: pip install -c constraints.txt -e '.[{field}]', or leave it out"
        for field in enabled
        if importlib.util.find_spec(field) is None
    ]
    if lines:
        raise ConfigError(lines)


class Sinks:
    """All sinks of a run.

    The run ends if metrics.jsonl cannot be written; any other sink that fails is dropped.
    """

    def __init__(self, config: RunConfig, rundir: RunDirectory, event: Event):
        logging = config.logging
        self._event, self._rundir = event, rundir
        self._undeclared: set[str] = set()
        self._one_at_a_time = threading.Lock()  # images are passed by another thread
        self._others: list[Sink] = [
            PrometheusExporter(
                logging.prometheus_port,
                logging.prometheus_host,
                event,
                config.name,
                config.iterations,
            )
        ]
        if logging.tensorboard:
            self._add("tensorboard", lambda: TensorBoard(rundir))
        if logging.wandb != "off":
            self._add("wandb", lambda: WeightsAndBiases(config, rundir))

    def row(self, row: Row) -> None:
        """Pass a row to every sink. Raises OSError if metrics.jsonl cannot be written."""
        for name in sorted(row.keys() - self._undeclared):
            if not declared(name):
                # a metric without a description is recorded as an event and does not end the run
                self._undeclared.add(name)
                self._event("metric_undeclared", metric=name, why="records.metrics lacks it")
        self._rundir.metric(dict(row))
        for sink in list(self._others):
            self._try(sink.name, lambda sink=sink: sink.row(row), sink)

    def images(self, iteration: int, shown: Sequence[Extreme]) -> None:
        """Pass an iteration's images to every sink that accepts images."""
        for sink in list(self._others):
            if isinstance(sink, ShowsImages):
                self._try(sink.name, lambda sink=sink: sink.images(iteration, shown), sink)

    def close(self) -> None:
        """Close every sink."""
        for sink in list(self._others):
            self._try(sink.name, sink.close, sink)
        self._others = []

    def _add(self, name: str, make: Callable[[], Sink]) -> None:
        self._try(name, lambda: self._others.append(make()), None)

    def _try(self, name: str, do: Callable[[], None], sink: Sink | None) -> None:
        """Call ``do``, and drop the sink if it raises: no logger may end a run."""
        try:
            with self._one_at_a_time:
                do()
        except Exception as error:
            self._event("sink_failed", sink=name, why=error_summary(error))
            self._others = [other for other in self._others if other is not sink]


class TensorBoard:
    """Sink to an event file in ``tensorboard/`` of the run directory: scalars by iteration."""

    name = "tensorboard"

    def __init__(self, rundir: RunDirectory):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(rundir.path / "tensorboard"))

    def row(self, row: Row) -> None:
        """Write and flush the row."""
        for name, value in numbers(row):
            self._writer.add_scalar(name, value, _iteration(row))
        self._writer.flush()

    def images(self, iteration: int, shown: Sequence[Extreme]) -> None:
        """Write the images as one, laid out by ``records.extremes.sheet``."""
        if shown:
            self._writer.add_image(SHEET, sheet(shown), iteration)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """Sink to an offline run in ``wandb/`` of the run directory, to be sent by `wandb sync`.

    A resumed run creates another one with the same id, and both are synced into one.
    """

    name = "wandb"

    def __init__(self, config: RunConfig, rundir: RunDirectory):
        import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            x_disable_stats=True,
            x_disable_meta=True,
            disable_git=True,
            disable_code=True,
        )
        self._run = wandb.init(
            project="sol-rl",
            name=config.name,
            dir=str(rundir.path),
            mode="offline",
            config=config.model_dump(mode="json"),
            settings=settings,
        )
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def row(self, row: Row) -> None:
        """Log the row at its iteration."""
        self._run.log({"iteration": _iteration(row), **dict(numbers(row))})

    def images(self, iteration: int, shown: Sequence[Extreme]) -> None:
        """Log the images as one, with the rewards as caption."""
        import wandb

        if shown:
            image = wandb.Image(sheet(shown).transpose(1, 2, 0), caption=caption(shown))
            self._run.log({"iteration": iteration, SHEET: image})

    def close(self) -> None:
        """Finish the offline run."""
        self._run.finish()


def caption(shown: Sequence[Extreme]) -> str:
    """Return the prompts and rewards of a sheet, a line per prompt."""
    lines: dict[int, str] = {}
    for one in shown:
        before = lines.get(one.prompt, f"{one.text}:")
        lines[one.prompt] = f"{before} {one.end} {one.stage} {one.reward:.3g};"
    return "\n".join(line.rstrip(";") for _, line in sorted(lines.items()))


def numbers(row: Row) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a row by name, without the iteration."""
    for name, value in row.items():
        if name != "iteration" and (number := finite_or_none(value)) is not None:
            yield name, number


def _iteration(row: Row) -> int:
    number = row["iteration"]
    assert isinstance(number, int)
    return number

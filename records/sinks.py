"""Where the rows of metrics.jsonl go: one list of sinks, each fed with every row. There is no other
way to log a number.

The file is always there. Prometheus, TensorBoard and Weights & Biases are options of ``[logging]``;
whichever of these cannot take a row is left out from then on, with an event, and the run goes on.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from configs.load import ConfigError
from configs.schema import RunConfig
from records.metrics import PrometheusExporter
from records.rundir import RunDirectory

Row = Mapping[str, Any]
Events = Callable[..., None]
EXTRAS = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""Fields of ``[logging]`` that need a package, by the module that must be there; the optional extra
has the field's name.
"""


class Sink(Protocol):
    """Takes rows in the order in which they come. A row that is done again after a resume comes
    again, with the same values.
    """

    name: str

    def row(self, row: Row) -> None:
        """One row of metrics.jsonl: ``kind`` is iteration or evaluation, ``iteration`` counts from
        0.
        """

    def close(self) -> None:
        """No more rows come."""


def check_sinks(config: RunConfig) -> None:
    """Raises ConfigError, a line per option of ``[logging]`` whose package is not installed."""
    asked = [field for field in EXTRAS if getattr(config.logging, field) not in (False, "off")]
    lines = [
        f"logging.{field} = {_toml(getattr(config.logging, field))}: there is no module"
        f" {EXTRAS[field]!r}: pip install -c constraints.txt -e '.[{field}]', or leave it out"
        for field in asked
        if importlib.util.find_spec(EXTRAS[field]) is None
    ]
    if lines:
        raise ConfigError(lines)


class Sinks:
    """All sinks of a run. The first is the run directory: what it cannot write ends the run, what
    another cannot take does not.
    """

    def __init__(self, config: RunConfig, rundir: RunDirectory, event: Events):
        logging = config.logging
        self._event, self._file = event, MetricsFile(rundir)
        self._others: list[Sink] = [
            PrometheusExporter(logging.prometheus_port, logging.prometheus_host, event)
        ]
        if logging.tensorboard:
            self._add("tensorboard", lambda: TensorBoard(rundir))
        if logging.wandb != "off":
            self._add("wandb", lambda: WeightsAndBiases(config, rundir))

    def row(self, row: Row) -> None:
        """Give every sink one row. Raises OSError when metrics.jsonl cannot be written."""
        self._file.row(row)
        for sink in list(self._others):
            self._try(sink.name, lambda sink=sink: sink.row(row), sink)

    def close(self) -> None:
        """Close every sink."""
        for sink in list(self._others):
            self._try(sink.name, sink.close, sink)
        self._others = []

    def _add(self, name: str, make: Callable[[], Sink]) -> None:
        self._try(name, lambda: self._others.append(make()), None)

    def _try(self, name: str, do: Callable[[], None], sink: Sink | None) -> None:
        """Other people's loggers raise what they like, and no run should end for it."""
        try:
            do()
        except Exception as error:
            self._event(
                "sink_failed", sink=name, why=f"{type(error).__name__}: {error}".splitlines()[0]
            )
            self._others = [other for other in self._others if other is not sink]


class MetricsFile:
    """metrics.jsonl."""

    name = "metrics.jsonl"

    def __init__(self, rundir: RunDirectory):
        self._rundir = rundir

    def row(self, row: Row) -> None:
        """Append it."""
        self._rundir.metric(dict(row))

    def close(self) -> None:
        """Every row was flushed as it came."""


class TensorBoard:
    """An event file in ``tensorboard/`` of the run directory: a scalar per name, its step the row's
    iteration.
    """

    name = "tensorboard"

    def __init__(self, rundir: RunDirectory):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(rundir.path / "tensorboard"))

    def row(self, row: Row) -> None:
        """Write and flush it."""
        for name, value in numbers(row):
            self._writer.add_scalar(name, value, int(row["iteration"]))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """An offline run in ``wandb/`` of the run directory, for `wandb sync`; nothing is sent from
    here. A run that is resumed makes another of the same id, which syncs into one.
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
        """Log it, over the row's iteration."""
        self._run.log({"iteration": int(row["iteration"]), **dict(numbers(row))})

    def close(self) -> None:
        """Finish the offline run."""
        self._run.finish()


def numbers(row: Row) -> Iterator[tuple[str, float]]:
    """The finite numbers of a row by name, without its iteration."""
    for name, value in row.items():
        if (
            name != "iteration"
            and not isinstance(value, bool)
            and isinstance(value, int | float)
            and math.isfinite(value)
        ):
            yield name, float(value)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'

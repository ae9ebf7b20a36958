"""Read a run directory for the report, tolerating missing, truncated and non-numeric data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from analysis.compare.statistics import Mean
from configs.paths import exists, is_file
from records.extremes import KeptIteration, find_extremes
from records.images import RunImages, find_images
from records.rundir import finite_or_none
from records.timeline import FILE as TIMELINE
from records.timeline import Span, read_spans

Row = dict[str, object]
Grid = list[list[float]]
"""Values [prompt][noise] of one evaluation; missing values are NaN."""
ENDINGS = {
    "run_finished": "finished",
    "run_failed": "failed",
    "run_stopped": "stopped",
    "run_started": "open",
    "run_resumed": "open",
}
NO_ITERATION = "No iteration has ended yet."


@dataclass(frozen=True)
class RunData:
    """Contents of a run directory; ``held_out`` rewards and ``scores`` are keyed by iteration."""

    name: str
    config: Row
    versions: Row
    iterations: list[Row]
    evaluations: list[Row]
    events: list[Row]
    images: RunImages
    held_out: dict[int, Grid] = field(default_factory=dict)
    scores: dict[int, dict[str, Grid]] = field(default_factory=dict)
    quantization: list[Row] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    prompts: dict[str, str] = field(default_factory=dict)
    extremes: list[KeptIteration] = field(default_factory=list)

    @property
    def state(self) -> str:
        """State: "finished", "failed", "stopped", or "open" if no end was recorded."""
        names = [str(event["event"]) for event in self.events]
        ends = [ENDINGS[name] for name in names if name in ENDINGS]
        return ends[-1] if ends else "open"

    @property
    def before(self) -> Row | None:
        """The evaluation before training, or else the first one; None if there is none."""
        return self.evaluations[0] if self.evaluations else None

    @property
    def after(self) -> Row | None:
        """The newest evaluation, or None if there is none after ``before``."""
        return self.evaluations[-1] if len(self.evaluations) > 1 else None

    @property
    def paired_gain(self) -> Mean:
        """Held-out reward after training minus that before, paired by prompt and seed.

        NaN if it is not known.
        """
        return mean_in(self.after or {}, "eval/gain", "eval/gain_stderr")

    @property
    def gain(self) -> Mean:
        """The paired gain if it is known, or else the difference of the two means."""
        gain = self.paired_gain
        if math.isfinite(gain.mean) or self.before is None or self.after is None:
            return gain
        start, end = held_out_reward(self.before), held_out_reward(self.after)
        return Mean(end.mean - start.mean, gain.error, 0)

    def prompt_means(self, row: Row | None) -> list[float]:
        """Return the mean held-out reward per prompt of an evaluation, NaN if none was scored."""
        rewards = self.held_out.get(step_of(row), []) if row else []
        kept = [[value for value in noises if math.isfinite(value)] for noises in rewards]
        return [math.fsum(noises) / len(noises) if noises else math.nan for noises in kept]

    def last_event(self, *names: str) -> Row | None:
        """Return the newest event with one of these names, or None."""
        return next((event for event in reversed(self.events) if event["event"] in names), None)

    def setting(self, path: str, otherwise: object = None) -> object:
        """Return a value of the configuration by dotted path, or ``otherwise`` if it is missing."""
        value: object = self.config
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                return otherwise
            value = value[key]
        return value


def read_run(directory: Path) -> RunData:
    """Read ``directory``; missing data is left empty.

    Raises FileNotFoundError if it is not a run directory.
    """
    files = ("config.json", "metrics.jsonl", "events.jsonl")
    if not any(is_file(directory / name) for name in files):
        raise FileNotFoundError(
            f"{directory} is not a run directory: it has none of {', '.join(files)}; give"
            " RUN_ROOT/NAME of a run"
        )
    remarks: list[str] = []
    root = _row(_json(directory / "config.json", remarks))
    config = _row(root.get("config"))
    rows = _lines(directory / "metrics.jsonl", remarks)
    events = [
        row
        for row in _lines(directory / "events.jsonl", remarks)
        if isinstance(row.get("event"), str)
    ]
    tables = {
        int(path.stem[5:]): _row(_json(path, []))
        for path in sorted((directory / "evaluations").glob("step_??????.json"))
    }
    return RunData(
        name=str(config.get("name") or directory.name),
        config=config,
        versions=_row(root.get("versions")),
        iterations=_newest_of(row for row in rows if row.get("kind") == "iteration"),
        evaluations=_same_weights(
            _newest_of(row for row in rows if row.get("kind") == "evaluation")
        ),
        events=sorted(events, key=lambda event: finite_or_none(event.get("time")) or 0.0),
        images=find_images(directory / "images"),
        held_out={step: _grid(table.get("rewards")) for step, table in tables.items()},
        scores={
            step: {label: _grid(rows) for label, rows in _row(table.get("scores")).items()}
            for step, table in tables.items()
        },
        quantization=_modules(directory, remarks),
        spans=read_spans(directory / TIMELINE, remarks),
        remarks=remarks,
        prompts={
            key: table for key, table in _row(root.get("prompts")).items() if isinstance(table, str)
        },
        extremes=find_extremes(directory / "images"),
    )


def step_of(row: Row) -> int:
    """Return the iteration of a row; ``read_run`` leaves out rows that have none."""
    return int(finite_or_none(row.get("iteration")) or 0)


def mean_in(row: Row, name: str, error: str) -> Mean:
    """Return a mean of the row and its standard error, NaN for missing values."""
    return Mean(or_nan(row.get(name)), or_nan(row.get(error)), 0)


def held_out_reward(row: Row) -> Mean:
    """Return the held-out reward of an evaluation."""
    return mean_in(row, "reward/eval_mean", "eval/stderr")


def points(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    """Return (iteration, value) of every row, NaN if missing; or [] if no row has a value."""
    pairs = [(float(step_of(row)), or_nan(row.get(name))) for row in rows]
    return pairs if any(math.isfinite(y) for _, y in pairs) else []


def values(rows: Sequence[Row], name: str) -> list[float]:
    """Return the finite values of ``name``."""
    return [value for row in rows if (value := finite_or_none(row.get(name))) is not None]


def reason(event: Row) -> str:
    """Return the reason that an event gives, or else all of its fields as text."""
    fields = (f"{key} {value}" for key, value in event.items() if key not in ("time", "event"))
    return str(event.get("why") or ", ".join(fields))


def actor_of(event: Row) -> str | None:
    """Return the actor that an event is about, such as ``rollout-1``, or None."""
    actor = event.get("actor")
    return None if actor is None else f"{event.get('kind')}-{actor}"


def _modules(directory: Path, remarks: list[str]) -> list[Row]:
    """Return the rows of ``quantization.json``.

    Older runs spell the file and its key "quantised"; the returned rows use the current key.
    """
    for file, key in (("quantization.json", "quantized"), ("quantisation.json", "quantised")):
        if exists(directory / file):
            table = _json(directory / file, remarks)
            rows = [row for row in map(_row, table) if row] if isinstance(table, list) else []
            return [{**row, "quantized": row.get(key)} for row in rows]
    return []


def _json(path: Path, remarks: list[str]) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        remarks.append(f"{path.name} is missing")
    except (ValueError, OSError, RecursionError) as error:
        remarks.append(f"{path.name} cannot be read ({error})")
    return None


def _lines(path: Path, remarks: list[str]) -> list[Row]:
    """Return the rows of a JSON-lines file.

    Invalid lines are counted in a remark, except an unfinished last line, which may still be being
    written.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        remarks.append(f"{path.name} cannot be read ({error})")
        return []
    rows, bad = [], 0
    for line in text.splitlines(keepends=True):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            bad += line.endswith("\n")
            continue
        if isinstance(row, dict):
            rows.append(row)
        else:
            bad += 1
    if bad:
        remarks.append(
            f"{path.name}: {bad} line{'s' if bad != 1 else ''} could not be read and"
            f" {'are' if bad != 1 else 'is'} ignored"
        )
    return rows


def _newest_of(rows: Iterable[Row]) -> list[Row]:
    """Return the last written row of each iteration, in ascending order."""
    newest = {
        index: row for row in rows if (index := finite_or_none(row.get("iteration"))) is not None
    }
    return [newest[index] for index in sorted(newest)]


def _same_weights(rows: list[Row]) -> list[Row]:
    """Keep evaluations of the base and of the same kind of weights as the newest evaluation.

    Others cannot be compared with it.
    """
    kind = rows[-1].get("weights") if rows else None
    return [row for row in rows if row.get("weights") in (kind, "base")]


def _row(value: object) -> Row:
    """Return ``value`` if it is a JSON object, or else an empty one."""
    return value if isinstance(value, dict) else {}


def _grid(value: object) -> Grid:
    """Return ``value`` as a table of numbers, or [] if it is not a table."""
    if not isinstance(value, list) or not all(isinstance(row, list) for row in value):
        return []
    return [[or_nan(cell) for cell in row] for row in value]


def or_nan(found: object) -> float:
    """Return ``found`` if it is a finite number, or else NaN."""
    value = finite_or_none(found)
    return math.nan if value is None else value

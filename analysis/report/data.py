"""A run directory as the report reads it: tolerant of what is missing, cut or not a number."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from analysis.compare.statistics import Mean
from records.extremes import KeptIteration, find_extremes
from records.images import RunImages, find_images
from records.rundir import finite
from records.timeline import FILE as TIMELINE
from records.timeline import Span, read_spans

Row = dict[str, object]
Grid = list[list[float]]
"""Values [prompt][noise] of one evaluation, NaN where there is none."""
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
    """What a report is made of; ``held_out`` rewards and ``scores`` by iteration."""

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
        """finished, failed, stopped, or open: no end was recorded."""
        names = [str(event["event"]) for event in self.events]
        ends = [ENDINGS[name] for name in names if name in ENDINGS]
        return ends[-1] if ends else "open"

    @property
    def before(self) -> Row | None:
        """The evaluation before training, or the first there is."""
        return self.evaluations[0] if self.evaluations else None

    @property
    def after(self) -> Row | None:
        """The newest evaluation after ``before``."""
        return self.evaluations[-1] if len(self.evaluations) > 1 else None

    @property
    def paired_gain(self) -> Mean:
        """Held-out reward after training less that before, paired by prompt and seed; NaN where it
        is not known.
        """
        return mean_in(self.after or {}, "eval/gain", "eval/gain_stderr")

    @property
    def gain(self) -> Mean:
        """The paired gain, or else the difference of the two means."""
        gain = self.paired_gain
        if math.isfinite(gain.mean) or self.before is None or self.after is None:
            return gain
        start, end = held_out_reward(self.before), held_out_reward(self.after)
        return Mean(end.mean - start.mean, gain.error, 0)

    def prompt_means(self, row: Row | None) -> list[float]:
        """Mean held-out reward of each prompt in an evaluation, NaN where none was scored."""
        rewards = self.held_out.get(step_of(row), []) if row else []
        kept = [[value for value in noises if math.isfinite(value)] for noises in rewards]
        return [math.fsum(noises) / len(noises) if noises else math.nan for noises in kept]

    def last_event(self, *names: str) -> Row | None:
        """The newest event of one of these names."""
        return next((event for event in reversed(self.events) if event["event"] in names), None)

    def setting(self, path: str, otherwise: object = None) -> object:
        """A value of the configuration by dotted path."""
        value: object = self.config
        for key in path.split("."):
            if not isinstance(value, dict) or key not in value:
                return otherwise
            value = value[key]
        return value


def read_run(directory: Path) -> RunData:
    """Read ``directory``; what is missing is a gap. FileNotFoundError: no run directory."""
    files = ("config.json", "metrics.jsonl", "events.jsonl")
    if not any((directory / name).is_file() for name in files):
        raise FileNotFoundError(
            f"{directory} is no run directory: it has none of {', '.join(files)}; give"
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
        events=sorted(events, key=lambda event: finite(event.get("time")) or 0.0),
        images=find_images(directory / "images"),
        held_out={step: _grid(found.get("rewards")) for step, found in tables.items()},
        scores={
            step: {label: _grid(rows) for label, rows in _row(found.get("scores")).items()}
            for step, found in tables.items()
        },
        quantization=_modules(directory, remarks),
        spans=read_spans(directory / TIMELINE, remarks),
        remarks=remarks,
        prompts={
            key: found for key, found in _row(root.get("prompts")).items() if isinstance(found, str)
        },
        extremes=find_extremes(directory / "images"),
    )


def step_of(row: Row) -> int:
    """The row's iteration; rows without one are left out when a run is read."""
    return int(finite(row.get("iteration")) or 0)


def mean_in(row: Row, name: str, error: str) -> Mean:
    """A mean of the row and its standard error, NaN for what it does not have."""
    return Mean(or_nan(row.get(name)), or_nan(row.get(error)), 0)


def held_out_reward(row: Row) -> Mean:
    """The held-out reward of an evaluation."""
    return mean_in(row, "reward/eval_mean", "eval/stderr")


def points(rows: Sequence[Row], name: str) -> list[tuple[float, float]]:
    """(iteration, value) of every row, NaN where it has none; nothing when no row has one."""
    found = [(float(step_of(row)), or_nan(row.get(name))) for row in rows]
    return found if any(math.isfinite(y) for _, y in found) else []


def values(rows: Sequence[Row], name: str) -> list[float]:
    """The finite values of ``name``."""
    return [value for row in rows if (value := finite(row.get(name))) is not None]


def reason(event: Row) -> str:
    """Why, in the words of the event, else all that it says."""
    fields = (f"{key} {value}" for key, value in event.items() if key not in ("time", "event"))
    return str(event.get("why") or ", ".join(fields))


def actor_of(event: Row) -> str | None:
    """The actor that an event is about: ``rollout-1``."""
    actor = event.get("actor")
    return None if actor is None else f"{event.get('kind')}-{actor}"


def _modules(directory: Path, remarks: list[str]) -> list[Row]:
    """Rows of ``quantization.json``; both names were spelled otherwise before."""
    for file, key in (("quantization.json", "quantized"), ("quantisation.json", "quantised")):
        if (directory / file).exists():
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
    """Rows of a JSON-lines file; bad lines are counted, except a last one that is being written."""
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
            f" {'are' if bad != 1 else 'is'} left out"
        )
    return rows


def _newest_of(rows: Iterable[Row]) -> list[Row]:
    """One row per iteration, the one written last, by rising iteration."""
    newest = {index: row for row in rows if (index := finite(row.get("iteration"))) is not None}
    return [newest[index] for index in sorted(newest)]


def _same_weights(rows: list[Row]) -> list[Row]:
    """Only evaluations of the base and of the newest one's weights: others cannot be compared."""
    kind = rows[-1].get("weights") if rows else None
    return [row for row in rows if row.get("weights") in (kind, "base")]


def _row(found: object) -> Row:
    """An object of JSON; empty where it is something else."""
    return found if isinstance(found, dict) else {}


def _grid(found: object) -> Grid:
    """A table of numbers as it was written; empty when it is none."""
    if not isinstance(found, list) or not all(isinstance(row, list) for row in found):
        return []
    return [[or_nan(cell) for cell in row] for row in found]


def or_nan(found: object) -> float:
    """A finite number, or NaN."""
    value = finite(found)
    return math.nan if value is None else value

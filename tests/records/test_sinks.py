"""Every row goes to every sink, and missing packages are reported before a run starts.

The files for viewers are read back.
"""

from __future__ import annotations

import importlib.util
import io
import json
import math
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from configs.load import ConfigError, load
from configs.schema import RunConfig
from records import sinks
from records.extremes import Extreme, sheet
from records.images import read_image
from records.rundir import RunDirectory
from records.sinks import Sinks, caption, check_sinks, numbers

ROWS: list[dict[str, Any]] = [
    {
        "kind": "evaluation",
        "iteration": 0,
        "weights": "ema",
        "reward/eval_mean": 0.25,
        "eval/gain": None,
    },
    {
        "kind": "iteration",
        "iteration": 0,
        "reward/train_mean": 0.5,
        "samples_seen": 96,
        "audit/kendall_tau": math.nan,
        "staleness": True,
    },
    {"kind": "iteration", "iteration": 1, "reward/train_mean": 0.75, "samples_seen": 192},
]


SHOWN = [
    Extreme(0, "a dot", "regenerated", "best", 3, 0.75, np.full((3, 8, 8), 40, np.uint8)),
    Extreme(0, "a dot", "regenerated", "worst", 5, 0.25, np.full((3, 8, 8), 90, np.uint8)),
]


def made(
    tmp_path: Path, *options: str
) -> tuple[RunConfig, RunDirectory, list[tuple[str, dict[str, Any]]]]:
    config = load("quickstart", [f"run_root={tmp_path}", *options])
    rundir = RunDirectory.of(config)
    rundir.create(config)
    return config, rundir, []


def feed(config: RunConfig, rundir: RunDirectory, events: list[tuple[str, dict[str, Any]]]) -> None:
    given = Sinks(config, rundir, lambda name, **fields: events.append((name, fields)))
    for row in ROWS:
        given.row(row)
    given.images(1, SHOWN)
    given.close()


def test_sinks_get_the_numbers_of_a_row():
    assert dict(numbers(ROWS[0])) == {"reward/eval_mean": 0.25}
    assert dict(numbers(ROWS[1])) == {"reward/train_mean": 0.5, "samples_seen": 96.0}


def test_without_options_only_metrics_jsonl_is_written(tmp_path):
    config, rundir, events = made(tmp_path)
    feed(config, rundir, events)
    rows = rundir.metrics()
    assert [row["kind"] for row in rows] == ["evaluation", "iteration", "iteration"]
    assert rows[1]["audit/kendall_tau"] is None
    assert {path.name for path in rundir.path.iterdir()} == {
        "checkpoints",
        "images",
        "config.json",
        "metrics.jsonl",
    }
    assert events == []


def test_an_undeclared_metric_is_reported_once_and_written(tmp_path):
    config, rundir, events = made(tmp_path)
    sinks = Sinks(config, rundir, lambda name, **fields: events.append((name, fields)))
    for _ in range(2):
        sinks.row({"kind": "iteration", "iteration": 0, "loss/odd": 0.5, "reward/shapes/colour": 1})
    assert [(name, fields["metric"]) for name, fields in events] == [
        ("metric_undeclared", "loss/odd")
    ]
    assert rundir.metrics()[1]["loss/odd"] == 0.5


def test_tensorboard_reads_back_the_metrics(tmp_path):
    pytest.importorskip(
        "tensorboard", reason="tensorboard is not installed: pip install '.[tensorboard]'"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, rundir, events = made(tmp_path, "logging.tensorboard=true")
    feed(config, rundir, events)
    found = EventAccumulator(str(rundir.path / "tensorboard"))
    found.Reload()
    scalars = {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }
    assert scalars == {
        "reward/eval_mean": [(0, 0.25)],
        "reward/train_mean": [(0, 0.5), (1, 0.75)],
        "samples_seen": [(0, 96.0), (1, 192.0)],
    }
    assert len(rundir.metrics()) == 3 and events == []
    (image,) = found.Images("images/best_and_worst")
    shown = np.asarray(Image.open(io.BytesIO(image.encoded_image_string))).transpose(2, 0, 1)
    assert image.step == 1 and np.array_equal(shown, sheet(SHOWN))


def test_weights_and_biases_records_offline(tmp_path, monkeypatch):
    """The package's own reader reads the file back."""
    pytest.importorskip("wandb", reason="wandb is not installed: pip install '.[wandb]'")
    # settings of the configuration take precedence over the environment's
    monkeypatch.setenv("WANDB_MODE", "online")
    config, rundir, events = made(tmp_path, 'logging.wandb="offline"')
    feed(config, rundir, events)
    assert events == []
    (record,) = (rundir.path / "wandb").glob("offline-run-*/run-*.wandb")
    until = time.monotonic() + 20  # another process writes, which a busy machine may delay
    while len(rows := history(record)) < 4 and time.monotonic() < until:
        time.sleep(0.05)
    assert [row["iteration"] for row in rows] == [0, 0, 1, 1]
    assert [row.get("reward/train_mean") for row in rows] == [None, 0.5, 0.75, None]
    (media,) = record.parent.glob("files/media/images/**/*.png")
    assert np.array_equal(read_image(media), sheet(SHOWN))
    assert caption(SHOWN) == "a dot: best regenerated 0.75; worst regenerated 0.25"
    assert rows[0]["reward/eval_mean"] == 0.25 and rows[2]["samples_seen"] == 192


def history(file: Path) -> list[dict[str, Any]]:
    """Return the logged rows of an offline run."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append({key: value for key, value in items.items() if not key.startswith("_")})
    return rows


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log with a header of 7 bytes.

    It has blocks of 32 KiB of chunks (crc, length, kind); kind 1 is whole, 2 to 4 are parts.
    """
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):  # still being written
            return
        parts = (
            data[at + 7 : at + 7 + length]
            if kind in (1, 2)
            else parts + data[at + 7 : at + 7 + length]
        )
        at += 7 + length
        if kind in (1, 4):
            yield parts


@pytest.mark.parametrize(("field", "value"), [("tensorboard", "true"), ("wandb", '"offline"')])
def test_a_missing_package_is_one_line_before_anything_starts(monkeypatch, field, value):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == field else found(name, *more),
    )
    check_sinks(load("quickstart"))
    with pytest.raises(ConfigError) as recorded:
        check_sinks(load("quickstart", [f"logging.{field}={value}"]))
    (line,) = recorded.value.lines
    assert line.startswith(f"logging.{field} = {value}: missing package '{field}': pip install")
    assert f".[{field}]" in line


def test_a_failed_sink_is_dropped_and_the_others_continue(tmp_path, monkeypatch):
    class Breaks:
        name = "tensorboard"

        def __init__(self, rundir: RunDirectory):
            self.rows = 0

        def row(self, row: sinks.Row) -> None:
            self.rows += 1
            if self.rows == 2:
                raise ValueError("no room\nand more")

        def close(self) -> None:
            raise AssertionError("it was left out before")

    monkeypatch.setattr(sinks, "TensorBoard", Breaks)
    config, rundir, events = made(tmp_path, "logging.tensorboard=true")
    feed(config, rundir, events)
    assert events == [("sink_failed", {"sink": "tensorboard", "why": "ValueError: no room"})]
    assert len(rundir.metrics()) == 3


def test_a_file_that_cannot_be_written_ends_the_run(tmp_path):
    config, rundir, _ = made(tmp_path)
    rundir.metrics_file.mkdir()
    with pytest.raises(IsADirectoryError):
        Sinks(config, rundir, lambda name, **fields: None).row(ROWS[0])

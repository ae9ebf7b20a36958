"""Damaged records of a run are skipped, and dropped when the run resumes."""

import json

import numpy as np
import pytest

from records.images import before_after, find_images, save_images
from records.rundir import RunDirectory, finite_or_none
from records.timeline import FILE, Span, read_spans


def test_invalid_rows_are_skipped_and_removed(tmp_path):
    rundir = RunDirectory(tmp_path)
    rows = [
        {"kind": "iteration", "iteration": 0},
        {"kind": "evaluation", "iteration": 1},
        {"kind": "iteration", "iteration": 1},
        {"kind": "iteration"},
        {"kind": "iteration", "iteration": None},
    ]
    lines = [*map(json.dumps, rows), "[1]", '{"cut', "3"]
    rundir.metrics_file.write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    assert rundir.metrics() == rows
    events = [{"event": "a", "time": 1}, {"event": "b"}, {"event": "c", "time": 9}]
    rundir.events_file.write_text("\n".join(map(json.dumps, events)))
    rundir.truncate(1, 5.0)
    assert rundir.metrics() == rows[:2]
    assert rundir.events() == events[:1]


def test_a_number_with_too_many_digits_is_missing():
    assert finite_or_none(10**400) is None and finite_or_none(-(10**308)) == -1e308


def test_images_of_other_prompts_are_refused(tmp_path):
    """The image of a model card used to be drawn by file names, of which there may be others."""
    for step in (0, 2):
        save_images(tmp_path, step, ["a cat"], np.zeros((1, 1, 3, 8, 8), np.uint8))
    (tmp_path / "prompts.json").write_text('[{"index": 7, "prompt": "a dog"}]')
    alone = before_after(tmp_path)
    (tmp_path / "prompts.json").write_text(f'[{{"index": {10**400}, "prompt": "a dog"}}]')
    assert find_images(tmp_path).sources == {}  # no file has such a name
    (tmp_path / "prompts.json").unlink()
    (tmp_path / "prompts.json").mkdir()
    assert find_images(tmp_path).prompts == {0: "prompt 0"}
    assert before_after(tmp_path).size == alone.size
    (tmp_path / "step_000002" / "0_0.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(OSError):
        before_after(tmp_path)


@pytest.mark.parametrize("field", ["attempt", "actor", "started", "work", "version", "unit"])
def test_a_span_with_wrong_types_is_skipped(tmp_path, field):
    """The report adds attempts and draws times."""
    span = Span("rollout", 0, 0, "explore", (0, 1), 3, 0, 1.0, 2.0, "done")
    row = span._asdict()
    (tmp_path / FILE).write_text(f"{json.dumps(row)}\n{json.dumps(row | {field: [[]]})}\n")
    assert read_spans(tmp_path / FILE) == [span]

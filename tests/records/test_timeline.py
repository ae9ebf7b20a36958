"""The timeline: its lines for every task, reading them, and its charts."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.calls import Task
from actors.messages import ChunkKey
from analysis.report.data import read_run
from analysis.report.events import running_times, timeline_of
from analysis.report.service_lanes import Lane
from analysis.report.timeline import Chart, in_running_time, last_iteration
from analysis.report.tracks import bars_of
from cluster.driver.session import Session
from cluster.runtime.pool import ActorPool
from configs.load import load
from configs.prompts import Prompt
from records import timeline as records_timeline
from records.rundir import RunDirectory
from records.timeline import OTHER, WORKS, Span, Timeline, read_spans, remove_after, span_of
from tests.analysis.page import page_of
from tests.analysis.synthetic import START, write_run
from tests.cluster.echo import Echo, Pool
from tools.cluster_demo.timeline import LETTERS, lines_of, strip


def span(
    work: str,
    started: float,
    ended: float,
    service: str = "rollout",
    actor: int = 0,
    outcome: str = "done",
    **more,
) -> Span:
    return Span(
        service,
        actor,
        0,
        work,
        more.get("unit", ()),
        more.get("version"),
        0,
        started,
        ended,
        outcome,
    )


@pytest.mark.parametrize(
    ("key", "work", "unit", "version"),
    [
        (ChunkKey(3, 1, 2, 5), "explore", (3, 1, 2), 5),
        (("score", ChunkKey(3, 1, 2, 5)), "score", ("explore", 3, 1, 2), None),
        (("score", ("regenerate", 3, 1)), "score", ("regenerate", 3, 1), None),
        (("update", 7), "update", (7,), None),
        (("quantization",), "quantization", (), None),
        ("odd", "odd", (), None),
        ((), "?", (), None),
    ],
)
def test_a_span_is_named_by_its_key(key, work, unit, version):
    found = span_of("learner", 0, 1, key, 2, 1.00004, 2.0, "done")
    assert (found.work, found.unit, found.version, found.attempt, found.incarnation) == (
        work,
        unit,
        version,
        2,
        1,
    )
    assert (found.started, found.ended) == (1.0, 2.0)


def test_spans_are_read_back_and_damaged_lines_skipped(tmp_path):
    file = tmp_path / "timeline.jsonl"
    spans = [
        span("update", 5.0, 7.0, "learner"),
        span("explore", 1.0, 2.5, unit=(0, 1, 2), version=4),
    ]
    timeline = Timeline(file)
    for each in spans:
        timeline.record(each)
    timeline.write()
    with file.open("a") as out:
        out.write(
            '[]\n{"service": 1}\n'
            + json.dumps({**json.loads(file.read_text().splitlines()[0]), "ended": 4.0})
            + '\n{"serv'
        )
    assert read_spans(file) == [spans[1], spans[0]]
    remove_after(file, 3.0)
    assert read_spans(file) == [spans[1]]
    assert read_spans(tmp_path / "none") == []


@pytest.mark.parametrize("block", [1, 150, 400, 1000, 1 << 20])
@given(
    ends=st.lists(st.integers(0, 20), max_size=30).map(sorted),
    lasted=st.lists(st.integers(0, 9), min_size=30, max_size=30),
    damaged=st.sets(st.integers(0, 29)),
    moment=st.integers(-1, 21),
    complete=st.booleans(),
)
@settings(max_examples=60)
def test_exactly_the_later_spans_are_removed_from_a_timeline(
    block, ends, lasted, damaged, moment, complete
):
    """Whatever the size of a block, which may be shorter than a line, and the damage."""
    spans = [
        span("score", max(0, end - took), end) for end, took in zip(ends, lasted, strict=False)
    ]
    lines = [json.dumps(each._asdict()) for each in spans]
    for number in damaged & set(range(len(lines))):
        lines[number] = "x" * (number * 40) + "{"
    whole = [each for number, each in enumerate(spans) if number not in damaged]
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        patch.setattr("records.timeline.BLOCK_BYTES", block)
        file = Path(scratch) / "timeline.jsonl"
        file.write_text("\n".join(lines) + "\n" * complete)
        remove_after(file, moment)
        kept = [each for each in whole if each.started <= moment]
        assert read_spans(file) == sorted(kept, key=lambda each: each.started)
        timeline, late = Timeline(file), span("update", 30, 31)
        timeline.record(late)
        assert read_spans(file)[-1] == late and len(read_spans(file)) == len(kept) + 1


def test_the_lines_of_a_long_run_are_not_parsed_when_it_is_resumed(tmp_path, monkeypatch):
    file, parsed = tmp_path / "timeline.jsonl", []
    rows = [json.dumps(span("score", end - 1.0, end)._asdict()) + "\n" for end in range(1, 5001)]
    file.write_text("".join(rows))
    real = records_timeline._parsed
    monkeypatch.setattr("records.timeline._parsed", lambda line: parsed.append(1) or real(line))
    monkeypatch.setattr("records.timeline.BLOCK_BYTES", 10 * len(rows[-1]))
    remove_after(file, 4900.0)
    assert file.read_text() == "".join(rows[:4901])
    assert len(parsed) < 300


def test_a_long_timeline_loses_its_oldest_lines(tmp_path, monkeypatch):
    file, length = tmp_path / "timeline.jsonl", 0
    rows = [json.dumps(span("score", end - 1.0, end)._asdict()) + "\n" for end in range(1001, 1100)]
    (size,) = {len(row) for row in rows}
    monkeypatch.setattr(records_timeline, "MAX_FILE_BYTES", 20 * size)
    monkeypatch.setattr(records_timeline, "KEPT_BYTES", 12 * size + 1)
    for number, row in enumerate(rows):
        records_timeline.append(file, row)
        length = 12 if length == 20 else length + 1
        assert file.read_text() == "".join(rows[number + 1 - length : number + 1])
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.jsonl"]


def test_the_report_says_that_a_long_timeline_is_not_whole(tmp_path, monkeypatch):
    """Also just after its oldest lines were removed."""
    assert records_timeline.KEPT_BYTES > records_timeline.MAX_READ_BYTES
    file, remarks = tmp_path / "timeline.jsonl", list[str]()
    row = json.dumps(span("score", 1.0, 2.0)._asdict()) + "\n"
    for name, rows in (("MAX_FILE_BYTES", 20), ("KEPT_BYTES", 12), ("MAX_READ_BYTES", 10)):
        monkeypatch.setattr(records_timeline, name, rows * len(row))
    records_timeline.append(file, 21 * row)
    assert len(read_spans(file, remarks)) in (9, 10) and len(remarks) == 1


def test_the_timeline_of_a_run_has_the_limit(tmp_path, monkeypatch):
    config = load("quickstart", [f"run_root={str(tmp_path)!r}"])
    rundir = RunDirectory.of(config)
    rundir.create(config)
    timeline = Session(config, rundir, [Prompt("a")], [Prompt("b")])._timeline
    size = len(json.dumps(span("score", 1.0, 2.0)._asdict())) + 1
    for name, rows in (("MAX_FILE_BYTES", 5), ("KEPT_BYTES", 3)):
        monkeypatch.setattr(records_timeline, name, rows * size)
    for _ in range(8):
        timeline.record(span("score", 1.0, 2.0))
        timeline.write()
    assert rundir.timeline_file.stat().st_size <= 5 * size and not rundir.events()


def test_old_kinds_of_work_have_their_current_names(tmp_path):
    file = tmp_path / "timeline.jsonl"
    file.write_text(json.dumps(span("chunk", 5.0, 7.0, "learner")._asdict()) + "\n")
    (found,) = read_spans(file)
    assert found == span("shard", 5.0, 7.0, "learner") and found.display == WORKS["export"]


def test_the_lines_of_a_second_are_written_together(tmp_path, monkeypatch):
    """They are in order; the file is opened once for all of them, and once for the first span."""
    now, opened = [1e6], []
    monkeypatch.setattr("records.timeline.time.monotonic", lambda: now[0])
    real = type(tmp_path).open

    def counted(path, mode, **named):
        opened.append(mode)
        return real(path, mode, **named)

    monkeypatch.setattr(type(tmp_path), "open", counted)
    timeline, spans = Timeline(tmp_path / "timeline.jsonl"), []
    for number in range(40):
        now[0] += 0.06
        spans.append(span("score", number, number + 1.0))
        timeline.record(spans[-1])
    assert opened == ["ab"] * 3
    timeline.write()
    timeline.write()
    assert opened == ["ab"] * 4 and read_spans(tmp_path / "timeline.jsonl") == spans


def test_a_full_disk_ends_the_timeline_and_nothing_else(tmp_path):
    recorded: list[str] = []
    timeline = Timeline(tmp_path / "no such directory" / "timeline.jsonl", recorded.append)
    timeline.record(span("explore", 1, 2))
    assert timeline.problem and "training continues" in timeline.problem
    timeline.record(span("explore", 1, 2))
    timeline.write()
    assert recorded == ["No such file or directory"]


def test_a_pool_records_every_attempt_in_order(ray_here, tmp_path):
    """Twelve tasks of 0.05 s on two actors with two slots each, and one that kills the actor that
    takes it first.
    """
    harness, died = Pool(2, in_flight=2), str(tmp_path / "died")

    async def work(pool: ActorPool) -> None:
        units = [pool.call(Task(("unit", i)), Echo.double, i, 0.05) for i in range(12)]
        await asyncio.gather(*units, pool.call(Task(("fatal", 0)), Echo.fatal, died, 0))

    harness.run(work)
    spans = harness.spans
    done = [each for each in spans if each.outcome == "done"]
    assert sorted(each.unit[0] for each in done if each.work == "unit") == list(range(12))
    lost = [each for each in spans if each.outcome == "lost"]
    (fatal,) = [each for each in lost if each.work == "fatal"]
    (again,) = [each for each in done if each.work == "fatal"]
    assert (fatal.attempt, again.attempt) == (0, 1) and again.started >= fatal.ended
    for actor in (0, 1):
        mine = sorted((each for each in spans if each.actor == actor), key=lambda each: each.ended)
        assert all(
            before.ended <= after.started for before, after in zip(mine, mine[1:], strict=False)
        )
    first = [each for each in done if each.work == "unit" and each.attempt == 0]
    # summed: if the driver notices an end late, the next task seems shorter by as much
    assert sum(each.ended - each.started for each in first) >= 0.045 * len(first)


def test_a_run_records_every_task_once(undisturbed: RunDirectory):
    """3 iterations of 2 prompts with 4 chunks each, 2 evaluations of 8 images in blocks of 4,
    versions 0 to 3.
    """
    spans = read_spans(undisturbed.timeline_file)
    assert {each.outcome for each in spans} == {"done"}
    explored = sorted(each.unit for each in spans if each.work == "explore")
    assert explored == [(i, p, c) for i in range(3) for p in range(2) for c in range(4)]
    assert all(
        each.version == each.unit[0] and each.service == "rollout"
        for each in spans
        if each.work == "explore"
    )
    assert sorted(each.unit for each in spans if each.work == "regenerate") == [
        (i, p) for i in range(3) for p in range(2)
    ]
    assert [each.unit for each in spans if each.work == "update"] == [(0,), (1,), (2,)]
    assert sum(each.work == "score" and each.unit[0] == "explore" for each in spans) == 24
    # every version goes to both rollout actors
    assert sum(each.work == "load" for each in spans) == 4 * 2
    updates = [each for each in spans if each.work == "update"]
    assert all(
        e.ended <= updates[e.unit[0]].started for e in spans if e.work in ("explore", "regenerate")
    )
    page = page_of(undisturbed.path)
    assert "The last iteration" in page.text and "regenerate" in page.text


# ---- the chart


def test_equal_adjacent_spans_are_joined():
    spans = [
        span("explore", 0, 1),
        span("explore", 1.05, 2),
        span("explore", 2.5, 3),
        span("load", 3, 3.5),
        span("explore", 3.5, 4),
        span("explore", 4, 5, outcome="lost"),
    ]
    bars = bars_of(spans, gap=0.1)
    assert [(bar.start, bar.stop, bar.count) for bar in bars] == [
        (0, 2, 2),
        (2.5, 3, 1),
        (3, 3.5, 1),
        (3.5, 4, 1),
        (4, 5, 1),
    ]


def test_the_last_iteration_lies_between_two_updates():
    assert last_iteration([span("update", 4, 6, "learner")]) is None
    spans = [
        span("update", 4, 6, "learner"),
        span("update", 9, 11, "learner"),
        span("update", 14, 15, "learner", outcome="lost"),
    ]
    assert last_iteration(spans) == (6, 11)


def test_the_pause_before_a_resume_takes_no_time():
    """It ran from 100 to 110 and resumed at 500: second 3 of the second part is second 13 of the
    run.
    """
    moments, times = [100.0, 110.0, 500.0, 520.0], [0.0, 10.0, 10.0, 30.0]
    moved = in_running_time([span("explore", 104, 106), span("explore", 503, 504)], moments, times)
    assert [(each.started, each.ended) for each in moved] == [(4, 6), (13, 14)]


def write_timeline(run: Path) -> list[Span]:
    """Write a timeline: rollout actors at work in ten iterations of 10.8 s, each followed by an
    update.

    One chunk is lost with its actor.
    """
    spans = []
    for i in range(20):
        began = START + 3.2 + 10.8 * i
        spans += [
            span(
                "explore",
                began + 2 * c,
                began + 2 * c + 1.9,
                actor=actor,
                unit=(i, c, 0),
                version=i,
            )
            for c in range(3)
            for actor in (0, 1)
        ]
        spans += [
            span(
                "score", began + 2 * c + 2, began + 2 * c + 2.4, "reward", unit=("explore", i, c, 0)
            )
            for c in range(3)
        ]
        spans.append(span("regenerate", began + 6.1, began + 7.2, "learner", unit=(i, 0)))
        spans.append(span("update", began + 7.2, began + 10.4, "learner", unit=(i,)))
    spans.append(
        span(
            "explore",
            START + 80.2,
            START + 80.8,
            actor=1,
            unit=(7, 2, 1),
            version=7,
            outcome="lost",
        )
    )
    timeline = Timeline(run / "timeline.jsonl")
    for each in spans:
        timeline.record(each)
    timeline.write()
    return spans


def test_the_report_contains_the_timeline(tmp_path):
    run = write_run(tmp_path / "run")
    spans = write_timeline(run)
    data = read_run(run)
    shown = timeline_of(data, running_times(data.events))
    assert len(shown.spans) == len(spans) and shown.versions[0] == (pytest.approx(14.0), 1)
    page = page_of(run)
    text = (run / "report.html").read_text()
    titles = re.findall(r"<rect[^>]*><title>([^<]*)</title>", text)
    # the lost chunk, and each task of the last iteration: it begins where update 18 ends, at 3.2 +
    # 18 x 10.8 + 10.4 s
    assert "explore 7/2/1, version 7: 1 min 20 s to 1 min 21 s, lost" in titles
    assert [title.split(":")[0] for title in titles if title.startswith("update 19")] == [
        "update 19",
        "update 19",
    ]
    assert "The last iteration: 11 s, after 3 min 28 s" in page.text
    for work in ("explore", "score", "regenerate", "update"):
        assert work in page.text
    assert "update 1 min 04 s" in page.text  # 20 of 3.2 s
    lost = re.search(r'<rect class="lost" x="([\d.]+)"', text)
    end = shown.end
    assert lost and float(lost.group(1)) == pytest.approx(1000 * 80.2 / end, abs=0.1)
    assert "v1" in page.text and "v19" in page.text


def test_every_kind_of_work_has_its_own_color_and_letter():
    works = set(WORKS.values()) | {OTHER}
    assert len({work.colour for work in works}) == len(works)
    assert set(LETTERS) == {work.label for work in works}
    assert len(set(LETTERS.values())) == len(LETTERS)
    assert span("load", 0, 1, "learner").display == OTHER != span("load", 0, 1).display


def test_an_actor_is_drawn_in_a_terminal():
    """Ten slices of a second: exploring for three, idle, a load of 0.2 s that is too short to show,
    dead from 6 to 8.
    """
    lane = Lane(
        lives=[(0.0, 6.0), (8.0, 10.0)], marks=[(6.0, "bad", "died"), (8.0, "good", "replaced")]
    )
    spans = [
        span("explore", 0, 2),
        span("explore", 2, 3),
        span("load", 4.4, 4.6),
        span("explore", 9.0, 10.0),
    ]
    assert strip(spans, lane, 10.0, 10) == "eee···X ·e"
    timeline = Chart({"rollout-0": lane}, [], [(0.0, 0), (0.5, 1), (9.0, 2)], spans, 10.0)
    head, body, scale, words = lines_of(timeline, 20)
    assert head == "policy    v0                v2"  # version 1 has no room beside version 0
    assert body.startswith("rollout-0 eeeeee") and scale.split() == ["0", "5.0", "s", "10", "s"]
    assert words == "e explore  p publish  X died  · idle"

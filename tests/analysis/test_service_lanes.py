"""Lanes of runs with many actors: which are drawn, and the lane of a whole service."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.report.events import FEW, TOGETHER_S, like_events
from analysis.report.service_lanes import (
    BINS,
    HEIGHT,
    WIDTH,
    Lane,
    areas_of,
    chosen_lanes,
    merged_marks,
)
from analysis.report.timeline import Chart, drawing
from analysis.report.tracks import MOST_LANES, MOST_MARKS
from records.timeline import Span

MARK = (1.0, "bad", "actor died (killed)")


def span(work: str, actor: int, started: float, ended: float) -> Span:
    return Span("rollout", actor, 0, work, (0, 0, 0), 1, 0, started, ended, "done")


# ---- which lanes are drawn


def test_small_services_keep_their_lanes_and_actors_with_marks_go_first():
    lanes = {f"rollout-{n}": Lane() for n in range(100)}
    lanes |= {f"scorers.hps-{n}": Lane() for n in range(3)} | {"learner-0": Lane()}
    for n in (7, 98):
        lanes[f"rollout-{n}"].marks.append(MARK)
    rollout, scorer, learner = chosen_lanes(lanes, 10)
    assert (rollout.name, scorer.name, learner.name) == ("rollout", "scorers.hps", "learner")
    assert scorer.drawn == ["scorers.hps-0", "scorers.hps-1", "scorers.hps-2"]
    assert learner.drawn == ["learner-0"]
    assert rollout.drawn == ["rollout-0", "rollout-1", "rollout-2", "rollout-3"] + [
        "rollout-7",
        "rollout-98",
    ]
    assert rollout.actors == [f"rollout-{n}" for n in range(100)]


@given(
    st.dictionaries(st.sampled_from("abcdefg"), st.integers(1, 60), min_size=1), st.integers(8, 50)
)
def test_lanes_are_shared_between_services(sizes, most):
    """None is left while an actor has none, and a smaller service never has fewer for a larger."""
    lanes = {f"{service}-{n}": Lane() for service, size in sizes.items() for n in range(size)}
    drawn = {each.name: len(each.drawn) for each in chosen_lanes(lanes, most)}
    assert list(drawn) == list(sizes)
    assert sum(drawn.values()) == min(most, sum(sizes.values()))
    cut = [drawn[service] for service in sizes if drawn[service] < sizes[service]]
    whole = [drawn[service] for service in sizes if drawn[service] == sizes[service]]
    if cut:
        assert max(cut) - min(cut) <= 1 and max([0, *whole]) <= min(cut) + 1


# ---- the lane of a service


def heights(path: str) -> list[tuple[float, float]]:
    """Return the (height, end) of each step of the upper line of an area, in user units."""
    steps = [(float(y), float(x)) for y, x in re.findall(r"V([\d.]+)H([\d.]+)", path)]
    turn = next(at for at, (_, x) in enumerate(steps) if x == WIDTH)
    return [(HEIGHT - y, x) for y, x in steps[: turn + 1]]


def test_areas_are_the_numbers_of_actors_in_service_and_at_work():
    """At most three of four actors: one leaves after 50 of 100 s, one comes after 80.

    For 20 s two of them explore, and one of these scores until 50 s.
    """
    lanes = [Lane([(0.0, 100.0)]), Lane([(0.0, 100.0)]), Lane([(0.0, 50.0)])]
    lanes.append(Lane([(80.0, 100.0)]))
    spans = [span("explore", 0, 0.0, 20.0), span("explore", 1, 0.0, 20.0)]
    spans += [span("score", 1, 20.0, 50.0)]
    alive, explore, score = areas_of(lanes, spans, 0.0, 100.0)
    assert (alive.kind, alive.text) == ("in-service", "at most 3")
    assert heights(alive.path) == [(10.0, 500.0), (6.67, 800.0), (10.0, 1000.0)]
    assert (explore.kind, explore.text) == ("fill-1", "explore: 15 % of the time in service")
    assert heights(explore.path) == [(6.67, 200.0), (0.0, 1000.0)]
    assert (score.kind, score.text) == ("fill-5", "score: 11 % of the time in service")
    # on top of what is below it: two actors to 20 s, where only the line of exploring is
    assert heights(score.path) == [(6.67, 200.0), (3.33, 500.0), (0.0, 1000.0)]
    assert score.path.endswith("V10.00H200.0V3.33H0.0Z")


def test_a_part_of_a_bin_counts_in_part():
    width = 100.0 / BINS
    (alive, explore) = areas_of(
        [Lane([(0.0, 100.0)])], [span("explore", 0, width / 4, 2 * width)], 0.0, 100.0
    )
    step = WIDTH / BINS
    assert heights(explore.path) == [(7.5, step), (10.0, 2 * step), (0.0, WIDTH)]
    (alive, explore) = areas_of(
        [Lane([(0.0, 100.0)])], [span("explore", 0, width, 2.5 * width)], 0.0, 100.0
    )
    ends = [(0.0, step), (10.0, 2 * step), (5.0, 3 * step), (0.0, WIDTH)]
    assert heights(explore.path) == ends
    # a window that begins later cuts the span
    (alive, explore) = areas_of(
        [Lane([(0.0, 100.0)])], [span("explore", 0, 0.0, 75.0)], 50.0, 100.0
    )
    assert heights(explore.path) == [(10.0, WIDTH / 2), (0.0, WIDTH)]
    assert alive.text == "at most 1" and explore.text == "explore: 50 % of the time in service"


def test_marks_close_to_each_other_are_one():
    marks = [[(10.0, "bad", "actor died (killed)"), (40.0, "good", "actor replaced")]]
    marks += [[(10.5, "bad", "actor died (lost)")], [(10.9, "bad", "actor benched")]]
    marks += [[(11.5, "bad", "actor died (late)"), (10.2, "good", "actor added")]]
    assert merged_marks(marks, 1.0) == [
        (10.0, "bad", "2 × actor died, 1 × actor benched"),
        (10.2, "good", "actor added"),
        (11.5, "bad", "actor died (late)"),
        (40.0, "good", "actor replaced"),
    ]


def test_a_chart_of_many_actors_has_all_services_and_one_lane_for_the_largest():
    lanes = {f"rollout-{n}": Lane([(0.0, 10.0)]) for n in range(1000)} | {
        "reward-0": Lane([(0.0, 10.0)]),
        "learner-0": Lane([(0.0, 10.0)], [MARK]),
    }
    lanes["rollout-999"].marks.append(MARK)
    lanes["rollout-998"].marks += [(1.05, *MARK[1:]), (1.1, *MARK[1:])]
    spans = [span("explore", n, 0.0, 5.0) for n in range(1000)]
    (window,) = drawing(Chart(lanes, [], [], spans, 10.0)).windows
    names = [row.name for row in window.rows]
    assert names[:2] == ["rollout, all 1,000", "rollout-0"] and "rollout-999" in names
    assert names[-2:] == ["reward-0", "learner-0"]
    assert len(names) == MOST_LANES + 1 and window.hidden == 1002 - MOST_LANES
    whole = window.rows[0]
    assert [area.kind for area in whole.areas] == ["in-service", "fill-1"]
    assert [dot.text for dot in whole.marks] == [
        "1.0 s: 2 × actor died",
        "1.1 s: actor died (killed)",
    ]
    # 38 actors have lanes, and are few enough for none to stand for all
    few = {name: lane for name, lane in lanes.items() if name in names}
    (window,) = drawing(Chart(few, [], [], spans, 10.0)).windows
    assert [row.name for row in window.rows] == names[1:] and not window.hidden


def test_marks_of_the_last_iteration_are_shown_after_many_earlier_ones():
    """A mark just before the window is not merged with one in it."""
    earlier = [(0.1 * n, "bad", "actor died") for n in range(2 * MOST_MARKS)]
    lanes = {f"rollout-{n}": Lane([(0.0, 100.0)]) for n in range(MOST_LANES + 1)}
    lanes["rollout-0"].marks += [*earlier, (79.99, "bad", "actor died"), (80.1, "bad", "late")]
    lanes |= {"learner-0": Lane([(0.0, 100.0)])}
    updates = [
        span("update", 0, end - 1.0, end)._replace(service="learner", unit=(end,))
        for end in (80, 100)
    ]
    whole, last = drawing(Chart(lanes, [], [], updates, 100.0)).windows
    for row in last.rows[:2]:  # all rollout actors, and the first
        assert [dot.text for dot in row.marks] == ["1 min 20 s: late"]
    assert [dot.left for dot in last.rows[0].marks] == ["0.50"]
    assert len(whole.rows[0].marks) <= 100


# ---- the table of events


def test_many_like_events_are_one_row():
    died = [
        ({"event": "actor_died", "kind": "rollout", "actor": n}, 10.0 + 20 * n) for n in range(5)
    ]
    learner = ({"event": "actor_died", "kind": "learner", "actor": 0}, 10.5)
    added = [({"event": "actor_added", "kind": "rollout", "actor": n}, 20.0) for n in range(FEW)]
    later = [({"event": "actor_died", "kind": "rollout", "actor": 9}, 90.1 + TOGETHER_S)]
    pairs = sorted([*died, learner, *added, *later], key=lambda pair: pair[1])
    groups = like_events(pairs)
    assert groups == [died, [learner], *([one] for one in added), later]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 100)), max_size=60))
def test_every_event_is_in_one_row(drawn):
    pairs = [
        ({"event": name, "n": n}, when)
        for n, (name, when) in enumerate(sorted(drawn, key=lambda row: row[1]))
    ]
    groups = like_events(pairs)
    assert sorted(e["n"] for group in groups for e, _ in group) == list(range(len(pairs)))
    assert all(len(group) == 1 or len(group) > FEW for group in groups)
    firsts = [group[0][1] for group in groups]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize(
    ("count", "reasons", "why"),
    [
        (FEW, ["killed"], "killed"),
        (FEW + 1, ["killed"], "killed"),
        (FEW + 1, ["node lost", "no memory", "killed"], "2 × node lost; 2 other reasons"),
    ],
)
def test_the_row_of_many_events_has_what_they_share(tmp_path, count, reasons, why):
    """If their reasons differ, it has the most frequent one."""
    from analysis.report.data import read_run
    from analysis.report.events import events_section
    from tests.analysis.synthetic import write_run

    run = write_run(tmp_path / "run")
    events = run / "events.jsonl"
    last = max(float(t) for t in re.findall(r'"time": ([\d.]+)', events.read_text()))
    with events.open("a") as file:
        for n in range(count):
            file.write(
                f'{{"time": {last + n}, "event": "actor_died", "kind": "rollout", "actor": {n},'
                f' "pid": {n}, "node": "{"0123456789" * 5}", "host": "h",'
                f' "why": "{reasons[n % len(reasons)]}"}}\n'
            )
    section = events_section(read_run(run))
    assert section is not None
    rows = [[cell.text for cell in row] for row in section.notable.rows][-count:]
    shared = f"node 01234567 · host h · {why}"
    if count == FEW:
        assert rows[-1][1:] == ["actor died", "rollout-3", f"pid 3 · {shared}"]
    else:
        assert rows[-1][1:] == ["5 × actor died", "5 rollout actors", shared]
        assert rows[-1][0].count(" to ") == 1

"""The display of a running run: numbers, time left, and one line per iteration in a log."""

from __future__ import annotations

import io
import math
import os

import pytest
from rich.console import Console

from records.formatting import duration
from records.progress import Progress, status_spinner


class Clock:
    """A clock that tests move by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[Progress, io.StringIO, Clock]:
    file, clock = io.StringIO(), Clock()
    return Progress("run", console=Console(file=file), clock=clock), file, clock


def on_terminal(width: int = 100) -> tuple[Progress, Console, Clock]:
    clock = Clock()
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    return Progress("quickstart", clock=clock, console=console), console, clock


def run_iteration(
    progress: Progress, clock: Clock, i: int, reward: float, seconds: float = 10.0
) -> None:
    progress.iteration_started(i, 2, 48)
    for stage, n in (
        ("explored", 24),
        ("scored", 24),
        ("explored", 24),
        ("scored", 24),
        ("selected", 12),
        ("selected", 12),
    ):
        progress.advanced(stage, n)
    progress.advanced("regenerated", 24)
    progress.advanced("updated", 24)
    clock.now += seconds
    progress.advanced("published", 1)
    progress.iteration_finished(
        {
            "reward/train_mean": reward,
            "audit/kendall_tau": 0.614,
            "loss/kl": None,
            "weights/version": i + 1,
        }
    )


def shown(progress: Progress, console: Console) -> str:
    with console.capture() as capture:
        console.print(progress.render())
    return capture.get()


def test_a_log_gets_one_line_per_iteration_evaluation_and_note():
    progress, file, clock = plain()
    with progress:
        progress.starting(2)
        progress.actor_started()
        progress.start(3)
        progress.evaluation_finished(
            {"iteration": 0, "reward/eval_mean": 0.5, "eval/stderr": 0.0201}
        )
        run_iteration(progress, clock, 0, 0.4)
        run_iteration(progress, clock, 1, 0.55)
    lines = file.getvalue().splitlines()
    assert lines == [
        "starting actors",
        "held-out reward after 0 iterations: 0.500 ± 0.020",
        (
            "iteration 1/3  reward 0.400  explored 48, selected 24, regenerated 24, updated 24  tau"
            " 0.614  published v1  10 s  20 s left"
        ),
        (
            "iteration 2/3  reward 0.550 (at the start 0.400, +0.150)  explored 48, selected 24,"
            " regenerated 24, updated 24  tau 0.614  published v2  10 s  10 s left"
        ),
    ]


def test_a_terminal_counts_actors_and_seconds_until_training_starts():
    progress, console, clock = on_terminal()
    progress.starting(6)
    assert "starting actors: 0 of 6, 0.0 s" in shown(progress, console)
    progress.actor_started()
    progress.actor_started()
    clock.now += 4.2
    assert "starting actors: 2 of 6, 4.2 s" in shown(progress, console)
    progress.start(3)
    progress.actor_started()  # one that replaces a lost actor
    assert "starting actors" not in shown(progress, console)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_spinner_is_shown_on_terminals_only(terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=60)
    with status_spinner("starting Ray", console), console.capture() as seen:
        console.print("x" if not terminal else "")
    assert ("starting Ray" in console.file.getvalue() + seen.get()) is terminal


def test_the_final_evaluation_reports_the_gain():
    progress, file, _ = plain()
    progress.evaluation_finished(
        {"iteration": 3, "reward/eval_mean": 0.6, "eval/gain": 0.1, "eval/gain_stderr": 0.0123}
    )
    progress.evaluation_finished({"iteration": 4, "reward/eval_mean": math.nan, "eval/gain": None})
    assert (
        file.getvalue()
        == "held-out reward after 3 iterations: 0.600, gain +0.100 ± 0.012\nheld-out reward after 4"
        " iterations: –\n"
    )


def test_time_left_is_the_median_of_recent_iterations_times_those_to_come():
    progress, _, clock = plain()
    progress.start(10, 4)  # resumed: six iterations left
    assert progress.time_left() is None
    for i, seconds in enumerate((30.0, 10.0, 12.0)):
        run_iteration(progress, clock, 4 + i, 0.5, seconds)
    assert progress.time_left() == 36.0  # three left, median 12
    progress.iteration_started(7, 2, 48)
    clock.now += 5
    assert progress.time_left() == 31.0
    clock.now += (
        100  # an iteration longer than any before must not fall below the time of those after it
    )
    assert progress.time_left() == 24.0


def test_a_resumed_run_continues_its_counts():
    progress, file, clock = plain()
    progress.restore(0.6, [])
    progress.start(6, 4)
    run_iteration(progress, clock, 4, 0.7)
    expected = "iteration 5/6  reward 0.700 (at the start 0.600, +0.100)  "
    assert file.getvalue().startswith(expected)
    progress, console, clock = on_terminal()
    progress.restore(0.6, [0.5, 0.55])
    progress.start(6, 4)
    run_iteration(progress, clock, 4, 0.7)
    assert "at the start 0.600 (+0.100)" in shown(progress, console)
    assert "held-out 0.500 → 0.550" in shown(progress, console)
    progress.evaluation_finished({"iteration": 6, "reward/eval_mean": 0.65})
    assert "held-out 0.500 → 0.650" in shown(progress, console)
    progress.restore(0.6, [0.5])  # returned to a checkpoint within the process
    assert progress.held_out == [0.5]


def test_the_display_shows_stages_rewards_and_time():
    progress, console, clock = on_terminal()
    progress.start(20)
    progress.evaluation_finished({"iteration": 0, "reward/eval_mean": 0.441})
    run_iteration(progress, clock, 0, 0.4)
    run_iteration(progress, clock, 1, 0.53)
    progress.iteration_started(2, 2, 48)
    progress.advanced("explored", 24)
    progress.advanced("scored", 6)
    clock.now += 4
    text = shown(progress, console)
    for expected in (
        "quickstart",
        "iteration 3/20",
        "24/48",
        "6/48",
        "0/24",
        "0/1",
        "0.530",
        "at the start 0.400 (+0.130)",
        "held-out 0.441",
        "24 s so far, about 2 min 56 s left",
    ):
        assert expected in text, (expected, text)


@pytest.mark.parametrize("width", [40, 59, 60, 120])
def test_the_display_fits_its_terminal(width: int):
    progress, console, clock = on_terminal(width)
    progress.start(100)
    run_iteration(progress, clock, 0, 0.4)
    run_iteration(progress, clock, 1, 0.5)
    assert max(len(line) for line in shown(progress, console).splitlines()) <= width


def test_repeated_work_does_not_break_the_progress_bar():
    progress, console, _ = on_terminal()
    progress.start(1)
    progress.iteration_started(0, 1, 24)
    progress.advanced("explored", 48)
    assert "48/48" in shown(progress, console)


def test_an_arm_without_exploration_shows_no_exploration():
    progress, console, _ = on_terminal()
    progress.start(1)
    progress.iteration_started(0, 1, 24)
    progress.advanced("regenerated", 24)
    assert "explored" not in shown(progress, console)


def test_live_display_ends_with_the_context_and_notes_stay():
    progress, console, clock = on_terminal()
    with pytest.raises(RuntimeError, match="boom"), progress:
        progress.start(2)
        progress.note("[bold] is printed as it is")
        run_iteration(progress, clock, 0, 0.25)
        raise RuntimeError("boom")
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[bold] is printed as it is" in written
    assert written.endswith("\x1b[?25h")  # the cursor is visible again


def test_a_display_without_any_value():
    progress, console, _ = on_terminal()
    assert shown(progress, console).strip() == "quickstart"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (4.21, "4.2 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (192, "3 min 12 s"),
        (3599.7, "1 h 00 min"),
        (3720, "1 h 02 min"),
    ],
)
def test_durations_are_formatted(seconds: float, text: str):
    assert duration(seconds) == text


def test_a_closed_output_does_not_end_the_run():
    """As after ``sol-rl train ... | head``; it is reported once."""
    reader, writer = os.pipe()
    recorded = []
    with os.fdopen(writer, "w") as file:
        progress = Progress("run", console=Console(file=file))
        progress.on_closed = recorded.append
        progress.note("one")
        assert os.read(reader, 100) == b"one\n"
        os.close(reader)
        progress.note("two")
        progress.note("three")
    assert recorded == ["Broken pipe"]

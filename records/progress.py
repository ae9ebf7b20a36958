"""Progress of a run: a live display on a terminal, or one line per iteration in a log.

Iterations count from 0 in the program and from 1 in output. Unknown totals of stages are estimated
from the previous iteration.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import IO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from records.formatting import decimals, duration, plus_minus
from records.output import FaultTolerantStream
from records.rundir import finite_or_none

UNITS = {
    "explored": "images",
    "scored": "images",
    "selected": "seeds",
    "regenerated": "images",
    "updated": "samples",
    "published": "version",
}
"""Unit of each stage's count, in the order of an iteration."""
STAGES = tuple(UNITS)
RECENT = 5
"""Number of recent iterations whose median duration predicts the time left."""


class Progress:
    """Context manager that displays progress.

    ``note`` may be called at any time, ``start`` once the first iteration is known. On a terminal
    the display is refreshed four times a second; elsewhere one plain line is printed per iteration,
    evaluation and note. ``clock`` returns seconds. If standard output is closed, ``on_closed`` is
    called once with the reason, and later output is dropped.
    """

    def __init__(
        self,
        title: str = "Sol-RL",
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ):
        self.title, self._clock = title, clock
        self.on_closed: Callable[[str], None] = lambda why: None
        self.console = console or Console()
        # a closed pipe or terminal, or a full disk, must not end the run
        self.console.file = cast(
            IO[str], FaultTolerantStream(self.console.file, lambda why: self.on_closed(why))
        )
        self.live = self.console.is_terminal
        self._live: Live | None = None
        self.total = self.first = self.iteration = 0
        self.counts: dict[str, int] = {}
        self.totals: dict[str, int] = {}
        self.reward_start: float | None = None
        self.reward_now: float | None = None
        self.held_out: list[float] = []
        self._running = False
        self._began = self._iteration_began = clock()
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._finished = 0
        self._phase = ""
        self._actors: tuple[int, int] | None = None  # (started actors, all actors)

    def __enter__(self) -> Progress:
        if self.live:
            self._live = Live(
                get_renderable=self.render, console=self.console, refresh_per_second=4
            )
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._running, self._actors = False, None
        self._phase = "" if kind is None else "stopped"
        if self._live is not None:
            self._live.stop()
            self._live = None

    # ---- called by the loop

    def starting(self, actors: int) -> None:
        """Report that the run starts this number of actors."""
        self._actors, self._began = (0, actors), self._clock()
        if not self.live:
            self.note("starting actors")

    def actor_started(self) -> None:
        """One more actor is ready; has no effect once the run has started."""
        if self._actors is not None:
            self._actors = self._actors[0] + 1, self._actors[1]

    def restore(self, first_reward: float | None, held_out: Sequence[float]) -> None:
        """Set what the run has reached before it continues from a checkpoint.

        ``first_reward`` is the mean reward of its first iteration, None if that is not over;
        ``held_out`` are the held-out rewards of its evaluations.
        """
        self.reward_start, self.held_out = first_reward, list(held_out)

    def start(self, total_iterations: int, start_iteration: int = 0) -> None:
        """Training starts or continues at ``start_iteration``, counted from 0."""
        self.total, self.first, self.iteration = total_iterations, start_iteration, start_iteration
        self._actors = None
        self._finished, self._began = 0, self._clock()
        self._phase = "evaluating held-out prompts" if start_iteration == 0 else ""

    def iteration_started(
        self, i: int, groups: int, images: int, totals: Mapping[str, int] | None = None
    ) -> None:
        """Report that iteration ``i`` starts, with its numbers of prompts and of images to explore.

        ``totals`` are the numbers of images of further stages.
        """
        before = {stage: count for stage, count in self.counts.items() if count}
        self.totals = {
            **before,
            "explored": images,
            "scored": images,
            "published": 1,
            **(totals or {}),
        }
        self.iteration, self.counts = i, {}
        self._iteration_began, self._running = self._clock(), True
        self._phase = f"{groups} prompt{'s' if groups != 1 else ''}"

    def advanced(self, stage: str, n: int = 1) -> None:
        """Add ``n`` to the count of ``stage``, one of ``STAGES`` or another."""
        self.counts[stage] = self.counts.get(stage, 0) + n

    def iteration_finished(self, metrics: Mapping[str, object]) -> None:
        """Report the end of an iteration, with its row of metrics.jsonl."""
        self._running = False
        self._finished += 1
        self._durations.append(self._clock() - self._iteration_began)
        now = finite_or_none(metrics.get("reward/train_mean"))
        self.reward_now = self.reward_now if now is None else now
        if self.reward_start is None:
            self.reward_start = self.reward_now
        self._phase = (
            "evaluating held-out prompts" if self.first + self._finished >= self.total else ""
        )
        if not self.live:
            self.note(self._line(metrics))

    def evaluation_finished(self, metrics: Mapping[str, object]) -> None:
        """Report the end of an evaluation, with its row of metrics.jsonl."""
        value = finite_or_none(metrics.get("reward/eval_mean"))
        if value is not None:
            self.held_out.append(value)
        self._phase = ""
        text = (
            f"held-out reward after {metrics.get('iteration', '?')} iterations:"
            f" {decimals(value)}{plus_minus(metrics, 'eval/stderr')}"
        )
        gain = finite_or_none(metrics.get("eval/gain"))
        if gain is not None:
            text += f", gain {gain:+.3f}{plus_minus(metrics, 'eval/gain_stderr')}"
        self.note(text)

    def note(self, text: str) -> None:
        """Print a line that stays, above the display or in the log."""
        if self.live:
            self.console.print(Text(text), highlight=False)
        else:
            print(" ".join(text.splitlines()), file=self.console.file, flush=True)

    # ---- display

    def time_left(self) -> float | None:
        """Return the seconds until the last iteration ends; None before the first has finished."""
        if not self._durations:
            return None
        one = statistics.median(self._durations)
        remaining = self.total - self.first - self._finished
        spent = self._clock() - self._iteration_began if self._running else 0.0
        return max(0.0, one * remaining - min(spent, one))

    def render(self) -> RenderableType:
        """Return the live display, for terminals of any width."""
        narrow = self.console.width < 60
        head = Table.grid(padding=(0, 1))
        done = self._finished + self.first
        cells: list[RenderableType] = [Text(self.title, style="bold")]
        if self.total:
            shown = min(self.iteration + 1, self.total) if self._running else done
            cells += [
                Text(f"iteration {shown}/{self.total}"),
                ProgressBar(total=self.total, completed=done, width=10 if narrow else 24),
            ]
            if not narrow:
                cells.append(Text(self._times(), style="dim"))
        head.add_row(*cells)
        body: list[RenderableType] = [head]
        if narrow and self.total:
            body.append(Text(self._times(), style="dim"))
        if self.counts or self._running:
            body.append(self._stages(narrow))
        if self.reward_now is not None or self.held_out:
            body.append(self._rewards())
        if self._actors is not None:
            spent = duration(self._clock() - self._began)
            started, actors = self._actors
            body.append(Text(f"… starting actors: {started} of {actors}, {spent}", style="dim"))
        if self._phase:
            body.append(Text(f"… {self._phase}", style="dim"))
        return Group(*body)

    def _stages(self, narrow: bool) -> Table:
        table = Table.grid(padding=(0, 1))
        for stage in dict.fromkeys([*STAGES, *self.counts]):
            count, total = self.counts.get(stage, 0), self.totals.get(stage)
            if (
                not count
                and stage in ("explored", "scored")
                and (self.counts.get("regenerated") or self.counts.get("updated"))
            ):
                continue  # an arm without exploration
            bar: RenderableType = Text("")
            if total:
                bar = ProgressBar(
                    total=total, completed=min(count, total), width=16 if narrow else 32
                )
            text = f"{count:,}" + (f"/{max(total, count):,}" if total else "")
            table.add_row(
                Text(f"  {stage}"),
                bar,
                Text(f"{text:>11}"),
                Text(UNITS.get(stage, ""), style="dim"),
            )
        return table

    def _rewards(self) -> Text:
        text = Text("  ")
        if self.reward_now is not None:
            text.append("reward ")
            text.append(decimals(self.reward_now), style="bold")
            if self.reward_start is not None and self.first + self._finished > 1:
                change = self.reward_now - self.reward_start
                text.append(f"  at the start {decimals(self.reward_start)} ")
                text.append(f"({change:+.3f})", style="green" if change > 0 else "red")
        if self.held_out:
            text.append(
                f"{'   ' if self.reward_now is not None else ''}held-out "
                + " → ".join(decimals(v) for v in self._ends())
            )
        return text

    def _ends(self) -> list[float]:
        return self.held_out if len(self.held_out) < 3 else [self.held_out[0], self.held_out[-1]]

    def _times(self) -> str:
        left = self.time_left()
        if left == 0 and not self._running:
            return duration(self._clock() - self._began)
        return (
            f"{duration(self._clock() - self._began)} so far,"
            f" {'about ' + duration(left) if left is not None else '…'} left"
        )

    def _line(self, metrics: Mapping[str, object]) -> str:
        """Return one line of text for an iteration."""
        parts = [
            f"iteration {self.first + self._finished}/{self.total}",
            f"reward {decimals(self.reward_now)}",
        ]
        earlier = self.first + self._finished > 1
        if self.reward_now is not None and self.reward_start is not None and earlier:
            parts[-1] += (
                f" (at the start {decimals(self.reward_start)},"
                f" {self.reward_now - self.reward_start:+.3f})"
            )
        counts = [
            f"{stage} {self.counts[stage]:,}"
            for stage in STAGES
            if self.counts.get(stage) and stage not in ("scored", "published")
        ]
        if counts:
            parts.append(", ".join(counts))
        for name, label in (("audit/kendall_tau", "tau"), ("loss/kl", "kl")):
            if (value := finite_or_none(metrics.get(name))) is not None:
                parts.append(f"{label} {value:.3g}")
        if (version := metrics.get("weights/version")) is not None:
            parts.append(f"published v{version}")
        left = self.time_left()
        ahead = "…" if left is None else duration(left)
        return "  ".join([*parts, duration(self._durations[-1]), f"{ahead} left"])


@contextmanager
def status_spinner(text: str, console: Console | None = None) -> Iterator[None]:
    """Show a spinner with ``text`` on a terminal, for work before ``Progress`` starts."""
    shown = console or Console()
    # ``Progress`` reports write errors
    shown.file = cast(IO[str], FaultTolerantStream(shown.file, lambda why: None))
    with shown.status(text) if shown.is_terminal else nullcontext():
        yield

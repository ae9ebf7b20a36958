"""Top of the report: description and state of the run, and the held-out reward."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import ValidationError

from analysis.compare.statistics import Mean
from analysis.report.charts import number
from analysis.report.data import RunData, held_out_reward, reason, step_of, values
from analysis.report.live import Live
from configs.schema import RunConfig
from records.formatting import duration

STATES = {
    "finished": ("finished", "good"),
    "failed": ("failed", "bad"),
    "stopped": ("stopped", "warn"),
    "open": ("no end recorded", "warn"),
}
RUNNING = ("going on", "good")


@dataclass(frozen=True)
class Headline:
    """Content of the top of the report.

    ``failure`` and ``stopped`` are the reasons for which a run ended, or empty. ``lines`` are
    further notes for the banner.
    """

    word: str
    tone: str
    sentence: str
    failure: str
    stopped: str
    lines: list[str]
    before: Mean | None
    after: Mean | None
    updates: int
    gain: Mean | None
    paired: bool  # False: ``gain`` is the difference of two means
    facts: list[tuple[str, str]]

    @property
    def banner(self) -> bool:
        """True if there is anything to show in a banner."""
        return bool(self.failure or self.stopped or self.lines)

    @property
    def banner_tone(self) -> str:
        """Tone of the banner: "bad" for a failure, or else "warn"."""
        return "bad" if self.failure else "warn"


def headline(run: RunData, live: Live | None = None) -> Headline:
    """Return the top of the page; ``live`` is given while the run continues."""
    failed, stopped = run.last_event("run_failed"), run.last_event("run_stopped")
    failure = stop = ""
    if run.state == "failed" and failed:
        failure = reason(failed) or "It did not say why."
    elif run.state == "stopped" and stopped:
        stop = reason(stopped) or "by request"
    return Headline(
        *(RUNNING if live else STATES[run.state]),
        _sentence(run),
        failure,
        stop,
        _lines(run, live),
        held_out_reward(run.before) if run.before else None,
        held_out_reward(run.after) if run.after else None,
        step_of(run.after) if run.after else 0,
        run.gain if math.isfinite(run.gain.mean) else None,
        math.isfinite(run.paired_gain.mean),
        _facts(run),
    )


def _sentence(run: RunData) -> str:
    """Describe the model, the arm and how training samples are obtained in one sentence."""
    if not run.config:
        return "Its configuration is missing."
    sides = ("model.width", "model.height", "model.frames")
    size = "×".join(str(side) for side in map(run.setting, sides) if side)
    model = f"{run.setting('model.family', 'model')} · {run.setting('model.path', '?')} · {size}"
    head = f"{model}. Arm {run.setting('arm', '?')}"
    try:
        config = RunConfig.model_validate(run.config)
    except ValidationError:
        return f"{head}."
    plan, keep, full = config.plan, config.selection.keep, config.regenerate
    if plan.explore is None:
        return f"{head}: {keep} seeds per prompt at {full.steps} steps, all trained on."
    backend = (run.last_event("backend_chosen") or {}).get("backend", plan.explore.backend)
    training = f"{keep} of these images are trained on directly"
    if plan.regenerate:
        training = f"{keep} regenerated in {full.precision} at {full.steps} steps and trained on"
    return (
        f"{head}: {plan.explore.pool_size} seeds per prompt explored in {backend} at"
        f" {plan.explore.steps} steps, {training}."
    )


def _lines(run: RunData, live: Live | None) -> list[str]:
    lines = []
    if run.state == "open" and live is None:
        lines.append(
            "No end was recorded: the run is still active, or it was killed. The report shows the"
            " results so far."
        )
    if event := run.last_event("stopped_early"):
        lines.append(f"Training ended early: {reason(event)}.")
    if not run.iterations:
        lines.append("No iteration has ended, so there are no curves yet.")
    return lines + [f"{remark}." for remark in run.remarks]


def _facts(run: RunData) -> list[tuple[str, str]]:
    done, planned = len(run.iterations), run.setting("iterations")
    facts = [("iterations", f"{done:,}" + (f" of {planned:,}" if isinstance(planned, int) else ""))]
    if seconds := values([*run.iterations, *run.evaluations], "seconds"):
        facts.append(("training time", duration(max(seconds))))
    if seen := values(run.iterations, "samples_seen"):
        facts.append(("samples trained on", f"{seen[-1]:,.0f}"))
    if tau := values(run.iterations, "audit/kendall_tau"):
        facts.append(("rank agreement (tau)", number(math.fsum(tau) / len(tau), 2)))
    deaths = sum(event["event"] == "actor_died" for event in run.events)
    return [*facts, ("actors lost", f"{deaths:,}"), ("run seed", str(run.setting("seed", "–")))]

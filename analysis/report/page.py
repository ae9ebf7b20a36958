"""``report.html``: what a run did, in one file that opens without a network, on a desk and on a
phone.

Everything is read from the run directory, so it can be built while the run goes on, after it
failed, and on another machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from pydantic import ValidationError

from analysis.report import events, rewards, sections
from analysis.report.charts import number
from analysis.report.data import RunData, finite, read_run, reason, values
from analysis.report.parts import Cell, table
from analysis.report.style import style_sheet
from configs.schema import RunConfig
from records.atomic import write_text
from records.images import TINY, StepPictures, data_uri
from records.progress import duration

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Content security policy: the browser itself refuses to fetch anything for this page."""
STATES = {
    "finished": ("finished", "good"),
    "failed": ("failed", "bad"),
    "stopped": ("stopped", "warn"),
    "open": ("no end recorded", "warn"),
}
FILE = "report.html"


def build_report(run_dir: Path) -> Path:
    """Writes ``report.html`` into ``run_dir`` and returns its path; an older one is replaced in one
    step.

    Raises:
        FileNotFoundError: ``run_dir`` is no run directory.
        OSError: it cannot be written.
    """
    run_dir = Path(run_dir)
    page = render(read_run(run_dir))
    target = run_dir / FILE
    write_text(target, page)
    return target


def render(run: RunData) -> str:
    """The page as text."""
    chapters = [
        (
            "Before and after",
            "The same held-out prompts and the same noises, before training and now.",
            _pictures(run),
        ),
        (
            "Reward",
            "What training optimises, on the prompts it sees and on prompts it never sees.",
            rewards.section(run),
        ),
        (
            "Exploration",
            "Many cheap pictures per prompt, made only to find the noises worth training on.",
            sections.exploration(run),
        ),
        (
            "Does the cheap ranking hold?",
            (
                "The cheap pictures need not be right, only in the right order. 1 is the order of"
                " full quality, 0 is chance (for the same side of the mean: 0.5)."
            ),
            sections.agreement(run),
        ),
        ("Where the time went", "", sections.time_spent(run)),
        ("Is training healthy?", "", sections.health(run)),
        ("Who did what, when", "", events.section(run)),
        ("All the particulars", "", _particulars(run)),
    ]
    body = "".join(
        f"<section><h2>{escape(title)}</h2>{_lead(lead)}{content}</section>"
        for title, lead, content in chapters
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(run.name)}: Sol-RL run report</title><style>{style_sheet()}</style></head>"
        f"<body><main>{_headline(run)}{body}</main></body></html>\n"
    )


# ---- the top


def _headline(run: RunData) -> str:
    word, tone = STATES[run.state]
    lines = [
        f'<div class="eyebrow">Sol-RL run report<span class="pill {tone}">{word}</span></div>',
        f"<h1>{escape(run.name)}</h1>",
        f'<p class="lead">{escape(_what(run))}</p>',
        _banner(run),
        (
            f'<div class="hero"><div class="card">{_result(run)}</div><div class="card'
            f' facts">{_facts(run)}</div></div>'
        ),
    ]
    return f"<header>{''.join(lines)}</header>"


def _what(run: RunData) -> str:
    """Model, arm and objective in a sentence."""
    if not run.config:
        return "Its configuration is missing."
    model = (
        f"{run.setting('model.family', 'model')} · {run.setting('model.path', '?')} ·"
        f" {run.setting('model.width')}×{run.setting('model.height')}"
    )
    arm = f"arm {run.setting('arm', '?')}"
    try:
        config = RunConfig.model_validate(run.config)
    except ValidationError:
        return f"{model}. {arm[0].upper()}{arm[1:]}."
    plan, keep, full = config.plan, config.selection.keep, config.regenerate
    if plan.explore is None:
        walk = f"{keep} noises per prompt at {full.steps} steps, all trained on"
    else:
        backend = (run.last_event("backend_chosen") or {}).get("backend", plan.explore.backend)
        seen = (
            f"{plan.explore.pool_size} noises per prompt explored in {backend} at"
            f" {plan.explore.steps} steps"
        )
        again = f"{keep} regenerated in {full.precision} at {full.steps} steps and trained on"
        walk = (
            f"{seen},"
            f" {again if plan.regenerate else f'{keep} of these pictures trained on as they are'}"
        )
    return f"{model}. {arm[0].upper()}{arm[1:]}: {walk}."


def _banner(run: RunData) -> str:
    """What a reader must know first: a failure, a stop, an open end, files that could not be read."""
    parts, tone = [], "warn"
    if run.state == "failed" and (event := run.last_event("run_failed")):
        tone = "bad"
        parts.append(
            "<strong>The run failed.</strong>"
            f" <p>{escape(reason(event) or 'It did not say why.')}</p>"
        )
    elif run.state == "stopped" and (event := run.last_event("run_stopped")):
        parts.append(
            f"The run was stopped ({escape(reason(event) or 'by request')}); <code>--resume</code>"
            " continues it."
        )
    elif run.state == "open":
        parts.append(
            "No end was recorded: the run is still going on, or it was killed. This is what there"
            " is so far."
        )
    if event := run.last_event("stopped_early"):
        parts.append(f"<p>Training ended early: {escape(reason(event))}.</p>")
    if not run.iterations:
        parts.append("<p>No iteration has ended, so there are no curves yet.</p>")
    parts += [f"<p>{escape(remark)}.</p>" for remark in run.remarks]
    return f'<div class="banner {tone}">{"".join(parts)}</div>' if parts else ""


def _result(run: RunData) -> str:
    """Held-out reward before and after, with standard errors and the paired gain."""
    before, after = run.before, run.after
    if before is None:
        return (
            "<h3>Held-out reward</h3>"
            + '<p class="none">Held-out prompts have not been scored yet.</p>'
        )
    cells = [_big("before", before)]
    if after is not None:
        cells += [
            '<span class="arrow" aria-hidden="true">→</span>',
            _big(f"after {number(finite(after['iteration']))} iterations", after),
        ]
    return f'<h3>Held-out reward</h3><div class="result">{"".join(cells)}</div>{_gain(run)}'


def _big(label: str, row: dict) -> str:
    error = finite(row.get("eval/stderr"))
    below = f"± {number(error, 2)} standard error" if error is not None else "no standard error"
    value = number(finite(row.get("reward/eval_mean")))
    return (
        f'<div><div class="label">{escape(label)}</div><div class="big">{value}</div><div'
        f' class="label">{below}</div></div>'
    )


def _gain(run: RunData) -> str:
    before, after = run.before, run.after
    if before is None or after is None:
        return '<p class="gain label">The evaluation after training is still to come.</p>'
    gain, error = finite(after.get("eval/gain")), finite(after.get("eval/gain_stderr"))
    paired = gain is not None
    if gain is None:
        start, end = finite(before.get("reward/eval_mean")), finite(after.get("reward/eval_mean"))
        if start is None or end is None:
            return (
                '<p class="gain label">The gain is unknown: an evaluation has no finite reward.</p>'
            )
        gain = end - start
    spread = f" ± {number(error, 2)}" if error is not None else ""
    tone = "up" if gain > 0 else "down"
    said = f'<b class="{tone}">{"+" if gain > 0 else ""}{number(gain)}{spread}</b> '
    if error:
        said += (
            f"{number(abs(gain) / error, 2)} standard errors {'above' if gain > 0 else 'below'}"
            " zero; "
        )
    how = (
        "same prompts and noises, paired and clustered by prompt."
        if paired
        else "difference of the two means, not paired."
    )
    return f'<p class="gain">{said}<span class="label">{how}</span></p>'


def _facts(run: RunData) -> str:
    done, planned = len(run.iterations), run.setting("iterations")
    facts = [("iterations", f"{done:,}" + (f" of {planned:,}" if isinstance(planned, int) else ""))]
    seconds = values([*run.iterations, *run.evaluations], "seconds")
    if seconds:
        facts.append(("training time", duration(max(seconds))))
    if seen := values(run.iterations, "samples_seen"):
        facts.append(("samples trained on", f"{seen[-1]:,.0f}"))
    if tau := values(run.iterations, "audit/kendall_tau"):
        facts.append(("rank agreement (tau)", number(math.fsum(tau) / len(tau), 2)))
    deaths = sum(event["event"] == "actor_died" for event in run.events)
    facts.append(("actors lost", f"{deaths:,}"))
    facts.append(("run seed", str(run.setting("seed", "–"))))
    return "".join(
        f'<div><span class="label">{escape(label)}</span><b>{escape(value)}</b></div>'
        for label, value in facts
    )


# ---- pictures


def _pictures(run: RunData) -> str:
    if not run.pictures.steps:
        return '<p class="none">No pictures have been made yet.</p>'
    first, last = run.pictures.steps[0], run.pictures.steps[-1]
    cards = [
        _pair(run, index, prompt, first, last) for index, prompt in run.pictures.prompts.items()
    ]
    alone = (
        '<p class="note">The pictures after training are still to come.</p>'
        if first is last
        else ""
    )
    return f'<div class="pictures">{"".join(cards)}</div>{alone}'


def _pair(run: RunData, index: int, prompt: str, first: StepPictures, last: StepPictures) -> str:
    noises = run.pictures.noises(index)
    halves = [_half(run, "before", first, index, prompt, noises)]
    if last is not first:
        halves.append(_half(run, f"after {last.step}", last, index, prompt, noises))
    return (
        f'<figure class="card"><figcaption class="caption">{escape(prompt)}</figcaption><div'
        f' class="pair">{"".join(halves)}</div></figure>'
    )


def _half(
    run: RunData, title: str, step: StepPictures, index: int, prompt: str, noises: Sequence[int]
) -> str:
    scores = run.held_out.get(step.step, [])
    row = scores[index] if index < len(scores) else []
    cells = []
    for position, noise in enumerate(noises):
        reward = row[position] if position < len(row) else math.nan
        scored = f", reward {number(reward)}" if math.isfinite(reward) else ""
        cells.append(_image(step, index, noise, f"{title}: {prompt}, noise {noise}{scored}"))
    known = [reward for reward in row[: len(noises)] if math.isfinite(reward)]
    mean = f"<b>{number(math.fsum(known) / len(known))}</b>" if known else ""
    columns = 1 if len(noises) < 2 else 2 if len(noises) <= 4 else 3
    return (
        f'<div><div class="label">{escape(title)}{mean}</div><div class="sheet'
        f' of-{columns}">{"".join(cells)}</div></div>'
    )


def _image(step: StepPictures, index: int, noise: int, text: str) -> str:
    path = step.files.get((index, noise))
    said = escape(text, quote=True)
    try:
        if path is None:
            raise FileNotFoundError
        address, width, height = data_uri(path)
    except OSError:  # missing, replaced just now, or no picture: a gap in the page
        return f'<span class="hole" title="{said}: not there"></span>'
    tiny = ' class="tiny"' if max(width, height) <= TINY else ""
    return (
        f'<img{tiny} width="{width}" height="{height}" alt="{said}" title="{said}" src="{address}">'
    )


# ---- the end


def _particulars(run: RunData) -> str:
    """Configuration, versions, quantised modules and the table of all numbers, each behind a fold."""
    parts = [sections.numbers(run)]
    if run.config:
        text = json.dumps(run.config, indent=2, ensure_ascii=False, default=str)
        parts.append(
            '<details class="card"><summary>Resolved'
            f" configuration</summary><div><pre>{escape(text)}</pre></div></details>"
        )
    if run.quantisation:
        parts.append(_quantised(run))
    if known := {
        **run.versions,
        **{f"prompts.{key}": f"xxh3 {found}" for key, found in run.prompts.items()},
    }:
        versions = table(
            ("package", "version"),
            [(str(name), str(version)) for name, version in known.items()],
            words=(0, 1),
        )
        parts.append(
            f'<details class="card"><summary>Versions</summary><div>{versions}</div></details>'
        )
    parts.append(
        "<footer>Made from config.json, metrics.jsonl, events.jsonl, timeline.jsonl and images/ by"
        " <code>sol-rl report</code>. This page loads nothing from anywhere.</footer>"
    )
    return "".join(parts)


def _quantised(run: RunData) -> str:
    """What was quantised, what not, and why: modules and weights by reason."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for row in run.quantisation:
        shape = row.get("shape")
        weights = math.prod(int(size) for size in shape) if isinstance(shape, list | tuple) else 0
        entry = groups.setdefault((bool(row.get("quantised")), str(row.get("why", ""))), [0, 0])
        entry[0] += 1
        entry[1] += weights
    rows = [
        ("quantised" if quantised else "kept wide", f"{count:,}", f"{weights:,}", Cell(why, "wide"))
        for (quantised, why), (count, weights) in sorted(
            groups.items(), key=lambda item: (not item[0][0], -item[1][1])
        )
    ]
    found = table(("", "modules", "weights", "why"), rows, words=(0, 3))
    return (
        f'<details class="card"><summary>What was quantised</summary><div>{found}</div></details>'
    )


def _lead(text: str) -> str:
    return f'<p class="lead">{escape(text)}</p>' if text else '<div style="height:12px"></div>'

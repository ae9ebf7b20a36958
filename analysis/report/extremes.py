"""Report section on training images: those with the highest and lowest rewards per iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.report.charts import number
from analysis.report.data import Row, RunData, finite_or_none
from analysis.report.gallery import InlineImage, shown_image
from records.extremes import ENDS, STAGES, KeptIteration

OPEN = 2
"""Number of newest iterations that are shown unfolded."""
OTHER = {"explored": "regenerated", "regenerated": "explored"}


@dataclass(frozen=True)
class Tile:
    """Image with its captions: stage and reward above, seed below."""

    title: str  # name of the stage
    reward: str
    note: str  # the seed
    shown: InlineImage


@dataclass(frozen=True)
class PromptEnds:
    """Images of a prompt in one iteration: the best of each stage, then the worst."""

    text: str
    ends: list[tuple[str, list[Tile]]]


@dataclass(frozen=True)
class IterationEnds:
    """Iteration whose images were kept."""

    iteration: int
    prompts: list[PromptEnds]


def kept_iterations(run: RunData) -> list[IterationEnds]:
    """Return the kept iterations, newest first; unreadable images are left blank."""
    return [
        IterationEnds(kept.iteration, [_prompt(kept, index) for index in _prompts(kept)])
        for kept in reversed(run.extremes)
        if kept.rows
    ]


def _prompts(kept: KeptIteration) -> list[int]:
    prompts = (finite_or_none(row.get("prompt")) for row in kept.rows)
    return sorted({int(prompt) for prompt in prompts if prompt is not None})


def _prompt(kept: KeptIteration, prompt: int) -> PromptEnds:
    rows = [row for row in kept.rows if row.get("prompt") == prompt]
    ends: list[tuple[str, list[Tile]]] = []
    for end in ENDS:
        by_stage = {str(row.get("stage")): row for row in rows if row.get("end") == end}
        tiles = [_tile(kept.directory, by_stage, stage) for stage in STAGES if stage in by_stage]
        if tiles:
            ends.append((end, tiles))
    return PromptEnds(str(rows[0].get("text", "")), ends)


def _tile(directory: Path, rows: Mapping[str, Row], stage: str) -> Tile:
    row = rows[stage]
    seed, reward, other = (finite_or_none(row.get(key)) for key in ("seed", "reward", "other"))
    other_row = rows.get(OTHER[stage])
    same = other_row is not None and other_row.get("seed") == row.get("seed")
    note = "" if seed is None else f"seed {seed:.0f}"
    if other is not None and not same:
        note += f" ({OTHER[stage]}: {number(other)})"
    shown = number(reward)
    text = f"{row.get('end')} {stage}: {row.get('text')}, {note}, reward {shown}"
    return Tile(stage, shown, note, shown_image(directory / Path(str(row.get("file"))).name, text))


def kept_iterations_note(run: RunData, found: Sequence[IterationEnds]) -> str:
    """Return a note on how many iterations are shown, or "" if all are."""
    done = len(run.iterations)
    if len(found) >= done:
        return ""
    return f"Images of {len(found)} of {done:,} iterations: the newest, and others evenly spread."

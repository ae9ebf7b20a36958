"""Images of the training itself: per kept iteration, what the reward likes and dislikes most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.report.charts import number
from analysis.report.data import Row, RunData, finite
from analysis.report.gallery import Shown, shown_image
from records.extremes import ENDS, STAGES, KeptIteration

OPEN = 2
"""Newest iterations that are not folded away."""
OTHER = {"explored": "regenerated", "regenerated": "explored"}


@dataclass(frozen=True)
class Tile:
    """An image with what stands above and below it."""

    title: str  # of its stage
    reward: str
    note: str  # the seed
    shown: Shown


@dataclass(frozen=True)
class PromptEnds:
    """A prompt of an iteration: the best images of the stages, then the worst."""

    text: str
    ends: list[tuple[str, list[Tile]]]


@dataclass(frozen=True)
class IterationEnds:
    """An iteration whose images were kept."""

    iteration: int
    prompts: list[PromptEnds]


def kept_iterations(run: RunData) -> list[IterationEnds]:
    """Newest first; an image that cannot be read is left blank."""
    return [
        IterationEnds(one.iteration, [_prompt(one, index) for index in _prompts(one)])
        for one in reversed(run.extremes)
        if one.rows
    ]


def _prompts(one: KeptIteration) -> list[int]:
    found = (finite(row.get("prompt")) for row in one.rows)
    return sorted({int(prompt) for prompt in found if prompt is not None})


def _prompt(one: KeptIteration, prompt: int) -> PromptEnds:
    rows = [row for row in one.rows if row.get("prompt") == prompt]
    ends: list[tuple[str, list[Tile]]] = []
    for end in ENDS:
        by_stage = {str(row.get("stage")): row for row in rows if row.get("end") == end}
        found = [_tile(one.directory, by_stage, stage) for stage in STAGES if stage in by_stage]
        if found:
            ends.append((end, found))
    return PromptEnds(str(rows[0].get("text", "")), ends)


def _tile(directory: Path, rows: Mapping[str, Row], stage: str) -> Tile:
    row = rows[stage]
    seed, reward, other = (finite(row.get(key)) for key in ("seed", "reward", "other"))
    other_row = rows.get(OTHER[stage])
    same = other_row is not None and other_row.get("seed") == row.get("seed")
    note = "" if seed is None else f"seed {seed:.0f}"
    if other is not None and not same:
        note += f" ({OTHER[stage]}: {number(other)})"
    shown = number(reward)
    text = f"{row.get('end')} {stage}: {row.get('text')}, {note}, reward {shown}"
    return Tile(stage, shown, note, shown_image(directory / Path(str(row.get("file"))).name, text))


def thinned(run: RunData, found: Sequence[IterationEnds]) -> str:
    """A note on how many iterations of how many are shown; empty where all are."""
    done = len(run.iterations)
    if len(found) >= done:
        return ""
    return f"Kept of {len(found)} of {done:,} iterations, evenly spread, and the newest."

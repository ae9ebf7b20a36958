"""The best and the worst images of an iteration on disk: what a reward model likes and dislikes, to
be seen by eye while a policy learns.

Layout below ``images/``: one directory per kept iteration, ``iteration_000012/``, with a file per
image and ``shown.json``, which says what each shows. An iteration appears whole or not at all.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from PIL import Image

from records import atomic
from records.images import LARGEST_INLINE, TINY, grid, reduced_image, to_pil, webp_bytes

Stage = Literal["explored", "regenerated"]
End = Literal["best", "worst"]
STAGES, ENDS = get_args(Stage), get_args(End)
DIRECTORY = re.compile(r"iteration_(\d+)")
INDEX = "shown.json"
NOTHING = 128
"""Grey where an image is missing from a sheet."""


@dataclass(frozen=True)
class Extreme:
    """The image of a prompt with the highest or lowest reward of a stage."""

    prompt: int  # position within the iteration
    text: str
    stage: Stage
    end: End
    seed: int  # position among the prompt's seeds
    reward: float
    image: np.ndarray  # uint8 [3, h, w], or of a clip [F, 3, h, w]; reduced
    other: float | None = None  # reward of the same seed in the other stage, where it has one

    @property
    def file(self) -> str:
        """Its name in the iteration's directory."""
        suffix = "png" if max(self.image.shape[-2:]) <= TINY else "jpg"
        suffix = "webp" if self.image.ndim == 4 else suffix
        return f"{self.prompt}_{self.stage}_{self.end}.{suffix}"

    def row(self) -> dict[str, object]:
        """Its row of ``shown.json``."""
        height, width = self.image.shape[-2:]
        keys = ("prompt", "text", "stage", "end", "seed", "reward", "other", "file")
        return {key: getattr(self, key) for key in keys} | {"width": width, "height": height}


@dataclass(frozen=True)
class KeptIteration:
    """A kept iteration: rows of its ``shown.json``, where their files are."""

    iteration: int
    directory: Path
    rows: list[dict[str, object]]


def reduced(image: np.ndarray) -> np.ndarray:
    """``image`` uint8 [3, H, W], or a clip, no larger than a page shows it."""
    if max(image.shape[-2:]) <= LARGEST_INLINE:
        return image.copy()  # a view would keep the whole batch in memory
    if image.ndim == 4:
        return np.stack([reduced(frame) for frame in image])
    return np.asarray(reduced_image(to_pil(image))).transpose(2, 0, 1)


def save_extremes(
    directory: Path, iteration: int, shown: Sequence[Extreme], limit: int, fps: int = 16
) -> None:
    """Write the images of ``iteration``, and remove those of iterations that are too many now.

    ``fps``: at which clips are shown.
    """
    with atomic.replacing_directory(directory / f"iteration_{iteration:06d}") as beside:
        for one in shown:
            (beside / one.file).write_bytes(_encoded(one, fps))
        rows = [one.row() for one in shown]
        (beside / INDEX).write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", "utf-8")
    there = _directories(directory)
    for index in there.keys() - kept(there, limit):
        shutil.rmtree(there[index], ignore_errors=True)


def kept(iterations: Iterable[int], limit: int) -> set[int]:
    """Which of ``iterations`` stay, at most ``limit`` >= 2: the newest, and the multiples of the
    smallest power of two of which there are few enough. No later call keeps what one has dropped.
    """
    known = set(iterations)
    newest, stride = max(known, default=0), 1
    while newest // stride + 1 > limit - (newest % stride > 0):
        stride *= 2
    return {index for index in known if index % stride == 0 or index == newest}


def forget_from(directory: Path, iteration: int) -> None:
    """Remove the images of ``iteration`` and of later ones: they will be made again."""
    for index, folder in _directories(directory).items():
        if index >= iteration:
            shutil.rmtree(folder, ignore_errors=True)


def find_extremes(directory: Path) -> list[KeptIteration]:
    """The iterations that ``save_extremes`` has written, rising; unreadable ones are left out."""
    found = []
    for index, folder in sorted(_directories(directory).items()):
        try:
            rows = json.loads((folder / INDEX).read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(rows, list):
            rows = [row for row in rows if isinstance(row, dict)]
            found.append(KeptIteration(index, folder, rows))
    return found


def sheet(shown: Sequence[Extreme]) -> np.ndarray:
    """All images as one, uint8 [3, H, W]: a row per prompt; columns best explored, best
    regenerated, worst explored, worst regenerated; stages that the arm lacks are left out. Of a
    clip the frame in its middle.
    """
    stages = [stage for stage in STAGES if any(one.stage == stage for one in shown)]
    columns = [(end, stage) for end in ENDS for stage in stages]
    places = {(one.prompt, one.end, one.stage): _still(one.image) for one in shown}
    prompts = sorted({one.prompt for one in shown})
    height, width = (max(one.image.shape[axis] for one in shown) for axis in (-2, -1))
    cells = np.full((len(prompts), len(columns), 3, height, width), NOTHING, np.uint8)
    for (row, prompt), (column, (end, stage)) in (
        (r, c) for r in enumerate(prompts) for c in enumerate(columns)
    ):
        image = places.get((prompt, end, stage))
        if image is not None:
            cells[row, column] = _enlarged(image, height, width)
    return grid(cells)


def _still(image: np.ndarray) -> np.ndarray:
    return image[len(image) // 2] if image.ndim == 4 else image


def _enlarged(image: np.ndarray, height: int, width: int) -> np.ndarray:
    if image.shape[1:] == (height, width):
        return image
    large = to_pil(image).resize((width, height), Image.Resampling.NEAREST)
    return np.asarray(large).transpose(2, 0, 1)


def _encoded(one: Extreme, fps: int) -> bytes:
    if one.image.ndim == 4:
        return webp_bytes(one.image, fps, TINY)
    buffer = io.BytesIO()
    image = to_pil(one.image)
    if one.file.endswith("png"):
        image.save(buffer, "PNG")
    else:
        image.save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


def _directories(directory: Path) -> dict[int, Path]:
    folders = (path for path in directory.glob("iteration_*") if path.is_dir())
    return {int(match[1]): path for path in folders if (match := DIRECTORY.fullmatch(path.name))}

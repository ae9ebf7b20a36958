"""The best and the worst images of an iteration on disk.

They let people see what a reward model likes and dislikes while a policy learns.

Layout below ``images/``: one directory per kept iteration, ``iteration_000012/``, with a file per
image and ``shown.json``, which describes each image. An iteration is written atomically.
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

from configs.paths import is_dir
from records import atomic
from records.images import MAX_INLINE_SIDE, MAX_TINY_SIDE, grid, reduced_image, to_pil, webp_bytes

Stage = Literal["explored", "regenerated"]
End = Literal["best", "worst"]
STAGES, ENDS = get_args(Stage), get_args(End)
DIRECTORY = re.compile(r"iteration_(\d+)")
INDEX = "shown.json"
EMPTY_GRAY = 128
"""Gray level of the cells of a sheet that have no image."""


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
    other: float | None = None  # reward of the same seed in the other stage, if it has one

    @property
    def file(self) -> str:
        """File name in the iteration's directory."""
        suffix = "png" if max(self.image.shape[-2:]) <= MAX_TINY_SIDE else "jpg"
        suffix = "webp" if self.image.ndim == 4 else suffix
        return f"{self.prompt}_{self.stage}_{self.end}.{suffix}"

    def row(self) -> dict[str, object]:
        """Return the row of ``shown.json`` that describes this image."""
        height, width = self.image.shape[-2:]
        keys = ("prompt", "text", "stage", "end", "seed", "reward", "other", "file")
        return {key: getattr(self, key) for key in keys} | {"width": width, "height": height}


@dataclass(frozen=True)
class KeptIteration:
    """A kept iteration: its directory and the rows of its ``shown.json``."""

    iteration: int
    directory: Path
    rows: list[dict[str, object]]


def downscaled(image: np.ndarray) -> np.ndarray:
    """Return ``image`` uint8 [3, H, W], or a clip, reduced to the size that a page shows."""
    if max(image.shape[-2:]) <= MAX_INLINE_SIDE:
        return image.copy()  # a view would keep the whole batch in memory
    if image.ndim == 4:
        return np.stack([downscaled(frame) for frame in image])
    return np.asarray(reduced_image(to_pil(image))).transpose(2, 0, 1)


def save_extremes(
    directory: Path, iteration: int, shown: Sequence[Extreme], limit: int, fps: int = 16
) -> None:
    """Write the images of ``iteration``, and remove iterations beyond ``limit``.

    ``iterations_to_keep`` chooses which. ``fps``: frame rate of clips.
    """
    directory.mkdir(exist_ok=True)
    with atomic.replace_directory(directory / f"iteration_{iteration:06d}") as temporary:
        for extreme in shown:
            (temporary / extreme.file).write_bytes(_encoded(extreme, fps))
        rows = [extreme.row() for extreme in shown]
        (temporary / INDEX).write_text(
            json.dumps(rows, ensure_ascii=False, indent=1) + "\n", "utf-8"
        )
    existing = _directories(directory)
    for index in existing.keys() - iterations_to_keep(existing, limit):
        shutil.rmtree(existing[index], ignore_errors=True)


def iterations_to_keep(iterations: Iterable[int], limit: int) -> set[int]:
    """Return the iterations to keep, at most ``limit`` >= 2.

    They are the newest and the multiples of the smallest power of two that leaves few enough. An
    iteration that one call drops is kept by no later call.
    """
    known = set(iterations)
    newest, stride = max(known, default=0), 1
    while newest // stride + 1 > limit - (newest % stride > 0):
        stride *= 2
    return {index for index in known if index % stride == 0 or index == newest}


def remove_from(directory: Path, iteration: int) -> None:
    """Remove the images of ``iteration`` and later ones, which a resumed run writes again."""
    for index, folder in _directories(directory).items():
        if index >= iteration:
            shutil.rmtree(folder, ignore_errors=True)


def find_extremes(directory: Path) -> list[KeptIteration]:
    """Return the iterations that ``save_extremes`` wrote, ascending, without unreadable ones."""
    iterations = []
    for index, folder in sorted(_directories(directory).items()):
        try:
            rows = json.loads((folder / INDEX).read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(rows, list):
            rows = [row for row in rows if isinstance(row, dict)]
            iterations.append(KeptIteration(index, folder, rows))
    return iterations


def sheet(shown: Sequence[Extreme]) -> np.ndarray:
    """Return all images as one image uint8 [3, H, W] with a row per prompt.

    Columns: best explored, best regenerated, worst explored, worst regenerated, without stages that
    the arm lacks. A clip is represented by its middle frame.
    """
    stages = [stage for stage in STAGES if any(extreme.stage == stage for extreme in shown)]
    columns = [(end, stage) for end in ENDS for stage in stages]
    images = {
        (extreme.prompt, extreme.end, extreme.stage): _middle_frame(extreme.image)
        for extreme in shown
    }
    prompts = sorted({extreme.prompt for extreme in shown})
    height, width = (max(extreme.image.shape[axis] for extreme in shown) for axis in (-2, -1))
    cells = np.full((len(prompts), len(columns), 3, height, width), EMPTY_GRAY, np.uint8)
    for (row, prompt), (column, (end, stage)) in (
        (r, c) for r in enumerate(prompts) for c in enumerate(columns)
    ):
        image = images.get((prompt, end, stage))
        if image is not None:
            cells[row, column] = _enlarged(image, height, width)
    return grid(cells)


def _middle_frame(image: np.ndarray) -> np.ndarray:
    return image[len(image) // 2] if image.ndim == 4 else image


def _enlarged(image: np.ndarray, height: int, width: int) -> np.ndarray:
    if image.shape[1:] == (height, width):
        return image
    large = to_pil(image).resize((width, height), Image.Resampling.NEAREST)
    return np.asarray(large).transpose(2, 0, 1)


def _encoded(extreme: Extreme, fps: int) -> bytes:
    if extreme.image.ndim == 4:
        return webp_bytes(extreme.image, fps, MAX_TINY_SIDE)
    buffer = io.BytesIO()
    image = to_pil(extreme.image)
    if extreme.file.endswith("png"):
        image.save(buffer, "PNG")
    else:
        image.save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


def _directories(directory: Path) -> dict[int, Path]:
    folders = (path for path in directory.glob("iteration_*") if is_dir(path))
    return {int(match[1]): path for path in folders if (match := DIRECTORY.fullmatch(path.name))}

"""Images of evaluations on disk, at fixed prompts and initial noise, and grids of them.

Layout below ``images/``: ``prompts.json``, a list of ``{"index": int, "prompt": str}``, and one
directory per evaluated step, ``step_000000/<prompt index>_<noise index>.png``, or an animated
``.webp`` for a clip. A step is written atomically. ``source_<prompt index>.png`` is the image that
a prompt of an editing model edits.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import isfile  # Path.is_file raises for a name that is too long
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageSequence

from configs.paths import is_dir
from records import atomic
from records.storage import retried

STEP = re.compile(r"step_(\d+)")
CELL = re.compile(r"(\d+)_(\d+)\.(?:png|webp)")
MAX_INLINE_SIDE = 256
"""Images wider or taller than this are reduced to it before they are embedded in a page. Larger
clips are compressed lossily: 33 lossless frames of 832x480 would take 20 MB.
"""
MAX_TINY_SIDE = 96
"""Images up to this size are enlarged by nearest neighbor, which keeps their pixels sharp."""


@dataclass(frozen=True)
class StepImages:
    """Images of one step: files by (prompt index, noise index)."""

    step: int
    files: dict[tuple[int, int], Path]


@dataclass(frozen=True)
class RunImages:
    """Content of ``images/``: prompts and source images by prompt index, and ascending steps."""

    prompts: dict[int, str]
    steps: list[StepImages]
    sources: dict[int, Path] = field(default_factory=dict[int, Path])

    def seeds(self, prompt: int) -> list[int]:
        """Return the noise indices of a prompt for which any step has an image, ascending."""
        return sorted(
            {noise for step in self.steps for index, noise in step.files if index == prompt}
        )


@retried
def save_images(
    directory: Path,
    step: int,
    prompts: Sequence[str],
    images: np.ndarray,
    fps: int = 16,
    sources: Sequence[np.ndarray | None] = (),
) -> Path:
    """Write the images of one step and return its directory, which replaces an existing one.

    ``images``: uint8 [P, S, 3, H, W] of P ``prompts``, or clips [P, S, F, 3, H, W] at ``fps``
    frames per second. ``sources``: the images that prompts edit, uint8 [3, H, W]. The parent of
    ``directory`` must exist. Raises ValueError if shape or dtype of ``images`` is another, or there
    are fewer prompts than rows.
    """
    if images.ndim not in (5, 6) or images.shape[-3] != 3 or images.dtype != np.uint8:
        raise ValueError(
            "images must be uint8 [prompts, seeds, 3, height, width] or [prompts, seeds, frames, 3,"
            f" height, width], not {images.dtype} {list(images.shape)}"
        )
    rows = len(images)
    if len(prompts) < rows:
        raise ValueError(f"{len(prompts)} prompts for images of {rows}: give one prompt per row")
    directory.mkdir(exist_ok=True)
    prompt_rows = [
        {"index": index, "prompt": prompt} for index, prompt in enumerate(prompts[:rows])
    ]
    atomic.write_text(
        directory / "prompts.json", json.dumps(prompt_rows, ensure_ascii=False, indent=1) + "\n"
    )
    for index, source in enumerate(sources):
        if source is not None:
            atomic.write_bytes(directory / f"source_{index}.png", png_bytes(source))
    final = directory / f"step_{step:06d}"
    with atomic.replace_directory(final) as temporary:
        for prompt, noise in np.ndindex(*images.shape[:2]):
            image = images[prompt, noise]
            clip = image.ndim == 4
            file = temporary / f"{prompt}_{noise}.{'webp' if clip else 'png'}"
            file.write_bytes(webp_bytes(image, fps) if clip else png_bytes(image))
    return final


def find_images(directory: Path) -> RunImages:
    """Return the images that ``save_images`` wrote; unreadable prompts get a number as text."""
    prompts: dict[int, str] = {}
    broken = OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError
    with contextlib.suppress(*broken):
        prompts = {
            int(row["index"]): str(row["prompt"])
            for row in json.loads((directory / "prompts.json").read_text("utf-8"))
        }
    steps = []
    for folder in sorted(directory.glob("step_*")):
        if (match := STEP.fullmatch(folder.name)) and is_dir(folder):
            cells = [(CELL.fullmatch(path.name), path) for path in sorted(folder.iterdir())]
            files = {(int(cell[1]), int(cell[2])): path for cell, path in cells if cell}
            if files:
                steps.append(StepImages(int(match[1]), files))
    shown = {index for step in steps for index, _ in step.files}
    names = {index: prompts.get(index, f"prompt {index}") for index in sorted(shown | set(prompts))}
    sources = {index: directory / f"source_{index}.png" for index in names}
    sources = {index: path for index, path in sources.items() if isfile(path)}
    return RunImages(names, sorted(steps, key=lambda one: one.step), sources)


def load_step(directory: Path, step: int) -> np.ndarray:
    """Return the images of one step, uint8 [P, S, 3, H, W]; the middle frame for a clip.

    Raises FileNotFoundError if an image is missing, OSError if one is unreadable or sizes differ.
    """
    saved = next((one for one in find_images(directory).steps if one.step == step), None)
    if saved is None:
        raise FileNotFoundError(f"no images of step {step} in {directory}")
    rows, columns = (sorted({key[axis] for key in saved.files}) for axis in (0, 1))
    for row, column in itertools.product(rows, columns):
        if (row, column) not in saved.files:
            raise FileNotFoundError(
                f"{row}_{column}.png is missing from the images of step {step} in {directory}"
            )
    try:
        return np.stack(
            [np.stack([read_image(saved.files[row, column]) for column in columns]) for row in rows]
        )
    except (ValueError, SyntaxError) as error:  # which Pillow raises for a truncated file
        raise OSError(f"images of step {step} in {directory}: {error}") from None


def read_image(path: Path) -> np.ndarray:
    """Read an image file as uint8 [3, H, W]; of a clip, its middle frame."""
    with Image.open(path) as image:
        image.seek(getattr(image, "n_frames", 1) // 2)
        return np.ascontiguousarray(np.asarray(image.convert("RGB")).transpose(2, 0, 1))


def to_pil(image: np.ndarray) -> Image.Image:
    """Convert ``image`` uint8 [3, H, W] to a Pillow image."""
    return Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))


def png_bytes(image: np.ndarray) -> bytes:
    """Encode ``image`` uint8 [3, H, W] as a PNG file."""
    buffer = io.BytesIO()
    to_pil(image).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def webp_bytes(clip: np.ndarray, fps: int, largest: int = MAX_INLINE_SIDE) -> bytes:
    """Encode ``clip`` uint8 [F, 3, H, W] as an animated WebP file that loops forever.

    Lossless if no side exceeds ``largest``. Consecutive equal frames become one longer frame.
    """
    small = max(clip.shape[2:]) <= largest
    frames = [to_pil(frame) for frame in clip]
    return _animated(frames, [1000 // fps] * len(frames), lossless=small, quality=90)


def _animated(frames: list[Image.Image], durations: list[int], **options: object) -> bytes:
    """Encode frames as a looping animated WebP; ``durations`` are milliseconds per frame."""
    buffer, (first, *rest) = io.BytesIO(), frames
    first.save(
        buffer, "WEBP", save_all=True, append_images=rest, duration=durations, loop=0, **options
    )
    return buffer.getvalue()


def grid(images: np.ndarray, gap: int = 2, scale: int = 1) -> np.ndarray:
    """Arrange ``images`` uint8 [R, C, 3, H, W] in one image [3, H', W'] on white.

    ``gap``: pixels between images. ``scale``: integer factor of enlargement.
    """
    rows, columns, _, height, width = images.shape
    height, width = height * scale, width * scale
    tall, wide = rows * (height + gap) - gap, columns * (width + gap) - gap
    sheet = np.full((3, tall, wide), 255, np.uint8)
    for row, column in np.ndindex(rows, columns):
        top, left = row * (height + gap), column * (width + gap)
        sheet[:, top : top + height, left : left + width] = (
            images[row, column].repeat(scale, axis=1).repeat(scale, axis=2)
        )
    return sheet


def before_after(
    directory: Path, prompts: int = 4, noises: int = 4, height: int = 96
) -> Image.Image:
    """Draw the images of the first step (left) and the last step (right), a row per prompt.

    Each small image is about ``height`` pixels high. Raises FileNotFoundError if fewer than two
    steps were saved.
    """
    saved = find_images(directory)
    if len(saved.steps) < 2:
        raise FileNotFoundError(
            f"{directory} holds images of {len(saved.steps)} step: a comparison of before and"
            " after needs two"
        )
    prompt_indices, head, gap = sorted({index for index, _ in saved.steps[0].files}), 26, 24
    before_and_after = [
        load_step(directory, one.step)[:prompts, :noises]
        for one in (saved.steps[0], saved.steps[-1])
    ]
    rows = prompt_indices[: min(map(len, before_and_after))]
    scale = max(1, round(height / before_and_after[0].shape[3]))
    strips = [
        [grid(step[row : row + 1], scale=scale) for step in before_and_after]
        for row in range(len(rows))
    ]
    _, tall, wide = strips[0][0].shape
    sheet = Image.new("RGB", (2 * wide + 3 * gap, head + len(rows) * (tall + 30) + 8), "white")
    draw = ImageDraw.Draw(sheet)
    small = ImageFont.load_default(14)
    bold = ImageFont.load_default(16)
    for column, title in enumerate(("before", "after")):
        draw.text((gap + column * (wide + gap), 5), title, fill="#555", font=bold)
    for row, index in enumerate(rows):
        top = head + row * (tall + 30)
        draw.text((gap, top + 6), saved.prompts[index], fill="#111", font=small)
        for column in (0, 1):
            sheet.paste(to_pil(strips[row][column]), (gap + column * (wide + gap), top + 26))
    return sheet


def data_uri(path: Path) -> tuple[str, int, int]:
    """Return an image file as a ``data:`` URL, with its width and height.

    A large image is reduced and becomes a JPEG; a clip stays an animated WebP, which browsers play.
    """
    content = path.read_bytes()
    with Image.open(io.BytesIO(content)) as image:
        kind, (width, height) = str(image.format).lower(), image.size
        if max(width, height) > MAX_INLINE_SIDE:
            frames: list[Image.Image] = []
            durations: list[int] = []
            for frame in ImageSequence.Iterator(image):
                frames.append(reduced_image(frame))
                durations.append(frame.info.get("duration", 0))  # set only once the frame is loaded
            width, height = frames[0].size
            if kind == "webp":
                content = _animated(frames, durations, quality=75)
            else:
                kind, buffer = "jpeg", io.BytesIO()
                frames[0].save(buffer, "JPEG", quality=90)
                content = buffer.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}", width, height


def reduced_image(image: Image.Image) -> Image.Image:
    """Return ``image`` in RGB, reduced to at most ``MAX_INLINE_SIDE`` pixels a side."""
    small = image.convert("RGB")
    small.thumbnail((MAX_INLINE_SIDE, MAX_INLINE_SIDE), Image.Resampling.LANCZOS)
    return small

"""Source images of editing prompts: checked before a run and read at the size of the model."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray
from PIL import Image, ImageOps

from configs.load import ConfigError
from configs.paths import is_file

Pixels: TypeAlias = NDArray[np.uint8]
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
"""Accepted formats. Pillow supports more, but starts external programs for some of them."""
KEPT = 128
"""Images that a process caches: 400 MB at 1024x1024 pixels."""


class Unreadable(OSError):
    """Error for a file that is not a complete image; the message names the file and the reason."""

    def __init__(self, path: Path, error: Exception):
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        why = " ".join(text.split())[:200] or type(error).__name__
        super().__init__(f"prompts: {path}: cannot be read as an image ({why})")


@functools.lru_cache(KEPT)
def pixels_of(path: Path, height: int, width: int) -> Pixels:
    """Return an image as RGB, uint8 [3, height, width], as a read-only array.

    The image is rotated as its EXIF says, cropped around its center to the aspect ratio, and
    resized by Lanczos, as in diffusers' pipelines. Raises Unreadable if it cannot be read.
    """
    image = ImageOps.exif_transpose(_opened(path)).convert("RGB")
    resized = ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
    pixels = np.moveaxis(np.asarray(resized), -1, 0).copy()
    pixels.flags.writeable = False
    return pixels


def refuse_unreadable(paths: Iterable[Path]) -> None:
    """Raise ConfigError for the first file that is not a complete image."""
    with ThreadPoolExecutor() as pool:
        for problem in pool.map(_problem, dict.fromkeys(paths)):
            if problem is not None:
                raise ConfigError(problem)


def file_digest(path: Path) -> str:
    """Return the xxh3-128 of a file, hex. Raises ConfigError if it cannot be read."""
    try:
        _require_file(path)
        return xxhash.xxh3_128_hexdigest(path.read_bytes())
    except OSError as error:
        raise ConfigError(str(Unreadable(path, error))) from None


def _problem(path: Path) -> str | None:
    try:
        _opened(path)
    except Unreadable as error:
        return str(error)
    return None


def _opened(path: Path) -> Image.Image:
    try:
        _require_file(path)
        with Image.open(path, formats=FORMATS) as opened:
            opened.load()
            return opened
    # Pillow's readers raise exceptions of any type for damaged files
    except Exception as error:
        raise Unreadable(path, error) from None


def _require_file(path: Path) -> None:
    """Raise OSError unless it is a regular file: reading a pipe or a device might never end."""
    path.stat()
    if not is_file(path):
        raise OSError("it is not a file")

"""Source images of prompts that edit one: checked before a run, read at the size that it draws."""

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

Pixels: TypeAlias = NDArray[np.uint8]
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
"""What is read: Pillow knows others, for some of which it starts programs."""
KEPT = 128
"""Images that a process remembers: of 1024x1024 pixels 400 MB."""


class Unreadable(OSError):
    """A file that holds no whole image. Says which, and why."""

    def __init__(self, path: Path, error: Exception):
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        why = " ".join(said.split())[:200] or type(error).__name__
        super().__init__(f"prompts: {path}: no image that can be read ({why})")


@functools.lru_cache(KEPT)
def pixels_of(path: Path, height: int, width: int) -> Pixels:
    """RGB uint8 [3, height, width], not to be written to.

    Turned as its EXIF says; of another shape, cut around its middle; then resized by Lanczos, which
    is what diffusers' pipelines resize with. Raises Unreadable.
    """
    image = ImageOps.exif_transpose(_opened(path)).convert("RGB")
    found = ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
    pixels = np.moveaxis(np.asarray(found), -1, 0).copy()
    pixels.flags.writeable = False
    return pixels


def refuse_unreadable(paths: Iterable[Path]) -> None:
    """Raises ConfigError for the first file that holds no whole image."""
    with ThreadPoolExecutor() as pool:
        for problem in pool.map(_problem, dict.fromkeys(paths)):
            if problem is not None:
                raise ConfigError(problem)


def file_digest(path: Path) -> str:
    """xxh3-128 of a file, hex. Raises ConfigError."""
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
    # Pillow's readers raise of every kind where a file is damaged
    except Exception as error:
        raise Unreadable(path, error) from None


def _require_file(path: Path) -> None:
    """Raises OSError: a pipe or a device would be read for ever."""
    path.stat()
    if not path.is_file():
        raise OSError("it is no file")

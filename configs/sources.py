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

from configs.load import ConfigError

Pixels: TypeAlias = NDArray[np.uint8]
KEPT = 128
"""Images that a process remembers: of 1024x1024 pixels 400 MB."""


@functools.lru_cache(KEPT)
def pixels_of(path: Path, height: int, width: int) -> Pixels:
    """RGB uint8 [3, height, width], not to be written to.

    Turned as its EXIF says; of another shape, cut around its middle; then resized by Lanczos, which
    is what diffusers' pipelines resize with. Raises OSError where it cannot be read any more.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened).convert("RGB")
        found = ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS)
    # Pillow's readers raise of every kind where a file is damaged
    except Exception as error:
        raise OSError(f"prompts: {path}: no image that can be read ({_why(error)})") from None
    pixels = np.moveaxis(np.asarray(found), -1, 0).copy()
    pixels.flags.writeable = False
    return pixels


def refuse_unreadable(paths: Iterable[Path]) -> None:
    """Raises ConfigError for the first file that holds no whole image."""
    from PIL import Image

    def look(path: Path) -> str | None:
        try:
            with Image.open(path) as opened:
                opened.load()
        except Exception as error:  # as above
            return f"prompts: {path}: no image that can be read ({_why(error)})"
        return None

    with ThreadPoolExecutor() as pool:
        for problem in pool.map(look, dict.fromkeys(paths)):
            if problem is not None:
                raise ConfigError(problem)


def file_digest(path: Path) -> str:
    """xxh3-128 of a file, hex. Raises ConfigError."""
    try:
        return xxhash.xxh3_128_hexdigest(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"prompts: {path}: cannot be read ({_why(error)})") from None


def _why(error: Exception) -> str:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(said.split())[:200] or type(error).__name__

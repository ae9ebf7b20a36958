"""Scorers that fail, and scorers whose values depend on more than the image."""

import os
import signal
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rewards import ScorerUnreachable


class Broken:
    """Returns NaN for every image, or for the first of a batch."""

    def __init__(self, kind: str):
        self.kind = kind

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> np.ndarray:
        scores = images.reshape(len(images), -1).mean(1).astype(np.float32)
        scores[: None if self.kind == "nan" else 1] = np.nan
        return scores


class Lot:
    """A random reward drawn from the bytes of the image: the smallest change of an image changes
    its rank.
    """

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> np.ndarray:
        return np.array([zlib.crc32(image.tobytes()) / 2**32 for image in images], np.float32)


class Closeness:
    """How little an edit changes: the negative mean difference to its source, in grey levels."""

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> np.ndarray:
        sources = np.stack([row["image"] for row in metadata])
        return -np.abs(images.astype(np.float32) - sources).mean((1, 2, 3))


class Brightness:
    """The mean of an image, in grey levels."""

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> np.ndarray:
        return images.reshape(len(images), -1).mean(1).astype(np.float32)


class Misbehaves:
    """Scores an image by its mean, except as ``kind`` says; "once ..." only while the file ``mark``
    is missing.
    """

    def __init__(self, kind: str, mark: str = ""):
        self.kind, self.mark = kind, Path(mark) if mark else None

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> Any:
        scores = images.reshape(len(images), -1).mean(1).astype(np.float32)
        kind = self.kind
        if self.mark and kind == "counts":
            with self.mark.open("a") as log:
                log.write(f"{len(images)}\n")
        if self.mark and kind.startswith("once "):
            if self.mark.exists():
                return scores
            self.mark.touch()
            kind = kind.removeprefix("once ")
        match kind:
            case "raises":
                raise RuntimeError("out of paint")
            case "unreachable":
                raise ScorerUnreachable("http://judge/ did not answer")
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hangs":
                time.sleep(600)
            case "nan":
                return np.full_like(scores, np.nan)
            case "infinite":
                scores[-1] = np.inf
            case "short":
                return scores[:-1]
            case "text":
                return ["very nice"] * len(scores)
        return scores


class Place:
    """The rank of an image within its batch: its value depends on the other images."""

    def __init__(self, fails: bool = False):
        self.fails = fails

    def __call__(
        self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]
    ) -> np.ndarray:
        if self.fails:
            raise ValueError("no two alike")
        means = images.reshape(len(images), -1).mean(1)
        return np.searchsorted(np.sort(means), means).astype(np.float32)

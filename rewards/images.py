"""Preprocessing of uint8 images for networks. A batch is resized once for all its scorers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from PIL import Image

from records.images import to_pil

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""OpenAI's constants, with which all four learned scorers were trained."""

Centre = Literal["round", "floor"]
Key = tuple[str | int, ...]
_made: tuple[weakref.ref[np.ndarray], dict[Key, np.ndarray]] | None = None
"""Cached results for the newest read-only batch."""


def cached_per_batch(images: np.ndarray, key: Key, make: Callable[[], np.ndarray]) -> np.ndarray:
    """Return ``make()``, cached under ``key`` while ``images`` is the newest batch.

    Nothing is cached for a writeable batch, because its content may change.
    """
    global _made
    if images.flags.writeable:
        return make()
    if _made is None or _made[0]() is not images:
        _made = (weakref.ref(images), {})
    if key not in _made[1]:
        _made[1][key] = make()
    return _made[1][key]


def crop_square(images: np.ndarray, size: int, centre: Centre = "round") -> np.ndarray:
    """Resize uint8 [B, 3, H, W] by Pillow's bicubic filter and crop the center to ``size``.

    The shorter side becomes ``size``. If an odd number of pixels is cut off, "round" rounds half of
    it to even (torchvision, open_clip, ImageReward), and "floor" cuts less at the top and left
    (transformers).
    """
    resized = cached_per_batch(
        images, ("shorter", size), lambda: np.stack([_shorter(image, size) for image in images])
    )
    cut = [edge - size for edge in resized.shape[2:]]
    top, left = (round(extra / 2) if centre == "round" else extra // 2 for extra in cut)
    return resized[:, :, top : top + size, left : left + size]


def _shorter(pixels: np.ndarray, size: int) -> np.ndarray:
    height, width = pixels.shape[1:]
    short, long = min(height, width), max(height, width)
    other = int(size * long / short)
    target = (size, other) if width <= height else (other, size)  # Pillow: width first
    return np.asarray(to_pil(pixels).resize(target, Image.Resampling.BICUBIC)).transpose(2, 0, 1)


def pad_square(images: np.ndarray, size: int) -> torch.Tensor:
    """Resize uint8 [B, 3, H, W] and pad with black: float32 [B, 3, size, size] in about [0, 1].

    The longer side becomes ``size``. As in HPSv2: a bicubic resize of the tensor whose overshoot is
    not clipped, and padding before normalization. Unlike there, an image whose longer side is
    ``size`` already is padded too, where HPSv2's code fails.
    """
    height, width = images.shape[2:]
    scale = size / max(height, width)
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    pixels = to_float(images)
    if (rows, columns) != (height, width):
        pixels = torch.nn.functional.interpolate(
            pixels, (rows, columns), mode="bicubic", align_corners=False, antialias=True
        )
    below, right = size - rows, size - columns
    return torch.nn.functional.pad(
        pixels, (right // 2, right - right // 2, below // 2, below - below // 2)
    )


def to_float(images: np.ndarray) -> torch.Tensor:
    """Convert uint8 [...] to float32 [...] and divide by 255."""
    return torch.from_numpy(np.array(images)).to(torch.float32).div(255)


def normalize(
    pixels: torch.Tensor, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD
) -> torch.Tensor:
    """Subtract ``mean`` from float32 [B, 3, S, S] and divide by ``std``, per channel."""
    shape = (1, 3, 1, 1)
    return (pixels - torch.tensor(mean).reshape(shape)) / torch.tensor(std).reshape(shape)

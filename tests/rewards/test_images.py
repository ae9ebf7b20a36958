"""Preprocessed pixels compared with the transforms with which the models were trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rewards.images import cached_per_batch, crop_square, normalize, pad_square, to_float
from tests.rewards import peers

SIZE = 32
SIDES = [(48, 48), (33, 47), (47, 33), (1, 1), (32, 32), (32, 55), (200, 31), (7, 90)]


def noise(height: int, width: int, count: int = 2) -> np.ndarray:
    return np.random.default_rng(height * 1000 + width).integers(
        0, 256, (count, 3, height, width), dtype=np.uint8
    )


def pil(image: np.ndarray) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))


@pytest.mark.parametrize("sides", SIDES)
def test_the_crop_equals_that_of_open_clip(sides):
    """Resize, crop, division and normalization with Pillow are equal bit for bit."""
    import open_clip

    images = noise(*sides)
    theirs = torch.stack(
        [open_clip.image_transform(SIZE, is_train=False)(pil(image)) for image in images]
    )
    assert torch.equal(normalize(to_float(crop_square(images, SIZE))), theirs)


@pytest.mark.parametrize("sides", SIDES)
def test_the_floor_crop_equals_that_of_transformers(sides):
    """uint8 pixels are equal; transformers then multiplies by 1/255 where the scorer divides, a
    rounding apart.
    """
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
    )
    images = noise(*sides)
    theirs = torch.cat(
        [processor(pil(image), return_tensors="pt").pixel_values for image in images]
    )
    assert torch.allclose(
        normalize(to_float(crop_square(images, SIZE, "floor"))), theirs, atol=1e-6, rtol=0
    )


def test_the_two_crops_differ_for_odd_differences():
    images = noise(32, 39)  # 7 columns too many: 3.5 is rounded to 4 or truncated to 3
    near, far = crop_square(images, SIZE, "floor"), crop_square(images, SIZE, "round")
    assert np.array_equal(near, images[..., 3:35]) and np.array_equal(far, images[..., 4:36])


@pytest.mark.parametrize("sides", SIDES)
def test_the_padding_equals_that_of_hpsv2(sides):
    if why := peers.missing("hpsv2"):
        pytest.skip(why)
    if max(sides) == SIZE and min(sides) < SIZE:
        pytest.skip(
            "the original does not pad an image whose longer side has the size already, and fails"
            " on it"
        )
    transform = peers.hpsv2_package().image_transform(SIZE, is_train=False, resize_longest_max=True)
    images = noise(*sides)
    theirs = torch.stack([transform(pil(image)) for image in images])
    # one interpolation per batch or per image gives the same sums per pixel, up to FP32 rounding
    assert torch.allclose(normalize(pad_square(images, SIZE)), theirs, atol=1e-5, rtol=0)


def test_padding_is_black_and_in_the_middle():
    padded = pad_square(np.full((1, 3, 16, 32), 255, np.uint8), 32)
    assert padded.shape == (1, 3, 32, 32)
    assert torch.equal(padded[:, :, 8:24], torch.ones(1, 3, 16, 32))
    assert not padded[:, :, :8].any() and not padded[:, :, 24:].any()
    # a side that would round to zero
    assert pad_square(np.zeros((1, 3, 1, 500), np.uint8), 32).shape == (1, 3, 32, 32)


@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from(["round", "floor"]))
def test_every_image_is_resized(height, width, centre):
    assert crop_square(noise(height, width, 1), 8, centre).shape == (1, 3, 8, 8)
    assert pad_square(noise(height, width, 1), 8).shape == (1, 3, 8, 8)


def test_an_immutable_batch_is_resized_once():
    images = noise(40, 50)
    calls = []
    make = lambda: calls.append(1) or len(calls)  # noqa: E731
    # writeable arrays are resized again
    assert [cached_per_batch(images, ("a",), make), cached_per_batch(images, ("a",), make)] == [
        1,
        2,
    ]
    images.flags.writeable = False
    assert [
        cached_per_batch(images, ("a",), make),
        cached_per_batch(images, ("a",), make),
        cached_per_batch(images, ("b",), make),
    ] == [3, 3, 4]
    other = noise(40, 50)
    other.flags.writeable = False
    # only the newest batch is cached
    assert (
        cached_per_batch(other, ("a",), make) == 5 and cached_per_batch(images, ("a",), make) == 6
    )

"""Images of evaluations: stored without loss, arranged in sheets, and reduced for a page."""

from __future__ import annotations

import base64
import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from records.images import (
    before_after,
    data_uri,
    find_images,
    grid,
    load_step,
    png_bytes,
    save_images,
)
from tests.analysis.page import page_of
from tests.analysis.synthetic import PROMPTS, random_images, write_run


def test_images_are_read_back_unchanged(tmp_path: Path):
    images = random_images(90)
    assert (
        save_images(tmp_path, 7, [*PROMPTS, "one prompt more than images"], images)
        == tmp_path / "step_000007"
    )
    assert np.array_equal(load_step(tmp_path, 7), images)
    found = find_images(tmp_path)
    assert found.prompts == dict(enumerate(PROMPTS)) and [step.step for step in found.steps] == [7]
    assert found.seeds(3) == [0, 1, 2, 3]
    # written again: replaced, and nothing is left over
    save_images(tmp_path, 7, PROMPTS[:2], images[:2, :1])
    assert len(list((tmp_path / "step_000007").iterdir())) == 2
    assert not list(tmp_path.glob(".*"))
    (tmp_path / "step_000007" / "1_0.png").unlink()
    (tmp_path / "step_000007" / "1_1.png").write_bytes(png_bytes(images[0, 0]))
    with pytest.raises(FileNotFoundError, match="0_1.png is missing"):
        load_step(tmp_path, 7)
    with pytest.raises(FileNotFoundError, match="no images of step 8"):
        load_step(tmp_path, 8)


@pytest.mark.parametrize(
    ("images", "prompts", "says"),
    [
        (np.zeros((1, 1, 3, 4, 4), np.float32), ["a"], "float32"),
        (np.zeros((1, 3, 4, 4), np.uint8), ["a"], r"\[1, 3, 4, 4\]"),
        (np.zeros((2, 1, 3, 4, 4), np.uint8), ["a"], "1 prompts for images of 2"),
    ],
)
def test_images_of_the_wrong_shape_are_refused(
    tmp_path: Path, images: np.ndarray, prompts: list[str], says: str
):
    with pytest.raises(ValueError, match=says):
        save_images(tmp_path / "images", 0, prompts, images)
    assert not (tmp_path / "images").exists()


def test_a_damaged_image_is_a_gap(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=1)
    (run / "images" / "step_000001" / "0_0.png").write_bytes(b"not an image")
    (run / "images" / "step_000001" / "0_1.png").unlink()
    page = page_of(run)
    assert len(page.all("img")) == 2 * len(PROMPTS) * 4 - 2
    assert len([span for span in page.all("span") if span.get("class") == "hole"]) == 2


def test_large_images_are_reduced_before_they_go_into_the_page(tmp_path: Path):
    path = tmp_path / "x.png"
    path.write_bytes(png_bytes(np.full((3, 512, 1024), 90, np.uint8)))
    address, width, height = data_uri(path)
    assert (width, height) == (256, 128) and address.startswith("data:image/jpeg;base64,")
    path.write_bytes(png_bytes(np.full((3, 256, 256), 90, np.uint8)))
    assert data_uri(path)[0].startswith("data:image/png;base64,")


def clips_of(frames: int, height: int, width: int) -> np.ndarray:
    """Return clips [1, 2, frames, 3, height, width]: a bar that moves right, on black and on
    grey.
    """
    clips = np.zeros((1, 2, frames, 3, height, width), np.uint8)
    clips[:, 1] = 60
    for frame in range(frames):
        clips[:, :, frame, :, :, frame * width // frames :][..., : width // frames] = np.array(
            [250, 120, 10]
        )[:, None, None]
    return clips


def played(content: bytes) -> tuple[np.ndarray, list[int]]:
    """Return the frames uint8 [F, H, W, 3] of an animated image, and their milliseconds."""
    with Image.open(io.BytesIO(content)) as image:
        assert image.info["loop"] == 0
        rows = [
            (np.asarray(frame.convert("RGB")), frame.info["duration"])
            for frame in ImageSequence.Iterator(image)
        ]
    return np.stack([frame for frame, _ in rows]), [duration for _, duration in rows]


def test_small_clips_are_kept_bit_for_bit(tmp_path: Path):
    clips = clips_of(5, 16, 20)
    save_images(tmp_path, 3, PROMPTS, clips, fps=8)
    assert sorted(path.name for path in (tmp_path / "step_000003").iterdir()) == [
        "0_0.webp",
        "0_1.webp",
    ]
    for noise, path in find_images(tmp_path).steps[0].files.items():
        frames, durations = played(path.read_bytes())
        assert np.array_equal(frames.transpose(0, 3, 1, 2), clips[noise]) and durations == [125] * 5
        address, *size = data_uri(path)
        assert size == [20, 16] and address.startswith("data:image/webp;base64,")
        assert base64.b64decode(address.partition(",")[2]) == path.read_bytes()
    assert np.array_equal(load_step(tmp_path, 3), clips[:, :, 2])


def test_large_clips_are_reduced_and_still_move(tmp_path: Path):
    """At quality 75 grey levels change by a few; the bar stays where it was."""
    clips = clips_of(4, 300, 512)
    save_images(tmp_path, 0, PROMPTS, clips, fps=10)
    address, *size = data_uri(tmp_path / "step_000000" / "0_1.webp")
    assert size == [256, 150]
    frames, durations = played(base64.b64decode(address.partition(",")[2]))
    assert frames.shape == (4, 150, 256, 3) and durations == [100] * 4
    for number, frame in enumerate(frames.astype(int)):
        bar = frame[20:130, number * 64 + 8 : number * 64 + 56]
        assert np.abs(bar.mean((0, 1)) - [250, 120, 10]).max() < 12
        rest = np.delete(frame[20:130], np.s_[max(0, number * 64 - 8) : number * 64 + 72], axis=1)
        assert np.abs(rest.mean((0, 1)) - 60).max() < 12


def test_the_source_image_is_shown_before_the_images(tmp_path: Path):
    run, sources = write_run(tmp_path / "r", iterations=1), random_images(2)[:, 0]
    images = random_images(2)
    for step in (run / "images").glob("step_*"):
        shutil.rmtree(step)
    for step in (0, 1):
        save_images(run / "images", step, PROMPTS, images, sources=[sources[0], None])
    found = find_images(run / "images")
    assert list(found.sources) == [0] and len(found.steps) == 2
    assert np.array_equal(np.moveaxis(np.asarray(Image.open(found.sources[0])), -1, 0), sources[0])
    page = page_of(run)
    shown = [str(one["alt"]) for one in page.all("img")]
    assert shown[0] == f"source: {PROMPTS[0]}" and sum("source:" in one for one in shown) == 1
    pairs = [one["class"] for one in page.all("div") if "pair" in str(one.get("class"))]
    assert pairs[:2] == ["pair of-3", "pair"]  # before those of training


def test_clips_play_in_the_page(tmp_path: Path):
    run = write_run(tmp_path / "r", iterations=1)
    for step in (run / "images").glob("step_*"):
        shutil.rmtree(step)
    for step in (0, 1):
        save_images(run / "images", step, PROMPTS[:1], clips_of(4, 16, 16))
    shown = page_of(run).all("img")
    assert len(shown) == 4
    assert all(str(p["src"]).startswith("data:image/webp;base64,") for p in shown)
    assert before_after(run / "images", prompts=1, noises=2).size[0] > 0


def test_grid_places_every_pixel():
    images = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3, 1, 1)
    sheet = grid(images, gap=1, scale=2)
    assert sheet.shape == (3, 5, 8)
    assert np.array_equal(sheet[:, 0, 0], images[0, 0, :, 0, 0])
    assert np.array_equal(sheet[:, 4, 7], images[1, 2, :, 0, 0])
    assert (sheet[:, 2] == 255).all() and (sheet[:, :, 2] == 255).all()


def test_before_after_image_for_a_readme(tmp_path: Path):
    run = write_run(tmp_path / "r")
    sheet = before_after(run / "images", prompts=2, noises=3, height=64)
    # scale 2: three images of 64 with gaps of 2 are 196 wide; two of them, three margins of 24; 26
    # above, 64 + 30 per prompt, 8 below
    assert sheet.size == (2 * 196 + 3 * 24, 26 + 2 * 94 + 8)
    first = np.asarray(sheet)[26 + 26, 24 + 196 + 24]
    assert np.array_equal(first, load_step(run / "images", 20)[0, 0, :, 0, 0])
    with pytest.raises(FileNotFoundError, match="images of 1 step"):
        save_images(tmp_path / "one", 0, PROMPTS, random_images(1))
        before_after(tmp_path / "one")
    assert isinstance(sheet, Image.Image)

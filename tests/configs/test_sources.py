"""Source images of prompts: found beside the prompt file, refused early, read as in diffusers."""

import json
import os

import numpy as np
import pytest
from PIL import Image

from configs.load import ConfigError
from configs.prompts import Prompt, changed_files, digests, read_prompts, refuse_overlap
from configs.sections import Model, Prompts
from configs.sources import pixels_of, refuse_unreadable


def image_file(path, width, height, mode="RGB", **how):
    """Write a file of random pixels and return them."""
    path.parent.mkdir(exist_ok=True)
    channels = {"RGB": (3,), "RGBA": (4,), "L": ()}[mode]
    chance = np.random.default_rng(width)
    pixels = chance.integers(0, 256, (height, width, *channels), dtype=np.uint8)
    Image.fromarray(pixels, mode).save(path, **how)
    return pixels


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_an_image_is_a_path_from_the_prompt_file(tmp_path):
    name = lines(
        tmp_path / "a.jsonl",
        {"prompt": "redder", "image": "in/a.png", "n": 1},
        {"prompt": "bluer", "image": str(tmp_path / "b.png")},
        {"prompt": "new"},
    )
    first, second, third = read_prompts(name)
    assert first == Prompt("redder", {"n": 1}, tmp_path / "in" / "a.png")
    assert (second.image, third.image) == (tmp_path / "b.png", None)


@pytest.mark.parametrize("image", [3, "", " ", ["a.png"], "a\0b"])
def test_an_invalid_image_path_is_one_line(tmp_path, image):
    name = lines(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "y", "image": image})
    with pytest.raises(ConfigError, match=r"a.jsonl:2: 'image' is not a file name$"):
        read_prompts(name)


def test_scorers_get_the_source_image_at_the_size_of_the_run(tmp_path):
    pixels = image_file(tmp_path / "a.png", 24, 16)
    prompt = Prompt("x", {"n": 1}, tmp_path / "a.png")
    model = Model(path="m", height=16, width=24)
    recorded = prompt.scorer_metadata(model)
    assert recorded["n"] == 1 and recorded["image"].dtype == np.uint8
    assert np.array_equal(recorded["image"], pixels.transpose(2, 0, 1))
    assert prompt.metadata == {"n": 1} and prompt.source(model) is recorded["image"]
    assert Prompt("x", {"n": 1}).scorer_metadata(model) == {"n": 1}


def test_source_images_are_resized_as_by_diffusers(tmp_path):
    """The expected pixels are those of the processor of its pipelines."""
    from diffusers.image_processor import VaeImageProcessor

    image_file(tmp_path / "a.png", 48, 32)
    theirs = VaeImageProcessor(vae_scale_factor=8).resize(Image.open(tmp_path / "a.png"), 16, 24)
    assert np.array_equal(
        pixels_of(tmp_path / "a.png", 16, 24), np.moveaxis(np.asarray(theirs), -1, 0)
    )


def test_another_aspect_ratio_is_cropped_at_the_center(tmp_path):
    pixels = image_file(tmp_path / "wide.png", 32, 16)
    assert np.array_equal(
        pixels_of(tmp_path / "wide.png", 16, 16), pixels[:, 8:24].transpose(2, 0, 1)
    )


def test_modes_and_orientation_equal_those_of_diffusers(tmp_path):
    from diffusers.utils import load_image

    exif = Image.Exif()
    exif[0x0112] = 6  # a rotation by 90 degrees
    image_file(tmp_path / "turned.jpg", 24, 16, exif=exif)
    for name, mode in (("grey.png", "L"), ("clear.png", "RGBA")):
        image_file(tmp_path / name, 16, 24, mode)
    for name in ("turned.jpg", "grey.png", "clear.png"):
        theirs = np.asarray(load_image(str(tmp_path / name)))
        assert theirs.shape == (24, 16, 3)
        assert np.array_equal(pixels_of(tmp_path / name, 24, 16), theirs.transpose(2, 0, 1))


@pytest.mark.parametrize("damage", ["missing", "text", "cut", "folder", "pipe", "gif"])
def test_an_unreadable_image_is_reported_before_the_start(tmp_path, damage):
    good, path = tmp_path / "good.png", tmp_path / "x.jpg"
    image_file(good, 40, 40)
    image_file(path, 40, 40)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-300])
    else:
        path.unlink()
    if damage == "text":
        path.write_text("no image")
    if damage == "folder":
        path.mkdir()
    if damage == "pipe":
        os.mkfifo(path)
    if damage == "gif":
        image_file(path, 8, 8, format="GIF")
    refuse_unreadable([good, good])
    with pytest.raises(
        ConfigError, match=r"^prompts: .*x.jpg: cannot be read as an image \("
    ) as recorded:
        refuse_unreadable([good, path])
    assert len(recorded.value.lines) == 1
    with pytest.raises(OSError, match="cannot be read as an image"):
        pixels_of(path, 16, 16)


def test_the_same_text_with_another_image_is_another_prompt(tmp_path):
    for name in "ab":
        image_file(tmp_path / f"{name}.png", 16 if name == "a" else 24, 16)
    a, b = (Prompt("Redder", {}, tmp_path / f"{name}.png") for name in "ab")
    recorded = Prompts(train="a", test="b")
    refuse_overlap(recorded, [a], [b])
    with pytest.raises(ConfigError, match="1 of 1 held-out prompts are among"):
        refuse_overlap(recorded, [a], [Prompt("redder", {"n": 1}, tmp_path / "x" / ".." / "a.png")])


def test_a_digest_is_of_the_image_not_of_its_name(tmp_path):
    pixels = image_file(tmp_path / "a.png", 16, 16)
    Image.fromarray(pixels).save(tmp_path / "b.png")
    train = lines(tmp_path / "one.jsonl", {"prompt": "x", "image": "a.png"})
    settings = Prompts(train=train, test=lines(tmp_path / "t.jsonl", {"prompt": "x"}))
    before = digests(settings)
    assert before["train"] != before["test"]
    lines(tmp_path / "one.jsonl", {"prompt": "x", "image": "b.png"})
    assert changed_files(settings, before) == []
    image_file(tmp_path / "b.png", 17, 16)
    assert changed_files(settings, before) == [f"prompts.train = {train!r}"]
    (tmp_path / "b.png").unlink()
    with pytest.raises(ConfigError, match=r"b.png: cannot be read as an image \(No such file"):
        digests(settings)

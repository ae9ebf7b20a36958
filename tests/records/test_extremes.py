"""Best and worst images on disk: which iterations are kept, their contents, and one sheet of
them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from records.extremes import (
    Extreme,
    downscaled,
    find_extremes,
    iterations_to_keep,
    remove_from,
    save_extremes,
    sheet,
)


def flat(value: int, size: int = 8) -> np.ndarray:
    return np.full((3, size, size), value, np.uint8)


def both(prompt: int, value: int, size: int = 8) -> list[Extreme]:
    """Return the best and the worst image, explored at half the size."""
    text = f"prompt {prompt}"
    return [
        Extreme(prompt, text, "explored", "best", 5, 0.75, flat(value, size // 2), 0.5),
        Extreme(prompt, text, "explored", "worst", 1, 0.25, flat(value + 1, size // 2)),
        Extreme(prompt, text, "regenerated", "best", 2, 0.8, flat(value + 2, size), 0.7),
        Extreme(prompt, text, "regenerated", "worst", 1, 0.2, flat(value + 3, size), 0.25),
    ]


def test_clips_move_and_a_sheet_shows_their_middle(tmp_path: Path):
    clip = np.stack([flat(value) for value in (10, 90, 170, 250)])
    shown = [Extreme(0, "a", "explored", "best", 3, 0.5, clip)]
    save_extremes(tmp_path, 2, shown, 4, fps=5)
    (found,) = find_extremes(tmp_path)
    assert found.rows[0]["file"] == "0_explored_best.webp" and found.rows[0]["width"] == 8
    with Image.open(found.directory / "0_explored_best.webp") as image:
        frames = [(np.asarray(f.convert("RGB")), f.info["duration"])
                  for f in ImageSequence.Iterator(image)]  # fmt: skip
    assert np.array_equal(np.stack([f for f, _ in frames]).transpose(0, 3, 1, 2), clip)
    assert [duration for _, duration in frames] == [200] * 4
    assert (sheet(shown)[:, :, :8] == 170).all()
    large = np.full((2, 3, 300, 600), 7, np.uint8)
    assert downscaled(large).shape == (2, 3, 128, 256)


def test_iterations_to_keep_are_spaced_evenly():
    assert iterations_to_keep(range(4), 4) == {0, 1, 2, 3}
    assert iterations_to_keep(range(5), 4) == {0, 2, 4}
    assert iterations_to_keep(range(6), 4) == {0, 2, 4, 5}
    assert iterations_to_keep(range(8), 4) == {0, 4, 7}
    assert iterations_to_keep([0, 4, 6, 8], 4) == {0, 4, 8}
    assert iterations_to_keep([7], 2) == {7} and iterations_to_keep([], 2) == set()


@pytest.mark.parametrize("limit", [2, 3, 4, 7, 16])
def test_incremental_thinning_equals_thinning_at_the_end(limit: int):
    there: set[int] = set()
    for newest in range(300):
        there = iterations_to_keep(there | {newest}, limit)
        assert len(there) <= limit and newest in there
        assert there == iterations_to_keep(range(newest + 1), limit)
        if newest >= limit:  # evenly: no gap exceeds the stride of the widest allowed one
            gaps = np.diff(sorted(there))
            assert max(gaps) == max(gaps[:-1], default=max(gaps))
            assert max(gaps) <= 4 * newest / limit


def test_written_extremes_are_found(tmp_path: Path):
    for iteration in range(5):
        save_extremes(tmp_path, iteration, both(0, 10) + both(1, 90), limit=3)
    found = find_extremes(tmp_path)
    assert [one.iteration for one in found] == [0, 2, 4]
    rows = found[2].rows
    assert len(rows) == 8
    assert (rows[2] == {
        "prompt": 0, "text": "prompt 0", "stage": "regenerated", "end": "best", "seed": 2,
        "reward": 0.8, "other": 0.7, "file": "0_regenerated_best.png", "width": 8, "height": 8,
    })  # fmt: skip
    with Image.open(found[2].directory / str(rows[2]["file"])) as image:
        assert image.getpixel((3, 3)) == (12, 12, 12)
    remove_from(tmp_path, 4)
    assert [one.iteration for one in find_extremes(tmp_path)] == [0, 2]
    (tmp_path / "iteration_000000" / "shown.json").write_text("[{")
    assert [one.iteration for one in find_extremes(tmp_path)] == [2]


def test_large_images_are_made_smaller_and_a_view_is_not_kept():
    batch = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    small = downscaled(batch[1])
    assert small.base is None and np.array_equal(small, batch[1])
    assert downscaled(np.full((3, 512, 1024), 7, np.uint8)).shape == (3, 128, 256)
    assert Extreme(0, "", "explored", "best", 0, 0.0, flat(0, 97)).file.endswith("jpg")


def test_a_sheet_has_a_row_per_prompt_and_a_column_per_end_and_stage():
    whole = sheet(both(0, 10) + both(2, 90)[:-1])
    assert whole.shape == (3, 2 * 8 + 2, 4 * 8 + 3 * 2)  # gaps of two pixels
    centres = [[int(whole[0, 4 + 10 * r, 4 + 10 * c]) for c in range(4)] for r in range(2)]
    assert centres == [[10, 12, 11, 13], [90, 92, 91, 128]]
    one_stage = sheet([one for one in both(0, 10) if one.stage == "regenerated"])
    assert one_stage.shape == (3, 8, 2 * 8 + 2)

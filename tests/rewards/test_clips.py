"""Clips: the frames that image scorers see, and the use of their scores."""

import numpy as np
import pytest

from configs.load import ConfigError, load
from configs.rewards import Scorer
from rewards import ScorerSetupError, check_settings
from rewards.cache import ScoreCache
from rewards.clips import scored_frames
from rewards.combine import WeightedScorer
from rewards.server import HttpScorer
from tests.rewards.server import serving

PROMPTS, ROWS = ["a", "b"], [{"row": 0}, {"row": 1}]


class Brightness:
    """Scorer by the mean of an image, which records its inputs."""

    def __call__(self, images, prompts, metadata):
        self.seen, self.prompts, self.metadata = images, list(prompts), list(metadata)
        self.parts = {"twice": 2 * images.reshape(len(images), -1).mean(1)}
        return images.reshape(len(images), -1).mean(1)


class Motion:
    """Scorer by the mean change from frame to frame."""

    clips = True

    def __call__(self, images, prompts, metadata):
        self.seen = images
        change = np.abs(np.diff(images.astype(float), axis=1)).reshape(len(images), -1)
        return change.mean(1) if change.size else np.zeros(len(images))


def clips(frames: int) -> np.ndarray:
    """Return uint8 [2, frames, 3, 2, 4], where frame f of clip b is b * 100 + f everywhere."""
    values = np.arange(2)[:, None] * 100 + np.arange(frames)
    return np.broadcast_to(values[:, :, None, None, None], (2, frames, 3, 2, 4)).astype(np.uint8)


@pytest.mark.parametrize(
    ("frames", "expected", "found"),
    [
        (5, None, [0, 1, 2, 3, 4]),
        (5, 8, [0, 1, 2, 3, 4]),
        (5, 1, [2]),
        (6, 1, [3]),
        (33, 4, [4, 12, 20, 28]),
        (81, 3, [13, 40, 67]),
        (5, 5, [0, 1, 2, 3, 4]),
    ],
)
def test_scored_frames_are_the_middles_of_equal_parts(frames, expected, found):
    assert scored_frames(frames, expected) == found


def test_frames_are_scored_as_images_and_their_mean_counts():
    bright, motion = Brightness(), Motion()
    scorer = WeightedScorer({"bright": bright, "motion": motion}, {"bright": 1.0, "motion": 10.0},
                            frames=3)  # fmt: skip
    made = scorer.attempt(clips(9), PROMPTS, ROWS)
    assert bright.seen.shape == (6, 3, 2, 4) and not bright.seen.flags.writeable
    assert bright.seen[:, 0, 0, 0].tolist() == [1, 4, 7, 101, 104, 107]
    assert bright.prompts == ["a"] * 3 + ["b"] * 3
    assert [row["row"] for row in bright.metadata] == [0, 0, 0, 1, 1, 1]
    assert made.scores["bright"].tolist() == [4.0, 104.0]
    assert made.parts["bright/twice"].tolist() == [8.0, 208.0]
    assert motion.seen.shape == (2, 9, 3, 2, 4) and made.scores["motion"].tolist() == [1.0, 1.0]
    assert made.work["bright"][0] == 6 and made.work["motion"][0] == 2
    assert scorer(clips(9), PROMPTS, ROWS).total.tolist() == [14.0, 114.0]


def test_a_clip_with_an_unscored_frame_has_no_score():
    def broken(images, prompts, metadata):
        scores = images[:, 0, 0, 0].astype(np.float32)
        return np.where(scores == 101, np.nan, scores)

    made = WeightedScorer({"s": broken}, {"s": 1.0}).attempt(clips(3), PROMPTS, ROWS)
    assert made.scores["s"][0] == 1 and np.isnan(made.scores["s"][1]) and made.failures


def test_an_image_is_a_clip_of_one_frame():
    motion = Motion()
    images = clips(4)[:, 0]
    made = WeightedScorer({"motion": motion}, {"motion": 1.0}).attempt(images, PROMPTS, ROWS)
    assert motion.seen.shape == (2, 1, 3, 2, 4) and made.scores["motion"].tolist() == [0.0, 0.0]


def test_scores_of_clips_are_cached():
    """Of a known clip and a new one, only the new one is scored."""
    bright = Brightness()
    cache = ScoreCache(WeightedScorer({"b": bright}, {"b": 1.0}, frames=2))
    cache.attempt(clips(5), PROMPTS, ROWS)
    again = np.stack([clips(5)[1], clips(5)[0] + 50])
    made = cache.attempt(again, ["b", "a"], [ROWS[1], ROWS[0]])
    assert bright.seen[:, 0, 0, 0].tolist() == [51, 53]
    assert made.scores["b"].tolist() == [102.0, 52.0]


def test_a_server_scores_whole_clips():
    with serving() as server:
        http = HttpScorer(server.url, clips=True)
        scorer = WeightedScorer({"http": http}, {"http": 1.0}, frames=1)
        assert scorer(clips(3), PROMPTS, ROWS).total.tolist() == [1.0, 101.0]
    (recorded,) = server.requests
    assert np.array_equal(np.stack(recorded["images"]), clips(3)) and recorded["prompts"] == PROMPTS
    settings = {"url": "http://localhost:1/", "clips": True, "encoding": "json"}
    with pytest.raises(ScorerSetupError, match="clips = true needs encoding = 'npz'"):
        check_settings(Scorer(name="http", settings=settings))


def test_frames_of_images_cannot_be_scored():
    with pytest.raises(ConfigError, match=r"rewards\.frames: 2 without model\.frames"):
        load("quickstart", ["rewards.frames=2"])

"""What the scorers of one iteration or evaluation answered: means, speeds, failures; and scorers
that rank nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from actors.messages import Floats, Scores
from records.errors import RunFailed
from records.rundir import Event
from rewards.combine import Combination

FEW = 4
"""Equal scores of fewer images say nothing."""
MOST_CONSTANT = 3
"""Iterations in a row in which no scorer tells any two images apart, before the run ends."""


class ScoreTally:
    """Of scorers ``labels``. ``images`` were scored, ``dropped`` of them lack a score that they
    need, and for ``stood_in`` scores of optional scorers a mean stands in. ``error`` is the largest
    difference of a second answer for the same images, in standard deviations.
    """

    def __init__(self, combination: Combination, labels: set[str], max_failed_share: float):
        self.labels = labels
        self._combination, self._max_failed_share = combination, max_failed_share
        self.images = 0
        self.error: float | None = None
        self._last_failure = ""
        # joined when they are asked about: answers come by the thousand
        self._scored: list[Mapping[str, Floats]] = []
        self._answers: dict[str, list[Floats]] = {}  # by label, answer by answer
        self._speed: dict[str, tuple[float, float]] = {}  # label -> images, seconds

    def scored(self, values: Mapping[str, Floats], images: int) -> None:
        """Count so many images and their scores float32 [images], by label."""
        self.images += images
        self._scored.append(values)

    @property
    def dropped(self) -> int:
        """See the class."""
        labels = self._combination.weights if self._scored else ()
        whole = {
            label: np.concatenate([values[label] for values in self._scored]) for label in labels
        }
        return self._combination.missing(whole) if whole else 0

    @property
    def stood_in(self) -> int:
        """See the class."""
        optional = self._combination.optional
        found = [values[label] for values in self._scored for label in optional]
        return sum(int(np.count_nonzero(~np.isfinite(each))) for each in found)

    def answered(self, answers: Sequence[Scores]) -> None:
        """Take what actors answered: scores and their parts, failures, and how long it took."""
        for answer in answers:
            self._last_failure = fault(answer) or self._last_failure
            for label, found in (answer.values | answer.parts).items():
                self._answers.setdefault(label, []).append(found)
            for label, (count, seconds) in answer.work.items():
                before = self._speed.get(label, (0.0, 0.0))
                self._speed[label] = before[0] + count, before[1] + seconds

    def constant(self) -> dict[str, float]:
        """Scorers that gave every image of several the same score, with that score."""
        return {
            label: float(found[0])
            for label, found in self._all_found().items()
            if label in self.labels and len(found) >= FEW and found.min() == found.max()
        }

    def _all_found(self) -> dict[str, Floats]:
        """What is finite."""
        whole = {label: np.concatenate(parts) for label, parts in self._answers.items()}
        return {label: found[np.isfinite(found)] for label, found in whole.items()}

    def check_share(self) -> None:
        """Raises RunFailed when more images were dropped than configured."""
        if self.images and self.dropped / self.images > self._max_failed_share:
            raise RunFailed(
                f"scoring failed for {self.dropped} of {self.images} images, more than"
                f" rewards.max_failed_share = {self._max_failed_share:g} allows; last:"
                f" {self._last_failure}"
            )

    def scorer_means(self) -> dict[str, float]:
        """Metrics of the scorers: mean raw scores over everything scored and of their parts
        (``reward/<label>``, ``reward/<label>/<part>``), their speeds, and for how many images an
        optional scorer's mean stood in for its score.
        """
        means = {
            f"reward/{label}": float(found.astype(np.float64).mean())
            for label, found in self._all_found().items()
            if len(found)
        }
        stood_in = {"rewards/stood_in": self.stood_in} if self._combination.optional else {}
        error = {"audit/scorer_error": self.error} if self.error is not None else {}
        return means | self.speeds() | stood_in | error

    def speeds(self) -> dict[str, float]:
        """``rewards/images_per_s/<label>``: images per second of each scorer while it works."""
        return {
            f"rewards/images_per_s/{label}": count / seconds
            for label, (count, seconds) in self._speed.items()
            if seconds  # all of it from an actor's memory: no work
        }


class ConstantScores:
    """Watches for scorers that give all images of an iteration one score: nothing is ranked, the
    advantages are zero, and nothing fails.
    """

    def __init__(self, event: Event, note: Callable[[str], None]):
        self._event, self._note, self._in_a_row = event, note, 0

    def observe(self, iteration: int, tally: ScoreTally) -> None:
        """Tell of each such scorer. Raises RunFailed when there was no other for some time."""
        found = tally.constant()
        for label, value in found.items():
            self._event("scorer_constant", iteration=iteration, scorer=label, value=value)
            self._note(
                f"iteration {iteration}: scorer {label!r} gave {value:g} for every image: it ranks"
                " nothing"
            )
        self._in_a_row = self._in_a_row + 1 if found.keys() == tally.labels else 0
        if self._in_a_row >= MOST_CONSTANT:
            raise RunFailed(
                f"iteration {iteration}: every scorer gave every image the same score,"
                f" {MOST_CONSTANT} iterations in a row, so nothing can be learned: look at"
                f" {', '.join(found)}, and continue with --resume"
            )


def fault(answer: Scores) -> str | None:
    """Why an answer should be tried again: what failed in it."""
    return "; ".join(answer.failures) or None

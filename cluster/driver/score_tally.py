"""Statistics of scoring in one iteration or evaluation, and detection of constant scorers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from actors.messages import Floats, Scores
from records.errors import RunFailed
from records.rundir import Event
from rewards.combine import Combination

FEW = 4
"""Least number of images whose equal scores make a scorer count as constant."""
MOST_CONSTANT = 3
"""Iterations in a row in which every scorer is constant, after which the run ends."""


class ScoreTally:
    """Counts, means, speeds and failures of the scorers ``labels``.

    ``images`` were scored, of which ``dropped`` lack the score of a required scorer. ``stood_in``
    scores of optional scorers are missing and replaced by a mean. ``error`` is the largest
    difference between two answers for the same images, in standard deviations. ``last_failure`` is
    a line of the last answer in which a scorer failed, or "".
    """

    def __init__(self, combination: Combination, labels: set[str], max_failed_share: float):
        self.labels = labels
        self._combination, self._max_failed_share = combination, max_failed_share
        self.images = 0
        self.error: float | None = None
        self.last_failure = ""
        # concatenated only when read: thousands of answers arrive
        self._scored: list[Mapping[str, Floats]] = []
        self._answers: dict[str, list[Floats]] = {}  # by label, answer by answer
        self._speed: dict[str, tuple[float, float]] = {}  # label -> images, seconds

    def scored(self, values: Mapping[str, Floats], images: int) -> None:
        """Count ``images`` images with their scores float32 [images], by label."""
        self.images += images
        self._scored.append(values)

    @property
    def dropped(self) -> int:
        """Number of images that lack the score of a required scorer."""
        labels = self._combination.weights if self._scored else ()
        whole = {
            label: np.concatenate([values[label] for values in self._scored]) for label in labels
        }
        return self._combination.missing(whole) if whole else 0

    @property
    def stood_in(self) -> int:
        """Number of missing scores of optional scorers, which a mean replaces."""
        optional = self._combination.optional
        optional_scores = [values[label] for values in self._scored for label in optional]
        return sum(int(np.count_nonzero(~np.isfinite(scores))) for scores in optional_scores)

    def answered(self, answers: Sequence[Scores]) -> None:
        """Record the answers of actors: scores and their parts, failures, and time spent."""
        for answer in answers:
            self.last_failure = fault(answer.failures) or self.last_failure
            for label, scores in (answer.values | answer.parts).items():
                self._answers.setdefault(label, []).append(scores)
            for label, (count, seconds) in answer.work.items():
                previous = self._speed.get(label, (0.0, 0.0))
                self._speed[label] = previous[0] + count, previous[1] + seconds

    def constant(self) -> dict[str, float]:
        """Return scorers that gave all of at least ``FEW`` images one score, with that score."""
        return {
            label: float(scores[0])
            for label, scores in self._all_found().items()
            if label in self.labels and len(scores) >= FEW and scores.min() == scores.max()
        }

    def _all_found(self) -> dict[str, Floats]:
        """Return all finite scores and parts, by label."""
        whole = {label: np.concatenate(parts) for label, parts in self._answers.items()}
        return {label: scores[np.isfinite(scores)] for label, scores in whole.items()}

    def check_share(self) -> None:
        """Raise RunFailed if more images were dropped than ``rewards.max_failed_share`` allows."""
        if self.images and self.dropped / self.images > self._max_failed_share:
            raise RunFailed(
                f"scoring failed for {self.dropped} of {self.images} images, more than"
                f" rewards.max_failed_share = {self._max_failed_share:g} allows; last:"
                f" {self.last_failure}"
            )

    def scorer_means(self) -> dict[str, float]:
        """Return the metrics of the scorers.

        These are the means over all raw scores (``reward/<label>``) and their parts
        (``reward/<label>/<part>``), the speeds, the number of scores of optional scorers that were
        replaced by a mean, and the largest difference of a repeated answer, if one was requested.
        """
        means = {
            f"reward/{label}": float(scores.astype(np.float64).mean())
            for label, scores in self._all_found().items()
            if len(scores)
        }
        stood_in = {"rewards/stood_in": self.stood_in} if self._combination.optional else {}
        error = {"audit/scorer_error": self.error} if self.error is not None else {}
        return means | self.speeds() | stood_in | error

    def speeds(self) -> dict[str, float]:
        """Return the speed of each scorer while it works, as ``rewards/images_per_s/<label>``."""
        return {
            f"rewards/images_per_s/{label}": count / seconds
            for label, (count, seconds) in self._speed.items()
            if seconds  # 0: all scores came from an actor's cache
        }


class ConstantScores:
    """Detects scorers that give all images of an iteration the same score.

    Such a scorer ranks nothing and gives zero advantages, without any error.
    """

    def __init__(self, event: Event, note: Callable[[str], None]):
        self._event, self._note, self._in_a_row = event, note, 0

    def observe(self, iteration: int, tally: ScoreTally) -> None:
        """Report each constant scorer of an iteration.

        Raises RunFailed if all scorers were constant in ``MOST_CONSTANT`` iterations in a row.
        """
        constant = tally.constant()
        for label, value in constant.items():
            self._event("scorer_constant", iteration=iteration, scorer=label, value=value)
            self._note(
                f"iteration {iteration}: scorer {label!r} gave {value:g} for every image, so it"
                " does not rank them"
            )
        self._in_a_row = self._in_a_row + 1 if constant.keys() == tally.labels else 0
        if self._in_a_row >= MOST_CONSTANT:
            raise RunFailed(
                f"iteration {iteration}: every scorer gave every image the same score,"
                f" {MOST_CONSTANT} iterations in a row, so nothing can be learned: check"
                f" {', '.join(constant)}, and continue with --resume"
            )


def fault(failures: Sequence[str]) -> str | None:
    """Return the failures of an answer as one line, or None."""
    return "; ".join(failures) or None

"""Base classes for the settings of the training objectives.

The settings of one objective are next to its formula, in its file in ``learner/objectives``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from pydantic import Field

from configs.section import Section
from configs.sections import AnySolver, StochasticSolver

DETERMINISTIC: tuple[AnySolver, ...] = ("dpmpp_2m", "euler", "unipc")
STOCHASTIC: tuple[str, ...] = get_args(StochasticSolver)


class ObjectiveSettings(Section):
    """Base class of an objective's settings.

    Class variables are properties of the objective, not settings. ``solvers``: the solvers that it
    can regenerate with, its default first. ``old_schedule``: how the sampling policy follows the
    trained weights unless ``[old_policy]`` says otherwise ("constant" with the value 0 makes it a
    copy of them). ``advantage_std`` and ``advantage_eps``: how rewards are normalized unless
    ``[advantages]`` says otherwise.
    """

    if TYPE_CHECKING:
        name: str
    solvers: ClassVar[tuple[AnySolver, ...]] = DETERMINISTIC
    old_schedule: ClassVar[Literal["constant", "linear_cap"]] = "constant"
    advantage_std: ClassVar[Literal["global", "group"]] = "global"
    advantage_eps: ClassVar[float] = 1e-4

    @property
    def stochastic(self) -> bool:
        """True if samples are paths of a stochastic solver, with log-probabilities."""
        return self.solvers[0] in STOCHASTIC

    @property
    def one_noise_per_group(self) -> bool:
        """True if all samples of a prompt start from the same initial noise."""
        return False

    def trained_steps(self, steps: int) -> Sequence[int]:
        """Return the positions in a schedule of ``steps`` steps that may be trained on."""
        return range(steps)


class Window(Section):
    """Window of steps of a path that are stochastic and trained on (MixGRPO, arXiv 2507.21802).

    The other steps are deterministic Euler steps.
    """

    size: int = Field(ge=1, description="number of steps in the window")
    start: int = Field(
        default=0, ge=0, description="first step of the window in the first iteration"
    )
    schedule: Literal["frozen", "progressive", "linear_decay", "exponential_decay", "random"] = (
        Field(
            default="frozen",
            description=(
                "frozen: the window never moves; progressive: it moves by `stride` after"
                " every `every` iterations; linear_decay, exponential_decay: it moves sooner"
                " the further it has moved; random: a random place in each iteration"
            ),
        )
    )
    stride: int = Field(default=1, ge=1, description="number of steps by which the window moves")
    every: int = Field(
        default=25, ge=1, description="iterations that the window stays at its first place"
    )
    wrap: bool = Field(
        default=False, description="move the window back to `start` after the end of the path"
    )

    def place(self, limit: int, done: int, seed: int) -> range:
        """Return the window after ``done`` iterations.

        ``limit``: number of steps at the start of the path that may be trained on. The window
        includes later steps only if it is longer than that.
        """
        last = max(limit - self.size, 0)
        at = min(self.start, last)
        if self.schedule == "random":
            digest = hashlib.blake2b(f"window/{seed}/{done}".encode(), digest_size=8).digest()
            at = int.from_bytes(digest, "little") % (last + 1)
        elif self.schedule != "frozen":
            left = done
            # a loop rather than a formula: the time at a place differs from place to place
            while left >= (stay := self._stay(at, limit)):
                left -= stay
                if at == last and not self.wrap:
                    break
                at = min(self.start, last) if at == last else min(at + self.stride, last)
        return range(at, at + self.size)

    def _stay(self, at: int, limit: int) -> int:
        """Return the iterations spent at the place ``at``, as in MixGRPO's schedules and code."""
        if self.schedule == "linear_decay":
            shortest = max(1, self.every // 4)
            return max(shortest, int(self.every + (shortest - self.every) * at / limit))
        if self.schedule == "exponential_decay":
            return math.ceil(self.every * math.exp(-0.1 * max(0, at - 13)))
        return self.every


class PathSettings(ObjectiveSettings):
    """Settings that the objectives on stochastic paths share."""

    if TYPE_CHECKING:
        eta: float  # noise level of the solver
    ratio_clip: float = Field(
        default=1e-4, gt=0, description="e: probability ratios are clipped to [1 - e, 1 + e]"
    )
    advantage_clip: float = Field(
        default=5.0, gt=0, description="c: advantages are clipped to [-c, c]"
    )
    window: Window | None = Field(
        default=None,
        description=(
            "steps that are stochastic and trained on; None: all steps, as in the paper"
            " of the objective"
        ),
    )
    shared_noise: bool = Field(
        default=False,
        description=(
            "all samples of a prompt start from the same initial noise, as in DanceGRPO's"
            " paper; if seeds are explored, this needs explore.paths"
        ),
    )
    noise_weight: float = Field(
        default=0.0,
        ge=0,
        le=8,
        description=(
            "p: the loss of a step is weighted by std^p, normalized to a mean of 1; 0:"
            " equal weights; TempFlow-GRPO uses 1"
        ),
    )
    ratio_norm: bool = Field(
        default=False,
        description=(
            "normalize as in GRPO-Guard: log ratios are centered and multiplied by std,"
            " the loss is divided by -dsigma"
        ),
    )

    @property
    def one_noise_per_group(self) -> bool:
        return self.shared_noise

    def window_at(self, steps: int, done: int = 0, seed: int = 0) -> range:
        """Return the stochastic steps of a path of ``steps`` steps after ``done`` iterations."""
        if self.window is None:
            return range(steps)
        window = self.window.place(max(self.trained_steps(steps)) + 1, done, seed)
        return range(window.start, min(window.stop, steps))

    def last_stop(self, steps: int) -> int:
        """Return the largest end (exclusive) of the window on a path of ``steps`` steps."""
        if self.window is None:
            return steps
        if self.window.schedule == "frozen":
            return self.window_at(steps).stop
        return min(max(max(self.trained_steps(steps)) + 1, self.window.size), steps)


def tolerant_floor(value: float) -> int:
    """Return the floor of ``value``, with a tolerance for rounding: 9 for 8.999999999999."""
    return math.floor(value + 1e-9)

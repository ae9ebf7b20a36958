"""What the settings of all training objectives share.

An objective's own settings stand beside its formula, in its file in ``learner/objectives``.
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
    """What every objective says about itself. Class variables are no settings, but follow from it.

    ``solvers``: what it may regenerate with, its own first. ``old_schedule``: how the sampling
    policy follows the trained weights unless ``[old_policy]`` says otherwise ("constant" with the
    value 0: it is a copy of them). ``advantage_std`` and ``advantage_eps``: how rewards are
    normalized unless ``[advantages]`` says otherwise.
    """

    if TYPE_CHECKING:
        name: str
    solvers: ClassVar[tuple[AnySolver, ...]] = DETERMINISTIC
    old_schedule: ClassVar[Literal["constant", "linear_cap"]] = "constant"
    advantage_std: ClassVar[Literal["global", "group"]] = "global"
    advantage_eps: ClassVar[float] = 1e-4

    @property
    def stochastic(self) -> bool:
        """True where samples are paths of a stochastic solver, with log-probabilities."""
        return self.solvers[0] in STOCHASTIC

    @property
    def one_noise_per_group(self) -> bool:
        """True where all samples of a prompt start from one initial noise."""
        return False

    def trained_steps(self, steps: int) -> Sequence[int]:
        """Positions of a schedule of ``steps`` steps that training times may be drawn from."""
        return range(steps)


class Window(Section):
    """The steps of a path that are stochastic and trained on; the others are Euler's
    (MixGRPO, arXiv 2507.21802).
    """

    size: int = Field(ge=1, description="steps in the window")
    start: int = Field(default=0, ge=0, description="its first step, in the first iteration")
    schedule: Literal["frozen", "progressive", "linear_decay", "exponential_decay", "random"] = (
        Field(
            default="frozen",
            description=(
                "frozen: it stays; progressive: it moves by `stride` every `every` iterations;"
                " linear_decay, exponential_decay: the sooner the further it is; random: another"
                " place in each iteration"
            ),
        )
    )
    stride: int = Field(default=1, ge=1, description="steps that it moves by")
    every: int = Field(default=25, ge=1, description="iterations at one place, at the start")
    wrap: bool = Field(default=False, description="at the end of the path go back to `start`")

    def place(self, limit: int, done: int, seed: int) -> range:
        """The window after ``done`` iterations, on a path whose first ``limit`` steps may be
        trained on. It covers later ones only where it is longer than that.
        """
        last = max(limit - self.size, 0)
        at = min(self.start, last)
        if self.schedule == "random":
            digest = hashlib.blake2b(f"window/{seed}/{done}".encode(), digest_size=8).digest()
            at = int.from_bytes(digest, "little") % (last + 1)
        elif self.schedule != "frozen":
            left = done
            # walked and not computed: how long it stays differs from place to place
            while left >= (stay := self._stay(at, limit)):
                left -= stay
                if at == last and not self.wrap:
                    break
                at = min(self.start, last) if at == last else min(at + self.stride, last)
        return range(at, at + self.size)

    def _stay(self, at: int, limit: int) -> int:
        """Iterations at the place ``at``: MixGRPO's schedules, with the constants of its code."""
        if self.schedule == "linear_decay":
            least = max(1, self.every // 4)
            return max(least, int(self.every + (least - self.every) * at / limit))
        if self.schedule == "exponential_decay":
            return math.ceil(self.every * math.exp(-0.1 * max(0, at - 13)))
        return self.every


class PathSettings(ObjectiveSettings):
    """What the objectives on stochastic paths have in common."""

    if TYPE_CHECKING:
        eta: float  # noise level of the solver
    ratio_clip: float = Field(
        default=1e-4, gt=0, description="e of the clipped ratio [1 - e, 1 + e]"
    )
    advantage_clip: float = Field(
        default=5.0, gt=0, description="advantages are clipped to [-c, c]"
    )
    window: Window | None = Field(
        default=None,
        description="steps that are stochastic and trained on; None: all, as in its paper",
    )
    shared_noise: bool = Field(
        default=False,
        description=(
            "one initial noise per prompt, as in DanceGRPO's paper; where seeds are explored with"
            " explore.paths only"
        ),
    )
    noise_weight: float = Field(
        default=0.0,
        ge=0,
        le=8,
        description="p: a step weighs std^p, in the mean 1; TempFlow-GRPO has 1; 0: all the same",
    )
    ratio_norm: bool = Field(
        default=False,
        description="GRPO-Guard: log ratios centred and times std, the loss over -dsigma",
    )

    @property
    def one_noise_per_group(self) -> bool:
        return self.shared_noise

    def window_at(self, steps: int, done: int = 0, seed: int = 0) -> range:
        """The stochastic steps of paths of ``steps`` steps after ``done`` iterations."""
        if self.window is None:
            return range(steps)
        found = self.window.place(max(self.trained_steps(steps)) + 1, done, seed)
        return range(found.start, min(found.stop, steps))

    def last_stop(self, steps: int) -> int:
        """The step at which the window ends where it reaches furthest, on such paths."""
        if self.window is None:
            return steps
        if self.window.schedule == "frozen":
            return self.window_at(steps).stop
        return min(max(max(self.trained_steps(steps)) + 1, self.window.size), steps)


def whole_part(value: float) -> int:
    """floor, but 9 for the 8.999... that a decimal fraction may give."""
    return math.floor(value + 1e-9)

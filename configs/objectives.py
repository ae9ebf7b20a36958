"""Settings of the training objectives: one class per paper.

The formulas live in ``learner/objectives``, one file per objective; here is only what a person may
write under ``[objective]``. No torch, so that a typo is found before anything heavy is imported.
``docs/methods.md`` tells the formulas.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Union

from pydantic import Discriminator, Field, Tag

from configs.section import Section

DETERMINISTIC = ("dpmpp_2m", "euler")
STOCHASTIC = ("flow_sde", "dance_sde")


class ObjectiveSettings(Section):
    """What every objective says about itself. Class variables are no settings, but follow from it.

    ``trained_by``: the class of its formula, ``module:class``. ``solvers``: what it may regenerate
    with, its own first. ``old_schedule``: how the sampling policy follows the trained weights
    unless ``[old_policy]`` says otherwise ("constant" with the value 0: it is a copy of them).
    ``advantage_std`` and ``advantage_eps``: how rewards are normalised unless ``[advantages]`` says
    otherwise.
    """

    if TYPE_CHECKING:
        name: str
    trained_by: ClassVar[str]
    solvers: ClassVar[tuple[str, ...]] = DETERMINISTIC
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


class DiffusionNFTSettings(ObjectiveSettings):
    """DiffusionNFT (arXiv 2509.16117): negative-aware fine-tuning on the forward process."""

    trained_by = "learner.objectives.diffusion_nft:DiffusionNFT"
    old_schedule = "linear_cap"

    name: Literal["diffusion_nft"] = "diffusion_nft"
    beta: float = Field(
        default=1.0,
        gt=0,
        le=10,
        description="mixing strength of the implicit positive and negative policies",
    )
    kl: float = Field(
        default=1e-4,
        ge=0,
        description="weight of the squared velocity distance to the reference (adapters off)",
    )
    advantage_clip: float = Field(
        default=5.0, gt=0, description="advantages are clipped to [-c, c] and scaled by 1/c"
    )
    times_per_sample: int = Field(
        default=6,
        ge=1,
        description="training times drawn per sample from the regeneration schedule",
    )


class AWMSettings(ObjectiveSettings):
    """Advantage weighted matching (arXiv 2509.25050).

    A policy gradient with the flow-matching loss in the place of the log-probability.
    """

    trained_by = "learner.objectives.awm:AWM"

    name: Literal["awm"] = "awm"
    weighting: Literal["uniform", "t", "t2", "huber", "ghuber"] = Field(
        default="ghuber",
        description="cost of the squared error e at time t: e, t e, t^2 e, or a Huber loss of it",
    )
    huber_power: float = Field(default=0.25, gt=0, le=1, description="p of 'ghuber'")
    ratio_clip: float = Field(
        default=1.0, gt=0, description="e of the clipped ratio [1 - e, 1 + e]"
    )
    kl: float = Field(
        default=1e-3,
        ge=0,
        description="weight of the squared velocity distance to the reference (adapters off)",
    )
    ema: float = Field(
        default=1.0,
        ge=0,
        description="weight of the squared velocity distance to the objective's own average",
    )
    ema_slope: float = Field(
        default=0.001,
        ge=0,
        description="the average's decay after iteration s is min(ema_slope s, ema_cap)",
    )
    ema_cap: float = Field(default=0.3, ge=0, lt=1)
    advantage_clip: float = Field(
        default=5.0, gt=0, description="advantages are clipped to [-c, c] and scaled by 1/c"
    )
    times_per_sample: int = Field(
        default=6, ge=1, description="training times per sample, one in each part of the schedule"
    )
    schedule_fraction: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="training times come from this first part of the schedule",
    )
    first_step: bool = Field(
        default=False,
        description="training times include the schedule's first, as in its PickScore recipe",
    )

    def trained_steps(self, steps: int) -> Sequence[int]:
        return range(0 if self.first_step else 1, whole_part(self.schedule_fraction * steps))


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

    def window_at(self, steps: int, done: int = 0, seed: int = 0) -> range:
        """The stochastic steps of paths of ``steps`` steps after ``done`` iterations."""
        if self.window is None:
            return range(steps)
        found = self.window.place(max(self.trained_steps(steps)) + 1, done, seed)
        return range(found.start, min(found.stop, steps))


class FlowGRPOSettings(PathSettings):
    """FlowGRPO (arXiv 2505.05470): GRPO on the paths of Flow-SDE."""

    trained_by = "learner.objectives.flow_grpo:FlowGRPO"
    solvers = ("flow_sde",)

    name: Literal["flow_grpo"] = "flow_grpo"
    eta: float = Field(default=0.7, gt=0, description="noise level of the stochastic solver")
    kl: float = Field(
        default=0.04,
        ge=0,
        description="weight beta of the KL to the reference; published SD3 recipes: 0.04, 0.01",
    )
    step_fraction: float = Field(
        default=0.99,
        gt=0,
        le=1,
        description="trained steps, from the first; 0.99 leaves out the last of up to 100",
    )

    def trained_steps(self, steps: int) -> Sequence[int]:
        return range(whole_part(self.step_fraction * steps))


class DanceGRPOSettings(PathSettings):
    """DanceGRPO (arXiv 2505.07818): GRPO on a random part of the steps of Dance-SDE, without KL."""

    trained_by = "learner.objectives.dance_grpo:DanceGRPO"
    solvers = ("dance_sde",)
    advantage_std = "group"
    advantage_eps = 1e-8

    name: Literal["dance_grpo"] = "dance_grpo"
    eta: float = Field(default=0.3, gt=0, description="noise level of the stochastic solver")
    step_fraction: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="share of the steps, without the last, drawn for each sample",
    )
    shared_noise: bool = Field(
        default=False,
        description="one initial noise per prompt, as in the paper; arm 'diffusionnft' only",
    )

    @property
    def one_noise_per_group(self) -> bool:
        return self.shared_noise

    def trained_steps(self, steps: int) -> Sequence[int]:
        return range(steps - 1)


def whole_part(value: float) -> int:
    """floor, but 9 for the 8.999... that a decimal fraction may give."""
    return math.floor(value + 1e-9)


OBJECTIVES: dict[str, type[ObjectiveSettings]] = {
    "diffusion_nft": DiffusionNFTSettings,
    "awm": AWMSettings,
    "flow_grpo": FlowGRPOSettings,
    "dance_grpo": DanceGRPOSettings,
}
DEFAULT_OBJECTIVE = "diffusion_nft"


def _name(value: object) -> object:
    """The ``name`` that says which settings a table is."""
    if isinstance(value, dict):
        return value.get("name", DEFAULT_OBJECTIVE)
    return getattr(value, "name", None)


if TYPE_CHECKING:
    Objective = ObjectiveSettings
else:
    Objective = Annotated[
        Union[tuple(Annotated[cls, Tag(name)] for name, cls in OBJECTIVES.items())],  # noqa: UP007
        Discriminator(_name),
    ]
    """``[objective]``: the class that its ``name`` says."""


def incompatibility(
    objective: ObjectiveSettings,
    arm: str,
    selects: bool,
    regenerates: bool,
    solver: str,
    steps: int,
) -> str | None:
    """Why this objective cannot be trained so, in one line, or None.

    ``solver`` and ``steps`` are those of regenerating.
    """
    name = objective.name
    if solver not in objective.solvers:
        kind = (
            "stochastic paths and their log-probabilities"
            if objective.stochastic
            else "samples of a deterministic solver"
        )
        return (
            f"regenerate.solver: {solver!r} with objective {name!r}, which trains on {kind}: "
            f"use {' or '.join(objective.solvers)}, or leave it out"
        )
    if objective.stochastic and not regenerates:
        why = (
            "quantised"
            if arm == "naive_quant"
            else "made by rollout actors with merged, rounded weights"
        )
        return (
            f"arm: {arm!r} with objective {name!r}: its samples are {why}, and the exact"
            " log-probability of their paths under the trained policy is needed: use 'sol_rl' or"
            " 'diffusionnft'"
        )
    if objective.one_noise_per_group and selects:
        return (
            f"objective.shared_noise: arm {arm!r} selects among initial noises, but a shared one"
            " leaves nothing to select: use arm 'diffusionnft', or shared_noise = false"
        )
    if not objective.trained_steps(steps):
        return (
            f"regenerate.steps: {steps} leave objective {name!r} no step to train on: use more"
            " steps"
        )
    window = objective.window if isinstance(objective, PathSettings) else None
    if window is not None and window.start + window.size > steps:
        return (
            f"objective.window: {window.size} steps from step {window.start} on, but"
            f" regenerate.steps is {steps}: let it end there"
        )
    return None

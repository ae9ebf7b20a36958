"""Configuration tables of rewards: scorers, their combination and advantages."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from configs.section import Section, Tree


class Scorer(Section):
    """One scorer and its weight in the reward."""

    name: str = Field(description="name of a built-in scorer, or module:attribute of a custom one")
    weight: float = Field(
        default=1.0, description="weight of the score in the reward, which is a weighted sum"
    )
    settings: Tree = Field(
        default_factory=dict, description="keyword arguments of the scorer's constructor"
    )
    alias: str | None = Field(
        default=None, description="name in logs and metrics; required if a scorer is used twice"
    )
    floor: float | None = Field(
        default=None, description="lower bound: raw scores below it are raised to it"
    )
    per: Literal["image", "prompt"] = Field(
        default="image",
        description=(
            "image: the scorer scores each image independently; prompt: one call gets all"
            " images of a prompt and may compare them, and evaluations leave this scorer"
            " out"
        ),
    )
    required: bool = Field(
        default=True,
        description=(
            "false: if the scorer fails for an image, the mean of the prompt's other"
            " scores is used instead"
        ),
    )

    @property
    def label(self) -> str:
        """Name under which this scorer's values are logged: only [A-Za-z0-9_]."""
        return re.sub(r"[^A-Za-z0-9_]+", "_", self.alias or self.name)


class Rewards(Section):
    """Scorers, and how their failures are handled. A failure never counts as a reward of zero."""

    scorers: tuple[Scorer, ...] = Field(min_length=1)
    evaluation_scorers: tuple[Scorer, ...] = Field(
        default=(), description="held-out scorers: computed in evaluations only, never trained on"
    )
    frames: int | None = Field(
        default=None,
        ge=1,
        description=(
            "number of equally spaced frames of a clip that image scorers score; their"
            " mean is the score of the clip; None: all frames"
        ),
    )
    normalize: Literal["none", "zscore", "rank"] = Field(
        default="none",
        description=(
            "normalization of each scorer's values within a prompt's group, before"
            " weighting; in training only"
        ),
    )
    attempts: int = Field(
        default=3,
        ge=1,
        description=(
            "attempts per batch, on another actor if possible, before its samples are dropped"
        ),
    )
    outage_s: float = Field(
        default=600.0,
        ge=0,
        description=(
            "longest wait for the server of a required scorer that cannot be reached, after which"
            " the run fails, seconds; 0: no wait"
        ),
    )
    max_failed_share: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="the run stops if a larger share of an iteration's samples is dropped",
    )

    deterministic: bool = Field(
        default=True,
        description=(
            "scorers must return the same score for the same image, which is checked"
            " every `audit.identity_every` iterations; false: they may be random"
        ),
    )

    @property
    def all_scorers(self) -> tuple[Scorer, ...]:
        """All scorers: those that are trained on, then the held-out ones."""
        return (*self.scorers, *self.evaluation_scorers)

    @property
    def comparing_labels(self) -> list[str]:
        """Labels of the scorers that compare the images of a prompt."""
        return [scorer.label for scorer in self.all_scorers if scorer.per == "prompt"]

    @model_validator(mode="after")
    def _check_scorers(self) -> Rewards:
        labels = [scorer.label for scorer in self.all_scorers]
        if len(set(labels)) < len(labels):
            raise ValueError(
                f"scorers: two scorers would be logged under one name: {labels}; give one of them"
                " an alias"
            )
        if any(scorer.per == "prompt" for scorer in self.evaluation_scorers):
            raise ValueError(
                "evaluation_scorers: per = 'prompt' compares images of one prompt, which"
                " does not measure the weights that generated them: use per = 'image'"
            )
        alone = (s for s in self.scorers if s.required and s.per == "image" and s.weight)
        if self.comparing_labels and not any(alone):
            raise ValueError(
                "scorers: with per = 'prompt' only, held-out images have no reward: add a required"
                " scorer with per = 'image' and a nonzero weight"
            )
        if not any(scorer.required for scorer in self.scorers):
            raise ValueError(
                "scorers: all are optional, so all samples could be dropped: make at least one"
                " required"
            )
        return self


class Advantages(Section):
    """Advantages A = (r - mean of the prompt's group) / (std + eps) of the samples trained on."""

    std: Literal["global", "group"] | None = Field(
        default=None,
        description=(
            "global: std over the iteration; group: std over the prompt's group; None: as"
            " in the paper of the objective"
        ),
    )
    eps: float | None = Field(
        default=None, gt=0, description="added to the std; None: as in the paper of the objective"
    )
    unbiased: bool = Field(
        default=False, description="divide by n - 1 instead of n in the std, as in DanceGRPO's code"
    )

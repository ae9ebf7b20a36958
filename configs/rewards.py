"""Configuration tables of rewards: scorers, their combination and advantages."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from configs.section import Section, Tree


class Scorer(Section):
    """One scorer and its weight in the reward."""

    name: str = Field(description="a built-in scorer, or module:attribute of your own")
    weight: float = Field(default=1.0, description="of the score in the reward, a weighted sum")
    settings: Tree = Field(default_factory=dict, description="passed to the scorer's constructor")
    alias: str | None = Field(
        default=None, description="name it is logged under; needed to use one scorer twice"
    )
    floor: float | None = Field(default=None, description="a raw score below this counts as this")
    per: Literal["image", "prompt"] = Field(
        default="image",
        description="what one call scores: images that have nothing to do with each other, or"
        " 'prompt': all of a prompt's images, which it may compare; then not in evaluations",
    )
    required: bool = Field(
        default=True,
        description="False: where it fails, its mean over the prompt's group stands in",
    )

    @property
    def label(self) -> str:
        """Name under which this scorer's values are logged: only [A-Za-z0-9_]."""
        return re.sub(r"[^A-Za-z0-9_]+", "_", self.alias or self.name)


class Rewards(Section):
    """Scorers, and how their failures are handled. A failure never counts as a reward of zero."""

    scorers: tuple[Scorer, ...] = Field(min_length=1)
    evaluation_scorers: tuple[Scorer, ...] = Field(
        default=(),
        description="held out: score evaluations like `scorers`, and are never trained on",
    )
    frames: int | None = Field(
        default=None,
        ge=1,
        description="of a clip, so many in equal distances are scored by scorers of images, and"
        " their mean is its score; None: all",
    )
    normalize: Literal["none", "zscore", "rank"] = Field(
        default="none",
        description="of each scorer's values in a prompt's group, before weighting; in training",
    )
    attempts: int = Field(
        default=3,
        ge=1,
        description="per batch, on another actor if there is one, before samples are dropped",
    )
    max_failed_share: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="share of an iteration's samples that may be dropped before the run stops",
    )

    deterministic: bool = Field(
        default=True,
        description="scorers give the same image the same score again, which is checked every"
        " `audit.identity_every` iterations; false: they may draw at random",
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
                "evaluation_scorers: per = 'prompt' compares images of one prompt, which says"
                " nothing about the weights that made them: use scorers with per = 'image'"
            )
        alone = (s for s in self.scorers if s.required and s.per == "image" and s.weight)
        if self.comparing_labels and not any(alone):
            raise ValueError(
                "scorers: with per = 'prompt' alone held-out images have no reward: add a required"
                " one with per = 'image' and a weight other than 0"
            )
        if not any(scorer.required for scorer in self.scorers):
            raise ValueError(
                "scorers: all are optional, so nothing would be left to train on: let one be"
                " required"
            )
        return self


class Advantages(Section):
    """Advantages A = (r - mean of the prompt's group) / (std + eps) of the samples trained on."""

    std: Literal["global", "group"] | None = Field(
        default=None,
        description="std over the iteration or the group; None: as in the objective's paper",
    )
    eps: float | None = Field(default=None, gt=0, description="None: as in the objective's paper")
    unbiased: bool = Field(
        default=False, description="std with n - 1 in the place of n, as DanceGRPO's code has it"
    )

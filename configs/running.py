"""Configuration tables of audits, checkpoints, early stops, logging and publishing."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from configs.section import Section


class Audit(Section):
    """Audit of the rank agreement: proxy rewards against full rewards on seeds that have both."""

    random_seeds: int = Field(
        default=0,
        ge=0,
        description="random seeds per prompt, regenerated to compare proxy and full rewards",
    )
    min_sign_agreement: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="act when audit/sign_agreement, of the selected seeds, is below; None: never",
    )
    min_tau: float | None = Field(
        default=None,
        ge=-1,
        le=1,
        description="act when audit/random_kendall_tau is below, which needs random_seeds >= 2",
    )
    patience: int = Field(
        default=3, ge=1, description="iterations below, in a row, before something is done"
    )
    action: Literal["warn", "finer_backend"] = Field(
        default="warn",
        description="finer_backend: from then on explore with the next finer precision here",
    )

    identity_every: int = Field(
        default=10,
        ge=0,
        description="policy versions between two checks of what learner and rollout actors compute"
        " from the same weights, and of what scorers answer twice; 0: never",
    )

    identity_action: Literal["stop", "warn"] = Field(
        default="stop",
        description="where a rollout actor computes something else than the learner: end the run,"
        " or say so and go on",
    )

    @model_validator(mode="after")
    def _check_thresholds(self) -> Audit:
        if self.min_tau is not None and self.random_seeds < 2:
            raise ValueError(
                f"min_tau = {self.min_tau:g} needs random seeds to rank, and random_seeds ="
                f" {self.random_seeds} gives too few: use at least 2"
            )
        if self.action != "warn" and not self.has_threshold:
            raise ValueError(
                f"action = {self.action!r} without a threshold never happens: give"
                " min_sign_agreement or min_tau"
            )
        return self

    @property
    def has_threshold(self) -> bool:
        """True if a threshold is set."""
        return self.min_sign_agreement is not None or self.min_tau is not None

    @property
    def two_stage_key(self) -> str | None:
        """Key of the first setting that needs an arm with two stages, or None."""
        settings = {
            "random_seeds": self.random_seeds or None,
            "min_sign_agreement": self.min_sign_agreement,
            "min_tau": self.min_tau,
        }
        return next((f"audit.{key}" for key, value in settings.items() if value is not None), None)


class Checkpoint(Section):
    """Atomic checkpoints in the run directory."""

    every: int = Field(default=1, ge=1, description="iterations between two checkpoints")
    keep_last: int = Field(default=2, ge=1, description="so many, the newest, are kept")


class Stop(Section):
    """Optional early stops; each ends the run cleanly after a checkpoint."""

    max_kl: float | None = Field(
        default=None, gt=0, description="stop when loss/kl (unweighted) exceeds this"
    )
    max_minutes: float | None = Field(
        default=None, gt=0, description="stop training after this many minutes"
    )


class Logging(Section):
    """Metrics, images and reports of a run. Nothing here changes results."""

    prometheus_port: int = Field(
        default=0, ge=0, le=65535, description="serve Prometheus metrics here; 0: off"
    )
    prometheus_host: str = Field(
        default="127.0.0.1", description="address the metrics are served at"
    )
    tensorboard: bool = Field(
        default=False, description="write the same numbers for TensorBoard, into the run directory"
    )
    wandb: Literal["off", "offline"] = Field(
        default="off",
        description="the same numbers for Weights & Biases, in the run directory (`wandb sync`)",
    )
    grid_prompts: int = Field(
        default=8, ge=1, description="held-out prompts in the before/after images"
    )
    report_every_s: float = Field(
        default=120.0,
        ge=0,
        description="the report is written again so often, and after evaluations; 0: at the end",
    )
    image_prompts: int = Field(
        default=4,
        ge=0,
        description="prompts of each iteration whose best and worst images are kept; 0: none",
    )
    image_iterations: int = Field(
        default=16, ge=2, description="iterations whose images stay, evenly spread, and the newest"
    )


class Publish(Section):
    """Publishing of weights from the learner to the rollout actors."""

    shard_mb: int = Field(default=256, ge=1, description="size of one shard in the object store")

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
        description=(
            "number of random seeds per prompt that are also regenerated, to compare"
            " proxy and full rewards"
        ),
    )
    min_sign_agreement: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description=(
            "threshold of audit/sign_agreement (of the selected seeds) below which"
            " `action` is taken; None: no threshold"
        ),
    )
    min_tau: float | None = Field(
        default=None,
        ge=-1,
        le=1,
        description=(
            "threshold of audit/random_kendall_tau below which `action` is taken; needs"
            " random_seeds >= 2"
        ),
    )
    patience: int = Field(
        default=3,
        ge=1,
        description="number of consecutive iterations below a threshold before `action` is taken",
    )
    action: Literal["warn", "finer_backend"] = Field(
        default="warn",
        description=(
            "what to do below a threshold; warn: report it; finer_backend: also explore"
            " with the next finer supported precision from then on"
        ),
    )

    identity_every: int = Field(
        default=10,
        ge=0,
        description=(
            "policy versions between two checks that learner and rollout actors compute"
            " the same from the same weights, and that scorers repeat their scores; 0: no"
            " checks"
        ),
    )

    identity_action: Literal["stop", "warn"] = Field(
        default="stop",
        description=(
            "what to do if a rollout actor and the learner differ; stop: end the run;"
            " warn: report it and continue"
        ),
    )

    @model_validator(mode="after")
    def _check_thresholds(self) -> Audit:
        if self.min_tau is not None and self.random_seeds < 2:
            raise ValueError(
                f"min_tau = {self.min_tau:g} needs random seeds to rank, but random_seeds ="
                f" {self.random_seeds}: use at least 2"
            )
        if self.action != "warn" and not self.has_threshold:
            raise ValueError(
                f"action = {self.action!r} is never taken without a threshold: set"
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

    every: int = Field(default=1, ge=1, description="number of iterations between checkpoints")
    keep_last: int = Field(default=2, ge=1, description="number of newest checkpoints to keep")


class Stop(Section):
    """Optional early stops; each ends the run cleanly after a checkpoint."""

    max_kl: float | None = Field(
        default=None, gt=0, description="stop the run when loss/kl (unweighted) exceeds this"
    )
    max_minutes: float | None = Field(
        default=None, gt=0, description="stop training after this number of minutes"
    )


class Logging(Section):
    """Metrics, images and reports of a run. Nothing here changes results."""

    prometheus_port: int = Field(
        default=0, ge=0, le=65535, description="port for Prometheus metrics; 0: off"
    )
    prometheus_host: str = Field(
        default="127.0.0.1", description="address on which Prometheus metrics are served"
    )
    tensorboard: bool = Field(
        default=False, description="also write metrics for TensorBoard into the run directory"
    )
    wandb: Literal["off", "offline"] = Field(
        default="off",
        description=(
            "also record metrics for Weights & Biases; offline: in the run directory, for"
            " `wandb sync`"
        ),
    )
    grid_prompts: int = Field(
        default=8, ge=1, description="number of held-out prompts in the before/after images"
    )
    report_every_s: float = Field(
        default=120.0,
        ge=0,
        description=(
            "seconds between updates of the report, which is also updated after"
            " evaluations; 0: only at the end"
        ),
    )
    image_prompts: int = Field(
        default=4,
        ge=0,
        description=(
            "number of prompts per iteration whose best and worst images are saved; 0: none"
        ),
    )
    image_iterations: int = Field(
        default=16,
        ge=2,
        description=(
            "number of iterations whose best and worst images are kept: evenly spaced"
            " ones and the newest"
        ),
    )


class Publish(Section):
    """Publishing of weights from the learner to the rollout actors."""

    shard_mb: int = Field(
        default=256,
        ge=1,
        description="maximum size in MB of one shard of published weights in the object store",
    )

"""Configuration tables of training: the LoRA adapter, the optimizer and the averages of weights."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator

from configs.section import Section


class Lora(Section):
    """LoRA adapter: the trained weights."""

    rank: int = Field(default=32, ge=1, description="of each adapter's two matrices")
    alpha: float = Field(
        default=64.0, gt=0, description="an adapter adds alpha / rank times its product"
    )
    targets: tuple[str, ...] = Field(
        default=(), description="module-name suffixes; empty: the family's own list"
    )
    init_from: str | None = Field(
        default=None, description="directory of an existing diffusers LoRA to start from"
    )
    base: Literal["full", "int8", "nf4"] = Field(
        default="full",
        description="the learner's frozen weights: in regenerate.precision, or packed by torchao",
    )


class Optimizer(Section):
    """AdamW on the LoRA parameters."""

    lr: float = Field(default=3e-4, gt=0, description="learning rate")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="AdamW's")
    weight_decay: float = Field(default=1e-4, ge=0, description="AdamW's")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's")
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="a gradient with a larger norm is scaled down to it"
    )
    schedule: Literal["constant", "linear"] = Field(
        default="constant", description="linear: down to zero over `iterations`"
    )
    warmup_iterations: int = Field(
        default=0, ge=0, description="the learning rate rises to its value over these"
    )
    steps_per_iteration: int = Field(
        default=1,
        ge=1,
        description="the iteration's samples are split into so many optimizer steps",
    )
    deal: Literal["random", "even"] = Field(
        default="random",
        description=(
            "how samples are dealt to these steps; even: each step gets as many of every replica's"
            " and of every prompt's, so that no replica waits for another"
        ),
    )
    batch_size: int = Field(
        default=24,
        ge=1,
        description="(sample, time) pairs per forward and backward pass; gradients accumulate",
    )
    averages: Literal["iteration", "step"] = Field(
        default="iteration",
        description=(
            "step: EMA and the objective's own average move after every optimizer step, and all"
            " decay schedules count these; iteration: once per iteration"
        ),
    )
    gradient_checkpointing: bool | float | Literal["auto"] = Field(
        default=False,
        description=(
            "compute blocks again in the backward pass, all of them or a share: less memory, more"
            " work, the same gradients; auto: as few as the GPUs of a layout have memory for"
        ),
    )

    compile: bool = Field(
        default=False,
        description="torch.compile of training's passes; the first update takes minutes longer",
    )

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _check_share(cls, value: object) -> object:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("Input should be a finite number")
        if value == "auto" or (isinstance(value, (bool, int, float)) and 0 <= value <= 1):
            return value
        raise ValueError("use true, false, a share of the blocks from 0 to 1, or auto")

    @property
    def recomputed(self) -> float:
        """Share of the blocks recomputed in the backward pass; 1 until "auto" is resolved."""
        setting = self.gradient_checkpointing
        return 1.0 if setting == "auto" else float(setting)


class OldPolicy(Section):
    """Sampling policy: theta_old <- d theta_old + (1 - d) theta after each iteration s.

    With d = 0 samples come from theta itself.
    """

    schedule: Literal["constant", "linear_cap", "delayed_linear_cap"] | None = Field(
        default=None,
        description=(
            "constant: d = value; linear_cap: d = min(slope s, cap); delayed_linear_cap: the same"
            " after `delay`; None: the objective's own, linear_cap for diffusion_nft and constant"
            " for the others"
        ),
    )
    value: float = Field(default=0.0, ge=0, lt=1, description="d of schedule constant")
    slope: float = Field(default=0.001, ge=0, description="growth of d per iteration")
    cap: float = Field(default=0.5, ge=0, lt=1, description="largest d")
    delay: int = Field(default=75, ge=0, description="iterations before d grows")


class Ema(Section):
    """Exponential moving average of the trained adapter, used in evaluations."""

    decay: float = Field(
        default=0.9, ge=0, lt=1, description="share of itself that the average keeps"
    )
    warmup: bool = Field(
        default=False,
        description="decay min((1 + s) / (10 + s), decay): the base model is forgotten sooner",
    )

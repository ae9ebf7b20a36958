"""Configuration tables of training: the LoRA adapter, the optimizer and the averages of weights."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator

from configs.section import Section


class Lora(Section):
    """LoRA adapter: the trained weights."""

    rank: int = Field(default=32, ge=1, description="rank of each adapter's two matrices")
    alpha: float = Field(
        default=64.0,
        gt=0,
        description="alpha: the product of an adapter's matrices is multiplied by alpha / rank",
    )
    targets: tuple[str, ...] = Field(
        default=(),
        description=(
            "name suffixes of the modules with an adapter; empty: the family's default list"
        ),
    )
    init_from: str | None = Field(
        default=None,
        description="LoRA to start from, a file or the directory of one; None: a new adapter",
    )
    base: Literal["full", "int8", "nf4"] = Field(
        default="full",
        description=(
            "format of the learner's frozen weights; full: regenerate.precision; int8,"
            " nf4: packed by torchao"
        ),
    )


class Optimizer(Section):
    """AdamW on the LoRA parameters."""

    lr: float = Field(default=3e-4, gt=0, description="learning rate")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), description="betas of AdamW")
    weight_decay: float = Field(default=1e-4, ge=0, description="weight decay of AdamW")
    eps: float = Field(default=1e-8, gt=0, description="epsilon of AdamW")
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="maximum norm of the gradient, which is scaled down to it"
    )
    schedule: Literal["constant", "linear"] = Field(
        default="constant",
        description="schedule of the learning rate; linear: decays to zero over `iterations`",
    )
    warmup_iterations: int = Field(
        default=0,
        ge=0,
        description="number of iterations over which the learning rate rises to its value",
    )
    steps_per_iteration: int = Field(
        default=1,
        ge=1,
        description="number of optimizer steps per iteration, among which its samples are divided",
    )
    deal: Literal["random", "even"] = Field(
        default="random",
        description=(
            "how samples are assigned to optimizer steps; random: at random; even: each"
            " step gets equal numbers from every replica and every prompt, so that no"
            " replica waits for another"
        ),
    )
    batch_size: int = Field(
        default=24,
        ge=1,
        description=(
            "number of (sample, time) pairs per forward and backward pass; gradients are"
            " accumulated"
        ),
    )
    averages: Literal["iteration", "step"] = Field(
        default="iteration",
        description=(
            "when the EMA and the objective's average are updated; step: after every"
            " optimizer step, and decay schedules count these steps; iteration: once per"
            " iteration"
        ),
    )
    gradient_checkpointing: bool | float | Literal["auto"] = Field(
        default=False,
        description=(
            "recompute blocks in the backward pass: true: all, or a share from 0 to 1;"
            " needs less memory and more time for the same gradients; auto: the smallest"
            " share that fits the memory of the layout's GPUs"
        ),
    )

    compile: bool = Field(
        default=False,
        description=(
            "compile the passes of training with torch.compile; the first update then"
            " takes minutes longer"
        ),
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
            "constant: d = value; linear_cap: d = min(slope s, cap); delayed_linear_cap:"
            " the same after `delay` iterations; None: the objective's default, linear_cap"
            " for diffusion_nft and constant for the others"
        ),
    )
    value: float = Field(default=0.0, ge=0, lt=1, description="value of d for schedule 'constant'")
    slope: float = Field(default=0.001, ge=0, description="increase of d per iteration")
    cap: float = Field(default=0.5, ge=0, lt=1, description="maximum of d")
    delay: int = Field(default=75, ge=0, description="number of iterations before d grows")


class Ema(Section):
    """Exponential moving average of the trained adapter, used in evaluations."""

    decay: float = Field(
        default=0.9, ge=0, lt=1, description="decay of the moving average per update"
    )
    warmup: bool = Field(
        default=False,
        description=(
            "use min((1 + s) / (10 + s), decay) as decay after s updates, so that the"
            " average leaves the base model sooner"
        ),
    )

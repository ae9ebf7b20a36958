"""The tables of a configuration, one class each: the model, its prompts, the two stages, training,
and what is kept of a run.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from configs.families import FamilyName
from configs.section import PathText, Section

Backend = Literal["auto", "te_nvfp4", "torch_nvfp4", "fp8", "emulated_nvfp4", "bf16", "fp32"]
Precision = Literal["bf16", "fp32"]
Solver = Literal["euler", "dpm2"]
AnySolver = Literal["euler", "dpm2", "flow_sde", "dance_sde"]


class Model(Section):
    """The base text-to-image model: a diffusers pipeline directory or hub id."""

    family: FamilyName = "sd3"
    path: PathText = Field(
        description=(
            "pipeline directory, hub id, or 'shapes' for the tiny model that ships with Sol-RL"
        )
    )
    height: int = Field(default=512, ge=16, multiple_of=8, description="picture height in pixels")
    width: int = Field(default=512, ge=16, multiple_of=8, description="picture width in pixels")
    max_sequence_length: int = Field(
        default=128, ge=1, description="tokens of the long text encoder"
    )
    shift: float | None = Field(
        default=None,
        gt=0,
        description="time shift of the sigma schedule; None keeps the model's own",
    )
    guidance: float | None = Field(
        default=None,
        ge=0,
        description=(
            "embedded guidance of a guidance-distilled model such as FLUX.1-dev; required there"
        ),
    )
    complex_human_instruction: bool = Field(
        default=True, description="SANA: the pipeline's own instruction goes before every prompt"
    )
    vae_slicing: bool = Field(
        default=False, description="decode one picture at a time: less memory"
    )
    vae_tiling: bool = Field(
        default=False,
        description="decode large pictures in overlapping tiles: less memory, other pixels",
    )
    text_offload: bool = Field(
        default=False,
        description=(
            "text encoders stay in host memory, and are on the encoder's GPU only while prompts are"
            " encoded"
        ),
    )


class Prompts(Section):
    """Prompt files: one prompt per line (.txt), or JSON lines with `prompt` and metadata (.jsonl)."""

    train: PathText = Field(description="training prompts")
    test: PathText = Field(description="held-out prompts")
    per_iteration: int = Field(default=48, ge=1, description="prompt groups per iteration")


class Explore(Section):
    """Stage 1: many cheap pictures per prompt, only to be ranked."""

    pool_size: int = Field(default=96, ge=2, description="N, initial noises per prompt")
    steps: int = Field(default=6, ge=1, description="sampling steps of a proxy picture")
    solver: Solver = "dpm2"
    backend: Backend = Field(default="auto", description="precision of the exploring denoiser")
    scale_search: bool = Field(
        default=True,
        description="NVFP4 weights: choose each block's scale among 12 neighbours by squared error",
    )
    frozen_amax: bool = Field(
        default=False,
        description=(
            "scales of trained weights keep the range of the run's first weights, with head-room"
        ),
    )
    activation_amax: Literal["power_of_two", "exact"] = Field(
        default="power_of_two",
        description=(
            "NVFP4 activations: rounded up, so that pictures of a batch do not change each other"
        ),
    )
    compile: bool = Field(
        default=False,
        description="torch.compile of the exploring denoiser; the first chunk then takes minutes",
    )
    keep_wide: tuple[str, ...] = Field(
        default=(), description="more module-name patterns (fnmatch) that stay unquantised"
    )
    chunk_size: int = Field(
        default=24,
        ge=1,
        description="noises per unit of work; part of the results, as it fixes batches",
    )


class Selection(Section):
    """Which K of the N explored noises are worth training on."""

    rule: Literal["best_worst", "random", "mean_deviation"] = "best_worst"
    keep: int = Field(
        default=24, ge=2, description="K, samples trained on per prompt; half best, half worst"
    )


class Regenerate(Section):
    """Stage 2: the selected noises again, at full steps and full precision."""

    steps: int = Field(default=10, ge=1)
    solver: AnySolver | None = Field(
        default=None,
        description=(
            "None: the objective's own; the stochastic ones belong to the objectives on paths"
        ),
    )
    precision: Precision = Field(
        default="bf16", description="of the learner's base weights; LoRA weights are always FP32"
    )
    compile: bool = Field(
        default=False,
        description="torch.compile of the regenerating denoiser; training itself stays eager",
    )
    batch_size: int = Field(default=24, ge=1, description="pictures per forward pass")


class Evaluate(Section):
    """Held-out prompts at fixed noises."""

    every: int = Field(
        default=10,
        ge=0,
        description="iterations between evaluations during training; 0: only first and last",
    )
    steps: int = Field(default=40, ge=1)
    solver: Solver = "dpm2"
    prompts: int = Field(default=128, ge=1, description="the first so many held-out prompts")
    noises: int = Field(default=4, ge=1, description="fixed noises per prompt")
    weights: Literal["ema", "current", "old"] = "ema"
    batch_size: int = Field(
        default=32,
        ge=1,
        description="pictures per unit of work; they pass the denoiser by regenerate.batch_size",
    )


class Lora(Section):
    """The trained weights."""

    rank: int = Field(default=32, ge=1)
    alpha: float = Field(default=64.0, gt=0)
    targets: tuple[str, ...] = Field(
        default=(), description="module-name suffixes; empty: the family's own list"
    )
    init_from: str | None = Field(
        default=None, description="directory of an existing diffusers LoRA to start from"
    )


class Optimizer(Section):
    """AdamW on the LoRA parameters."""

    lr: float = Field(default=3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(default=1e-4, ge=0)
    eps: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    schedule: Literal["constant", "linear"] = Field(
        default="constant", description="linear: down to zero over `iterations`"
    )
    warmup_iterations: int = Field(default=0, ge=0)
    steps_per_iteration: int = Field(
        default=1,
        ge=1,
        description="the iteration's samples are split into so many optimiser steps",
    )
    batch_size: int = Field(
        default=24,
        ge=1,
        description="(sample, time) pairs per forward and backward pass; gradients accumulate",
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description=(
            "compute each block again in the backward pass instead of keeping what it made: less"
            " memory"
        ),
    )


class OldPolicy(Section):
    """The sampling policy: theta_old <- d theta_old + (1 - d) theta after each iteration s. d = 0
    samples from theta itself.
    """

    schedule: Literal["constant", "linear_cap", "delayed_linear_cap"] | None = Field(
        default=None,
        description=(
            "constant: d = value; linear_cap: d = min(slope s, cap); delayed_linear_cap: the same"
            " after `delay`; None: the objective's own, linear_cap for diffusion_nft and constant"
            " for the others"
        ),
    )
    value: float = Field(default=0.0, ge=0, lt=1)
    slope: float = Field(default=0.001, ge=0)
    cap: float = Field(default=0.5, ge=0, lt=1)
    delay: int = Field(default=75, ge=0)


class Ema(Section):
    """The evaluation average of the trained adapter."""

    decay: float = Field(default=0.9, ge=0, lt=1)


class Audit(Section):
    """Does the cheap ranking hold? Measured on seeds that have a proxy and a full reward."""

    random_seeds: int = Field(
        default=0,
        ge=0,
        description=(
            "random noises per prompt to hold against their full rewards; those that were not"
            " selected are regenerated for it"
        ),
    )
    min_sign_agreement: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="act when audit/sign_agreement, of the selected noises, is below; None: never",
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
        description=(
            "finer_backend: explore with the next finer precision that the device has, from then on"
        ),
    )

    @model_validator(mode="after")
    def _measurable(self) -> Audit:
        if self.min_tau is not None and self.random_seeds < 2:
            raise ValueError(
                f"min_tau = {self.min_tau:g} is held against random noises, of which random_seeds ="
                f" {self.random_seeds} gives too few to rank: use at least 2"
            )
        if self.action != "warn" and not self.watches:
            raise ValueError(
                f"action = {self.action!r} without a threshold never happens: give"
                " min_sign_agreement or min_tau"
            )
        return self

    @property
    def watches(self) -> bool:
        """Whether there is a threshold."""
        return self.min_sign_agreement is not None or self.min_tau is not None

    @property
    def asked_for(self) -> str | None:
        """The key of what needs an arm with two stages; None: nothing."""
        given = {
            "random_seeds": self.random_seeds or None,
            "min_sign_agreement": self.min_sign_agreement,
            "min_tau": self.min_tau,
        }
        return next((f"audit.{key}" for key, value in given.items() if value is not None), None)


class Checkpoint(Section):
    """Atomic checkpoints in the run directory."""

    every: int = Field(default=1, ge=1, description="iterations")
    keep_last: int = Field(default=2, ge=1)


class Stop(Section):
    """Optional early stops; each ends the run cleanly after a checkpoint."""

    max_kl: float | None = Field(
        default=None, gt=0, description="stop when loss/kl (unweighted) exceeds this"
    )
    max_minutes: float | None = Field(
        default=None, gt=0, description="stop training after this many minutes"
    )


class Logging(Section):
    """Watching a run. Nothing here changes results."""

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
        description=(
            "record the same numbers for Weights & Biases, into the run directory, for `wandb sync`"
        ),
    )
    grid_prompts: int = Field(
        default=8, ge=1, description="held-out prompts in the before/after pictures"
    )


class Publish(Section):
    """Weights from the learner to the rollout actors."""

    chunk_mb: int = Field(default=256, ge=1, description="size of one object-store chunk")

"""What a run is. Pydantic models, no torch, no ray: a typo answers at once.

Defaults are the paper's ("FP4 Explore, BF16 Train", arXiv 2604.06916). A preset or a file states only what differs.
``RunConfig`` is the root; ``docs/configuration.md`` is the tour.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from configs.objectives import DiffusionNFTSettings, Objective, misfit

Arm = Literal["diffusionnft", "naive_scaling", "naive_quant", "sol_rl"]
Backend = Literal["auto", "te_nvfp4", "torch_nvfp4", "fp8", "emulated_nvfp4", "bf16", "fp32"]
Precision = Literal["bf16", "fp32"]
Solver = Literal["euler", "dpm2"]
AnySolver = Literal["euler", "dpm2", "flow_sde", "dance_sde"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Section(BaseModel):
    """A table of the configuration: unknown keys are errors, values do not change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(Section):
    """The base text-to-image model: a diffusers pipeline directory or hub id."""

    family: Literal["sd3", "flux", "sana"] = "sd3"
    path: str = Field(description="pipeline directory, hub id, or 'shapes' for the tiny model that ships with Sol-RL")
    height: int = Field(default=512, ge=16, multiple_of=8, description="picture height in pixels")
    width: int = Field(default=512, ge=16, multiple_of=8, description="picture width in pixels")
    max_sequence_length: int = Field(default=128, ge=1, description="tokens of the long text encoder")
    shift: float | None = Field(default=None, gt=0, description="time shift of the sigma schedule; None keeps the model's own")
    guidance: float | None = Field(
        default=None, ge=0, description="embedded guidance of a guidance-distilled model such as FLUX.1-dev; required there"
    )
    complex_human_instruction: bool = Field(
        default=True, description="SANA: the pipeline's own instruction goes before every prompt"
    )
    vae_slicing: bool = Field(default=False, description="decode one picture at a time: less memory")
    vae_tiling: bool = Field(default=False, description="decode large pictures in overlapping tiles: less memory, other pixels")
    text_offload: bool = Field(
        default=False, description="text encoders stay in host memory, and are on the encoder's GPU only while prompts are encoded"
    )


class Prompts(Section):
    """Prompt files: one prompt per line (.txt), or JSON lines with `prompt` and metadata (.jsonl)."""

    train: str = Field(description="training prompts")
    test: str = Field(description="held-out prompts")
    per_iteration: int = Field(default=48, ge=1, description="prompt groups per iteration")


class Explore(Section):
    """Stage 1: many cheap pictures per prompt, only to be ranked."""

    pool_size: int = Field(default=96, ge=2, description="N, initial noises per prompt")
    steps: int = Field(default=6, ge=1, description="sampling steps of a proxy picture")
    solver: Solver = "dpm2"
    backend: Backend = Field(default="auto", description="precision of the exploring denoiser")
    scale_search: bool = Field(
        default=True, description="NVFP4 weights: choose each block's scale among 12 neighbours by squared error"
    )
    frozen_amax: bool = Field(
        default=False, description="scales of trained weights keep the range of the run's first weights, with head-room"
    )
    activation_amax: Literal["power_of_two", "exact"] = Field(
        default="power_of_two", description="NVFP4 activations: rounded up, so that pictures of a batch do not change each other"
    )
    compile: bool = Field(default=False, description="torch.compile of the exploring denoiser; the first chunk then takes minutes")
    keep_wide: tuple[str, ...] = Field(default=(), description="more module-name patterns (fnmatch) that stay unquantised")
    chunk_size: int = Field(default=24, ge=1, description="noises per unit of work; part of the results, as it fixes batches")


class Selection(Section):
    """Which K of the N explored noises are worth training on."""

    rule: Literal["best_worst", "random", "mean_deviation"] = "best_worst"
    keep: int = Field(default=24, ge=2, description="K, samples trained on per prompt; half best, half worst")


class Regenerate(Section):
    """Stage 2: the selected noises again, at full steps and full precision."""

    steps: int = Field(default=10, ge=1)
    solver: AnySolver | None = Field(
        default=None, description="None: the objective's own; the stochastic ones belong to the objectives on paths"
    )
    precision: Precision = Field(default="bf16", description="of the learner's base weights; LoRA weights are always FP32")
    compile: bool = Field(default=False, description="torch.compile of the regenerating denoiser; training itself stays eager")
    batch_size: int = Field(default=24, ge=1, description="pictures per forward pass")


class Evaluate(Section):
    """Held-out prompts at fixed noises."""

    every: int = Field(default=10, ge=0, description="iterations between evaluations during training; 0: only first and last")
    steps: int = Field(default=40, ge=1)
    solver: Solver = "dpm2"
    prompts: int = Field(default=128, ge=1, description="the first so many held-out prompts")
    noises: int = Field(default=4, ge=1, description="fixed noises per prompt")
    weights: Literal["ema", "current", "old"] = "ema"
    batch_size: int = Field(default=32, ge=1)


class Scorer(Section):
    """One reward model and its weight in the sum."""

    name: str = Field(description="a built-in scorer, or module:attribute of your own")
    weight: float = 1.0
    settings: dict[str, Any] = Field(default_factory=dict, description="passed to the scorer's constructor")
    alias: str | None = Field(default=None, description="name it is logged under; needed to use one scorer twice")
    floor: float | None = Field(default=None, description="a raw score below this counts as this")
    required: bool = Field(
        default=True, description="False: where it fails, its mean over the prompt's group stands in, and the picture is kept"
    )

    @property
    def label(self) -> str:
        """The name under which this scorer's values are logged: [A-Za-z0-9_] only."""
        return re.sub(r"[^A-Za-z0-9_]+", "_", self.alias or self.name)


class Rewards(Section):
    """What pictures are scored by, and how much failing is tolerated. A failure is never a reward of zero."""

    scorers: tuple[Scorer, ...] = Field(min_length=1)
    evaluation_scorers: tuple[Scorer, ...] = Field(
        default=(), description="held out: judge the evaluations beside `scorers`, and are never trained on"
    )
    normalise: Literal["none", "zscore", "rank"] = Field(
        default="none", description="of each scorer's values over a prompt's group, before they are weighted; not in evaluations"
    )
    attempts: int = Field(
        default=3, ge=1, description="tries per batch, on another actor where there is one, before samples are dropped"
    )
    max_failed_share: float = Field(
        default=0.05, ge=0, le=1, description="share of an iteration's samples that may be dropped before the run stops"
    )

    @property
    def everyone(self) -> tuple[Scorer, ...]:
        """The scorers that are trained on and the held-out ones."""
        return (*self.scorers, *self.evaluation_scorers)

    @model_validator(mode="after")
    def _distinct(self) -> Rewards:
        labels = [scorer.label for scorer in self.everyone]
        if len(set(labels)) < len(labels):
            raise ValueError(f"scorers: two scorers would be logged under one name: {labels}; give one of them an alias")
        if not any(scorer.required for scorer in self.scorers):
            raise ValueError("scorers: all are optional, so nothing would be left to train on: let one be required")
        return self


class Advantages(Section):
    """A = (r - mean of the prompt's group) / (std + eps), from the rewards of the samples that are trained on."""

    std: Literal["global", "group"] | None = Field(
        default=None, description="standard deviation over the iteration or over the group; None: as the objective's paper"
    )
    eps: float | None = Field(default=None, gt=0, description="None: as the objective's paper")


class Lora(Section):
    """The trained weights."""

    rank: int = Field(default=32, ge=1)
    alpha: float = Field(default=64.0, gt=0)
    targets: tuple[str, ...] = Field(default=(), description="module-name suffixes; empty: the family's own list")
    init_from: str | None = Field(default=None, description="directory of an existing diffusers LoRA to start from")


class Optimizer(Section):
    """AdamW on the LoRA parameters."""

    lr: float = Field(default=3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(default=1e-4, ge=0)
    eps: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    schedule: Literal["constant", "linear"] = Field(default="constant", description="linear: down to zero over `iterations`")
    warmup_iterations: int = Field(default=0, ge=0)
    steps_per_iteration: int = Field(default=1, ge=1, description="the iteration's samples are split into so many optimiser steps")
    batch_size: int = Field(
        default=24, ge=1, description="(sample, time) pairs per forward and backward pass; gradients accumulate"
    )
    gradient_checkpointing: bool = Field(
        default=False, description="compute each block again in the backward pass instead of keeping what it made: less memory"
    )


class OldPolicy(Section):
    """The sampling policy: theta_old <- d theta_old + (1 - d) theta after each iteration s. d = 0 samples from theta itself."""

    schedule: Literal["constant", "linear_cap", "delayed_linear_cap"] | None = Field(
        default=None,
        description="constant: d = value; linear_cap: d = min(slope s, cap); delayed_linear_cap: the same after `delay`; "
        "None: the objective's own, linear_cap for diffusion_nft and constant for the others",
    )
    value: float = Field(default=0.0, ge=0, lt=1)
    slope: float = Field(default=0.001, ge=0)
    cap: float = Field(default=0.5, ge=0, lt=1)
    delay: int = Field(default=75, ge=0)


class Ema(Section):
    """The evaluation average of the trained adapter."""

    decay: float = Field(default=0.9, ge=0, lt=1)


class Service(Section):
    """One kind of actor."""

    actors: int = Field(default=1, ge=1)
    threads: int = Field(
        default=1, ge=1, description="CPU threads of each actor; part of the results, as it fixes the order of sums"
    )
    cpus: float = Field(default=0.5, ge=0, description="CPU share that each actor reserves from Ray")
    gpus: float = Field(default=0.0, ge=0, description="GPU share that each actor reserves from Ray")
    in_flight: int = Field(default=2, ge=1, description="units of work at an actor at a time; the next one waits there")
    deadline_s: float = Field(
        default=900.0, gt=0, description="a unit that takes longer counts as hung: its actor is killed, the unit reissued"
    )
    warm_up_s: float = Field(
        default=1800.0, ge=0, description="added to the deadline until an actor that compiles has answered its first unit"
    )
    max_attempts: int = Field(default=4, ge=1, description="tries of one unit over all actors before the run stops")
    max_restarts: int = Field(default=20, ge=0, description="replacements of one actor before it is benched")
    accelerator: str | None = Field(
        default=None, description="nodes with this `ray.io/accelerator-type` only: B200, in(B200,GB200), !H100; None: any node"
    )
    labels: dict[str, str] = Field(
        default_factory=dict, description="further node labels that are required, in Ray's selector words"
    )
    strategy: Literal["spread", "pack"] = Field(default="pack", description="over as many nodes as there are, or onto few")
    min_actors: int = Field(default=1, ge=1, description="fewest that scaling leaves")
    max_actors: int | None = Field(default=None, ge=1, description="most that scaling makes; None: as many as there is room for")

    @model_validator(mode="after")
    def _within(self) -> Service:
        if not self.min_actors <= self.actors <= (self.max_actors or self.actors):
            raise ValueError(
                f"actors = {self.actors} is not within min_actors = {self.min_actors} and max_actors = {self.max_actors}"
            )
        if self.gpus > 1 and self.gpus % 1:
            raise ValueError(f"gpus = {self.gpus:g}: a share above 1 is whole GPUs")
        return self


class RolloutService(Service):
    """The explorers."""

    actors: int = Field(default=2, ge=1)
    strategy: Literal["spread", "pack"] = Field(default="spread", description="over as many nodes as there are, or onto few")


class LearnerService(Service):
    """The learner holds state: a unit that fails there is not tried again, a learner that dies is restored from its checkpoint."""

    in_flight: int = Field(default=1, ge=1)
    max_attempts: Literal[1] = 1
    max_restarts: int = Field(default=10, ge=0, description="times the learner may be restored from its checkpoint in one run")


class ScorerService(Service):
    """Actors of one scorer alone: its own share of a GPU, its own threads and deadline, and if need be its own packages."""

    runtime_env: dict[str, Any] = Field(
        default_factory=dict, description="Ray's runtime_env of these actors: pip, uv, py_modules, env_vars, ..."
    )


class Autoscale(Section):
    """Grows the rollout pool while the learner waits for it, shrinks it while explorers idle, within min_actors and max_actors."""

    enabled: bool = False
    grow_above: float = Field(default=0.5, gt=0, lt=1, description="grow when the learner waits for a larger share of an iteration")
    shrink_below: float = Field(default=0.25, gt=0, lt=1, description="shrink when explorers work a smaller share of an iteration")
    patience: int = Field(default=2, ge=1, description="iterations in a row that must agree")
    step: float = Field(default=0.25, gt=0, le=1, description="share of the pool that is added or removed, one actor at least")


class Services(Section):
    """The actor groups, and how they are given their places."""

    start_deadline_s: float = Field(
        default=600.0, gt=0, description="an actor must be placed and have loaded its model within this"
    )
    wait_for_nodes_s: float = Field(
        default=0.0, ge=0, description="on an autoscaling cluster: ask for missing nodes and wait so long before giving up"
    )
    autoscale: Autoscale = Autoscale()
    rollout: RolloutService = RolloutService()
    reward: Service = Service()
    scorers: dict[str, ScorerService] = Field(default_factory=dict, description="by label; the others share `reward`")
    encoder: Service = Service()
    selector: Service = Service()
    learner: LearnerService = LearnerService()

    def of(self, kind: str) -> Service:
        """The settings of ``rollout``, ``reward``, ``scorers.<label>``, ..."""
        name, _, label = kind.partition(".")
        return self.scorers[label] if label else getattr(self, name)

    @model_validator(mode="after")
    def _scalable(self) -> Services:
        if self.autoscale.enabled and self.rollout.max_actors is None:
            raise ValueError("autoscale.enabled: say how far: services.rollout.max_actors = N")
        for kind in ("learner", "encoder", "selector"):
            if (service := getattr(self, kind)).max_actors not in (None, service.actors):
                raise ValueError(f"{kind}.max_actors = {service.max_actors}: only rollout and reward can be scaled")
        return self


class Audit(Section):
    """Does the cheap ranking hold? Measured on seeds that have a proxy and a full reward."""

    random_seeds: int = Field(default=0, ge=0, description="random noises per prompt, regenerated and scored but not trained on")


class Checkpoint(Section):
    """Atomic checkpoints in the run directory."""

    every: int = Field(default=1, ge=1, description="iterations")
    keep_last: int = Field(default=2, ge=1)


class Stop(Section):
    """Optional early stops; each ends the run cleanly after a checkpoint."""

    max_kl: float | None = Field(default=None, gt=0, description="stop when loss/kl (unweighted) exceeds this")
    max_minutes: float | None = Field(default=None, gt=0, description="stop training after this many minutes")


class Logging(Section):
    """Watching a run. Nothing here changes results."""

    prometheus_port: int = Field(default=0, ge=0, le=65535, description="serve Prometheus metrics here; 0: off")
    prometheus_host: str = Field(default="127.0.0.1", description="address the metrics are served at")
    grid_prompts: int = Field(default=8, ge=1, description="held-out prompts in the before/after pictures")


class Publish(Section):
    """Weights from the learner to the rollout actors."""

    chunk_mb: int = Field(default=256, ge=1, description="size of one object-store chunk")


class RunConfig(Section):
    """A whole run."""

    name: str = Field(description="names the run directory")
    run_root: str | None = Field(default=None, description="directory of run directories; 'runs' on one machine")
    seed: int = Field(default=0, ge=0, lt=2**63)
    iterations: int = Field(default=100, ge=1)
    arm: Arm = "sol_rl"
    explore_ahead: Literal[0] = 0
    model: Model
    prompts: Prompts
    explore: Explore = Explore()
    selection: Selection = Selection()
    regenerate: Regenerate = Regenerate()
    evaluate: Evaluate = Evaluate()
    rewards: Rewards
    advantages: Advantages = Advantages()
    objective: Objective = DiffusionNFTSettings()
    lora: Lora = Lora()
    optimizer: Optimizer = Optimizer()
    old_policy: OldPolicy = OldPolicy()
    ema: Ema = Ema()
    services: Services = Services()
    audit: Audit = Audit()
    checkpoint: Checkpoint = Checkpoint()
    stop: Stop = Stop()
    logging: Logging = Logging()
    publish: Publish = Publish()

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError("letters, digits, '.', '_' and '-' only, starting with a letter or digit, at most 100")
        return value

    @model_validator(mode="after")
    def _possible(self) -> RunConfig:
        keep, pool = self.selection.keep, self.explore.pool_size
        if self.plan.explore is not None and keep > pool:
            raise ValueError(
                f"selection.keep: {keep} samples cannot be kept of explore.pool_size = {pool}: lower keep or raise pool_size"
            )
        if self.selection.rule == "best_worst" and keep % 2:
            raise ValueError(
                f"selection.keep: {keep} is odd, but rule 'best_worst' keeps as many best as worst: use an even number"
            )
        if self.audit.random_seeds and not self.plan.regenerate:
            raise ValueError(f"audit.random_seeds: arm {self.arm!r} regenerates nothing, so there is nothing to audit: use 0")
        if self.audit.random_seeds > pool - keep:
            raise ValueError(
                f"audit.random_seeds: {self.audit.random_seeds} is more than the {pool - keep} noises that selection leaves"
            )
        plan, objective = self.plan, self.objective
        selects = plan.explore is not None
        if why := misfit(objective, objective.name, self.arm, selects, plan.regenerate, plan.solver, self.regenerate.steps):
            raise ValueError(why)
        labels = [scorer.label for scorer in self.rewards.everyone]
        if strangers := sorted(self.services.scorers.keys() - set(labels)):
            raise ValueError(f"services.scorers.{strangers[0]}: there is no scorer of that name; there are: {', '.join(labels)}")
        return self

    def scorers_of(self, kind: str) -> tuple[str, ...]:
        """Labels of the scorers that actors of ``reward`` or ``scorers.<label>`` hold; none where all have actors of their own."""
        labels, own = [scorer.label for scorer in self.rewards.everyone], self.services.scorers
        return tuple(label for label in labels if (f"scorers.{label}" if label in own else "reward") == kind)

    @property
    def plan(self) -> ArmPlan:
        """What `arm` means for the two stages."""
        return ArmPlan.of(self)

    @property
    def resolved_old_policy(self) -> OldPolicy:
        """``old_policy`` with the objective's own schedule where none is given."""
        return self.old_policy.model_copy(update={"schedule": self.old_policy.schedule or self.objective.old_schedule})

    @property
    def resolved_advantages(self) -> Advantages:
        """``advantages`` with the objective's own rule where none is given."""
        given, own = self.advantages, self.objective
        return given.model_copy(update={"std": given.std or own.advantage_std, "eps": given.eps or own.advantage_eps})


class Exploration(Section):
    """Stage 1 as an arm runs it."""

    pool_size: int
    steps: int
    solver: AnySolver
    backend: Backend


class ArmPlan(Section):
    """An arm of the paper's table, spelled out, so that nothing downstream asks for the arm's name.

    ``explore`` is None where all K noises are trained on without selection. ``regenerate`` is False where the explored
    samples themselves are trained on. ``solver`` is that of samples at full quality: the objective's own unless given.
    """

    explore: Exploration | None
    regenerate: bool
    solver: AnySolver

    @classmethod
    def of(cls, config: RunConfig) -> ArmPlan:
        """The plan of ``config.arm``: K-in-K, K-in-N wide, K-in-N quantised, or K-in-N two-stage."""
        explore, full = config.explore, config.regenerate
        solver: Any = full.solver or config.objective.solvers[0]
        match config.arm:
            case "diffusionnft":
                return cls(explore=None, regenerate=True, solver=solver)
            case "naive_scaling":
                wide = Exploration(pool_size=explore.pool_size, steps=full.steps, solver=solver, backend=full.precision)
                return cls(explore=wide, regenerate=False, solver=solver)
            case "naive_quant":
                quick = Exploration(pool_size=explore.pool_size, steps=full.steps, solver=solver, backend=explore.backend)
                return cls(explore=quick, regenerate=False, solver=solver)
            case "sol_rl":
                quick = Exploration(
                    pool_size=explore.pool_size, steps=explore.steps, solver=explore.solver, backend=explore.backend
                )
                return cls(explore=quick, regenerate=True, solver=solver)

"""What a run is. Pydantic models, no torch, no ray: a typo answers at once.

Defaults follow the paper ("FP4 Explore, BF16 Train", arXiv 2604.06916) and public notes on it;
``docs/reproducing.md`` says where they differ from its reference code. A preset or a file states
only what differs. ``RunConfig`` is the root; its tables are in ``configs/sections.py``,
``rewards.py``, ``services.py`` and ``objectives.py``. ``docs/configuration.md`` is the tour.
"""

from __future__ import annotations

import re
from typing import Literal, cast, get_args

from pydantic import Field, field_validator, model_validator

from configs.aliases import current
from configs.backends import BackendName
from configs.layout import Layout
from configs.objective import incompatibility
from configs.objectives import DEFAULT_OBJECTIVE, SETTINGS, Objective
from configs.rewards import Advantages, Rewards
from configs.running import Audit, Checkpoint, Logging, Publish, Stop
from configs.section import PathText, Section
from configs.sections import (
    AnySolver,
    Ema,
    Evaluate,
    Explore,
    Guidance,
    Lora,
    Model,
    OldPolicy,
    Optimizer,
    Prompts,
    Regenerate,
    Selection,
    Solver,
)
from configs.services import Services

Arm = Literal["diffusionnft", "naive_scaling", "naive_quant", "sol_rl"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
UNEVEN = 0.05
"""Share by which replicas that share samples may wait for one that regenerates more."""


class RunConfig(Section):
    """A whole run."""

    name: str = Field(description="names the run directory")
    run_root: PathText | None = Field(
        default=None, description="directory of run directories; 'runs' on one machine"
    )
    seed: int = Field(default=0, ge=0, lt=2**63)
    iterations: int = Field(default=100, ge=1)
    arm: Arm = "sol_rl"
    explore_ahead: Literal[0, 1] = Field(
        default=0,
        description="1: explore with the policy before the one that is still being trained",
    )
    model: Model
    prompts: Prompts
    guidance: Guidance = Guidance()
    explore: Explore = Explore()
    selection: Selection = Selection()
    regenerate: Regenerate = Regenerate()
    evaluate: Evaluate = Evaluate()
    rewards: Rewards
    advantages: Advantages = Advantages()
    objective: Objective = SETTINGS[DEFAULT_OBJECTIVE].model_validate({})
    lora: Lora = Lora()
    optimizer: Optimizer = Optimizer()
    old_policy: OldPolicy = OldPolicy()
    ema: Ema = Ema()
    services: Services = Services()
    layout: Layout | None = Field(
        default=None, description="how actors share GPUs; None: as `services` says"
    )
    audit: Audit = Audit()
    checkpoint: Checkpoint = Checkpoint()
    stop: Stop = Stop()
    logging: Logging = Logging()
    publish: Publish = Publish()

    @model_validator(mode="before")
    @classmethod
    def _in_todays_names(cls, tree: object) -> object:
        """A run that was started under old names can be resumed and reported."""
        return current(tree) if isinstance(tree, dict) else tree

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(
                "letters, digits, '.', '_' and '-' only, starting with a letter or digit, at"
                " most 100"
            )
        return value

    @model_validator(mode="after")
    def _possible(self) -> RunConfig:
        keep, pool = self.selection.keep, self.explore.pool_size
        if self.plan.explore is not None and keep > pool:
            raise ValueError(
                f"selection.keep: {keep} samples cannot be kept of explore.pool_size = {pool}:"
                " lower keep or raise pool_size"
            )
        if self.selection.rule == "best_worst" and keep % 2:
            raise ValueError(
                f"selection.keep: {keep} is odd, but rule 'best_worst' keeps as many best as worst:"
                " use an even number"
            )
        self._possible_size()
        self._possible_base()
        if why := _one_stage(self.arm, self.plan):
            if self.explored_model != self.model:
                key = "height" if self.explore.height is not None else "frames"
                raise ValueError(
                    f"explore.{key}: arm {self.arm!r} {why}, so it cannot explore at another size:"
                    " leave explore.height, explore.width and explore.frames out"
                )
            if self.explore_ahead:
                raise ValueError(
                    f"explore_ahead: arm {self.arm!r} {why}, so it cannot explore with an older"
                    " policy: use 0"
                )
            if asked := self.audit.needs_two_stages:
                raise ValueError(
                    f"{asked}: arm {self.arm!r} {why}, so there is nothing to audit: leave it out"
                )
            if self.explore.decoder == "tiny":
                raise ValueError(
                    f"explore.decoder: arm {self.arm!r} {why}, so there are no proxy images to"
                    " decode: use 'full'"
                )
        if self.audit.random_seeds > pool:
            raise ValueError(
                f"audit.random_seeds: {self.audit.random_seeds} is more than explore.pool_size ="
                f" {pool}"
            )
        if self.audit.random_seeds and (compared := self.rewards.compared):
            raise ValueError(
                f"audit.random_seeds: {compared[0]} compares images with others of their prompt, so"
                " that those of random seeds have no place among the selected ones: use 0"
            )
        self._possible_share()
        self._possible_shards()
        self._possible_turns()
        plan, selects, steps = self.plan, self.plan.explore is not None, self.regenerate.steps
        if why := incompatibility(
            self.objective, self.arm, selects, plan.regenerate, plan.solver, steps
        ):
            raise ValueError(why)
        guidance = self.guidance
        if plan.solver not in get_args(Solver) and guidance.train != guidance.regenerate:
            raise ValueError(
                f"guidance.train: {guidance.train:g} is not guidance.regenerate ="
                f" {guidance.regenerate:g}: {plan.solver!r} is trained on the densities of the"
                " steps that were taken"
            )
        labels = [scorer.label for scorer in self.rewards.everyone]
        if strangers := sorted(self.services.scorers.keys() - set(labels)):
            raise ValueError(
                f"services.scorers.{strangers[0]}: there is no scorer of that name; there are:"
                f" {', '.join(labels)}"
            )
        return self

    def _possible_share(self) -> None:
        """Raises ValueError for replicas of which one would have nothing to train on."""
        learner, prompts = self.services.learner, self.prompts.per_iteration
        samples = prompts * self.selection.keep
        if learner.share == "prompts" and learner.replicas > prompts:
            raise ValueError(
                f"services.learner.replicas: {learner.replicas} cannot share prompts.per_iteration"
                f" = {prompts}: each trains on one prompt at least, or on part of one with"
                " services.learner.share = 'samples'"
            )
        if learner.replicas > samples:
            raise ValueError(
                f"services.learner.replicas: {learner.replicas} cannot share {samples} samples"
                " (prompts.per_iteration x selection.keep): each trains on one at least"
            )

    def _possible_shards(self) -> None:
        """Raises ValueError for what cannot go with frozen weights in shards."""
        learner = self.services.learner
        if learner.shard == "none":
            return
        key = "services.learner.shard: 'base'"
        chosen = self.layout is not None and "replicas" not in learner.model_fields_set
        if learner.replicas == 1 and not chosen:
            raise ValueError(
                f"{key} with one replica, which holds all of it: set services.learner.replicas"
            )
        if self.lora.base != "full":
            raise ValueError(
                f"{key} with lora.base = {self.lora.base!r}: packed weights are not sharded: use"
                " 'full', or shard = 'none'"
            )
        if self.regenerate.compile:
            raise ValueError(
                f"{key} with regenerate.compile: blocks that gather their weights are not"
                " compiled: use false, or shard = 'none'"
            )

    def _possible_turns(self) -> None:
        """Raises ValueError for what cannot go with weights that leave a GPU between turns."""
        services = self.services
        for kind in ("rollout", "learner"):
            if getattr(services, kind).between_turns == "host" and self.explore_ahead:
                raise ValueError(
                    f"services.{kind}.between_turns: 'host' with explore_ahead = 1: rollout actors"
                    " and learner then work at the same time: use 'stay', or explore_ahead = 0"
                )
        if services.learner.between_turns == "stay":
            return
        key = "services.learner.between_turns: 'host'"
        if services.learner.shard != "none":
            raise ValueError(
                f"{key} with services.learner.shard = {services.learner.shard!r}: shards stay on"
                " their GPUs: use 'stay', or shard = 'none'"
            )
        if self.lora.base != "full":
            raise ValueError(
                f"{key} with lora.base = {self.lora.base!r}: packed weights are small, and stay:"
                " use 'stay', or 'full'"
            )

    def _possible_base(self) -> None:
        """Raises ValueError for what cannot go with packed frozen weights."""
        base, plan = self.lora.base, self.plan
        if base == "full":
            return
        if plan.explore is not None and plan.explore.backend in ("bf16", "fp32"):
            raise ValueError(
                f"lora.base: {base!r} with exploring in {plan.explore.backend}, which would explore"
                " another model than is trained: use a backend that quantizes, or 'full'"
            )
        if self.audit.action == "finer_backend":
            raise ValueError(
                f"lora.base: {base!r} with audit.action = 'finer_backend', which may explore"
                " unquantized: use 'warn', or 'full'"
            )
        if self.regenerate.compile:
            raise ValueError(
                f"lora.base: {base!r} with regenerate.compile: packed weights are not compiled: use"
                " false, or 'full'"
            )

    def _possible_size(self) -> None:
        """Raises ValueError for proxy images whose noise is no whole part of the full one."""
        sizes = {side: getattr(self.explore, side) for side in ("height", "width")}
        if None in sizes.values() and any(sizes.values()):
            raise ValueError("explore.height: one side alone is given: give both, or none")
        for side, pixels in sizes.items():
            full = getattr(self.model, side)
            if pixels is not None and full % pixels:
                raise ValueError(
                    f"explore.{side}: {pixels} is no whole part of model.{side} = {full}: the noise"
                    " of proxy images is that of full ones, in whole blocks"
                )
        frames, full = self.explore.frames, self.model.frames
        if full is None and self.rewards.frames is not None:
            raise ValueError(
                f"rewards.frames: {self.rewards.frames} without model.frames: images have none,"
                " leave it out"
            )
        if frames is not None and full is None:
            raise ValueError(
                f"explore.frames: {frames} without model.frames: images have none, leave it out"
            )
        if frames is not None and full is not None and frames > full:
            raise ValueError(
                f"explore.frames: {frames} is more than model.frames = {full}: proxy clips are the"
                " beginning of full ones"
            )

    @property
    def explored_model(self) -> Model:
        """``model`` at the size of proxy images."""
        sizes = {side: getattr(self.explore, side) for side in ("height", "width", "frames")}
        return self.model.model_copy(
            update={side: size for side, size in sizes.items() if size is not None}
        )

    def scorers_of(self, kind: str) -> tuple[str, ...]:
        """Labels of the scorers that actors of ``reward`` or ``scorers.<label>`` hold."""
        labels, own = [scorer.label for scorer in self.rewards.everyone], self.services.scorers
        return tuple(
            label for label in labels if (f"scorers.{label}" if label in own else "reward") == kind
        )

    @property
    def plan(self) -> ArmPlan:
        """What `arm` means for the two stages."""
        return ArmPlan.of(self)

    @property
    def regenerated_size(self) -> int:
        """Images of a task in which a prompt is regenerated: all, or the most that replicas which
        share samples can take evenly, to a twentieth.
        """
        learner, keep = self.services.learner, self.selection.keep
        prompts, replicas = self.prompts.per_iteration, learner.replicas
        if learner.share == "prompts" or self.objective.one_noise_per_group:
            return keep

        def uneven(size: int) -> float:  # of the busiest replica, over an equal share
            turns = -(-prompts * -(-keep // size) // replicas)
            return turns * size * replicas / (prompts * keep)

        sizes = range(keep, 0, -1)
        even = (size for size in sizes if uneven(size) <= 1 + UNEVEN)
        return next(even, None) or min(sizes, key=uneven)

    @property
    def resolved_old_policy(self) -> OldPolicy:
        """``old_policy`` with the objective's own schedule where none is given."""
        return self.old_policy.model_copy(
            update={"schedule": self.old_policy.schedule or self.objective.old_schedule}
        )

    @property
    def resolved_advantages(self) -> Advantages:
        """``advantages`` with the objective's own rule where none is given."""
        given, own = self.advantages, self.objective
        return given.model_copy(
            update={"std": given.std or own.advantage_std, "eps": given.eps or own.advantage_eps}
        )


def _one_stage(arm: str, plan: ArmPlan) -> str | None:
    """What an arm lacks of exploring in one stage and regenerating in another; None: nothing."""
    if plan.explore is None:
        return "explores nothing"
    return None if plan.regenerate else "trains on the explored images themselves"


class Exploration(Section):
    """Stage 1 as an arm runs it."""

    pool_size: int
    steps: int
    solver: AnySolver
    backend: BackendName
    guidance: float = 1.0


class ArmPlan(Section):
    """An arm of the paper's table, spelled out, so that nothing downstream asks for the arm's name.

    ``explore`` is None where all K samples are trained on without selection. ``regenerate`` is
    False where the explored samples themselves are trained on. ``solver`` is that of samples at
    full precision: the objective's own unless given.
    """

    explore: Exploration | None
    regenerate: bool
    solver: AnySolver

    @classmethod
    def of(cls, config: RunConfig) -> ArmPlan:
        """The plan of ``config.arm``, one of the paper's four."""
        explore, full = config.explore, config.regenerate
        solver = full.solver or cast("AnySolver", config.objective.solvers[0])
        if config.arm == "diffusionnft":
            return cls(explore=None, regenerate=True, solver=solver)
        two_stages = config.arm == "sol_rl"
        stage = Exploration(
            pool_size=explore.pool_size,
            steps=explore.steps if two_stages else full.steps,
            solver=explore.solver if two_stages else solver,
            backend=full.precision if config.arm == "naive_scaling" else explore.backend,
            guidance=config.guidance.scale("explore" if two_stages else "regenerate"),
        )
        return cls(explore=stage, regenerate=two_stages, solver=solver)

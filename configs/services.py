"""Configuration tables of the actor pools: sizes, placement, shares of machines and timeouts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from configs.section import Section, Tree

Share = Literal["prompts", "samples"]
"""Unit by which the learner's replicas divide an iteration."""
Sharding = Literal["none", "base"]
"""Weights that are sharded over the learner's replicas."""
SCALABLE = ("rollout", "reward")
"""Services whose pools can grow and shrink during a run."""
BetweenTurns = Literal["stay", "host"]
"""Where an actor's weights are while others on the same GPU have their turn."""


class Service(Section):
    """Settings of one actor pool."""

    actors: int = Field(default=1, ge=1, description="actors of the pool")
    threads: int = Field(
        default=1,
        ge=1,
        description="CPU threads of each actor; part of the results, as it fixes the order of sums",
    )
    tf32: bool = Field(
        default=True,
        description="on a GPU, products in FP32 may use TF32 tensor cores; part of the results",
    )
    cpus: float = Field(
        default=0.5, ge=0, description="CPU share that each actor reserves from Ray"
    )
    gpus: float = Field(
        default=0.0, ge=0, description="GPU share that each actor reserves from Ray"
    )
    in_flight: int = Field(
        default=2, ge=1, description="tasks at an actor at a time; the next one waits there"
    )
    deadline_s: float = Field(
        default=900.0,
        gt=0,
        description="a task that takes longer counts as hung: its actor is killed, it is retried",
    )
    warm_up_s: float = Field(
        default=1800.0,
        ge=0,
        description="added to the deadline until a compiling actor has answered its first task",
    )
    max_attempts: int = Field(
        default=4, ge=1, description="attempts at one task over all actors before the run stops"
    )
    max_restarts: int = Field(
        default=20, ge=0, description="replacements of one pool member before it is given up"
    )
    accelerator: str | None = Field(
        default=None,
        description="`ray.io/accelerator-type` of nodes: B200, in(B200,GB200), !H100; None: any",
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="further node labels that are required, in Ray's selector words",
    )
    strategy: Literal["spread", "pack"] = Field(
        default="pack", description="over as many nodes as there are, or onto few"
    )
    min_actors: int = Field(default=1, ge=1, description="fewest that scaling leaves")
    max_actors: int | None = Field(
        default=None,
        ge=1,
        description="most that scaling makes; None: as many as there is room for",
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Service:
        if not self.min_actors <= self.actors <= (self.max_actors or self.actors):
            raise ValueError(
                f"actors = {self.actors} is not within min_actors = {self.min_actors} and"
                f" max_actors = {self.max_actors}"
            )
        if self.gpus > 1 and self.gpus % 1:
            raise ValueError(f"gpus = {self.gpus:g}: a share above 1 is whole GPUs")
        return self

    @property
    def count(self) -> int:
        """Number of actors that a run starts with."""
        return self.actors


class RolloutService(Service):
    """Settings of the rollout actors."""

    actors: int = Field(default=2, ge=1, description="actors of the pool")
    strategy: Literal["spread", "pack"] = Field(
        default="spread", description="over as many nodes as there are, or onto few"
    )
    between_turns: BetweenTurns = Field(
        default="stay",
        description="'host': the denoiser and its decoder are on the GPU only while it explores,"
        " and in host memory while the learner works",
    )


class LearnerService(Service):
    """Settings of the learner, which holds state: its tasks are not retried.

    A learner that died is restored from a checkpoint.
    """

    actors: Literal[1] = Field(
        default=1, description="there is one learner; `replicas` says of how many processes"
    )
    threads: int = Field(
        default=1,
        ge=1,
        description="CPU threads of each replica; where not given and without a GPU, the cores"
        " there are, up to 4; part of the results, as it fixes the order of sums",
    )
    regenerate_threads: int | None = Field(
        default=None,
        ge=1,
        description="as `threads`, while rollout actors explore beside it; where not given and"
        " without a GPU, the cores that those leave, one at least",
    )
    replicas: int = Field(
        default=1,
        ge=1,
        description="learners that share an iteration and add gradients; fixes the order of sums",
    )
    share: Share = Field(
        default="prompts",
        description="replicas: whole prompts for each, or as many samples for each as for the"
        " others, also parts of prompts; part of the results, as it fixes batches and sums",
    )
    shard: Sharding = Field(
        default="none",
        description="replicas: 'base' leaves each its part of the frozen weights (FSDP2), which"
        " they gather block by block in every pass; for models that do not fit on one GPU",
    )
    between_turns: BetweenTurns = Field(
        default="stay",
        description="'host': the frozen weights and the decoder are on the GPU only while the"
        " learner works, and in host memory while rollout actors explore",
    )
    silence_s: float = Field(
        default=600.0,
        gt=0,
        description="replicas: longest wait for another one, which then counts as lost",
    )

    @property
    def regeneration_threads(self) -> int:
        """CPU threads of calls that regenerate training samples; evaluations use ``threads``."""
        return self.regenerate_threads or self.threads

    in_flight: int = Field(default=1, ge=1, description="tasks at a replica at a time")
    max_attempts: Literal[1] = Field(default=1, description="a learner's tasks are not retried")
    max_restarts: int = Field(
        default=10,
        ge=0,
        description="times the learner may be restored from its checkpoint in one run",
    )

    @property
    def count(self) -> int:
        """Number of actors, one for each replica."""
        return self.replicas

    @model_validator(mode="after")
    def _check_gpu_per_replica(self) -> LearnerService:
        if self.replicas > 1 and 0 < self.gpus <= 0.5:
            raise ValueError(
                f"gpus = {self.gpus:g}: two of the {self.replicas} replicas would fit on one GPU,"
                " and NCCL wants one each: use more than 0.5, or 0 for CPUs"
            )
        return self


class ScorerService(Service):
    """Settings of one scorer's own actors, with their GPU share, threads, deadline and packages."""

    runtime_env: Tree = Field(
        default_factory=dict,
        description="Ray's runtime_env of these actors: pip, uv, py_modules, env_vars, ...",
    )


class Autoscale(Section):
    """Automatic scaling of the rollout pool, within min_actors and max_actors.

    The pool grows while the learner waits for it and shrinks while its actors are idle.
    """

    enabled: bool = Field(default=False, description="the rollout pool sizes itself")
    grow_above: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="grow when the learner waits for a larger share of an iteration",
    )
    shrink_below: float = Field(
        default=0.25,
        gt=0,
        lt=1,
        description="shrink when rollout actors are busy for a smaller share of an iteration",
    )
    patience: int = Field(default=2, ge=1, description="iterations in a row that must agree")
    step: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="share of the pool that is added or removed, one actor at least",
    )


class Services(Section):
    """All actor pools, and how their actors are started and placed."""

    start_deadline_s: float = Field(
        default=600.0,
        gt=0,
        description="an actor must be placed and have loaded its model within this",
    )
    wait_for_nodes_s: float = Field(
        default=0.0,
        ge=0,
        description="on an autoscaling cluster: request missing nodes, and wait so long",
    )
    node_silence_s: float = Field(
        default=4.0,
        ge=0,
        description="a node that answers no connection for so long is lost; 0: when Ray says so",
    )
    autoscale: Autoscale = Autoscale()
    rollout: RolloutService = RolloutService()
    reward: Service = Service()
    scorers: dict[str, ScorerService] = Field(
        default_factory=dict, description="by label; the others share `reward`"
    )
    encoder: Service = Service()
    selector: Service = Service()
    learner: LearnerService = LearnerService()

    def of(self, kind: str) -> Service:
        """Return the settings of a service: ``rollout``, ``reward``, ``scorers.<label>``, ..."""
        name, _, label = kind.partition(".")
        return self.scorers[label] if label else getattr(self, name)

    @property
    def takes_turns(self) -> bool:
        """True if rollout actors and learner take turns because one of them leaves the GPU."""
        return "host" in (self.rollout.between_turns, self.learner.between_turns)

    @model_validator(mode="after")
    def _check_scaling(self) -> Services:
        if self.autoscale.enabled and self.rollout.max_actors is None:
            raise ValueError("autoscale.enabled: say how far: services.rollout.max_actors = N")
        for kind in ("learner", "encoder", "selector"):
            if (service := getattr(self, kind)).max_actors not in (None, service.actors):
                raise ValueError(
                    f"{kind}.max_actors = {service.max_actors}: only {' and '.join(SCALABLE)} can"
                    " be scaled"
                )
        return self


class Layout(Section):
    """Choice of the numbers of actors and their GPU shares when a run starts.

    Settings that ``services`` gives explicitly take precedence.
    """

    mode: Literal["auto", "shared", "split"] = Field(
        default="auto",
        description=(
            "shared: rollout actors and learner replicas take turns on each GPU; split: GPUs of"
            " their own; auto: what is predicted to be fastest of what fits"
        ),
    )
    gpus: int | None = Field(
        default=None, ge=1, description="GPUs to use; None: all that the cluster or machine has"
    )

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

    actors: int = Field(default=1, ge=1, description="number of actors")
    threads: int = Field(
        default=1,
        ge=1,
        description=(
            "CPU threads per actor; affects results, because it determines the order of sums"
        ),
    )
    tf32: bool = Field(
        default=True,
        description="allow TF32 tensor cores for FP32 matrix products on a GPU; affects results",
    )
    cpus: float = Field(
        default=0.5, ge=0, description="CPU share that each actor reserves from Ray"
    )
    gpus: float = Field(
        default=0.0, ge=0, description="GPU share that each actor reserves from Ray"
    )
    in_flight: int = Field(
        default=2,
        ge=1,
        description=(
            "maximum number of tasks sent to an actor at a time; one runs, the others"
            " wait at the actor"
        ),
    )
    deadline_s: float = Field(
        default=900.0,
        gt=0,
        description=(
            "timeout of a task in seconds: its actor counts as hung and is killed, and"
            " the task is retried"
        ),
    )
    warm_up_s: float = Field(
        default=1800.0,
        ge=0,
        description="seconds added to the deadline of the first task of an actor that compiles",
    )
    max_attempts: int = Field(
        default=4,
        ge=1,
        description=(
            "maximum number of attempts at a task over all actors, after which the run fails"
        ),
    )
    max_restarts: int = Field(
        default=20,
        ge=0,
        description=(
            "maximum number of restarts of one member of the pool, after which it stays down"
        ),
    )
    accelerator: str | None = Field(
        default=None,
        description=(
            "required `ray.io/accelerator-type` of nodes: B200, in(B200,GB200), !H100; None: any"
        ),
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="further required node labels, in Ray's label selector syntax",
    )
    strategy: Literal["spread", "pack"] = Field(
        default="pack",
        description=(
            "spread: place actors on as many nodes as possible; pack: on as few as possible"
        ),
    )
    min_actors: int = Field(default=1, ge=1, description="lower limit of scaling")
    max_actors: int | None = Field(
        default=None,
        ge=1,
        description="upper limit of scaling; None: as many actors as the cluster has room for",
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Service:
        if not self.min_actors <= self.actors <= (self.max_actors or self.actors):
            raise ValueError(
                f"actors = {self.actors} is not within min_actors = {self.min_actors} and"
                f" max_actors = {self.max_actors}"
            )
        if self.gpus > 1 and self.gpus % 1:
            raise ValueError(f"gpus = {self.gpus:g}: shares above 1 must be whole numbers")
        return self

    @property
    def count(self) -> int:
        """Number of actors that a run starts with."""
        return self.actors


class RolloutService(Service):
    """Settings of the rollout actors."""

    actors: int = Field(default=2, ge=1, description="number of actors")
    strategy: Literal["spread", "pack"] = Field(
        default="spread",
        description=(
            "spread: place actors on as many nodes as possible; pack: on as few as possible"
        ),
    )
    between_turns: BetweenTurns = Field(
        default="stay",
        description=(
            "stay: the denoiser and its decoder stay on the GPU; host: they are on the"
            " GPU only while exploring, and in host memory while the learner works"
        ),
    )


class LearnerService(Service):
    """Settings of the learner, which holds state: its tasks are not retried.

    A learner that died is restored from a checkpoint.
    """

    actors: Literal[1] = Field(
        default=1, description="always 1: `replicas` is the number of learner processes"
    )
    threads: int = Field(
        default=1,
        ge=1,
        description=(
            "CPU threads per replica; if not set and without a GPU: the number of cores,"
            " at most 4; affects results, because it determines the order of sums"
        ),
    )
    regenerate_threads: int | None = Field(
        default=None,
        ge=1,
        description=(
            "CPU threads per replica while rollout actors explore at the same time; if"
            " not set and without a GPU: the cores that they leave free, at least 1"
        ),
    )
    replicas: int = Field(
        default=1,
        ge=1,
        description=(
            "number of learner processes that share an iteration and sum their gradients;"
            " affects results, because it determines the order of sums"
        ),
    )
    share: Share = Field(
        default="prompts",
        description=(
            "how replicas share an iteration; prompts: whole prompts each; samples: equal"
            " numbers of samples each, which may split prompts; affects results, because"
            " it determines batches and sums"
        ),
    )
    shard: Sharding = Field(
        default="none",
        description=(
            "weights sharded over replicas; base: each replica keeps a part of the frozen"
            " weights (FSDP2) and gathers them block by block in every pass, for models"
            " that do not fit on one GPU"
        ),
    )
    between_turns: BetweenTurns = Field(
        default="stay",
        description=(
            "stay: the frozen weights and the decoder stay on the GPU; host: they are on"
            " the GPU only while the learner works, and in host memory while rollout"
            " actors explore"
        ),
    )
    elastic: bool = Field(
        default=False,
        description=(
            "--resume may continue with other `replicas` and `share`, for example on fewer"
            " GPUs; affects results from there on, as `replicas` does"
        ),
    )
    silence_s: float = Field(
        default=600.0,
        gt=0,
        description="timeout in seconds for another replica, which then counts as lost",
    )

    @property
    def regeneration_threads(self) -> int:
        """CPU threads of calls that regenerate training samples; evaluations use ``threads``."""
        return self.regenerate_threads or self.threads

    in_flight: int = Field(
        default=1, ge=1, description="maximum number of tasks sent to a replica at a time"
    )
    max_attempts: Literal[1] = Field(
        default=1, description="always 1: tasks of the learner are not retried"
    )
    max_restarts: int = Field(
        default=10,
        ge=0,
        description="maximum number of times that a run restores the learner from its checkpoint",
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
                " but NCCL needs one GPU per replica: use more than 0.5, or 0 for CPUs"
            )
        return self


class ScorerService(Service):
    """Settings of one scorer's own actors, with their GPU share, threads, deadline and packages."""

    runtime_env: Tree = Field(
        default_factory=dict,
        description="Ray's runtime_env for these actors: pip, uv, py_modules, env_vars, ...",
    )


class Autoscale(Section):
    """Automatic scaling of the rollout pool, within min_actors and max_actors.

    The pool grows while the learner waits for it and shrinks while its actors are idle.
    """

    enabled: bool = Field(default=False, description="scale the rollout pool automatically")
    grow_above: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="add actors if the learner waits for more than this share of an iteration",
    )
    shrink_below: float = Field(
        default=0.25,
        gt=0,
        lt=1,
        description=(
            "remove actors if rollout actors are busy for less than this share of an iteration"
        ),
    )
    patience: int = Field(
        default=2, ge=1, description="number of consecutive iterations that must meet the condition"
    )
    step: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="share of the pool that is added or removed at a time, at least one actor",
    )


class Services(Section):
    """All actor pools, and how their actors are started and placed."""

    start_deadline_s: float = Field(
        default=600.0,
        gt=0,
        description="timeout in seconds for placing an actor and loading its model",
    )
    wait_for_nodes_s: float = Field(
        default=0.0,
        ge=0,
        description=(
            "on an autoscaling cluster: request missing nodes and wait up to this number"
            " of seconds for them"
        ),
    )
    node_silence_s: float = Field(
        default=4.0,
        ge=0,
        description=(
            "a node that accepts no connection for this number of seconds counts as lost;"
            " 0: when Ray reports it"
        ),
    )
    autoscale: Autoscale = Autoscale()
    rollout: RolloutService = RolloutService()
    reward: Service = Service()
    scorers: dict[str, ScorerService] = Field(
        default_factory=dict,
        description="scorers with their own actors, by label; all other scorers share `reward`",
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
            raise ValueError(
                "autoscale.enabled needs an upper limit: set services.rollout.max_actors = N"
            )
        for kind in ("learner", "rollout", "encoder", "selector"):
            if (gpus := getattr(self, kind).gpus) > 1:
                more = "replicas" if kind == "learner" else "actors"
                raise ValueError(
                    f"{kind}.gpus = {gpus:g}: each process uses one GPU: set {kind}.{more} ="
                    f" {gpus:g} and {kind}.gpus = 1 to use as many"
                )
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
            "shared: rollout actors and learner replicas take turns on each GPU; split:"
            " each has its own GPUs; auto: the layout that is predicted to be fastest"
            " among those that fit"
        ),
    )
    gpus: int | None = Field(
        default=None,
        ge=1,
        description="number of GPUs to use; None: all GPUs of the cluster or machine",
    )

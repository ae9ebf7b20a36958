"""What a run is. Pydantic models, no torch, no ray: a typo answers at once.

Defaults follow the paper ("FP4 Explore, BF16 Train", arXiv 2604.06916) and public notes on it;
``docs/reproducing.md`` says where they differ from its reference code. A preset or a file states
only what differs. ``RunConfig`` is the root; its tables are in ``configs/sections.py``,
``training.py``, ``rewards.py``, ``services.py`` and ``objectives.py``; what goes together is in
``possible.py``.
``docs/configuration.md`` is the tour.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from configs.aliases import current
from configs.arms import Arm, ArmPlan
from configs.objectives import DEFAULT_OBJECTIVE, SETTINGS, Objective
from configs.rewards import Advantages, Rewards
from configs.running import Audit, Checkpoint, Logging, Publish, Stop
from configs.section import PathText, Section
from configs.sections import Evaluate, Explore, Guidance, Model, Prompts, Regenerate, Selection
from configs.services import Layout, Services
from configs.training import Ema, Lora, OldPolicy, Optimizer
from configs.validation import check_possible

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
UNEVEN = 0.05
"""Share by which replicas that share samples may wait for one that regenerates more."""


class RunConfig(Section):
    """A whole run."""

    name: str = Field(description="names the run directory")
    run_root: PathText | None = Field(
        default=None, description="directory of run directories; 'runs' on one machine"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="the run seed: all else follows it")
    iterations: int = Field(default=100, ge=1, description="updates of the policy")
    arm: Arm = Field(default="sol_rl", description="what is explored, regenerated and trained on")
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
        check_possible(self)
        return self

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
    def learner_compiles(self) -> str | None:
        """The key by which the learner compiles some of its passes; None: all are eager."""
        for key, section in (("regenerate", self.regenerate), ("optimizer", self.optimizer)):
            if section.compile:
                return f"{key}.compile"
        return None

    @property
    def explores_meanwhile(self) -> bool:
        """Whether an iteration may begin to be explored during an evaluation. Not where the rollout
        pool sizes itself: its rule looks at whole iterations, and actors would seem idle in them.
        """
        return self.evaluate.explore_meanwhile and not self.services.autoscale.enabled

    @property
    def regenerated_size(self) -> int:
        """Images of a task in which a prompt is regenerated: all, or the most that replicas which
        share samples can take evenly, to a twentieth.
        """
        learner, keep = self.services.learner, self.selection.keep
        prompts, replicas = self.prompts.per_iteration, learner.replicas
        if learner.share == "prompts":
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

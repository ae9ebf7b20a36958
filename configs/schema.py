"""Schema of a run's configuration, as Pydantic models.

Neither torch nor ray is imported, so that a typo is reported at once. Defaults follow the paper
("FP4 Explore, BF16 Train", arXiv 2604.06916) and public notes on it; ``docs/reproducing.md`` says
where they differ from its reference code. A preset or a file states only what differs.
``RunConfig`` is the root. Its tables are in ``configs/sections.py``, ``training.py``,
``rewards.py``, ``services.py``, ``running.py`` and ``objectives.py``; checks across tables are in
``validation.py``. ``docs/configuration.md`` is an introduction.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from configs.aliases import rename_old_keys
from configs.arms import Arm, ArmPlan
from configs.objectives import DEFAULT_OBJECTIVE, SETTINGS, Objective
from configs.rewards import Advantages, Rewards
from configs.running import Audit, Checkpoint, Logging, Publish, Stop
from configs.section import PathText, Section
from configs.sections import Evaluate, Explore, Guidance, Model, Prompts, Regenerate, Selection
from configs.services import Layout, Services
from configs.training import Ema, Lora, OldPolicy, Optimizer
from configs.validation import check_combinations

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
UNEVEN = 0.05
"""Accepted imbalance of regeneration: excess of the busiest replica over an equal share."""


class RunConfig(Section):
    """Configuration of a run."""

    name: str = Field(description="name of the run and of its directory")
    run_root: PathText | None = Field(
        default=None,
        description=(
            "parent of the run directory; None: 'runs' on one machine, required on a cluster"
        ),
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="run seed, from which all random numbers are derived"
    )
    iterations: int = Field(default=100, ge=1, description="number of policy updates")
    arm: Arm = Field(
        default="sol_rl",
        description="method: which images are explored, regenerated and trained on",
    )
    explore_ahead: Literal[0, 1] = Field(
        default=0,
        description=(
            "1: explore the next iteration during training, with the previous policy; 0:"
            " after training"
        ),
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
        default=None, description="how actors share GPUs; None: as configured in `services`"
    )
    audit: Audit = Audit()
    checkpoint: Checkpoint = Checkpoint()
    stop: Stop = Stop()
    logging: Logging = Logging()
    publish: Publish = Publish()

    @model_validator(mode="before")
    @classmethod
    def _rename_old_keys(cls, tree: object) -> object:
        """Replace old names, so that runs started under them can be resumed and reported."""
        return rename_old_keys(tree) if isinstance(tree, dict) else tree

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(
                "letters, digits, '.', '_' and '-' only, starting with a letter or digit, at"
                " most 100"
            )
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> RunConfig:
        check_combinations(self)
        return self

    @property
    def explored_model(self) -> Model:
        """``model`` with the size of proxy images."""
        sizes = {side: getattr(self.explore, side) for side in ("height", "width", "frames")}
        return self.model.model_copy(
            update={side: size for side, size in sizes.items() if size is not None}
        )

    def scorers_of(self, kind: str) -> tuple[str, ...]:
        """Return the labels of the scorers of a service, ``reward`` or ``scorers.<label>``."""
        labels, own = [scorer.label for scorer in self.rewards.all_scorers], self.services.scorers
        return tuple(
            label for label in labels if (f"scorers.{label}" if label in own else "reward") == kind
        )

    @property
    def plan(self) -> ArmPlan:
        """The two stages as ``arm`` runs them."""
        return ArmPlan.of(self)

    @property
    def learner_compile_key(self) -> str | None:
        """Key of the setting that makes the learner compile passes, or None if all are eager."""
        for key, section in (("regenerate", self.regenerate), ("optimizer", self.optimizer)):
            if section.compile:
                return f"{key}.compile"
        return None

    @property
    def explores_meanwhile(self) -> bool:
        """True if exploring the next iteration may start during an evaluation.

        False if the rollout pool scales automatically: its rule measures whole iterations, in which
        the actors would seem idle.
        """
        return self.evaluate.explore_meanwhile and not self.services.autoscale.enabled

    @property
    def regeneration_task_size(self) -> int:
        """Images per regeneration task: all of a prompt, unless replicas share by samples.

        Then it is the largest size with which the busiest replica gets at most ``UNEVEN`` more than
        an equal share, or else the most even size.
        """
        learner, keep = self.services.learner, self.selection.keep
        prompts, replicas = self.prompts.per_iteration, learner.replicas
        if learner.share == "prompts":
            return keep

        def imbalance(size: int) -> float:  # load of the busiest replica over an equal share
            tasks = -(-prompts * -(-keep // size) // replicas)
            return tasks * size * replicas / (prompts * keep)

        sizes = range(keep, 0, -1)
        even = (size for size in sizes if imbalance(size) <= 1 + UNEVEN)
        return next(even, None) or min(sizes, key=imbalance)

    @property
    def resolved_old_policy(self) -> OldPolicy:
        """``old_policy``, with the objective's own schedule if none is set."""
        return self.old_policy.model_copy(
            update={"schedule": self.old_policy.schedule or self.objective.old_schedule}
        )

    @property
    def resolved_advantages(self) -> Advantages:
        """``advantages``, with the objective's own ``std`` and ``eps`` if they are not set."""
        chosen, own = self.advantages, self.objective
        return chosen.model_copy(
            update={"std": chosen.std or own.advantage_std, "eps": chosen.eps or own.advantage_eps}
        )

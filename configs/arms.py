"""Arms of the comparison, and the stages that each of them runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from configs.backends import BackendName
from configs.section import Section, Tree
from configs.sections import AnySolver

if TYPE_CHECKING:
    from configs.schema import RunConfig

Arm = Literal["diffusionnft", "naive_scaling", "naive_quant", "sol_rl"]
TWO_STAGES: Arm = "sol_rl"
"""The arm that explores proxy images and regenerates those that it selects."""
OF_TWO_STAGES = (
    "explore_ahead",
    *(f"audit.{key}" for key in ("random_seeds", "min_sign_agreement", "min_tau", "action")),
    *(f"explore.{key}" for key in ("height", "width", "frames", "decoder", "decoder_path")),
)
"""Settings that other arms refuse, or do not use."""


class ExploreStage(Section):
    """Settings of stage 1 as an arm runs it."""

    pool_size: int
    steps: int
    solver: AnySolver
    backend: BackendName
    guidance: float = 1.0


class ArmPlan(Section):
    """Stages of an arm, so that no other code depends on the arm's name.

    ``explore`` is None if all K samples are trained on without selection. ``regenerate`` is False
    if the explored samples themselves are trained on. ``solver`` samples at full precision: the
    objective's default unless set.
    """

    explore: ExploreStage | None
    regenerate: bool
    solver: AnySolver

    @classmethod
    def of(cls, config: RunConfig) -> ArmPlan:
        """Return the plan of ``config.arm``, one of the four arms of the paper's table."""
        explore, full = config.explore, config.regenerate
        solver = full.solver or config.objective.solvers[0]
        if config.arm == "diffusionnft":
            return cls(explore=None, regenerate=True, solver=solver)
        two_stages = config.arm == TWO_STAGES
        stage = ExploreStage(
            pool_size=explore.pool_size,
            steps=explore.steps if two_stages else full.steps,
            solver=proxy_solver(config) if two_stages else solver,
            backend=full.precision if config.arm == "naive_scaling" else explore.backend,
            guidance=config.guidance.scale("explore" if two_stages else "regenerate"),
        )
        return cls(explore=stage, regenerate=two_stages, solver=solver)


def proxy_solver(config: RunConfig) -> AnySolver:
    """Return the solver of proxy images: the objective's own if its paths are explored."""
    if config.explore.paths and config.objective.stochastic:
        return config.objective.solvers[0]
    return config.explore.solver


def set_arm(tree: Tree, arm: str) -> None:
    """Set the arm of a configuration's plain tree, and remove settings that it would refuse.

    They take their defaults when the tree is parsed.
    """
    tree["arm"] = arm
    if arm == TWO_STAGES:
        return
    for key in OF_TWO_STAGES:
        *tables, last = key.split(".")
        table = tree
        for name in tables:
            table = table.get(name, {})
        table.pop(last, None)

"""What an arm means for the two stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from configs.backends import BackendName
from configs.section import Section
from configs.sections import AnySolver

if TYPE_CHECKING:
    from configs.schema import RunConfig

Arm = Literal["diffusionnft", "naive_scaling", "naive_quant", "sol_rl"]


class ExploreStage(Section):
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

    explore: ExploreStage | None
    regenerate: bool
    solver: AnySolver

    @classmethod
    def of(cls, config: RunConfig) -> ArmPlan:
        """The plan of ``config.arm``, one of the paper's four."""
        explore, full = config.explore, config.regenerate
        solver = full.solver or config.objective.solvers[0]
        if config.arm == "diffusionnft":
            return cls(explore=None, regenerate=True, solver=solver)
        two_stages = config.arm == "sol_rl"
        stage = ExploreStage(
            pool_size=explore.pool_size,
            steps=explore.steps if two_stages else full.steps,
            solver=proxy_solver(config) if two_stages else solver,
            backend=full.precision if config.arm == "naive_scaling" else explore.backend,
            guidance=config.guidance.scale("explore" if two_stages else "regenerate"),
        )
        return cls(explore=stage, regenerate=two_stages, solver=solver)


def proxy_solver(config: RunConfig) -> AnySolver:
    """What draws proxy images: the objective's own solver where its paths are explored."""
    if config.explore.paths and config.objective.stochastic:
        return config.objective.solvers[0]
    return config.explore.solver

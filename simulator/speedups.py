"""Suggest settings that shorten an iteration, by prediction.

They are tried cumulatively; one that gains less than ``LEAST`` is left out again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from configs.load import ConfigError
from configs.schema import RunConfig
from planning.assumptions import Assumptions
from planning.layouts.report import gpu_hours
from planning.placement import Node
from planning.plan import Plan, make_plan
from planning.savings import changed, value_of
from simulator.outlook import run

LEAST = 0.01


@dataclass(frozen=True)
class Speedup:
    """A setting ``key=value`` that may shorten an iteration, and what else it changes."""

    setting: str
    changes: str


ROUNDING = "results differ by rounding"
SPEEDUPS = (
    Speedup("explore.compile=true", f"exploring is compiled; {ROUNDING}"),
    Speedup("regenerate.compile=true", f"regenerating is compiled; {ROUNDING}"),
    Speedup("optimizer.compile=true", f"training is compiled; {ROUNDING}"),
    Speedup(
        "optimizer.gradient_checkpointing=auto",
        "fewer blocks are computed again, as many as planned memory allows; same results",
    ),
    Speedup(
        "explore.activation_amax=previous_pass",
        "NVFP4 packs inputs by their amax in the step before; those that outgrow it are clipped",
    ),
    Speedup(
        "prompts.encode_once=true",
        "prompts are encoded at the start and kept in host memory; same results",
    ),
    Speedup(
        "optimizer.deal=even",
        "replicas have equally many samples in every optimizer step; other samples share a step",
    ),
    Speedup("explore_ahead=1", "seeds are ranked by a policy that is one update old"),
)
"""In the order in which they are tried; the last ones change more than rounding."""


@dataclass(frozen=True)
class Faster:
    """The prediction with a setting on top of all settings before it."""

    speedup: Speedup
    seconds: float  # per iteration
    gpus: int
    gb: float  # on the fullest GPU

    @property
    def line(self) -> str:
        """The line that is printed."""
        return (
            f"  {self.seconds:8.1f} s, {gpu_hours(self.seconds, self.gpus):.0f} GPU-hours,"
            f" {self.gb:.1f} GB on the fullest GPU, with --set {self.speedup.setting}:"
            f" {self.speedup.changes}"
        )

    @property
    def as_json(self) -> dict[str, object]:
        """What ``sol-rl plan --faster --json`` prints of it."""
        return {
            "setting": self.speedup.setting,
            "iteration_s": self.seconds,
            "memory_gb": self.gb,
            "changes": self.speedup.changes,
        }


def speedups(
    config: RunConfig, plan: Plan, given: Assumptions, nodes: Sequence[Node] | None = None
) -> Iterator[Faster]:
    """Iterate over settings that shorten an iteration of ``config``, each on top of those before.

    ``plan`` is that of ``config``. Settings that the run has, or that it cannot have, are left out.
    Each is planned anew, which takes up to a minute for a large model. Raises ConfigError if the
    plan has no prediction.
    """
    # here, so that the error comes before anything is printed
    return _tried(config, _seconds(plan), given, nodes)


def _tried(
    config: RunConfig, best: float, given: Assumptions, nodes: Sequence[Node] | None
) -> Iterator[Faster]:
    settings: dict[str, str] = {}
    for speedup in SPEEDUPS:
        key, _, value = speedup.setting.partition("=")
        if str(value_of(config, key)).lower() == value:
            continue
        try:
            other = make_plan(changed(config, settings | {key: value}), given, nodes)
        except ConfigError:  # impossible for this model, arm or these GPUs
            continue
        seconds = _seconds(other)
        if seconds > (1 - LEAST) * best:
            continue
        best, settings = seconds, settings | {key: value}
        assert other.outlook is not None
        gpus = sum(each.count for each in other.outlook.gpus)
        yield Faster(speedup, seconds, gpus, other.outlook.fullest_gb)


def _seconds(plan: Plan) -> float:
    if plan.scenarios is None:
        raise ConfigError("--faster: no service requests a GPU, so there is no prediction")
    return run(plan.scenarios.mine).iteration

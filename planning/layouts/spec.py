"""The values that make up a layout: actors and shares of each service, and explore_ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from configs.load import parse
from configs.schema import RunConfig
from configs.services import Share
from planning.layouts.threads import keep_threads
from planning.placement import kinds_of

FIELDS = ("actors", "gpus", "cpus", "accelerator")
TAKE_TURNS = ("rollout", "learner")
"""Services that may leave a GPU between their turns."""


@dataclass(frozen=True)
class Group:
    """The actors of one service: their number, and what each reserves on which kind of GPU."""

    actors: int
    gpus: float = 0.0
    cpus: float = 0.5
    accelerator: str | None = None


@dataclass(frozen=True)
class LayoutSpec:
    """A layout, with ``groups`` by service; explicitly configured values are already applied."""

    mode: str
    groups: Mapping[str, Group]
    ahead: int = 0
    share: Share = "prompts"  # what learner replicas share
    leaves: tuple[str, ...] = ()  # services of TAKE_TURNS that are in host memory between turns

    def describe(self) -> str:
        """Return ``8 learner at 0.52 GPU, 8 rollout at 0.36 GPU``: services with GPU shares."""
        parts = [
            f"{group.actors} {kind} at {group.gpus:g} GPU"
            + (f" of {group.accelerator}" if group.accelerator else "")
            for kind, group in self.groups.items()
            if group.gpus
        ]
        shared = ", replicas share samples" if self.share == "samples" else ""
        ahead = ", explore_ahead = 1" if self.ahead else ""
        turns = f", {' and '.join(self.leaves)} in host memory between turns" if self.leaves else ""
        return ", ".join(parts) + shared + ahead + turns


def configured_layout(config: RunConfig) -> LayoutSpec:
    """Return the layout of a configuration, whether set explicitly or chosen."""
    groups = {}
    for kind in kinds_of(config):
        service = config.services.of(kind)
        groups[kind] = Group(service.count, service.gpus, service.cpus, service.accelerator)
    services = config.services
    between_turns = {
        "rollout": services.rollout.between_turns,
        "learner": services.learner.between_turns,
    }
    leaves = tuple(kind for kind in TAKE_TURNS if kind in groups and between_turns[kind] == "host")
    return LayoutSpec("by hand", groups, config.explore_ahead, services.learner.share, leaves)


def explicit_fields(config: RunConfig) -> dict[str, dict[str, int | float | str | None]]:
    """Return the explicitly configured fields of ``Group``, by service."""
    result: dict[str, dict[str, int | float | str | None]] = {}
    for kind in kinds_of(config):
        service = config.services.of(kind)
        keys = {field: field for field in FIELDS}  # of Group -> of the service
        if kind == "learner":
            keys["actors"] = "replicas"
        explicit = {field: key for field, key in keys.items() if key in service.model_fields_set}
        result[kind] = {field: getattr(service, key) for field, key in explicit.items()}
    return result


def apply_explicit_fields(config: RunConfig, numbers: LayoutSpec) -> LayoutSpec:
    """Return ``numbers`` with the values that the configuration sets explicitly.

    A scoring service whose GPU share is set keeps its configured number of actors.
    """
    groups = dict(numbers.groups)
    for kind, explicit in explicit_fields(config).items():
        service = config.services.of(kind)
        if kind.partition(".")[0] in ("reward", "scorers") and "gpus" in explicit:
            explicit = {"actors": service.count, **explicit}
        base = groups.get(
            kind, Group(service.count, service.gpus, service.cpus, service.accelerator)
        )
        groups[kind] = replace(base, **explicit)  # type: ignore[arg-type]
    ahead = config.explore_ahead if "explore_ahead" in config.model_fields_set else numbers.ahead
    learner = config.services.learner
    share = learner.share if "share" in learner.model_fields_set else numbers.share
    explicit_turns = [
        kind for kind in TAKE_TURNS if "between_turns" in config.services.of(kind).model_fields_set
    ]
    configured_leaves = configured_layout(config).leaves
    leaves = (
        k for k in TAKE_TURNS if k in (configured_leaves if k in explicit_turns else numbers.leaves)
    )
    return LayoutSpec(numbers.mode, groups, ahead, share, tuple(leaves))


def with_layout(config: RunConfig, numbers: LayoutSpec) -> RunConfig:
    """Return the configuration with a layout written out. Raises ConfigError if it is invalid."""
    tree = config.model_dump(mode="json")
    tree["explore_ahead"] = numbers.ahead
    tree["services"]["learner"]["share"] = numbers.share
    for kind in TAKE_TURNS:
        where = "host" if kind in numbers.leaves else "stay"
        tree["services"][kind]["between_turns"] = where
    for kind, group in numbers.groups.items():
        name, _, label = kind.partition(".")
        table = tree["services"][name]
        table = table[label] if label else table
        table["replicas" if kind == "learner" else "actors"] = group.actors
        table |= {"gpus": group.gpus, "cpus": group.cpus, "accelerator": group.accelerator}
    return parse(tree)


def as_started(config: RunConfig, recorded: RunConfig) -> RunConfig:
    """Return ``config`` with recorded values in place of those that a layout would choose."""
    if config.layout is None:
        return config
    return with_layout(config, apply_explicit_fields(config, configured_layout(recorded)))


def as_recorded(config: RunConfig, recorded: RunConfig) -> RunConfig:
    """Return ``config`` with all values that the recorded run chose when it started.

    Any remaining difference from ``recorded`` was configured explicitly.
    """
    return keep_threads(as_started(config, recorded), recorded)

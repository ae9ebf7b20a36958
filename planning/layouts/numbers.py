"""The numbers that a layout consists of: actors and shares of each service, and explore_ahead."""

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
    """The actors of one service: how many, and what each reserves on which kind of GPU."""

    actors: int
    gpus: float = 0.0
    cpus: float = 0.5
    accelerator: str | None = None


@dataclass(frozen=True)
class Numbers:
    """A layout; ``groups`` by service. What a service's table says by hand is in it already."""

    mode: str
    groups: Mapping[str, Group]
    ahead: int = 0
    share: Share = "prompts"  # what learner replicas share
    leaves: tuple[str, ...] = ()  # of TAKE_TURNS, who is in host memory between turns

    def describe(self) -> str:
        """``8 learner at 0.52 GPU, 8 rollout at 0.36 GPU``: those with a share of a GPU."""
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


def numbers_of(config: RunConfig) -> Numbers:
    """The numbers of a configuration, whether given by hand or chosen by a layout."""
    groups = {}
    for kind in kinds_of(config):
        service = config.services.of(kind)
        groups[kind] = Group(service.count, service.gpus, service.cpus, service.accelerator)
    services = config.services
    given = {"rollout": services.rollout.between_turns, "learner": services.learner.between_turns}
    leaves = tuple(kind for kind in TAKE_TURNS if kind in groups and given[kind] == "host")
    return Numbers("by hand", groups, config.explore_ahead, services.learner.share, leaves)


def by_hand(config: RunConfig) -> dict[str, dict[str, int | float | str | None]]:
    """What the tables of the services say themselves, by service: fields of ``Group``."""
    found: dict[str, dict[str, int | float | str | None]] = {}
    for kind in kinds_of(config):
        service = config.services.of(kind)
        keys = {field: field for field in FIELDS}  # of Group -> of the service
        if kind == "learner":
            keys["actors"] = "replicas"
        written = {field: key for field, key in keys.items() if key in service.model_fields_set}
        found[kind] = {field: getattr(service, key) for field, key in written.items()}
    return found


def completed(config: RunConfig, numbers: Numbers) -> Numbers:
    """``numbers`` with everything in its place that the configuration gives by hand.

    A scorer whose share is given is not multiplied: its actors are what the table says.
    """
    groups = dict(numbers.groups)
    for kind, given in by_hand(config).items():
        own = config.services.of(kind)
        if kind.partition(".")[0] in ("reward", "scorers") and "gpus" in given:
            given = {"actors": own.count, **given}
        base = groups.get(kind, Group(own.count, own.gpus, own.cpus, own.accelerator))
        groups[kind] = replace(base, **given)  # type: ignore[arg-type]
    ahead = config.explore_ahead if "explore_ahead" in config.model_fields_set else numbers.ahead
    learner = config.services.learner
    share = learner.share if "share" in learner.model_fields_set else numbers.share
    given_turns = [
        kind for kind in TAKE_TURNS if "between_turns" in config.services.of(kind).model_fields_set
    ]
    hand = numbers_of(config).leaves
    leaves = (k for k in TAKE_TURNS if k in (hand if k in given_turns else numbers.leaves))
    return Numbers(numbers.mode, groups, ahead, share, tuple(leaves))


def with_numbers(config: RunConfig, numbers: Numbers) -> RunConfig:
    """The configuration with a layout written out. Raises ConfigError for what it refuses."""
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
    """``config`` with the recorded numbers in the place of those that a layout chooses."""
    if config.layout is None:
        return config
    return with_numbers(config, completed(config, numbers_of(recorded)))


def as_recorded(config: RunConfig, recorded: RunConfig) -> RunConfig:
    """``config`` with what the start of the recorded run chose; what then differs is by hand."""
    return keep_threads(as_started(config, recorded), recorded)

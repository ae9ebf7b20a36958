"""Placement of actors on nodes: a pure function of the configuration and the nodes' resources.

All actors are placed before any is started, so that an impossible configuration is rejected at once
with a list of the missing resources. Every actor is then started on its chosen node: Ray by itself
would place actors one by one, and a badly placed one can leave another pending forever
(docs/decisions/0002-placement.md).

Shares are counted in units of 1/10,000, as in Ray. A GPU share below 1 must lie on one GPU; shares
of 1 and more are whole GPUs. Ray puts a share on the fullest GPU that has room for it, so shares
are placed from the largest to the smallest, here and, on nodes with several GPUs, when actors are
started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from configs.load import ConfigError
from configs.schema import RunConfig
from configs.services import Service

WHOLE = 10_000
ACCELERATOR = "ray.io/accelerator-type"


@dataclass(frozen=True)
class Node:
    """A node: the resources that the run may use, and its labels."""

    id: str
    cpus: float
    gpus: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    memory_gb: float | None = None  # host memory without the object store; None: unknown

    def describe(self) -> str:
        """Return ``8 CPU, 4 GPU, ray.io/accelerator-type=B200``: all labels but the node id."""
        marks = [
            f"{key}={value}"
            for key, value in sorted(self.labels.items())
            if key != "ray.io/node-id"
        ]
        return ", ".join([f"{self.cpus:g} CPU", f"{self.gpus:g} GPU", *marks])


@dataclass(frozen=True)
class Need:
    """The resources that one actor needs."""

    actor: str  # "rollout-0"
    cpus: float
    gpus: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    spread: bool = False

    @property
    def kind(self) -> str:
        """The service of the actor: ``rollout`` for ``rollout-0``."""
        return self.actor.rpartition("-")[0]

    def describe(self) -> str:
        """Return ``0.5 CPU and 1 GPU on a node with ray.io/accelerator-type=B200``."""
        what = " and ".join([f"{self.cpus:g} CPU", *([f"{self.gpus:g} GPU"] if self.gpus else [])])
        where = " and ".join(f"{key}={value}" for key, value in sorted(self.labels.items()))
        return what + (f" on a node with {where}" if where else "")


class NoRoom(Exception):
    """Some actors cannot be placed.

    ``lines`` has one line per service: how many have no place, what each needs, what is free.
    """

    def __init__(self, lines: Sequence[str]):
        super().__init__("; ".join(lines))
        self.lines = list(lines)


class LargerFirst(NoRoom):
    """There is room for an actor, but one with a larger share of a GPU is to be started first."""

    def __init__(self, actor: str, larger: str):
        super().__init__([f"{actor} starts after {larger}, which needs more of a GPU"])


def kinds_of(config: RunConfig) -> tuple[str, ...]:
    """Return the services of a run; rollout only if it explores, scoring services only if used."""
    scoring = [
        kind
        for kind in ("reward", *(f"scorers.{label}" for label in config.services.scorers))
        if config.scorers_of(kind)
    ]
    exploring = ["rollout"] if config.plan.explore is not None else []
    return (*exploring, "learner", *scoring, "encoder", "selector")


def need_of(kind: str, index: int, service: Service) -> Need:
    """Return the needs of actor ``index`` of a service."""
    labels = {
        **service.labels,
        **({ACCELERATOR: service.accelerator} if service.accelerator else {}),
    }
    return Need(f"{kind}-{index}", service.cpus, service.gpus, labels, service.strategy == "spread")


def needs_of(config: RunConfig, kinds: Iterable[str] | None = None) -> list[Need]:
    """Return the needs of all actors that a run starts with, or of those of ``kinds``."""
    chosen = kinds_of(config) if kinds is None else tuple(kinds)
    services = {kind: config.services.of(kind) for kind in chosen}
    return [
        need_of(kind, index, service)
        for kind, service in services.items()
        for index in range(service.count)
    ]


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Return True if labels satisfy a Ray selector: ``a``, ``!a``, ``in(a,b)`` or ``!in(a,b)``."""
    for key, requested in selector.items():
        negated = requested.startswith("!")
        plain = requested.removeprefix("!")
        inside = plain.startswith("in(") and plain.endswith(")")
        allowed = [part.strip() for part in plain[3:-1].split(",")] if inside else [plain]
        if (labels.get(key) in allowed) == negated:
            return False
    return True


def place(
    needs: Sequence[Need], nodes: Sequence[Node], held: Mapping[str, tuple[Need, str]] | None = None
) -> dict[str, str]:
    """Return a node id for every actor of ``needs``.

    ``held`` has the (need, node id) of actors that were placed before. Actors with the fewest
    eligible nodes choose first, then those with the largest shares. With the strategy ``spread`` an
    actor takes the node with the fewest actors of its service, otherwise the fullest node that has
    room. Actors without a GPU share avoid nodes with GPUs. If these preferences leave an actor
    without a place, all are packed as tightly as possible instead.

    Raises:
        NoRoom: neither attempt places every actor. Both are greedy: in contrived cases another
            arrangement may exist.
    """
    try:
        return _greedy(needs, nodes, held or {}, tight=False)
    except NoRoom:
        return _greedy(needs, nodes, held or {}, tight=True)


def _greedy(
    needs: Sequence[Need], nodes: Sequence[Node], held: Mapping[str, tuple[Need, str]], tight: bool
) -> dict[str, str]:
    """Place one actor after the other; ``tight`` ignores ``spread`` and fills nodes one by one."""
    load: dict[str, list[Need]] = {node.id: [] for node in nodes}
    for need, where in held.values():
        # earlier placements may be on nodes that are not in ``nodes``: new ones, or lost ones
        load.setdefault(where, []).append(need)
    eligible = {
        need.actor: [node for node in nodes if matches(node.labels, need.labels)] for need in needs
    }
    placed: dict[str, str] = {}
    unplaced: list[Need] = []
    # actors with few eligible nodes choose first: the others can still go elsewhere. Large shares
    # before small ones: fractions fit into the gaps that whole GPUs leave, but not vice versa
    for need in sorted(needs, key=lambda need: (len(eligible[need.actor]), -need.gpus, -need.cpus)):
        with_room = [node for node in eligible[need.actor] if fits(node, [*load[node.id], need])]
        if not with_room:
            unplaced.append(need)
            continue
        chosen = min(with_room, key=lambda node: _rank(node, need, load[node.id], tight))
        load[chosen.id].append(need)
        placed[need.actor] = chosen.id
    if unplaced:
        # without those of ``needs`` that have found a place: they are not started either
        earlier = [(need, where) for need, where in held.values()]
        raise NoRoom(_missing(unplaced, needs, nodes, earlier))
    return placed


def _rank(node: Node, need: Need, load: Sequence[Need], tight: bool) -> tuple[float, ...]:
    """Return the sort key of a node for an actor; the node with the smallest key is chosen."""
    same = sum(other.kind == need.kind for other in load)
    free_gpus = node.gpus - sum(other.gpus for other in load)
    free_cpus = node.cpus - sum(other.cpus for other in load)
    # an actor without a GPU uses up CPUs of a GPU node, without which its GPUs are unusable
    wasted = node.gpus if not need.gpus else 0.0
    if need.spread and not tight:
        return (same, wasted, -free_gpus if need.gpus else 0.0, -free_cpus)
    return (wasted, free_gpus if need.gpus else 0.0, free_cpus)


def fits(node: Node, load: Sequence[Need]) -> bool:
    """Return True if a node can hold ``load``: CPU shares in sum, GPU shares below 1 on one GPU."""
    if sum(_share(need.cpus) for need in load) > _share(node.cpus):
        return False
    return _gpus_left(node, load) is not None


def _gpus_left(node: Node, load: Sequence[Need]) -> list[int] | None:
    """Return what ``load`` leaves of each GPU, in units of 1/10,000; None if it has no room."""
    whole, rest = divmod(_share(node.gpus), WHOLE)
    # a share must lie on one GPU: 0.5 does not fit if two GPUs have 0.3 left each
    free = [WHOLE] * whole + ([rest] if rest else [])
    for share in sorted((_share(need.gpus) for need in load if need.gpus), reverse=True):
        if share >= WHOLE:
            # Ray assigns shares of 1 and more as whole GPUs
            count = -(-share // WHOLE)
            if free.count(WHOLE) < count:
                return None
            for _ in range(count):
                free.remove(WHOLE)
            continue
        with_room = [gpu for gpu in free if gpu >= share]
        if not with_room:
            return None
        fullest = min(with_room)
        free.remove(fullest)
        free.append(fullest - share)
    return free


def _share(share: float) -> int:
    """Return a share in units of 1/10,000, which add up without rounding errors."""
    return round(share * WHOLE)


def _missing(
    unplaced: Sequence[Need],
    needs: Sequence[Need],
    nodes: Sequence[Node],
    held: Sequence[tuple[Need, str]],
) -> list[str]:
    """Return a line per service: its actors without a place, the needs of each, what is free.

    What is free is for all of ``needs``, so a line has their sum as well. ``held`` are the actors
    that have a place already, and the node of each.
    """
    node_counts = Counter(
        _left(node, [need for need, where in held if where == node.id]) for node in nodes
    )
    available = (
        " and ".join(f"{count} x ({text})" for text, count in sorted(node_counts.items()))
        or "no node"
    )
    lines = []
    for kind in dict.fromkeys(need.kind for need in unplaced):
        of_kind = [need for need in unplaced if need.kind == kind]
        total = sum(need.kind == kind for need in needs)
        line = (
            f"services.{kind}: {len(of_kind)} of {total} actors cannot be placed: each needs"
            f" {of_kind[0].describe()}; free now: {available}"
        )
        if len(needs) > len(of_kind):
            cpus, gpus = sum(need.cpus for need in needs), sum(need.gpus for need in needs)
            line += f", for {len(needs)} actors that need {cpus:g} CPU and {gpus:g} GPU together"
        if not any(matches(node.labels, of_kind[0].labels) for node in nodes):
            line += "; no node has these labels"
        lines.append(line)
    return lines


def _left(node: Node, load: Sequence[Need]) -> str:
    """Return ``24 CPU, 0.48 GPU, at most 0.12 on one``: what the actors on a node leave of it."""
    gpus = _gpus_left(node, load) or []
    cpus = (_share(node.cpus) - sum(_share(need.cpus) for need in load)) / WHOLE
    text = replace(node, cpus=max(cpus, 0.0), gpus=sum(gpus) / WHOLE).describe()
    largest = max(gpus, default=0)
    # a share must lie on one GPU, so the sum alone would mislead
    return (
        f"{text}, at most {largest / WHOLE:g} on one"
        if 0 < largest < min(sum(gpus), WHOLE)
        else text
    )


def check_placement(
    config: RunConfig, free: Sequence[Node], kinds: Iterable[str] | None = None
) -> None:
    """Raise ConfigError, with a line per service, if a run's actors cannot all be placed."""
    try:
        place(needs_of(config, kinds), free)
    except NoRoom as error:
        raise ConfigError(
            [f"{line}: lower the service's actors or shares, or add nodes" for line in error.lines]
        ) from None

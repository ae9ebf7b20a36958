"""Where actors go: a pure function of the configuration and of what the nodes have.

All actors are placed before any is started, so that an impossible configuration is refused at once,
with the missing resources. Ray is then told a node for every actor: left to itself it would place
them one by one, and one that was placed badly can leave another pending for ever
(docs/decisions/0002-placement.md).

Shares are counted in ten-thousandths, as Ray does. A GPU share below 1 lies on one GPU; from 1 on
it is whole GPUs. Ray gives a share the fullest GPU that has room for it, so shares are placed from
the largest to the smallest, here and, on nodes with several GPUs, when actors are started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from configs.load import ConfigError
from configs.schema import RunConfig
from configs.services import Service

WHOLE = 10_000
ACCELERATOR = "ray.io/accelerator-type"


@dataclass(frozen=True)
class Node:
    """The resources of one node that are ours to use, and its labels."""

    id: str
    cpus: float
    gpus: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    memory_gb: float | None = None  # of the host, without object store; None: not known

    def describe(self) -> str:
        """``8 CPU, 4 GPU, ray.io/accelerator-type=B200``: all labels but Ray's own node id."""
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
        """``rollout`` of ``rollout-0``."""
        return self.actor.rpartition("-")[0]

    def describe(self) -> str:
        """``0.5 CPU and 1 GPU on a node with ray.io/accelerator-type=B200``."""
        what = " and ".join([f"{self.cpus:g} CPU", *([f"{self.gpus:g} GPU"] if self.gpus else [])])
        where = " and ".join(f"{key}={value}" for key, value in sorted(self.labels.items()))
        return what + (f" on a node with {where}" if where else "")


class NoRoom(Exception):
    """Some actors have no place: a line per service, with their number, needs, and what is free."""

    def __init__(self, lines: Sequence[str]):
        super().__init__("; ".join(lines))
        self.lines = list(lines)


def kinds_of(config: RunConfig) -> tuple[str, ...]:
    """The services that a run has: rollout if it explores, rewards if they score."""
    scoring = [
        kind
        for kind in ("reward", *(f"scorers.{label}" for label in config.services.scorers))
        if config.scorers_of(kind)
    ]
    exploring = ["rollout"] if config.plan.explore is not None else []
    return (*exploring, "learner", *scoring, "encoder", "selector")


def need_of(kind: str, index: int, service: Service) -> Need:
    """The needs of actor ``index`` of a service."""
    labels = {
        **service.labels,
        **({ACCELERATOR: service.accelerator} if service.accelerator else {}),
    }
    return Need(f"{kind}-{index}", service.cpus, service.gpus, labels, service.strategy == "spread")


def needs_of(config: RunConfig, kinds: Iterable[str] | None = None) -> list[Need]:
    """The needs of every actor that a run starts with."""
    chosen = kinds_of(config) if kinds is None else tuple(kinds)
    services = {kind: config.services.of(kind) for kind in chosen}
    return [
        need_of(kind, index, service)
        for kind, service in services.items()
        for index in range(service.count)
    ]


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether labels satisfy a selector of Ray: ``a``, ``!a``, ``in(a,b)``, ``!in(a,b)``."""
    for key, wanted in selector.items():
        negated = wanted.startswith("!")
        plain = wanted.removeprefix("!")
        inside = plain.startswith("in(") and plain.endswith(")")
        allowed = [part.strip() for part in plain[3:-1].split(",")] if inside else [plain]
        if (labels.get(key) in allowed) == negated:
            return False
    return True


def place(
    needs: Sequence[Need], nodes: Sequence[Node], held: Mapping[str, tuple[Need, str]] | None = None
) -> dict[str, str]:
    """A node id for every actor of ``needs``; ``held``: (need, node id) of those placed before.

    Actors with the fewest possible nodes choose first, then those with the largest shares.
    ``spread`` takes the node with the fewest actors of the same service; otherwise an actor takes
    the fullest node that has room. Actors without a GPU share avoid nodes with GPUs. Where these
    preferences leave an actor without a place, all are packed as tightly as possible.

    Raises:
        NoRoom: neither way has a place for every actor. Both are greedy: in contrived cases another
            arrangement may exist.
    """
    try:
        return _greedy(needs, nodes, held or {}, tight=False)
    except NoRoom:
        return _greedy(needs, nodes, held or {}, tight=True)


def _greedy(
    needs: Sequence[Need], nodes: Sequence[Node], held: Mapping[str, tuple[Need, str]], tight: bool
) -> dict[str, str]:
    load: dict[str, list[Need]] = {node.id: [] for node in nodes}
    for need, where in held.values():
        # held places may be on nodes that are not among these: on new ones, or lost ones
        load.setdefault(where, []).append(need)
    eligible = {
        need.actor: [node for node in nodes if matches(node.labels, need.labels)] for need in needs
    }
    placed: dict[str, str] = {}
    left: list[Need] = []
    # who has few nodes to go to chooses first: others can still go elsewhere. Large before small,
    # because shares fill the gaps that whole GPUs leave, and not the other way round
    for need in sorted(needs, key=lambda need: (len(eligible[need.actor]), -need.gpus, -need.cpus)):
        possible = [node for node in eligible[need.actor] if fits(node, [*load[node.id], need])]
        if not possible:
            left.append(need)
            continue
        chosen = min(possible, key=lambda node: _rank(node, need, load[node.id], tight))
        load[chosen.id].append(need)
        placed[need.actor] = chosen.id
    if left:
        raise NoRoom(_missing(left, needs, nodes))
    return placed


def _rank(node: Node, need: Need, load: Sequence[Need], tight: bool) -> tuple[float, ...]:
    same = sum(other.kind == need.kind for other in load)
    free_gpus = node.gpus - sum(other.gpus for other in load)
    free_cpus = node.cpus - sum(other.cpus for other in load)
    # an actor without a GPU that fills a GPU node's CPUs would leave its GPUs unusable
    wasted = node.gpus if not need.gpus else 0.0
    if need.spread and not tight:
        return (same, wasted, -free_gpus if need.gpus else 0.0, -free_cpus)
    return (wasted, free_gpus if need.gpus else 0.0, free_cpus)


def fits(node: Node, load: Sequence[Need]) -> bool:
    """Whether a node holds all of ``load``: CPU shares in sum, GPU shares on single GPUs."""
    if sum(_share(need.cpus) for need in load) > _share(node.cpus):
        return False
    whole, rest = divmod(_share(node.gpus), WHOLE)
    # a share must lie on one GPU: 0.5 does not fit where two GPUs have 0.3 left each
    free = [WHOLE] * whole + ([rest] if rest else [])
    for share in sorted((_share(need.gpus) for need in load if need.gpus), reverse=True):
        if share >= WHOLE:
            # from 1 on Ray gives whole GPUs only
            count = -(-share // WHOLE)
            if free.count(WHOLE) < count:
                return False
            for _ in range(count):
                free.remove(WHOLE)
            continue
        possible = [gpu for gpu in free if gpu >= share]
        if not possible:
            return False
        fullest = min(possible)
        free.remove(fullest)
        free.append(fullest - share)
    return True


def _share(share: float) -> int:
    return round(share * WHOLE)


def _missing(left: Sequence[Need], needs: Sequence[Need], nodes: Sequence[Node]) -> list[str]:
    """A line per service: how many of its actors have no place, what each needs, what is free."""
    there = Counter(node.describe() for node in nodes)
    exists = (
        " and ".join(f"{count} x ({text})" for text, count in sorted(there.items())) or "no node"
    )
    lines = []
    for kind in dict.fromkeys(need.kind for need in left):
        mine = [need for need in left if need.kind == kind]
        total = sum(need.kind == kind for need in needs)
        line = (
            f"services.{kind}: {len(mine)} of {total} actors have no place: each needs"
            f" {mine[0].describe()}; free now: {exists}"
        )
        if not any(matches(node.labels, mine[0].labels) for node in nodes):
            line += "; no node has these labels"
        lines.append(line)
    return lines


def waits_for(placed: Iterable[tuple[Need, str]], gpus: Mapping[str, float]) -> dict[str, set[str]]:
    """By service, those whose actors must hold their GPUs before its own are asked for.

    Ray gives a fraction the fullest GPU that has room when the actor arrives: a small one that came
    first could take the room of a large one. Not where a node has one GPU; ``gpus``: by node id.
    """
    shares: dict[str, dict[str, float]] = {}  # by node and service
    for need, node in placed:
        if 0 < need.gpus < 1 and gpus.get(node, 0.0) > 1:
            shares.setdefault(node, {})[need.kind] = need.gpus
    found: dict[str, set[str]] = {}
    for here in shares.values():
        for kind, share in here.items():
            larger = {other for other, its in here.items() if its > share}
            if larger:
                found.setdefault(kind, set()).update(larger)
    return found


def check_placement(
    config: RunConfig, free: Sequence[Node], kinds: Iterable[str] | None = None
) -> None:
    """Raises ConfigError, a line per service, when a run's actors cannot all be placed."""
    try:
        place(needs_of(config, kinds), free)
    except NoRoom as error:
        raise ConfigError(
            [f"{line}: lower the service's actors or shares, or add nodes" for line in error.lines]
        ) from None

"""The available GPUs, and the actors on each of them if shares are assigned as Ray does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from configs.load import ConfigError
from planning.layouts.spec import Group, LayoutSpec
from planning.placement import ACCELERATOR, WHOLE, Node, matches


@dataclass(frozen=True)
class Gpus:
    """GPUs of one kind: their number and the memory of each in GB.

    ``cpus`` and ``host_gb`` are the CPUs and the GB of host memory of a node per GPU; None: not
    known.
    """

    kind: str
    count: int
    memory_gb: float
    cpus: float = 12.0
    host_gb: float | None = None


@dataclass(frozen=True)
class GpuAssignment:
    """``count`` GPUs of one kind, each with the same numbers of actors by service."""

    kind: str
    count: int
    actors: Mapping[str, int]


_State = tuple[str, int, tuple[tuple[str, int], ...]]  # kind, free ten-thousandths, actors


def gpus_of(nodes: Sequence[Node], memory: Mapping[str, float]) -> list[Gpus]:
    """Return the whole free GPUs of nodes, by kind.

    ``memory`` has the GB of each known kind. Raises ConfigError for a kind that is not in it.
    """
    count: Counter[str] = Counter()
    cpus: dict[str, float] = {}
    host: dict[str, float] = {}
    for node in nodes:
        whole, kind = int(node.gpus), node.labels.get(ACCELERATOR, "")
        if not whole:
            continue
        if kind not in memory:
            named = kind or f"without the label {ACCELERATOR}"
            raise ConfigError(
                f"layout: unknown GPU {named} (known: {', '.join(memory)}): set actors, gpus and"
                " replicas of the services explicitly"
            )
        count[kind] += whole
        cpus[kind] = min(cpus.get(kind, node.cpus / whole), node.cpus / whole)
        if node.memory_gb is not None:
            per_gpu = node.memory_gb / whole
            host[kind] = min(host.get(kind, per_gpu), per_gpu)
    return [Gpus(kind, count[kind], memory[kind], cpus[kind], host.get(kind)) for kind in count]


def assign_gpus(numbers: LayoutSpec, gpus: Sequence[Gpus]) -> list[GpuAssignment] | None:
    """Assign actors to GPUs, largest shares first, each to the fullest GPU that has room.

    Returns None if an actor has no place. Actors without a share of a GPU are left out.
    """
    state: Counter[_State] = Counter({(g.kind, WHOLE, ()): g.count for g in gpus})
    for kind, group in sorted(numbers.groups.items(), key=lambda item: -item[1].gpus):
        if group.gpus and not _lay_group(state, kind, group):
            return None
    merged: Counter[tuple[str, tuple[tuple[str, int], ...]]] = Counter()
    for (kind, _, actors), count in state.items():
        merged[kind, actors] += count
    return [
        GpuAssignment(kind, count, dict(actors))
        for (kind, actors), count in merged.items()
        if count
    ]


def _lay_group(state: Counter[_State], service: str, group: Group) -> bool:
    """Assign the actors of a service to GPUs in ``state``; return False if they have no room.

    The fullest GPU with room stays the fullest until it has none, so it gets as many as it holds.
    """
    share, left = round(group.gpus * WHOLE), group.actors
    gpus_each = -(-share // WHOLE)
    if share > WHOLE:  # an actor on n whole GPUs is treated as n actors with one GPU each
        left, share = left * gpus_each, WHOLE
    while left:
        with_room = [s for s, n in state.items() if n and s[1] >= share and _may(group, s[0])]
        if not with_room:
            return False
        fullest = min(with_room, key=itemgetter(1))
        kind, free, actors = fullest
        each = min(left, free // share)
        count = min(state[fullest], left // each)
        state[fullest] -= count
        state[kind, free - each * share, (*actors, (service, each))] += count
        left -= count * each
    return True


def _may(group: Group, kind: str) -> bool:
    return not group.accelerator or matches({ACCELERATOR: kind}, {ACCELERATOR: group.accelerator})

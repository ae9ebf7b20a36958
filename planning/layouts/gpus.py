"""The GPUs there are, and who lies on which of them when shares are laid as Ray lays them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from configs.load import ConfigError
from planning.layouts.numbers import Group, Numbers
from planning.placement import ACCELERATOR, WHOLE, Node, matches


@dataclass(frozen=True)
class Gpus:
    """GPUs of one kind: how many, memory of each in GB, and CPUs and GB of host memory of a node
    for each of its GPUs; None: not known.
    """

    kind: str
    count: int
    memory_gb: float
    cpus: float = 12.0
    host_gb: float | None = None


@dataclass(frozen=True)
class Laid:
    """GPUs that hold the same actors: ``count`` of them, with ``actors`` by service on each."""

    kind: str
    count: int
    actors: Mapping[str, int]


_State = tuple[str, int, tuple[tuple[str, int], ...]]  # kind, free ten-thousandths, actors


def gpus_of(nodes: Sequence[Node], memory: Mapping[str, float]) -> list[Gpus]:
    """Whole free GPUs of nodes, by kind. ``memory``: GB of each kind that is known.

    Raises ConfigError for a kind that is not known.
    """
    count: Counter[str] = Counter()
    cpus: dict[str, float] = {}
    host: dict[str, float] = {}
    for node in nodes:
        whole, kind = int(node.gpus), node.labels.get(ACCELERATOR, "")
        if not whole:
            continue
        if kind not in memory:
            named = kind or f"without a label {ACCELERATOR}"
            raise ConfigError(
                f"layout: nothing is known of the GPU {named}"
                f" (known: {', '.join(memory)}): give actors, gpus and replicas of services by"
                " hand"
            )
        count[kind] += whole
        cpus[kind] = min(cpus.get(kind, node.cpus / whole), node.cpus / whole)
        if node.memory_gb is not None:
            each = node.memory_gb / whole
            host[kind] = min(host.get(kind, each), each)
    return [Gpus(kind, count[kind], memory[kind], cpus[kind], host.get(kind)) for kind in count]


def lay(numbers: Numbers, gpus: Sequence[Gpus]) -> list[Laid] | None:
    """Who lies where, largest shares first and always on the fullest GPU that has room; None where
    somebody has no place. Actors without a share of a GPU are not in it.
    """
    state: Counter[_State] = Counter({(g.kind, WHOLE, ()): g.count for g in gpus})
    for kind, group in sorted(numbers.groups.items(), key=lambda item: -item[1].gpus):
        if group.gpus and not _lay_group(state, kind, group):
            return None
    alike: Counter[tuple[str, tuple[tuple[str, int], ...]]] = Counter()
    for (kind, _, actors), count in state.items():
        alike[kind, actors] += count
    return [Laid(kind, count, dict(actors)) for (kind, actors), count in alike.items() if count]


def _lay_group(state: Counter[_State], service: str, group: Group) -> bool:
    """Put the actors of a service on GPUs; False where they have no room.

    The fullest GPU with room stays the fullest until it has none, so that it gets all it can take.
    """
    share, left = round(group.gpus * WHOLE), group.actors
    whole = -(-share // WHOLE)
    if share > WHOLE:  # several whole GPUs each: as many actors, each on the first of its GPUs
        left, share = left * whole, WHOLE
    while left:
        room = [s for s, n in state.items() if n and s[1] >= share and _may(group, s[0])]
        if not room:
            return False
        fullest = min(room, key=itemgetter(1))
        kind, free, actors = fullest
        each = min(left, free // share)
        count = min(state[fullest], left // each)
        state[fullest] -= count
        state[kind, free - each * share, (*actors, (service, each))] += count
        left -= count * each
    return True


def _may(group: Group, kind: str) -> bool:
    return not group.accelerator or matches({ACCELERATOR: kind}, {ACCELERATOR: group.accelerator})

"""What is counted of a configuration: seconds of its tasks, bytes of its actors, and how much of
them a GPU holds at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from planning.layouts.gpus import Laid
from planning.layouts.numbers import TAKE_TURNS, Numbers
from planning.layouts.predict import Tasks

PROCESS_GB = 1.0
"""GPU memory of a process beside what is counted: the device's libraries, its allocator's gaps."""


@dataclass(frozen=True)
class Parts:
    """Bytes of an actor: ``models`` leave its GPU if it leaves between turns, ``passes`` are
    allocated in its own turn only.
    """

    models: int
    passes: int


@dataclass(frozen=True)
class Costs:
    """What is counted of a configuration, by kind of GPU: ``tasks`` in seconds, ``memory`` in bytes
    per actor of a service. ``learner`` gives the bytes of a learner among so many replicas. Bytes
    that are not known are left out.
    """

    tasks: Mapping[str, Tasks]
    memory: Mapping[str, Mapping[str, float]]
    learner: Callable[[int], float]
    encoder_leaves: bool = False  # before anything else is started
    # of what takes turns; where it is not known nobody leaves between them
    parts: Mapping[str, Mapping[str, Parts]] = field(default_factory=dict)

    def held_gb(self, laid: Laid, numbers: Numbers) -> float:
        """GB that the actors of a GPU hold at most."""
        replicas = numbers.groups["learner"].actors
        each = {**self.memory[laid.kind], "learner": self.learner(replicas)}
        held = {k: n * (each.get(k, 0) / 1e9 + PROCESS_GB) for k, n in laid.actors.items()}
        first = held.pop("encoder", 0.0) if self.encoder_leaves else 0.0
        return max(first, sum(held.values()) - self._freed_gb(laid, numbers))

    def _freed_gb(self, laid: Laid, numbers: Numbers) -> float:
        """GB that are never there together: one side is elsewhere in the other's turn."""
        if not numbers.leaves:
            return 0.0
        freed: dict[str, float] = dict.fromkeys(TAKE_TURNS, 0.0)
        for kind, each in self.parts.get(laid.kind, {}).items():
            size = each.passes + (each.models if kind in numbers.leaves else 0)
            freed[kind] = laid.actors.get(kind, 0) * size / 1e9
        return min(freed.values())

    def encoder_gb(self, laid: Laid) -> float:
        """GB that a GPU would have more room for, were all prompts encoded at the start."""
        if self.encoder_leaves or "encoder" not in laid.actors:
            return 0.0
        return self.memory[laid.kind].get("encoder", 0.0) / 1e9 + PROCESS_GB

    def host_gb(self, laid: Laid, numbers: Numbers) -> float:
        """GB of host memory that the actors of a GPU keep what leaves it in."""
        parts = self.parts.get(laid.kind, {})
        leaving = (kind for kind in numbers.leaves if kind in parts)
        return sum(laid.actors.get(kind, 0) * parts[kind].models / 1e9 for kind in leaving)

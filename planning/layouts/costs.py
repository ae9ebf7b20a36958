"""Costs of a configuration: seconds of its tasks, bytes of its actors, and peak memory per GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from planning.layouts.gpus import GpuAssignment
from planning.layouts.predict import Tasks
from planning.layouts.spec import TAKE_TURNS, LayoutSpec

PROCESS_GB = 1.0
"""GPU memory of a process that is not counted: the device's libraries and its allocator's gaps."""


@dataclass(frozen=True)
class Parts:
    """Bytes of an actor that takes turns on its GPU.

    ``models`` are moved to host memory if it leaves between turns; ``passes`` are allocated in its
    own turn only.
    """

    models: int
    passes: int


@dataclass(frozen=True)
class Costs:
    """Costs of a configuration, by kind of GPU.

    ``tasks`` are in seconds, ``memory`` in bytes per actor, by service. ``learner`` maps the number
    of replicas to the bytes of one learner. Unknown bytes are left out.
    """

    tasks: Mapping[str, Tasks]
    memory: Mapping[str, Mapping[str, float]]
    learner: Callable[[int], float]
    encoder_leaves: bool = False  # the encoder ends before anything else is started
    # by service that takes turns; a service that is missing never leaves its GPU
    parts: Mapping[str, Mapping[str, Parts]] = field(default_factory=dict)

    def held_gb(self, assigned: GpuAssignment, numbers: LayoutSpec) -> float:
        """Return the most GB that the actors of a GPU hold at once."""
        replicas = numbers.groups["learner"].actors
        actor_bytes = {**self.memory[assigned.kind], "learner": self.learner(replicas)}
        held = {
            k: n * (actor_bytes.get(k, 0) / 1e9 + PROCESS_GB) for k, n in assigned.actors.items()
        }
        encoder_gb = held.pop("encoder", 0.0) if self.encoder_leaves else 0.0
        return max(encoder_gb, sum(held.values()) - self._freed_gb(assigned, numbers))

    def _freed_gb(self, assigned: GpuAssignment, numbers: LayoutSpec) -> float:
        """Return the GB that are saved by turns: one side is in host memory in the other's turn."""
        if not numbers.leaves:
            return 0.0
        freed: dict[str, float] = dict.fromkeys(TAKE_TURNS, 0.0)
        for kind, each in self.parts.get(assigned.kind, {}).items():
            size = each.passes + (each.models if kind in numbers.leaves else 0)
            freed[kind] = assigned.actors.get(kind, 0) * size / 1e9
        return min(freed.values())

    def encoder_gb(self, assigned: GpuAssignment) -> float:
        """Return the GB that would be free on a GPU if all prompts were encoded at the start."""
        if self.encoder_leaves or "encoder" not in assigned.actors:
            return 0.0
        return self.memory[assigned.kind].get("encoder", 0.0) / 1e9 + PROCESS_GB

    def host_gb(self, assigned: GpuAssignment, numbers: LayoutSpec) -> float:
        """Return the GB of host memory for the weights that leave a GPU between turns."""
        parts = self.parts.get(assigned.kind, {})
        leaving = (kind for kind in numbers.leaves if kind in parts)
        return sum(assigned.actors.get(kind, 0) * parts[kind].models / 1e9 for kind in leaving)

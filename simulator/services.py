"""Services of a run with simulated actors instead of Ray's, and the resources that they use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.driver.actor_placement import ActorPlacement
from cluster.driver.services import ActorServices
from cluster.runtime.transport import Handle
from configs.schema import RunConfig
from learner.step_assignment import StepAssignment
from planning.durations import Durations
from planning.layouts.gpus import GpuAssignment
from planning.placement import kinds_of
from records.rundir import Event, RunDirectory
from records.timeline import Span
from simulator.actors import Encoder, Learner, Reward, Rollout, Selector, Simulated
from simulator.machine import SharedResource
from simulator.transport import Actor, SimulatedTransport

NO_DEADLINE_S = 1e12


@dataclass(frozen=True)
class Hardware:
    """Resources of a simulated run, and the durations of calls on them.

    ``durations`` is by kind of GPU. If ``cores`` is set, all actors share that many cores, which
    run at the speed ``together`` while all are busy. Otherwise actors are on the GPUs of
    ``assigned``, and actors without a share of a GPU have enough cores of their own. A version has
    ``broadcast`` bytes in ``shards`` shards.
    """

    durations: Mapping[str, Durations]
    assigned: Sequence[GpuAssignment] = ()
    cores: float = 0.0
    together: float = 1.0
    shards: int = 1
    broadcast: int = 0

    @property
    def any_durations(self) -> Durations:
        """Durations of the first kind of GPU, for actors that are not on a particular one."""
        return next(iter(self.durations.values()))


class Board:
    """The GPUs or cores of ``Hardware``, and the one that each actor uses."""

    def __init__(self, hardware: Hardware):
        self.hardware = hardware
        self.parts: list[
            tuple[SharedResource, str, Mapping[str, int]]
        ] = []  # (resource, kind, actors)
        self._of: dict[str, list[tuple[SharedResource, str]]] = {}
        for assigned in hardware.assigned if not hardware.cores else ():
            for _ in range(assigned.count):
                part = SharedResource(f"GPU {len(self.parts)}")
                self.parts.append((part, assigned.kind, assigned.actors))
                for service, count in assigned.actors.items():
                    self._of.setdefault(service, []).extend([(part, assigned.kind)] * count)
        if hardware.cores:
            part = SharedResource("cores", hardware.cores, hardware.together)
            self.parts.append((part, next(iter(hardware.durations)), {}))

    def used(self) -> list[float]:
        """Return the seconds until now in which each GPU, or any of the cores, was in use."""
        return [part.used() for part, _, _ in self.parts]

    def place(self, service: str, index: int) -> tuple[SharedResource, Durations]:
        """Return the resource that an actor uses, and the durations of its calls."""
        hardware = self.hardware
        if hardware.cores:
            return self.parts[0][0], hardware.any_durations
        own_parts = self._of.get(service, [])
        if index < len(own_parts):
            part, kind = own_parts[index]
            return part, hardware.durations[kind]
        return SharedResource(f"{service}-{index}"), hardware.any_durations


class SimulatedPlaces(ActorPlacement):
    """``ActorPlacement`` without a choice of nodes: ``Board`` knows where actors are."""

    async def choose(self, kinds: Collection[str]) -> None:
        """Do nothing: every actor has a place."""

    async def wait_for_larger(self, kind: str) -> None:
        """Do nothing: every actor has its GPU."""

    def take(self, name: str) -> str:
        """Return the one name that is used for all nodes."""
        return "simulated"

    def gone(self, actor: str, node: str | None) -> asyncio.Future[str]:
        """Return a future that is never done: nodes are not lost."""
        return asyncio.get_running_loop().create_future()

    def refresh(self, running: Collection[str]) -> None:
        """Do nothing: nodes are neither added nor lost."""


class SimulatedServices(ActorServices):
    """``ActorServices`` with simulated actors and transport, in virtual time."""

    def __init__(
        self, config: RunConfig, board: Board, event: Event, record: Callable[[Span], None]
    ):
        durations = board.hardware.any_durations
        self.board = board
        transport = SimulatedTransport(durations.call_s, durations.driver_s)
        self.transport: SimulatedTransport = transport
        self._tree = config.model_dump(mode="json")
        super().__init__(without_deadlines(config), RunDirectory(Path()), event, record)

    async def _watch_idle(self) -> None:
        """Do nothing: simulated actors do not end, and a timer would hide that all tasks wait."""

    def _places(self) -> ActorPlacement:
        return SimulatedPlaces(self.config, self._event)

    def _spawner(self, kind: str, actor: type, *args: object) -> Callable[[str], Handle]:
        service, gpus = self.config.services.of(kind), not self.board.hardware.cores

        def spawn(name: str) -> Handle:
            index = int(name.rpartition(".")[0].rpartition("-")[2])
            resource, durations = self.board.place(kind, index)
            requested = 1.0 if gpus else float(service.threads)
            return Actor(kind, self._simulated(kind, durations, index), resource, requested)

        return spawn

    def _simulated(self, kind: str, durations: Durations, index: int) -> Simulated:
        hardware, learner = self.board.hardware, self.config.services.learner
        common = (durations, index, learner.replicas if kind == "learner" else 1)
        if kind == "learner":
            shard_bytes = -(-hardware.broadcast // hardware.shards)
            regenerating = float(learner.regeneration_threads) if hardware.cores else None
            shards, dealing = (
                [shard_bytes] * hardware.shards,
                StepAssignment.of(self.config.optimizer),
            )
            return Learner(*common, None, shards, dealing, self.config.seed, regenerating)
        if kind == "rollout":
            return Rollout(*common, self.config.explore.backend)
        if kind == "encoder":
            return Encoder(*common, None)
        if kind == "selector":
            return Selector(*common, None, self._tree)
        return Reward(*common, None, kind)


def without_deadlines(config: RunConfig) -> RunConfig:
    """Return the configuration without deadlines, so that long calls are simulated to their end."""
    services = config.services
    for kind in kinds_of(config):
        service = services.of(kind).model_copy(update={"deadline_s": NO_DEADLINE_S})
        name, _, label = kind.partition(".")
        changed = {label: service} if label else {name: service}
        if label:
            changed = {"scorers": {**services.scorers, **changed}}
        services = services.model_copy(update=changed)
    return config.model_copy(update={"services": services})

"""The services of a run with simulated actors in the place of Ray's, and where each of them is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.driver.actor_placement import ActorPlacement
from cluster.driver.services import ActorServices
from cluster.runtime.transport import Handle
from configs.schema import RunConfig
from learner.dealing import Dealing
from planning.durations import Durations
from planning.layouts.gpus import Laid
from planning.placement import kinds_of
from records.rundir import Event, RunDirectory
from records.timeline import Span
from simulator.actors import Encoder, Learner, Reward, Rollout, Selector, Simulated
from simulator.machine import Shared
from simulator.transport import Actor, SimulatedTransport

NO_DEADLINE_S = 1e12


@dataclass(frozen=True)
class Hardware:
    """Where the actors of a run are and what calls take there.

    ``durations`` by kind of GPU. With ``cores`` everything shares so many of them, at the speed
    ``together`` while all are busy; else actors are on the GPUs of ``laid``, and those without a
    share of one are on hosts with cores enough.
    """

    durations: Mapping[str, Durations]
    laid: Sequence[Laid] = ()
    cores: float = 0.0
    together: float = 1.0
    shards: int = 1
    broadcast: int = 0

    @property
    def any_durations(self) -> Durations:
        """Of the first kind."""
        return next(iter(self.durations.values()))


class Board:
    """The GPUs or cores of ``Hardware``, and which actor is on which."""

    def __init__(self, hardware: Hardware):
        self.hardware = hardware
        self.parts: list[tuple[Shared, str, Mapping[str, int]]] = []  # with its kind and actors
        self._of: dict[str, list[tuple[Shared, str]]] = {}
        for laid in hardware.laid if not hardware.cores else ():
            for _ in range(laid.count):
                part = Shared(f"GPU {len(self.parts)}")
                self.parts.append((part, laid.kind, laid.actors))
                for service, count in laid.actors.items():
                    self._of.setdefault(service, []).extend([(part, laid.kind)] * count)
        if hardware.cores:
            part = Shared("cores", hardware.cores, hardware.together)
            self.parts.append((part, next(iter(hardware.durations)), {}))

    def used(self) -> list[float]:
        """Seconds until now in which each GPU, or a core, was in use."""
        return [part.used() for part, _, _ in self.parts]

    def place(self, service: str, index: int) -> tuple[Shared, Durations]:
        """Where an actor is, and what its calls take."""
        hardware = self.hardware
        if hardware.cores:
            return self.parts[0][0], hardware.any_durations
        mine = self._of.get(service, [])
        if index < len(mine):
            part, kind = mine[index]
            return part, hardware.durations[kind]
        return Shared(f"{service}-{index}"), hardware.any_durations


class SimulatedPlaces(ActorPlacement):
    """Nothing to choose: ``Board`` has it."""

    async def choose(self, kinds: Collection[str]) -> None:
        """Every actor has a place."""

    def take(self, actor: str) -> str:
        """One name stands for all nodes."""
        return "simulated"

    def gone(self, actor: str, node: str | None) -> asyncio.Future[str]:
        """Never done: nodes do not come and go."""
        return asyncio.get_running_loop().create_future()

    def refresh(self, running: Collection[str]) -> None:
        """Nodes do not come and go."""


class SimulatedServices(ActorServices):
    """``ActorServices`` in virtual time."""

    def __init__(
        self, config: RunConfig, board: Board, event: Event, record: Callable[[Span], None]
    ):
        durations = board.hardware.any_durations
        self.board = board
        carries = SimulatedTransport(durations.call_s, durations.driver_s)
        self.transport: SimulatedTransport = carries
        self._tree = config.model_dump(mode="json")
        super().__init__(patient(config), RunDirectory(Path()), event, record)

    def _places(self) -> ActorPlacement:
        return SimulatedPlaces(self.config, self._event)

    def _spawner(self, kind: str, actor: type, *args: object) -> Callable[[str], Handle]:
        service, gpus = self.config.services.of(kind), not self.board.hardware.cores

        def spawn(name: str) -> Handle:
            index = int(name.rpartition(".")[0].rpartition("-")[2])
            on, durations = self.board.place(kind, index)
            wanted = 1.0 if gpus else float(service.threads)
            return Actor(kind, self._simulated(kind, durations, index), on, wanted)

        return spawn

    def _simulated(self, kind: str, durations: Durations, index: int) -> Simulated:
        hardware, learner = self.board.hardware, self.config.services.learner
        common = (durations, index, learner.replicas if kind == "learner" else 1)
        if kind == "learner":
            each = -(-hardware.broadcast // hardware.shards)
            regenerating = float(learner.regenerating) if hardware.cores else None
            shards, dealing = [each] * hardware.shards, Dealing.of(self.config.optimizer)
            return Learner(*common, None, shards, dealing, self.config.seed, regenerating)
        if kind == "rollout":
            return Rollout(*common, self.config.explore.backend)
        if kind == "encoder":
            return Encoder(*common, None)
        if kind == "selector":
            return Selector(*common, None, self._tree)
        return Reward(*common, None, kind)


def patient(config: RunConfig) -> RunConfig:
    """Without deadlines: what takes long is to be seen."""
    services = config.services
    for kind in kinds_of(config):
        own = services.of(kind).model_copy(update={"deadline_s": NO_DEADLINE_S})
        name, _, label = kind.partition(".")
        changed = {label: own} if label else {name: own}
        if label:
            changed = {"scorers": {**services.scorers, **changed}}
        services = services.model_copy(update=changed)
    return config.model_copy(update={"services": services})

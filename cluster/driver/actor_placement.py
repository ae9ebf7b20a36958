"""Placement of a run's actors on nodes, and requests for new nodes when there is no room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable

from cluster.runtime.nodes import (
    LAG_S,
    LOOK_S,
    Requests,
    addresses,
    all_nodes,
    find_room,
    free_nodes,
    started_actors,
)
from cluster.runtime.watch import NodeWatch
from configs.load import ConfigError
from configs.schema import RunConfig
from planning.placement import LargerFirst, NoRoom
from planning.placer import Placer
from records.rundir import Event

HOLDING_S = 0.1
"""Seconds between polls of granted GPUs: Ray takes a second to grant one, and sends no notice."""


class ActorPlacement:
    """Chooses a node for every actor of a run with a ``Placer``, while nodes come and go.

    Nodes are chosen here instead of by Ray, so that a lack of room is reported at once, with what
    is available, and no actor stays pending because another one was placed badly before it.
    """

    def __init__(self, config: RunConfig, event: Event):
        self._config, self._event = config, event
        self._placer = Placer(config)
        self._requests = Requests()
        self._watch = NodeWatch(config.services.node_silence_s)
        self._names: dict[str, str] = {}  # by actor: the name in Ray of its last incarnation
        self._started: set[str] | None = None  # names that hold resources; None: not asked yet
        self._served: set[str] = set()  # those of ``_names`` that have been alive
        self._running: set[str] = set()  # actors that are alive
        self._first_nodes: set[str] = set()  # ids of those the run started with
        self.joined_gpus = 0
        """Whole GPUs that no job uses, on nodes that joined the cluster after the start."""

    async def choose(self, kinds: Collection[str]) -> None:
        """Choose a node for every actor of ``kinds``. Raises ConfigError if there is no room."""
        nodes = await find_room(self._config, tuple(kinds))
        self._first_nodes = self._first_nodes or {node.id for node in nodes}
        self._placer.refresh(nodes)
        self._placer.place_all(kinds)

    async def wait_for_larger(self, kind: str) -> None:
        """Return when a service may be started: all larger shares beside its actors are held.

        All actors that have places are being started. On a node with one GPU no share can take the
        room of another one, so nobody waits there.
        """
        nodes = self._placer.nodes_of(kind)
        if not self._placer.larger(kind, nodes):
            return
        several = {node.id for node in all_nodes() if node.gpus > 1}
        larger = self._placer.larger(kind, nodes & several)
        while not all(other in self._names and self._holds_gpu(other) for other in larger):
            await asyncio.sleep(HOLDING_S)
            self._started = None

    def take(self, name: str) -> str:
        """Return the node to start an actor on, which Ray will know as ``name``.

        Raises NoRoom if there is none. In that case a node is requested from the autoscaler if the
        run may wait for nodes, and later calls raise NoRoom until Ray has granted one. Raises
        LargerFirst while an actor with a larger share of a GPU is to be started before this one.
        """
        actor = name.rpartition("/")[2].rpartition(".")[0]
        if actor in self._requests:
            granted = self._requests.granted(actor)
            if granted is None:
                need = self._placer.need(actor).describe()
                raise NoRoom([f"Ray has not granted the reserved resources: {need}"])
            self._placer.put([actor], granted)
            self._requests.withdraw(actor)
        try:
            self._placer.plan(actor)
        except LargerFirst:
            raise  # no node is missing
        except NoRoom:
            if self._config.services.wait_for_nodes_s:
                self._request([actor])
            raise
        self._let_larger_first(actor)
        self._names[actor] = name
        return self._placer.take(actor)

    def _let_larger_first(self, actor: str) -> None:
        """Raise LargerFirst while a larger share on the actor's node has ended or is to start.

        Ray puts a share on the fullest GPU that has room at that moment, so a small one that came
        first could take the room of a large one, which would then wait for ever.
        """
        kind, node = actor.rpartition("-")[0], self._placer.where(actor)
        for other in self._placer.larger(kind, {node} if node else ()):
            if other in self._names and not self._holds_gpu(other):
                raise LargerFirst(actor, other)

    def _holds_gpu(self, actor: str) -> bool:
        name = self._names[actor]
        if name in self._served and actor not in self._running:
            return False  # killed, though Ray may not know it yet
        if self._started is None:
            self._started = started_actors()
        return name in self._started

    def release(self, actor: str) -> None:
        """Free the place of an actor that has left for good."""
        self._placer.release(actor)
        self._names.pop(actor, None)
        # otherwise the autoscaler would add a node that is not needed
        self._requests.withdraw(actor)

    def gone(self, actor: str, node: str | None) -> asyncio.Future[str]:
        """Return a future of the reason why the actor's node is lost, done when that happens.

        With ``node`` None it is the node that was taken for the actor.
        """
        return self._watch.gone(node or self._placer.where(actor) or "")

    async def close(self) -> None:
        """Withdraw all requests for nodes and stop watching nodes, at the end of the run."""
        self._requests.withdraw()
        await self._watch.close()

    def refresh(self, running: Collection[str]) -> None:
        """Update the nodes from the cluster's state, and report lost ones that had actors of ours.

        ``running``: names of the actors that are alive.
        """
        self._started, self._running = None, set(running)
        known = set(self._names.values())
        self._served = (self._served & known) | {
            self._names[actor] for actor in running if actor in self._names
        }
        self._watch.set_addresses(addresses())
        # Ray still lists a node that the watch has found lost for up to half a minute, and would
        # start actors there
        free = [node for node in free_nodes() if node.id not in self._watch.lost]
        self.joined_gpus = sum(int(node.gpus) for node in free if node.id not in self._first_nodes)
        for node, actors in self._placer.refresh(free, running).items():
            self._event("node_lost", node=node, actors=actors)

    async def make_room(self, actors: list[str], partly: bool) -> int:
        """Reserve room for new actors; return how many of them, from the first on, have room.

        Waits for nodes that an autoscaler may add. All actors must find room; with ``partly``, as
        many as there is room for. Raises ConfigError, a line per service, if there is none.
        """
        wait_s, began = self._config.services.wait_for_nodes_s, time.monotonic()
        if partly and (room := self._placer.reserve_some(actors)):
            return room
        try:
            self._placer.reserve(actors)
            return len(actors)
        except NoRoom as error:
            why = [f"cannot grow: {line}" for line in error.lines]
        try:
            while True:
                waited = time.monotonic() - began
                if wait_s:
                    self._request(actors)
                # any granted place fits any of the actors: all are of one kind, with equal needs
                granted = [node for actor in actors for node in self._requests.granted(actor) or ()]
                if len(granted) == len(actors) or (partly and granted and waited > LAG_S):
                    self._placer.put(actors[: len(granted)], granted)
                    return len(granted)
                if waited >= wait_s:
                    raise ConfigError(why)
                await asyncio.sleep(LOOK_S)
        finally:
            # the placer reserves the places from now on; while the requests reserve them in Ray, no
            # actor could take them
            self._requests.withdraw(*actors)

    def _request(self, actors: Iterable[str]) -> None:
        """Request room from Ray's autoscaler for each actor by itself: each granted one is used."""
        need = self._placer.need
        requested = [actor for actor in actors if self._requests.request(actor, [need(actor)])]
        if requested:
            self._event("nodes_asked", actors=requested, each=need(requested[0]).describe())

"""The nodes that a run's actors are on, and those that are asked for where there is no room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Mapping

from cluster.runtime.nodes import (
    LAG_S,
    LOOK_S,
    Requests,
    addresses,
    all_nodes,
    find_room,
    free_nodes,
)
from cluster.runtime.watch import NodeWatch
from configs.load import ConfigError
from configs.schema import RunConfig
from planning.placement import NoRoom, waits_for
from planning.placer import Placer
from records.rundir import Event


class Places:
    """Chooses a node for every actor of a run, with the run's ``Placer``, while nodes come and go.

    A node is chosen here and not left to Ray: what has no room is then said at once, with what
    there is, and nothing pends because something else was placed badly before it.
    """

    def __init__(self, config: RunConfig, event: Event):
        self._config, self._event = config, event
        self._placer = Placer(config)
        self._requests = Requests()
        self._watch = NodeWatch(config.services.node_silence_s)

    async def choose(self, kinds: Collection[str]) -> None:
        """A node for every actor of the run's start. Raises ConfigError where there is no room."""
        self._placer.refresh(await find_room(self._config, tuple(kinds)))
        self._placer.place_all(kinds)

    def waits_for(self) -> Mapping[str, Collection[str]]:
        """By service of the run's start, those that must hold their GPUs before it is started."""
        on_gpus = [(need, node) for need, node in self._placer.placed if need.gpus]
        return waits_for(on_gpus, {node.id: node.gpus for node in all_nodes()}) if on_gpus else {}

    def take(self, actor: str) -> str:
        """The node to start an actor on. Raises NoRoom; where an autoscaler may bring a node, one
        is requested, and the actor then waits for what Ray grants.
        """
        if actor in self._requests:
            granted = self._requests.granted(actor)
            if granted is None:
                need = self._placer.need(actor).describe()
                raise NoRoom([f"Ray has not granted the place that it was asked for: {need}"])
            self._placer.put([actor], granted)
            self._requests.withdraw(actor)
        try:
            return self._placer.take(actor)
        except NoRoom:
            if self._config.services.wait_for_nodes_s:
                self._request([actor])
            raise

    def release(self, actor: str) -> None:
        """The actor has left for good."""
        self._placer.release(actor)
        # or the autoscaler would bring a node for nobody
        self._requests.withdraw(actor)

    def gone(self, actor: str, node: str | None) -> asyncio.Future[str]:
        """Done when ``node`` is lost, or the one that was taken for the actor; with the reason."""
        return self._watch.gone(node or self._placer.where(actor) or "")

    async def close(self) -> None:
        """The run ends: no node is wanted any more, or watched."""
        self._requests.withdraw()
        await self._watch.close()

    def refresh(self, running: Collection[str]) -> None:
        """Take over what nodes there are now, and tell which of ours are lost."""
        self._watch.know(addresses())
        # Ray lists a node that the watch has lost for up to half a minute, and would start actors
        # there
        free = [node for node in free_nodes() if node.id not in self._watch.lost]
        for node, actors in self._placer.refresh(free, running).items():
            self._event("node_lost", node=node, actors=actors)

    async def make_room(self, actors: list[str], partly: bool) -> int:
        """Reserve room for new actors, on nodes that an autoscaler may have to add first; how many
        of the first have room: all, or, ``partly``, as many as there is room for.

        Raises ConfigError, a line per service, where there is none.
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
                # any of the granted will do for any of the actors: all are of one kind, with the
                # same needs
                granted = [node for actor in actors for node in self._requests.granted(actor) or ()]
                if len(granted) == len(actors) or (partly and granted and waited > LAG_S):
                    self._placer.put(actors[: len(granted)], granted)
                    return len(granted)
                if waited >= wait_s:
                    raise ConfigError(why)
                await asyncio.sleep(LOOK_S)
        finally:
            # our own count holds the places now; as long as Ray does, no actor could take them
            self._requests.withdraw(*actors)

    def _request(self, actors: Iterable[str]) -> None:
        """Have Ray's autoscaler bring nodes, for each actor by itself: any that comes is of use."""
        need = self._placer.need
        new = [actor for actor in actors if self._requests.request(actor, [need(actor)])]
        if new:
            self._event("nodes_asked", actors=new, each=need(new[0]).describe())

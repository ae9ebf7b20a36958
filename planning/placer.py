"""Which actor is on which node while a run lives, and what nodes have left for others."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from configs.schema import RunConfig
from planning.placement import Need, Node, NoRoom, need_of, needs_of, place

SETTLED_S = 10.0
"""For this long after we started or ended an actor on a node, Ray's count of that node is stale."""


class Placer:
    """Call ``refresh`` before placing any."""

    def __init__(self, config: RunConfig, clock: Callable[[], float] = time.monotonic):
        self._config, self._clock = config, clock
        self._nodes: dict[str, Node] = {}
        self._held: dict[str, tuple[Need, str]] = {}
        self._planned: set[str] = set()  # actors that have a place and are not yet started
        self._changed: dict[str, float] = {}  # by node: when a place was last taken or released

    def refresh(self, free: Sequence[Node], running: Collection[str] = ()) -> dict[str, list[str]]:
        """Take over Ray's nodes and what is ``free``; returns the actors of nodes that are gone.

        Of a known node the old count stays while an actor placed there is not ``running``, and for
        ``SETTLED_S`` after a place there was taken or released: Ray's count lags behind, and a
        dying actor may hold its share for a while. Otherwise a node offers what is free and what
        our own actors hold: other jobs come and go.
        """
        ours: dict[str, dict[str, Need]] = {}  # by node
        for actor, (need, where) in self._held.items():
            ours.setdefault(where, {})[actor] = need
        alive = set(running)
        self._nodes = {node.id: self._count(node, ours.get(node.id, {}), alive) for node in free}
        lost: dict[str, list[str]] = {}
        for actor, (_, where) in tuple(self._held.items()):
            if where not in self._nodes:
                lost.setdefault(where, []).append(actor)
                del self._held[actor]
        return lost

    def _count(self, free: Node, ours: Mapping[str, Need], running: set[str]) -> Node:
        """A node with the resources that it would have free without ``ours``."""
        now, known = self._clock(), self._nodes.get(free.id)
        # a node that is new to us holds none of our actors
        if known is None:
            return free
        settled = now - self._changed.setdefault(free.id, now) >= SETTLED_S
        if not settled or not ours.keys() <= running:
            return known
        taken = ours.values()
        return replace(
            free,
            cpus=free.cpus + sum(need.cpus for need in taken),
            gpus=free.gpus + sum(need.gpus for need in taken),
        )

    def place_all(self, kinds: Iterable[str]) -> None:
        """Choose a node for every actor that a run starts with. Raises NoRoom."""
        needs = needs_of(self._config, kinds)
        self._hold(needs, place(needs, list(self._nodes.values()), self._held))

    def reserve(self, actors: Sequence[str]) -> None:
        """Choose nodes for actors that will be started soon: for all, or raises NoRoom."""
        needs = [self.need(actor) for actor in actors]
        self._hold(needs, place(needs, list(self._nodes.values()), self._held))

    def reserve_some(self, actors: Sequence[str]) -> int:
        """Choose nodes for as many of the first actors as there is room for; returns how many."""
        for count in range(len(actors), 0, -1):
            try:
                self.reserve(actors[:count])
                return count
            except NoRoom:
                continue
        return 0

    def put(self, actors: Sequence[str], nodes: Sequence[str]) -> None:
        """Places that Ray has granted, a node for each actor, whatever our count of it says."""
        self._hold([self.need(actor) for actor in actors], dict(zip(actors, nodes, strict=True)))

    def take(self, actor: str) -> str:
        """The node to start an actor on: first the planned one, later a new one. Raises NoRoom."""
        if actor not in self._planned or actor not in self._held:
            self.release(actor)
            self.reserve([actor])
        self._planned.discard(actor)
        self._touch(actor)
        return self._held[actor][1]

    def need(self, actor: str) -> Need:
        """The needs of an actor, by its name."""
        kind = actor.rpartition("-")[0]
        return replace(need_of(kind, 0, self._config.services.of(kind)), actor=actor)

    def where(self, actor: str) -> str | None:
        """The node id chosen for an actor, if any."""
        held = self._held.get(actor)
        return held[1] if held else None

    @property
    def placed(self) -> list[tuple[Need, str]]:
        """What every actor with a place needs, and the node id that was chosen for it."""
        return list(self._held.values())

    def release(self, actor: str) -> None:
        """The actor is gone; its share is free again."""
        self._touch(actor)
        self._held.pop(actor, None)
        self._planned.discard(actor)

    def _hold(self, needs: Sequence[Need], chosen: Mapping[str, str]) -> None:
        self._held |= {need.actor: (need, chosen[need.actor]) for need in needs}
        self._planned |= set(chosen)
        for actor in chosen:
            self._touch(actor)

    def _touch(self, actor: str) -> None:
        if actor in self._held:
            self._changed[self._held[actor][1]] = self._clock()

"""Bookkeeping of the node of each actor during a run, and of the resources left on each node."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from configs.schema import RunConfig
from planning.placement import LargerFirst, Need, Node, NoRoom, need_of, needs_of, place

SETTLED_S = 10.0
"""Seconds for which Ray's count of a node is stale after an actor was started or ended there."""


class Placer:
    """Chooses and records the node of each actor of a run.

    Call ``refresh`` before placing actors.
    """

    def __init__(self, config: RunConfig, clock: Callable[[], float] = time.monotonic):
        self._config, self._clock = config, clock
        self._nodes: dict[str, Node] = {}
        self._held: dict[str, tuple[Need, str]] = {}
        self._planned: set[str] = set()  # actors that have a place and are not yet started
        # actors that are to be started again and have no place, by service
        self._waiting: dict[str, list[str]] = {}
        self._changed: dict[str, float] = {}  # by node: when a place was last taken or released

    def refresh(self, free: Sequence[Node], running: Collection[str] = ()) -> dict[str, list[str]]:
        """Update the nodes from Ray's ``free`` resources; return the actors of lost nodes, by node.

        The recorded size of a known node is kept while an actor placed there is not ``running``,
        and for ``SETTLED_S`` after a place there was taken or released: Ray's count lags behind,
        and a dying actor may hold its share for a while. Otherwise the size of a node is what is
        free plus what the run's own actors hold, as other jobs come and go.
        """
        own_actors: dict[str, dict[str, Need]] = {}  # by node
        for actor, (need, where) in self._held.items():
            own_actors.setdefault(where, {})[actor] = need
        alive = set(running)
        self._nodes = {
            node.id: self._count(node, own_actors.get(node.id, {}), alive) for node in free
        }
        lost: dict[str, list[str]] = {}
        for actor, (_, where) in tuple(self._held.items()):
            if where not in self._nodes:
                lost.setdefault(where, []).append(actor)
                del self._held[actor]
                self._wait(actor)
        return lost

    def _count(self, free: Node, own_actors: Mapping[str, Need], running: set[str]) -> Node:
        """Return a node with the resources that would be free without the run's own actors."""
        now, known = self._clock(), self._nodes.get(free.id)
        # a node that was not known holds no actors of this run
        if known is None:
            return free
        settled = now - self._changed.setdefault(free.id, now) >= SETTLED_S
        if not settled or not own_actors.keys() <= running:
            return known
        taken = own_actors.values()
        return replace(
            free,
            cpus=free.cpus + sum(need.cpus for need in taken),
            gpus=free.gpus + sum(need.gpus for need in taken),
        )

    def place_all(self, kinds: Iterable[str]) -> None:
        """Choose a node for every actor that a run starts with. Raises NoRoom if there is none."""
        needs = needs_of(self._config, kinds)
        self._hold(needs, place(needs, list(self._nodes.values()), self._held))

    def reserve(self, actors: Sequence[str]) -> None:
        """Choose nodes for actors that will be started soon. Raises NoRoom unless all have one."""
        needs = [self.need(actor) for actor in actors]
        self._hold(needs, place(needs, list(self._nodes.values()), self._held))

    def reserve_some(self, actors: Sequence[str]) -> int:
        """Choose nodes for as many of the first actors as have room; return their number."""
        for count in range(len(actors), 0, -1):
            try:
                self.reserve(actors[:count])
                return count
            except NoRoom:
                continue
        return 0

    def put(self, actors: Sequence[str], nodes: Sequence[str]) -> None:
        """Record the node that Ray granted to each actor, even if no room was recorded there."""
        self._hold([self.need(actor) for actor in actors], dict(zip(actors, nodes, strict=True)))

    def take(self, actor: str) -> str:
        """Return the node to start an actor on: the planned one at first, a new one at restarts.

        Raises NoRoom as ``plan`` does.
        """
        self.plan(actor)
        self._planned.discard(actor)
        self._touch(actor)
        return self._held[actor][1]

    def plan(self, actor: str) -> str:
        """Return the node that ``take`` will return, and reserve the place.

        Raises NoRoom if there is none, and LargerFirst while an actor that waits for a larger share
        of a GPU has room: a smaller one must not take the only place where it fits.
        """
        if actor not in self._planned or actor not in self._held:
            self.release(actor)
            self._wait(actor)
            own = self.need(actor)
            # one of each service: its actors have equal needs, and a thousand may wait
            for other in [each[0] for each in self._waiting.values()]:
                if _is_larger(self.need(other), own) and self._has_room(other):
                    raise LargerFirst(actor, other)
            self.reserve([actor])
        return self._held[actor][1]

    def _wait(self, actor: str) -> None:
        self._waiting.setdefault(actor.rpartition("-")[0], []).append(actor)

    def _end_waiting(self, actor: str) -> None:
        kind = actor.rpartition("-")[0]
        waiting = self._waiting.get(kind, [])
        if actor in waiting:
            waiting.remove(actor)
        if not waiting:
            self._waiting.pop(kind, None)

    def _has_room(self, actor: str) -> bool:
        try:
            place([self.need(actor)], list(self._nodes.values()), self._held)
        except NoRoom:
            return False
        return True

    def larger(self, kind: str, nodes: Collection[str]) -> list[str]:
        """Return the actors on ``nodes`` with larger shares of a GPU than those of a service."""
        own = self.need(f"{kind}-0")
        return [
            actor
            for actor, (need, where) in self._held.items()
            if where in nodes and _is_larger(need, own)
        ]

    def nodes_of(self, kind: str) -> set[str]:
        """Return the node ids on which actors of a service have places."""
        return {where for need, where in self._held.values() if need.kind == kind}

    def need(self, actor: str) -> Need:
        """Return the needs of an actor, given its name."""
        kind = actor.rpartition("-")[0]
        return replace(need_of(kind, 0, self._config.services.of(kind)), actor=actor)

    def where(self, actor: str) -> str | None:
        """Return the node id chosen for an actor, or None."""
        held = self._held.get(actor)
        return held[1] if held else None

    def release(self, actor: str) -> None:
        """Free the place of an actor that has ended."""
        self._touch(actor)
        self._held.pop(actor, None)
        self._planned.discard(actor)
        self._end_waiting(actor)

    def _hold(self, needs: Sequence[Need], chosen: Mapping[str, str]) -> None:
        self._held |= {need.actor: (need, chosen[need.actor]) for need in needs}
        self._planned |= set(chosen)
        for actor in chosen:
            self._end_waiting(actor)
            self._touch(actor)

    def _touch(self, actor: str) -> None:
        if actor in self._held:
            self._changed[self._held[actor][1]] = self._clock()


def _is_larger(need: Need, other: Need) -> bool:
    """Return True for two parts of a GPU of which the first is larger."""
    return 0 < other.gpus < need.gpus < 1

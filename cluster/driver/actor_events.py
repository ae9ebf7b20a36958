"""Events of actors, and the lines that a run prints about some of them."""

from __future__ import annotations

from planning.facts import SMALL_SHM
from planning.machine import killed_for_memory, usable_memory
from records.progress import Progress
from records.rundir import Event


class ActorEvents:
    """Records events of actors; prints what an operator should know, once each."""

    def __init__(self, record: Event, progress: Progress) -> None:
        self._record, self._progress = record, progress
        self._waiting = set[object]()  # services of which an actor waits for room
        self._slow_stores = set[object]()  # nodes whose object store is on a disk
        self._killed = killed_for_memory()  # processes killed so far at the container's limit
        self._told_memory_limit = False
        self._told_left_out = False

    def event(self, name: str, **fields: object) -> None:
        """Record an event of an actor."""
        self._record(name, **fields)
        if name == "actor_started":
            self._progress.actor_started()
        elif name == "actor_waits" and fields["kind"] not in self._waiting:
            # one line for all actors of a service: the run may stand still until they have room
            self._waiting.add(fields["kind"])
            self._progress.note(f"{fields['kind']}-{fields['actor']} waits: {fields['why']}")
        elif name == "actor_replaced":
            self._waiting.discard(fields["kind"])
        elif name == "actor_died":
            self._tell_memory_limit()
        elif name == "scorer_unreachable":
            self._progress.note(f"{fields['why']}: waiting up to {fields['limit_s']:g} s for it")
        elif name == "scorer_reached":
            self._progress.note(
                f"scorer {fields['scorer']!r} answers again after {fields['seconds']} s"
            )
        if (layers := fields.get("left_out")) and not self._told_left_out:
            self._told_left_out = True
            self._progress.note(
                f"lora.init_from also changes {layers} layers of text encoders, which are not used:"
                " images start out different from those of the whole LoRA"
            )
        if fields.get("store_on_disk") and fields["node"] not in self._slow_stores:
            self._tell_slow_store(fields["node"], fields["host"], fields["store_on_disk"])

    def _tell_slow_store(self, node: object, host: object, directory: object) -> None:
        # Ray warns in the log of the node's start alone
        self._slow_stores.add(node)
        self._record("object_store_on_disk", node=node, host=host, directory=directory)
        self._progress.note(f"{host}: Ray's object store is in {directory}: {SMALL_SHM}")

    def _tell_memory_limit(self) -> None:
        # of the driver's container, which on one machine is also that of the actors
        killed = killed_for_memory()
        if killed == self._killed:
            return
        limit = f"{usable_memory() / 1e9:.2f} GB"
        self._record("memory_limit_reached", killed=killed - self._killed, limit=limit)
        if not self._told_memory_limit:
            self._progress.note(
                "the kernel kills processes for lack of memory: this container, or machine, has"
                f" {limit}: give it more"
            )
        self._killed, self._told_memory_limit = killed, True

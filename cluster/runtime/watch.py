"""Which nodes still answer: asked by the driver itself, because calls to a lost one only wait.

A call to an actor on a node that is gone ends when Ray gives the node up, which takes it up to
half a minute, longer where the network swallows what is sent. So the driver opens a connection to
the port of every node on which it has actors, again and again, and closes it: the kernel over there
answers for a process that is busy, and nobody answers for one that is gone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from enum import Enum, auto

from cluster.runtime.tasks import cancel_all

TRIES = 4
"""Connections in a row that must stay without an answer. Of a network that loses one packet in a
hundred in each direction a node is given up by mistake less than once in a month.
"""
REFUSALS = 2
"""Connections in a row that must be refused: an answer, so that no packet was lost, from a machine
on which Ray's process has ended. Two, as a firewall may refuse one while it is set up.
"""
Address = tuple[str, int]


class NodeWatch:
    """Watches nodes from the first time that one is asked for.

    It counts failed connections and not seconds: a driver that was stopped for a minute has not
    heard of anybody, and has lost nobody.
    """

    def __init__(self, silence_s: float):
        """A node is lost when it has not answered for ``silence_s`` seconds, or has refused for
        three fifths of them; 0: never.
        """
        # one wait after the last connection that was taken, then as long for each that is not
        self._every_s = silence_s / (TRIES + 1)
        self._addresses: dict[str, Address] = {}
        self._gone: dict[str, asyncio.Future[str]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.lost: set[str] = set()

    def know(self, addresses: Mapping[str, Address]) -> None:
        """Where the nodes that Ray counts as alive take connections; all others are lost."""
        self._addresses = dict(addresses)
        for node in self._gone:
            if node not in addresses:
                self._lose(node, "Ray has given its node up")

    def gone(self, node: str) -> asyncio.Future[str]:
        """Done when ``node`` is lost, with the reason in words. Never, where it is not watched."""
        if node not in self._gone:
            self._gone[node] = asyncio.get_running_loop().create_future()
            if self._every_s and node in self._addresses:
                self._tasks[node] = asyncio.create_task(self._watch(node))
        return self._gone[node]

    async def close(self) -> None:
        """Watch no more."""
        await cancel_all(list(self._tasks.values()))
        self._tasks.clear()

    def _lose(self, node: str, why: str) -> None:
        self.lost.add(node)
        if not self._gone[node].done():
            self._gone[node].set_result(why)

    async def _watch(self, node: str) -> None:
        """Until Ray gives the node up as well. One that answers again may be used again."""
        failures = refusals = 0
        while address := self._addresses.get(node):
            answer = await _ask(address, self._every_s)
            if answer is Reply.UNASKED:
                continue
            failures = 0 if answer is Reply.TAKEN else failures + 1
            refusals = refusals + 1 if answer is Reply.REFUSED else 0
            if node not in self.lost:
                if refusals == REFUSALS:
                    self._lose(node, "its node refuses connections")
                elif failures == TRIES:
                    silent_s = self._every_s * (TRIES + 1)
                    self._lose(node, f"its node answers no connection for {silent_s:g} s")
            elif answer is Reply.TAKEN:  # it stayed watched, as it may come back
                self.lost.discard(node)
                self._gone[node] = asyncio.get_running_loop().create_future()
        self._tasks.pop(node, None)


class Reply(Enum):
    """What comes of a connection."""

    TAKEN = auto()
    REFUSED = auto()
    NONE = auto()
    UNASKED = auto()  # none could be begun here, which says nothing of the node


async def _ask(address: Address, within_s: float) -> Reply:
    """Open a connection; return after ``within_s`` seconds, whatever comes of it."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        made = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    except OSError:  # as where this process has too many files open
        await asyncio.sleep(within_s)
        return Reply.UNASKED
    with made:
        made.setblocking(False)
        attempt = asyncio.ensure_future(loop.sock_connect(made, address))
        # not asyncio.timeout: in a loop that was held up, an answer that has come counts
        done, _ = await asyncio.wait({attempt}, timeout=within_s)
        if not done:
            await cancel_all([attempt])
    # before the pause, which may be cancelled: asyncio complains of an error nobody looked at
    error = attempt.exception() if done else TimeoutError()
    await asyncio.sleep(max(0.0, began + within_s - loop.time()))
    if error is None:
        return Reply.TAKEN
    return Reply.REFUSED if isinstance(error, ConnectionRefusedError) else Reply.NONE

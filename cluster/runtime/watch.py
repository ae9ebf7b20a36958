"""Health checks of nodes by the driver, which notices a lost node sooner than Ray does.

A call to an actor on a lost node fails only when Ray declares the node dead, which takes up to half
a minute, and longer if the network drops packets. Therefore the driver repeatedly opens and closes
a TCP connection to every node on which it has actors. The node's kernel accepts it even if the
process there is busy; a lost node does not answer.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from enum import Enum, auto

from cluster.runtime.tasks import cancel_all

TRIES = 4
"""Number of consecutive connections without an answer after which a node is lost. On a network that
loses 1 % of packets in each direction, a node is lost by mistake less than once in a month.
"""
REFUSALS = 2
"""Number of consecutive refused connections after which a node is lost. A refusal is an answer from
a machine on which Ray's process has ended. Two, as a firewall may refuse one while it is set up.
"""
Address = tuple[str, int]


class NodeWatch:
    """Watches each node from the first call of ``gone`` for it.

    It counts failed connections instead of seconds: a driver that was stopped for a minute has had
    no answers in that time, but no node is lost because of that.
    """

    def __init__(self, silence_s: float):
        """Create a watch; ``silence_s`` 0 disables it.

        A node counts as lost if it has not answered for ``silence_s`` seconds, or has refused
        connections for three fifths of that time.
        """
        # one interval after the last accepted connection, and one for each failed attempt
        self._every_s = silence_s / (TRIES + 1)
        self._addresses: dict[str, Address] = {}
        self._gone: dict[str, asyncio.Future[str]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.lost: set[str] = set()

    def set_addresses(self, addresses: Mapping[str, Address]) -> None:
        """Set the addresses of the nodes that Ray considers alive; all other nodes are lost."""
        self._addresses = dict(addresses)
        for node in self._gone:
            if node not in addresses:
                self._lose(node, "Ray reports its node as dead")

    def gone(self, node: str) -> asyncio.Future[str]:
        """Return a future that gets the reason when ``node`` is lost; never if it is unknown."""
        if node not in self._gone:
            self._gone[node] = asyncio.get_running_loop().create_future()
            if self._every_s and node in self._addresses:
                self._tasks[node] = asyncio.create_task(self._watch(node))
        return self._gone[node]

    async def close(self) -> None:
        """Stop all checks."""
        await cancel_all(list(self._tasks.values()))
        self._tasks.clear()

    def _lose(self, node: str, why: str) -> None:
        self.lost.add(node)
        if not self._gone[node].done():
            self._gone[node].set_result(why)

    async def _watch(self, node: str) -> None:
        """Check the node until Ray declares it dead too; a node that answers again is usable."""
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
                    self._lose(node, f"its node has not accepted a connection for {silent_s:g} s")
            elif answer is Reply.TAKEN:  # a lost node came back
                self.lost.discard(node)
                self._gone[node] = asyncio.get_running_loop().create_future()
        self._tasks.pop(node, None)


class Reply(Enum):
    """Result of a connection attempt."""

    TAKEN = auto()
    REFUSED = auto()
    NONE = auto()
    UNASKED = auto()  # the attempt could not be started, which says nothing about the node


async def _ask(address: Address, within_s: float) -> Reply:
    """Try to open a connection; return the result after exactly ``within_s`` seconds."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        made = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    except OSError:  # for example too many open files in this process
        await asyncio.sleep(within_s)
        return Reply.UNASKED
    with made:
        made.setblocking(False)
        attempt = asyncio.ensure_future(loop.sock_connect(made, address))
        # unlike asyncio.timeout, this counts an answer that arrived while the loop was held up
        done, _ = await asyncio.wait({attempt}, timeout=within_s)
        if not done:
            await cancel_all([attempt])
    # read before the pause, which may be cancelled: asyncio logs errors that are never retrieved
    error = attempt.exception() if done else TimeoutError()
    await asyncio.sleep(max(0.0, began + within_s - loop.time()))
    if error is None:
        return Reply.TAKEN
    return Reply.REFUSED if isinstance(error, ConnectionRefusedError) else Reply.NONE

"""Health checks of nodes by the driver, which notices a lost node sooner than Ray does.

A call to an actor on a lost node fails only when Ray declares the node dead, which takes up to half
a minute, and longer if the network drops packets. Therefore the driver repeatedly opens and closes
a TCP connection to every node on which it has actors. The node's kernel accepts it even if the
process there is busy; a lost node does not answer.

All nodes are asked in one round: a task of the event loop for every connection would take twice as
much of the driver's time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from ipaddress import ip_address

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


class Reply(Enum):
    """Result of a connection attempt."""

    TAKEN = auto()
    REFUSED = auto()
    NONE = auto()
    UNASKED = auto()  # the attempt could not be started, which says nothing about the node


@dataclass
class Watched:
    """A node's future, which gets the reason when it is lost, and its consecutive failures."""

    gone: asyncio.Future[str]
    failures: int = 0
    refusals: int = 0


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
        self._nodes: dict[str, Watched] = {}
        self._ips: dict[str, str] = {}  # by host, which may be a name
        self._task: asyncio.Task[None] | None = None
        self.lost: set[str] = set()

    def set_addresses(self, addresses: Mapping[str, Address]) -> None:
        """Set the addresses of the nodes that Ray considers alive; all other nodes are lost."""
        self._addresses = dict(addresses)
        for node in self._nodes:
            if node not in addresses:
                self._lose(node, "Ray reports its node as dead")

    def gone(self, node: str) -> asyncio.Future[str]:
        """Return a future that gets the reason when ``node`` is lost; never if it is unknown."""
        if node not in self._nodes:
            self._nodes[node] = Watched(asyncio.get_running_loop().create_future())
            if self._every_s and self._task is None:
                self._task = asyncio.create_task(self._watch())
        return self._nodes[node].gone

    async def close(self) -> None:
        """Stop all checks."""
        await cancel_all([self._task] if self._task else [])

    def _lose(self, node: str, why: str) -> None:
        self.lost.add(node)
        if not self._nodes[node].gone.done():
            self._nodes[node].gone.set_result(why)

    async def _watch(self) -> None:
        """Check nodes until Ray declares them dead too; a node that answers again is usable."""
        while True:
            known = {node: self._addresses[node] for node in self._nodes if node in self._addresses}
            hosts = {host for host, _ in known.values()}
            await asyncio.gather(*map(self._resolve, hosts - self._ips.keys()))
            asked = {
                node: (self._ips[host], port)
                for node, (host, port) in known.items()
                if host in self._ips
            }
            replies = await ask_all(asked.values(), self._every_s)
            for node, address in asked.items():
                if node in self._addresses:  # Ray may have reported it meanwhile
                    self._count(node, replies[address])

    async def _resolve(self, host: str) -> None:
        """Find the IP address of ``host``; a name that has none now is tried in the next round."""
        with contextlib.suppress(ValueError):
            self._ips[host] = str(ip_address(host))
            return
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._every_s):
                found = await asyncio.get_running_loop().getaddrinfo(host, None)
            self._ips[host] = str(found[0][4][0])

    def _count(self, node: str, reply: Reply) -> None:
        state = self._nodes[node]
        if reply is Reply.UNASKED:
            return
        state.failures = 0 if reply is Reply.TAKEN else state.failures + 1
        state.refusals = state.refusals + 1 if reply is Reply.REFUSED else 0
        if node not in self.lost:
            if state.refusals == REFUSALS:
                self._lose(node, "its node refuses connections")
            elif state.failures == TRIES:
                silent_s = self._every_s * (TRIES + 1)
                self._lose(node, f"its node has not accepted a connection for {silent_s:g} s")
        elif reply is Reply.TAKEN:  # a lost node came back
            self.lost.discard(node)
            state.gone = asyncio.get_running_loop().create_future()


async def ask_all(addresses: Iterable[Address], within_s: float) -> dict[Address, Reply]:
    """Open a connection to each address; return the replies after exactly ``within_s`` seconds.

    Replies that arrive while the event loop is held up count. Hosts have to be IP addresses; the
    event loop would wait while a name is resolved.
    """
    attempts = {address: _Attempt(address) for address in addresses}
    try:
        await asyncio.sleep(within_s)
        poll = select.poll()
        for attempt in attempts.values():
            if attempt.reply is None:
                poll.register(attempt.socket, select.POLLOUT)
        answered = {descriptor for descriptor, _ in poll.poll(0)}
        return {address: attempt.result(answered) for address, attempt in attempts.items()}
    finally:
        for attempt in attempts.values():
            attempt.close()


class _Attempt:
    """A connection that is being opened."""

    def __init__(self, address: Address):
        self.reply: Reply | None = None  # None: it is not known yet
        try:
            self.socket = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        except OSError:  # for example too many open files in this process
            self.reply = Reply.UNASKED
            return
        self.socket.setblocking(False)
        code = self.socket.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            self.reply = _reply(code)

    def result(self, answered: set[int]) -> Reply:
        """Return the reply, if the socket is among the file descriptors that were answered."""
        if self.reply is not None:
            return self.reply
        if self.socket.fileno() not in answered:
            return Reply.NONE
        return _reply(self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def close(self) -> None:
        """Close the socket, if there is one."""
        if self.reply is not Reply.UNASKED:
            self.socket.close()


def _reply(code: int) -> Reply:
    """Return the reply that an error number of a connection stands for; 0: it was accepted."""
    if code == 0:
        return Reply.TAKEN
    return Reply.REFUSED if code == errno.ECONNREFUSED else Reply.NONE

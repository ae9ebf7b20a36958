"""Watching nodes, on sockets of this machine: one accepts connections, one refuses them, one is
silent.
"""

import asyncio
import errno
import gc
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from cluster.runtime.watch import REFUSALS, TRIES, Address, NodeWatch, Reply, ask_all

HERE = "127.0.0.1"
SILENCE_S = 0.25


@contextmanager
def listening(port: int = 0, queue: int = 100) -> Iterator[tuple[str, int]]:
    with socket.create_server((HERE, port), backlog=queue) as made:
        yield made.getsockname()[:2]


@contextmanager
def swallowing() -> Iterator[tuple[str, int]]:
    """Open a socket whose queue is full: the kernel answers no further connection, as with a cut
    cable.
    """
    with ExitStack() as stack:
        address = stack.enter_context(listening(queue=0))
        for _ in range(4):
            full = stack.enter_context(socket.socket())
            full.setblocking(False)
            full.connect_ex(address)
        yield address


def refusing() -> tuple[str, int]:
    with listening() as address:
        return address


async def watched(**addresses: tuple[str, int]) -> NodeWatch:
    watch = NodeWatch(SILENCE_S)
    watch.set_addresses(addresses)
    for node in addresses:
        watch.gone(node)
    return watch


def test_nodes_that_refuse_or_swallow_connections_are_lost_and_others_are_not():
    async def main(silent: tuple[str, int], alive: tuple[str, int]) -> None:
        watch = await watched(refuses=refusing(), swallows=silent, answers=alive)
        assert await asyncio.wait_for(watch.gone("refuses"), 60) == "its node refuses connections"
        assert watch.lost == {"refuses"}  # before the silent one
        why = await asyncio.wait_for(watch.gone("swallows"), 60)
        assert why == "its node has not accepted a connection for 0.25 s"
        assert watch.lost == {"refuses", "swallows"} and not watch.gone("answers").done()
        await watch.close()

    with swallowing() as silent, listening() as alive:
        asyncio.run(main(silent, alive))


def test_a_node_that_answers_again_is_not_lost():
    async def main() -> None:
        address = refusing()
        watch = await watched(node=address)
        first = watch.gone("node")
        await asyncio.wait_for(first, 60)
        with listening(address[1]):
            while watch.lost:
                await asyncio.sleep(0.01)
        assert watch.gone("node") is not first
        await asyncio.wait_for(watch.gone("node"), 60)  # and it can be lost once more
        await watch.close()

    asyncio.run(main())


def test_a_node_that_ray_reports_dead_is_lost_and_no_longer_watched():
    async def main(address: tuple[str, int]) -> None:
        watch = await watched(node=address)
        watch.set_addresses({})
        assert watch.gone("node").result() == "Ray reports its node as dead"
        await asyncio.sleep(2 * SILENCE_S)
        assert watch.lost == {"node"}
        await watch.close()

    with listening() as address:
        asyncio.run(main(address))


@pytest.mark.parametrize(("failure", "count"), [(Reply.NONE, TRIES), (Reply.REFUSED, REFUSALS)])
def test_only_consecutive_failures_count(monkeypatch, failure, count):
    """A driver that slept, or a lost packet, is no loss of a node."""
    answers = iter([*[failure] * (count - 1), Reply.TAKEN] * 5 + [failure] * count)
    lost_before: list[set[str]] = []  # each answer
    watches: list[NodeWatch] = []

    async def scripted(addresses: Iterable[Address], within_s: float) -> dict[Address, Reply]:
        await asyncio.sleep(0)
        lost_before.append(set(watches[0].lost))
        reply: Reply = next(answers)
        return dict.fromkeys(addresses, reply)

    monkeypatch.setattr("cluster.runtime.watch.ask_all", scripted)

    async def main() -> None:
        watches.append(await watched(node=(HERE, 1)))
        (watch,) = watches
        with pytest.raises(RuntimeError, match="StopAsyncIteration|StopIteration"):
            assert watch._task
            await asyncio.gather(watch.gone("node"), watch._task)
        # by the last of the consecutive failures, and by none before it
        assert lost_before == [set()] * (6 * count) + [{"node"}]

    asyncio.run(main())


def test_without_a_limit_nothing_is_watched():
    async def main() -> None:
        watch = NodeWatch(0.0)
        watch.set_addresses({"node": refusing()})
        assert not watch.gone("node").done() and not watch._task

    asyncio.run(main())


def test_a_watch_closed_during_a_pause_raises_nothing():
    """A refusal arrives at once, and the watch then pauses: it may be closed meanwhile."""
    complaints: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
        watch = NodeWatch(5 * 60.0)  # a pause of a minute
        watch.set_addresses({"node": refusing()})
        watch.gone("node")
        for _ in range(100):  # turns of the event loop, in which the refusal arrives
            await asyncio.sleep(0)
        await watch.close()
        gc.collect()

    asyncio.run(main())
    assert complaints == []


def test_without_free_file_descriptors_no_node_counts_as_lost(monkeypatch):
    left = 2 * TRIES
    real = socket.socket

    def scarce(family: int) -> socket.socket:
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(family)

    async def main() -> None:
        watch = await watched(node=refusing())
        async with asyncio.timeout(30):
            while left > 0:
                assert not watch.lost
                await asyncio.sleep(0.01)
        assert await asyncio.wait_for(watch.gone("node"), 60) == "its node refuses connections"
        await watch.close()

    names = ("AF_INET", "AF_INET6", "SOL_SOCKET", "SO_ERROR")
    constants = {name: getattr(socket, name) for name in names}
    monkeypatch.setattr("cluster.runtime.watch.socket", SimpleNamespace(socket=scarce, **constants))
    asyncio.run(main())


def test_a_host_may_be_a_name_and_one_without_an_address_is_not_lost():
    async def main() -> None:
        host, port = refusing()
        watch = await watched(named=("localhost", port), unknown=("no-such-host.invalid", port))
        why = await asyncio.wait_for(watch.gone("named"), 60)
        assert why == "its node refuses connections" and watch.lost == {"named"}
        await watch.close()

    asyncio.run(main())


def test_a_name_is_tried_until_it_has_an_address(monkeypatch):
    asked: list[object] = []

    async def main() -> None:
        async def found(host: object, port: object) -> list[object]:
            asked.append(host)
            if len(asked) < 3:
                raise socket.gaierror("try again")
            return [(socket.AF_INET, 0, 0, "", (HERE, 0))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
        watch = await watched(node=("later.invalid", refusing()[1]))
        assert await asyncio.wait_for(watch.gone("node"), 60) == "its node refuses connections"
        await watch.close()

    asyncio.run(main())
    assert asked == ["later.invalid"] * 3


def test_all_replies_are_read_after_one_interval_and_sockets_are_closed():
    async def main(silent: tuple[str, int], alive: tuple[str, int]) -> None:
        refuses, before = refusing(), len(os.listdir("/proc/self/fd"))
        began = asyncio.get_running_loop().time()
        replies = await ask_all([refuses, silent, alive], SILENCE_S)
        assert asyncio.get_running_loop().time() - began >= SILENCE_S
        assert replies == {refuses: Reply.REFUSED, silent: Reply.NONE, alive: Reply.TAKEN}
        cancelled = asyncio.create_task(ask_all([refuses, silent, alive], 60.0))
        await asyncio.sleep(0)
        assert len(os.listdir("/proc/self/fd")) == before + 3
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert len(os.listdir("/proc/self/fd")) == before

    with swallowing() as silent, listening() as alive:
        asyncio.run(main(silent, alive))

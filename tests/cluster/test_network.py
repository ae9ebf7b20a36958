"""The wire between namespaces: delays, losses and cuts; and a node behind it that is watched."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.runtime.watch import NodeWatch
from tests.cluster.network import Network, missing
from tests.cluster.wire import Line, enter

PORT = 7000
ECHO = """
import socket
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(65536):
                connection.sendall(data)
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if why := missing():
        pytest.skip(why)
    with Network("one", "two") as made:
        command = made.inside("two", sys.executable, "-c", ECHO)
        with subprocess.Popen(command, stdout=subprocess.PIPE) as echo:
            assert echo.stdout is not None and echo.stdout.readline() == b"ready\n"
            yield made
            echo.kill()


def in_one(network: Network, work: Callable[[], Any]) -> Any:
    """Return the result of ``work`` in namespace "one"; namespaces belong to threads."""
    found: list[Any] = []

    def go() -> None:
        enter(network.namespace("one"))
        found.append(work())

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    return found[0]


def test_delay_and_loss_of_packets_are_measured():
    line = Line(delay_s=0.05, bytes_per_s=1000.0)
    assert line.due(10.0, 100) == pytest.approx(10.15)
    assert line.due(10.0, 100) == pytest.approx(10.25)  # behind the first
    assert Line(cut=True).due(10.0, 1) is None
    kept = [Line(loss=0.01, delay_s=1.0)] * 20_000
    lost = sum(line.due(0.0, 1) is None for line in kept)
    assert 130 < lost < 270  # 200 +- 14, five deviations
    full = Line(bytes_per_s=100.0)
    assert [full.due(0.0, 40) for _ in range(3)] == pytest.approx([0.4, 0.8, None])


def test_addresses_are_reachable_as_configured(network):
    where = (network.addresses["two"], PORT)

    def there_and_back() -> tuple[float, bytes]:
        began = time.monotonic()
        with socket.create_connection(where, timeout=20) as made:
            made.sendall(b"x" * 1000)
            message = b""
            while len(message) < 1000:
                message += made.recv(65536)
        return time.monotonic() - began, message

    network.everywhere(delay_s=0.05, loss=0.01)
    seconds, message = in_one(network, there_and_back)
    assert seconds >= 0.2 and message == b"x" * 1000  # a handshake and an echo, 50 ms each way

    def refused() -> bool:
        with socket.socket() as made:
            made.settimeout(1.0)
            return made.connect_ex(where) != 0

    network.between(["one"], ["two"], cut=True)
    assert in_one(network, refused)
    network.everywhere()
    assert in_one(network, there_and_back)[1] == message


def test_a_partitioned_node_is_lost_and_returns(network):
    async def main() -> list[set[str]]:
        watch = NodeWatch(1.0)
        watch.set_addresses({"two": (network.addresses["two"], PORT)})
        gone = watch.gone("two")
        await asyncio.sleep(0.5)
        seen = [set(watch.lost)]
        network.between(["one"], ["two"], cut=True)
        await asyncio.wait_for(gone, 60)
        seen.append(set(watch.lost))
        network.everywhere()
        while watch.lost:
            await asyncio.sleep(0.05)
        await watch.close()
        return seen

    assert in_one(network, lambda: asyncio.run(main())) == [set(), {"two"}]

"""Benchmark of the driver's CPU time for watching nodes, relative to the time that passes.

Every connection is to this machine, whose kernel handles both of its ends; between machines the
driver's kernel handles one.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context

from bench.timing import Options, Ratio
from cluster.runtime.watch import NodeWatch

NODES = (8, 32, 128)
SECONDS = 4.0
"""Length of a repeat."""


def measure(options: Options) -> list[Ratio]:
    """Return a ratio per number of nodes."""
    with _accepting() as port:
        return [asyncio.run(_row(count, port, options)) for count in NODES]


async def _row(count: int, port: int, options: Options) -> Ratio:
    watch = NodeWatch(options.config.services.node_silence_s)
    # all of 127.0.0.0/8 is this machine
    watch.set_addresses({f"node-{index}": (f"127.0.0.{index + 1}", port) for index in range(count)})
    for index in range(count):
        watch.gone(f"node-{index}")
    times: dict[str, list[float]] = {"watching": [], "time": []}
    for _ in range(options.repeats):
        used, began = time.process_time(), time.perf_counter()
        await asyncio.sleep(SECONDS)
        times["watching"].append(time.process_time() - used)
        times["time"].append(time.perf_counter() - began)
    await watch.close()
    what = f"watching {count} nodes"
    return Ratio.of({what: times["watching"], "time": times["time"]}, what, "time")


@contextmanager
def _accepting() -> Iterator[int]:
    """Accept connections in another process; yield the port."""
    with socket.create_server(("0.0.0.0", 0), backlog=1024) as listener:
        server = get_context("fork").Process(target=_accept, args=(listener,), daemon=True)
        server.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.kill()
            server.join()


def _accept(listener: socket.socket) -> None:
    while True:
        listener.accept()[0].close()

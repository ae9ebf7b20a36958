"""A network in one process, between namespaces: ``python -m tests.cluster.wire SOCKET NAME=ADDRESS
...``.

Each namespace has an interface "wire" (a TUN device). Its packets arrive here and go on to the
namespace of their address: late, not at all, or as fast as the line allows, according to the rules
of their pair. This does what ``tc netem`` does where the kernel has that, but works on every Linux;
a seed determines which packets are lost. Rules are sent to SOCKET as JSON.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
SET_INTERFACE, TUN, PLAIN = 0x400454CA, 0x0001, 0x1000  # TUNSETIFF, IFF_TUN, IFF_NO_PI
INTERFACE = "wire"
LONGEST_QUEUE_S = 0.5
"""Packets that would wait longer for a slow line are dropped, as by routers."""


@dataclass
class Line:
    """One direction between two namespaces."""

    delay_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float = 0.0  # 0: no limit
    cut: bool = False
    free_at: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def due(self, now: float, size: int) -> float | None:
        """Return when a packet of ``size`` bytes that is sent now arrives; None: never."""
        if self.cut or (self.loss and self.chance.random() < self.loss):
            return None
        if self.bytes_per_s:
            if self.free_at - now > LONGEST_QUEUE_S:
                return None
            self.free_at = max(now, self.free_at) + size / self.bytes_per_s
            now = self.free_at
        return now + self.delay_s


def enter(name: str) -> None:
    """Move this thread into the namespace."""
    with open(f"/var/run/netns/{name}", encoding="utf-8") as file:
        _enter(file.fileno())


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


def open_interface(name: str) -> int:
    """Return the file whose reads and writes are the packets of the namespace's interface."""
    enter(name)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, SET_INTERFACE, struct.pack("16sH14x", INTERFACE.encode(), TUN | PLAIN))
    return device


def forward(devices: dict[str, int], places: dict[bytes, str], control: socket.socket) -> None:
    """Forward packets between all namespaces, until ``control`` receives "end"."""
    lines: defaultdict[tuple[str, str], Line] = defaultdict(Line)
    names = {device: name for name, device in devices.items()}
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([control, *devices.values()], [], [], left)
        now = time.monotonic()
        for file in ready:
            if file is control:
                rule = json.loads(control.recv(4096))
                if rule == "end":
                    return
                _apply(lines, **rule)
                continue
            for _ in range(64):
                try:
                    packet = os.read(file, 65536)
                except BlockingIOError:
                    break
                to = places.get(packet[16:20])  # IPv4's destination
                if to is not None:
                    due = lines[names[file], to].due(now, len(packet))
                    if due is not None:
                        count += 1
                        heapq.heappush(waiting, (due, count, devices[to], packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, device, packet = heapq.heappop(waiting)
            try:
                os.write(device, packet)
            except OSError:  # its queue is full, or it is closing: the packet is lost
                continue


def _apply(
    lines: dict[tuple[str, str], Line], between: list[list[str]], seed: int = 0, **rule: float
) -> None:
    for one, other in between:
        for pair in ((one, other), (other, one)):
            chance = random.Random(f"{seed} {pair}")
            lines[pair] = Line(chance=chance, **rule)  # type: ignore[arg-type]


def main(path: str, *places: str) -> None:
    found = dict(place.split("=") for place in places)
    with open("/proc/self/ns/net", encoding="utf-8") as own:
        devices = {name: open_interface(name) for name in found}
        _enter(own.fileno())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control:
        control.bind(path)
        forward(devices, {socket.inet_aton(ip): name for name, ip in found.items()}, control)


if __name__ == "__main__":
    main(*sys.argv[1:])

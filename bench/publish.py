"""Publish and load of packed weights through the ring's channel, against memcpy of the same bytes.

The bytes are random, the path is the run's own: chunks out of a learner's memory into the object store, checked and copied
in place by every explorer, acknowledged. Packing itself is the benchmark ``pack``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import numpy as np
import torch

from bench.timing import Options, Ratio, ray_for
from cluster.pool import ActorPool
from cluster.weights import WeightChannel
from configs.services import Service
from policy.precision.wire import pack_tensors, unpack_into

TENSORS = 16


class Sender:
    """Stands for the learner: holds weights that are packed already."""

    def __init__(self, nbytes: int, chunk_bytes: int):
        rng = np.random.default_rng(0)
        weights = {name: torch.from_numpy(rng.integers(0, 256, size, np.uint8)) for name, size in sizes(nbytes).items()}
        self._manifest, self._chunks = pack_tensors(weights, 0, "nvfp4", chunk_bytes)

    def ready(self) -> dict[str, Any]:
        """Answers once the weights are there."""
        return {}

    def export(self, version: int, backend: str | None = None, weights: str | None = None) -> tuple[Any, dict[str, float]]:
        """The manifest under a new version number."""
        return dataclasses.replace(self._manifest, version=version), {}

    def chunk_by_reference(self, index: int) -> tuple[int, np.ndarray]:
        """As ``actors.learner.LearnerActor.chunk_by_reference``."""
        return self._chunks[index].nbytes, self._chunks[index]


class Receiver:
    """Stands for an explorer: buffers that are loaded in place."""

    def __init__(self, nbytes: int):
        self._targets = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes(nbytes).items()}

    def ready(self) -> dict[str, Any]:
        """Answers once the buffers are there."""
        return {}

    def load(self, backend: str | None, manifest: Any, *chunks: np.ndarray) -> tuple[int, str]:
        """As ``policy.explorer.Explorer.load``."""
        unpack_into(manifest, list(chunks), self._targets)
        return manifest.version, manifest.checksum


def sizes(nbytes: int) -> dict[str, int]:
    """Names and sizes of the tensors that make up ``nbytes``."""
    shares = np.diff(np.linspace(0, nbytes, TENSORS + 1).astype(int))
    return {f"weight.{i}": int(size) for i, size in enumerate(shares)}


def measure(options: Options) -> list[Ratio]:
    """One ratio per number of receivers."""
    with ray_for(options.config):
        return asyncio.run(_all(options))


async def _all(options: Options) -> list[Ratio]:
    nbytes = options.publish_bytes
    # written to, both: untouched zeros are one page of the kernel's, which copies out of the cache
    source, target = np.full(nbytes, 7, np.uint8), np.ones(nbytes, np.uint8)
    sender = _pool("sender", Sender, 1, nbytes, options.config.publish.chunk_mb * 2**20)
    await sender.start()
    try:
        return [await _one(options, sender, count, source, target) for count in options.receivers]
    finally:
        await sender.stop()


async def _one(options: Options, sender: ActorPool, count: int, source: np.ndarray, target: np.ndarray) -> Ratio:
    name = f"publish to {count}"
    receivers = _pool(f"receiver{count}", Receiver, count, options.publish_bytes)
    await receivers.start()
    channel = WeightChannel(lambda *args, **fields: None)
    times: dict[str, list[float]] = {name: [], "memcpy": []}
    try:
        for turn in range(options.repeats + 1):
            start = time.perf_counter()
            np.copyto(target, source)
            copied = time.perf_counter()
            await channel.publish(turn, sender, receivers)
            published = time.perf_counter()
            if turn:  # the first turn touches fresh memory
                times["memcpy"].append(copied - start)
                times[name].append(published - copied)
    finally:
        await receivers.stop()
    rate = options.publish_bytes / min(times["memcpy"]) / 1e9
    return Ratio.of(times, name, "memcpy", note=f"{options.publish_bytes / 2**20:g} MiB; memcpy {rate:.1f} GB/s")


def _pool(kind: str, actor: type, count: int, *args: Any) -> ActorPool:
    import ray

    remote = ray.remote(actor)
    service = Service(actors=count, max_attempts=1, max_restarts=0)
    return ActorPool(kind, lambda name: remote.options(num_cpus=0).remote(*args), service, lambda *a, **fields: None)

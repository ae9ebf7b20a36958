"""Publish and load of packed weights through the ring's channel, against memcpy of the same bytes.

The bytes are random, the path is the run's own: chunks out of a learner's memory into the object
store, checked and copied in place by every explorer, acknowledged. Packing itself is the benchmark
``pack``. To make do with little memory the sender holds one chunk, which it sends again and again,
and a version is let go before the next is sent. What still has no room is left out, with the
reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import torch
import xxhash

from actors.messages import ActorInfo, Exported, WeightsId
from actors.runtime import identity
from bench.timing import Options, Ratio, ray_for, silent
from cluster.driver.learners import LearnerGroup
from cluster.driver.weights import WeightChannel
from cluster.runtime.pool import ActorPool
from configs.services import LearnerService, RolloutService, Service
from planning.object_store import SPILLS_AT, store_size
from policy.precision.backends import wire_formats
from policy.precision.manifest import Entry, Manifest
from policy.precision.wire import unpack_into

TENSORS = 16
COPIED_AT_ONCE = 10**9
"""memcpy goes through so much memory, as often as it takes: far more than any cache holds."""
KEPT_FREE = 3 * 10**9
WARM_UP = 2


class Sender:
    """Stands for the learner: holds weights that are packed already, all shards of which begin like
    the one that it has. Every second version is another, so that all shards are sent every time.
    """

    def __init__(self, nbytes: int, shard_bytes: int):
        shape = (2, min(shard_bytes, nbytes))
        self._chunks = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        self._sizes = tuple(
            min(shard_bytes, nbytes - start) for start in range(0, nbytes, shard_bytes)
        )
        named, entries, offset = sizes(nbytes), [], 0
        for name, size in named.items():
            entries.append(Entry(name, "uint8", (size,), offset, size))
            offset += size
        known = {
            (which, size): xxhash.xxh3_64_hexdigest(chunk[:size].data)
            for which, chunk in enumerate(self._chunks)
            for size in set(self._sizes)
        }
        self._manifests = [
            Manifest(
                which,
                "nvfp4",
                wire_formats()["nvfp4"],
                self._sizes,
                tuple(known[which, size] for size in self._sizes),
                tuple(entries),
            )
            for which in (0, 1)
        ]
        self._version = 0

    def ready(self) -> ActorInfo:
        """Answers once the weights are there."""
        return identity()

    def export(
        self, version: int, backend: str | None = None, weights: str | None = None
    ) -> Exported:
        """The manifest under a new version number."""
        self._version = version
        return Exported(dataclasses.replace(self._manifests[version % 2], version=version), {})

    def shard(self, index: int) -> tuple[int, np.ndarray]:
        """As ``actors.learner.LearnerActor.shard``."""
        return self._sizes[index], self._chunks[self._version % 2, : self._sizes[index]]


class Receiver:
    """Stands for an explorer: buffers that are loaded in place."""

    def __init__(self, nbytes: int):
        self._targets = {
            name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes(nbytes).items()
        }
        self._manifest: Manifest | None = None

    def ready(self) -> ActorInfo:
        """Answers once the buffers are there."""
        return identity()

    def load(
        self, backend: str | None, manifest: Manifest, sent: Sequence[int], *shards: np.ndarray
    ) -> WeightsId:
        """As ``actors.rollout.RolloutActor.load``."""
        arrived = dict(zip(sent, shards, strict=True))
        parts = [arrived.get(index) for index in range(len(manifest.hashes))]
        unpack_into(manifest, parts, self._targets, self._manifest)
        self._manifest = manifest
        return WeightsId(manifest.version, manifest.checksum, backend)


def sizes(nbytes: int) -> dict[str, int]:
    """Names and sizes of the tensors that make up ``nbytes``."""
    shares = np.diff(np.linspace(0, nbytes, TENSORS + 1).astype(int))
    return {f"weight.{i}": int(size) for i, size in enumerate(shares)}


def measure(options: Options) -> list[Ratio]:
    """One ratio per size and number of receivers. Every size has a Ray of its own: a store keeps
    the memory that it once used.
    """
    ratios = []
    for nbytes, counts in options.broadcasts:
        with _ray(options, nbytes):
            ratios += asyncio.run(_to_each(options, nbytes, counts))
    return ratios


@contextmanager
def _ray(options: Options, nbytes: int) -> Iterator[None]:
    """Ray as the caller left it, the cluster of RAY_ADDRESS, or one with a store that a version
    fits into.
    """
    import ray

    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        with ray_for(options.config):
            yield
        return
    store = store_size(min(nbytes, psutil.virtual_memory().available))
    ray.init(
        "local",
        num_cpus=4,
        object_store_memory=store,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


async def _to_each(options: Options, nbytes: int, counts: Sequence[int]) -> list[Ratio]:
    """A ratio for each of these numbers of receivers."""
    import ray

    ratios, sender, available = [], None, psutil.virtual_memory().available
    store = ray.cluster_resources().get("object_store_memory", 0.0)
    for count in counts:
        name = f"{nbytes / 1e9:.3g} GB to {count}"
        if why := no_room(nbytes, count, available, store):
            print(f"publish  {name}: left out: {why}", flush=True)
            continue
        if sender is None:
            sender = learner(nbytes, options.config.publish.shard_mb * 2**20)
            await sender.start()
        ratios.append(await _one(options, sender, name, nbytes, count))
    if sender is not None:
        await sender.stop()
    return ratios


def no_room(nbytes: int, count: int, available: float, store: float) -> str | None:
    """Why a version of ``nbytes`` cannot be sent to ``count`` explorers where there is so much
    ``available`` memory and object ``store``, in bytes, with ``KEPT_FREE`` left to others; None: it
    can.
    """
    if store * SPILLS_AT < nbytes:
        return (
            f"the object store has {store / 1e9:.3g} GB: ray start"
            f" --object-store-memory={store_size(nbytes)}"
        )
    needed = nbytes * (1 + count) + 2 * min(nbytes, COPIED_AT_ONCE)
    if available < needed + KEPT_FREE:
        return (
            f"needs {needed / 1e9:.3g} GB of memory and {KEPT_FREE / 1e9:g} GB beside it,"
            f" {available / 1e9:.3g} GB are free"
        )
    return None


async def _one(options: Options, sender: LearnerGroup, name: str, nbytes: int, count: int) -> Ratio:
    service = RolloutService(actors=count, max_attempts=1, max_restarts=0)
    receivers = _pool(f"receiver{count}", service, Receiver, nbytes)
    await receivers.start()
    # written to, both: untouched zeros are one page of the kernel's, which copies out of the cache
    source, target = (np.full(min(nbytes, COPIED_AT_ONCE), value, np.uint8) for value in (7, 1))
    times: dict[str, list[float]] = {name: [], "memcpy": []}
    try:
        for turn in range(WARM_UP + options.repeats):
            start = time.perf_counter()
            for first in range(0, nbytes, COPIED_AT_ONCE):
                np.copyto(target[: nbytes - first], source[: nbytes - first])
            copied = time.perf_counter()
            await WeightChannel(silent).publish(turn, sender.client, receivers)
            published = time.perf_counter()
            if turn >= WARM_UP:  # before that memory is touched for the first time
                times["memcpy"].append(copied - start)
                times[name].append(published - copied)
    finally:
        await receivers.stop()
    rate = nbytes / min(times["memcpy"]) / 1e9
    return Ratio.of(
        times, name, "memcpy", note=f"{count * nbytes / 1e9:.3g} GB in all; memcpy {rate:.1f} GB/s"
    )


def learner(nbytes: int, shard_bytes: int) -> LearnerGroup:
    """A learner alone, which is a ``Sender``."""
    service = LearnerService(max_restarts=0)
    return LearnerGroup(_pool("sender", service, Sender, nbytes, shard_bytes))


def _pool(kind: str, service: Service, actor: type, *args: Any) -> ActorPool:
    import ray

    remote = ray.remote(actor)
    return ActorPool(kind, lambda name: remote.options(num_cpus=0).remote(*args), service, silent)

"""Benchmark of publishing packed weights through the ring's channel, relative to memcpy.

The bytes are random, but the path is that of a run: shards from a learner's memory go to the object
store, and every explorer checks them, copies them in place and acknowledges. Packing is measured by
the benchmark ``pack``. To save memory the sender holds one shard, which it sends repeatedly, and a
version is released before the next is sent. Cases without enough memory are skipped with a reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
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
from cluster.driver.learner_group import LearnerGroup
from cluster.driver.weights import WeightChannel
from cluster.runtime.local_ray import start_ray
from cluster.runtime.pool import ActorPool
from configs.services import LearnerService, RolloutService, Service
from planning.object_store import SPILLS_AT, store_size
from policy.precision.backends import wire_formats
from policy.precision.manifest import Entry, Manifest
from policy.precision.wire import unpack_into

TENSORS = 16
COPIED_AT_ONCE = 10**9
"""Size of the memcpy buffers, copied repeatedly: far larger than any cache."""
KEPT_FREE = 3 * 10**9
WARM_UP = 2


class Sender:
    """Stand-in for the learner with packed weights.

    All its shards are prefixes of one shard, so that it needs little memory. Consecutive versions
    have different contents, so that all shards are sent every time.
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
        digests = {
            (parity, size): xxhash.xxh3_64_hexdigest(chunk[:size].data)
            for parity, chunk in enumerate(self._chunks)
            for size in set(self._sizes)
        }
        self._manifests = [
            Manifest(
                parity,
                "nvfp4",
                wire_formats()["nvfp4"],
                self._sizes,
                tuple(digests[parity, size] for size in self._sizes),
                tuple(entries),
            )
            for parity in (0, 1)
        ]
        self._version = 0

    def ready(self) -> ActorInfo:
        """Return the actor's identity once the weights exist."""
        return identity()

    def export(
        self, version: int, backend: str | None = None, weights: str | None = None
    ) -> Exported:
        """Return the manifest with a new version number."""
        self._version = version
        return Exported(dataclasses.replace(self._manifests[version % 2], version=version), {})

    def shard(self, index: int) -> tuple[int, np.ndarray]:
        """Return (size, bytes) of a shard, like ``actors.learner.LearnerActor.shard``."""
        return self._sizes[index], self._chunks[self._version % 2, : self._sizes[index]]


class Receiver:
    """Stand-in for an explorer with buffers that are loaded in place."""

    def __init__(self, nbytes: int):
        self._targets = {
            name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes(nbytes).items()
        }
        self._manifest: Manifest | None = None

    def ready(self) -> ActorInfo:
        """Return the actor's identity once the buffers exist."""
        return identity()

    def load(
        self, backend: str | None, manifest: Manifest, sent: Sequence[int], *shards: np.ndarray
    ) -> WeightsId:
        """Load published weights, like ``actors.rollout.RolloutActor.load``."""
        received = dict(zip(sent, shards, strict=True))
        parts = [received.get(index) for index in range(len(manifest.hashes))]
        unpack_into(manifest, parts, self._targets, self._manifest)
        self._manifest = manifest
        return WeightsId(manifest.version, manifest.checksum, backend)


def sizes(nbytes: int) -> dict[str, int]:
    """Return names and sizes of tensors that add up to ``nbytes``."""
    shares = np.diff(np.linspace(0, nbytes, TENSORS + 1).astype(int))
    return {f"weight.{i}": int(size) for i, size in enumerate(shares)}


def measure(options: Options) -> list[Ratio]:
    """Return one ratio per size and number of receivers.

    Every size runs in a separate Ray instance, because an object store keeps the memory that it has
    used.
    """
    ratios = []
    for nbytes, counts in options.broadcasts:
        with _ray(options, nbytes):
            ratios += asyncio.run(_ratios(options, nbytes, counts))
    return ratios


@contextmanager
def _ray(options: Options, nbytes: int) -> Iterator[None]:
    """Use the initialized Ray or the cluster of RAY_ADDRESS, or start a local Ray.

    The object store of the latter has room for a version of ``nbytes``.
    """
    import ray

    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        with ray_for(options.config):
            yield
        return
    store = store_size(min(nbytes, psutil.virtual_memory().available))
    start_ray(num_cpus=4, object_store_memory=store)
    try:
        yield
    finally:
        ray.shutdown()


async def _ratios(options: Options, nbytes: int, counts: Sequence[int]) -> list[Ratio]:
    """Return a ratio for each of these numbers of receivers."""
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
        ratios.append(await _ratio(options, sender, name, nbytes, count))
    if sender is not None:
        await sender.stop()
    return ratios


def no_room(nbytes: int, count: int, available: float, store: float) -> str | None:
    """Return why a version of ``nbytes`` cannot be sent to ``count`` explorers, or None if it can.

    ``available`` memory and the size of the object ``store`` are in bytes; ``KEPT_FREE`` bytes of
    memory are left to others.
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


async def _ratio(
    options: Options, sender: LearnerGroup, name: str, nbytes: int, count: int
) -> Ratio:
    service = RolloutService(actors=count, max_attempts=1, max_restarts=0)
    receivers = _pool(f"receiver{count}", service, Receiver, nbytes)
    await receivers.start()
    # both are written to: untouched zeros map to a single kernel page, which is read from the cache
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
            if turn >= WARM_UP:  # earlier turns touch memory for the first time
                times["memcpy"].append(copied - start)
                times[name].append(published - copied)
    finally:
        await receivers.stop()
    rate = nbytes / min(times["memcpy"]) / 1e9
    return Ratio.of(
        times, name, "memcpy", note=f"{count * nbytes / 1e9:.3g} GB in all; memcpy {rate:.1f} GB/s"
    )


def learner(nbytes: int, shard_bytes: int) -> LearnerGroup:
    """Return a learner group of a single ``Sender``."""
    service = LearnerService(max_restarts=0)
    return LearnerGroup(_pool("sender", service, Sender, nbytes, shard_bytes))


def _pool(kind: str, service: Service, actor: type, *args: Any) -> ActorPool:
    import ray

    remote = ray.remote(actor)
    return ActorPool(kind, lambda name: remote.options(num_cpus=0).remote(*args), service, silent)

"""Memory measurement during a run: bytes in actors, in their processes and in the object store."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from configs.schema import RunConfig
from configs.section import Tree
from records.rundir import RunDirectory

EVERY_S, EVERYTHING_EVERY_S = 0.1, 1.0
"""Seconds between measurements of single processes and of the total.

The store holds two versions of the weights for less than a second, while the actors load one.
"""


def tensor_bytes(actor: Any) -> int:
    """Return the bytes of all tensors in the actor's process.

    The shards that a learner keeps are included.
    """
    import torch

    sizes: dict[int, int] = {}
    for item in gc.get_objects():
        if type(item) is torch.Tensor or type(item) is torch.nn.Parameter:
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    shards: list[Any] = getattr(actor, "_shards", [])
    return sum(sizes.values()) + sum(item.nbytes for item in shards)


class BaselineActor:
    """Actor that imports what the other actors import and holds nothing else."""

    def __init__(self) -> None:
        import diffusers

        from actors import learner, rollout
        from learner import trainer

        autoencoders = diffusers.AutoencoderDC, diffusers.AutoencoderKL
        self.imported = (learner, rollout, trainer, *autoencoders)

    def memory(self) -> int:
        """Return the bytes of memory of this process."""
        return memory_of(os.getpid())


def memory_of(pid: int) -> int:
    """Return the bytes of a process's own memory, without pages shared through the object store.

    Returns 0 if the process has ended.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    kinds = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    own = (kinds[name] for name in ("RssAnon", "RssFile") if name in kinds)
    return sum(int(size.split()[0]) * 1024 for size in own)


@dataclass
class MemoryMeasurements:
    """Sizes in bytes, measured during a run.

    ``tensors`` and ``process`` are per kind of actor: bytes of tensors, and the peak memory of a
    process once its actor has started. ``libraries`` is the memory of a process that only imports
    the libraries. ``at_once`` is the peak sum over all processes and the store; memory shared by
    processes counts in each of them.
    """

    tensors: dict[str, int] = field(default_factory=dict[str, int])
    process: dict[str, int] = field(default_factory=dict[str, int])
    libraries: int = 0
    store: int = 0
    at_once: int = 0
    broadcast: int = 0
    seconds: float = 0.0


class MemoryMonitor(threading.Thread):
    """Thread that measures the actors of a run while it runs."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(daemon=True)
        self.config, self.found, self.ended = config, MemoryMeasurements(), threading.Event()
        self.rundir = RunDirectory.of(config)
        self.trouble: str | None = None

    def run(self) -> None:
        """Measure every ``EVERY_S`` seconds until ``ended`` is set."""
        last_total = 0.0
        while not self.ended.wait(EVERY_S):
            try:
                events = self.rundir.events()
                started = [event for event in events if event["event"] == "actor_started"]
                for event in started:
                    self._process(event)
                if ray.is_initialized():
                    self.found.store = max(self.found.store, store_bytes())
                if time.monotonic() - last_total > EVERYTHING_EVERY_S and ray.is_initialized():
                    last_total = time.monotonic()
                    self._everything([event["pid"] for event in started])
                versions = [each for each in events if each["event"] == "version_published"]
                if not self.found.libraries and ray.is_initialized():
                    self._libraries()
                if len(versions) > 1 and not self.found.tensors:
                    self.found.broadcast = versions[-1]["bytes"]
                    self._tensors(started)
            except Exception as error:  # reported at the end; the run continues
                self.trouble = f"{type(error).__name__}: {error}"

    def _process(self, event: Tree) -> None:
        before = self.found.process.get(event["kind"], 0)
        self.found.process[event["kind"]] = max(before, memory_of(event["pid"]))

    def _everything(self, pids: Sequence[int]) -> None:
        total = store_bytes() + sum(memory_of(pid) for pid in (os.getpid(), *pids))
        self.found.at_once = max(self.found.at_once, total)

    def _libraries(self) -> None:
        bare: Any = ray.remote(BaselineActor)
        self.found.libraries = ray.get(bare.options(num_cpus=0).remote().memory.remote())

    def _tensors(self, started: Sequence[Tree]) -> None:
        """Measure the tensors of one actor of each kind.

        All requests are sent at once, because the run ends soon; each is served between two tasks
        of its actor.
        """
        namespace = f"sol-rl-{ray.get_runtime_context().get_job_id()}"
        answers: Tree = {}
        for event in started:
            kind = event["kind"]
            if kind in ("rollout", "learner", "encoder"):
                name = f"{self.config.name}/{kind}-{event['actor']}.{event['incarnation']}"
                actor: Any = ray.get_actor(name, namespace=namespace)
                answers[kind] = actor.__ray_call__.remote(tensor_bytes)
        self.found.tensors = {kind: ray.get(answer) for kind, answer in answers.items()}


def store_bytes() -> int:
    """Return the number of bytes used in the object store of this machine."""
    from ray._private import internal_api, state

    address = ray.get_runtime_context().gcs_address
    reply = internal_api.get_memory_info_reply(internal_api.get_state_from_address(address))
    assert state is not None
    return int(reply.store_stats.object_store_bytes_used)

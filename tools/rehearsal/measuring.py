"""What is looked at while it runs: bytes in actors, in their processes, and in the object store."""

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
"""The store holds two versions of the weights for less than a second, while the actors load one."""


def held(actor: Any) -> int:
    """Bytes of all tensors in an actor's process, and of the shards that a learner keeps."""
    import torch

    sizes: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) is torch.Tensor or type(each) is torch.nn.Parameter:
            storage = each.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    shards: list[Any] = getattr(actor, "_shards", [])
    return sum(sizes.values()) + sum(each.nbytes for each in shards)


class Bare:
    """A process that has imported what actors import, and holds nothing."""

    def __init__(self) -> None:
        import diffusers

        import actors.learner
        import actors.rollout
        import learner.trainer

        self.imported = (actors, learner, diffusers.AutoencoderDC, diffusers.AutoencoderKL)

    def memory(self) -> int:
        """Bytes of this process."""
        return memory_of(os.getpid())


def memory_of(pid: int) -> int:
    """Bytes of a process that are its own: not what it shares through the object store. Where it
    has ended, 0.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return 0
    kinds = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    own = (kinds[name] for name in ("RssAnon", "RssFile") if name in kinds)
    return sum(int(size.split()[0]) * 1024 for size in own)


@dataclass
class Measured:
    """Bytes by kind of actor: of tensors, and of the process at most since it answered; ``at_once``
    of all processes and the store, where what they share counts in each.
    """

    tensors: dict[str, int] = field(default_factory=dict[str, int])
    process: dict[str, int] = field(default_factory=dict[str, int])
    libraries: int = 0
    store: int = 0
    at_once: int = 0
    broadcast: int = 0
    seconds: float = 0.0


class Watch(threading.Thread):
    """Looks at the actors of a run while it runs."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(daemon=True)
        self.config, self.found, self.ended = config, Measured(), threading.Event()
        self.rundir = RunDirectory.of(config)
        self.trouble: str | None = None

    def run(self) -> None:
        """Until ``ended``."""
        looked = 0.0
        while not self.ended.wait(EVERY_S):
            try:
                events = self.rundir.events()
                started = [event for event in events if event["event"] == "actor_started"]
                for event in started:
                    self._process(event)
                if ray.is_initialized():
                    self.found.store = max(self.found.store, store_bytes())
                if time.monotonic() - looked > EVERYTHING_EVERY_S and ray.is_initialized():
                    looked = time.monotonic()
                    self._everything([event["pid"] for event in started])
                versions = [each for each in events if each["event"] == "version_published"]
                if not self.found.libraries and ray.is_initialized():
                    self._libraries()
                if len(versions) > 1 and not self.found.tensors:
                    self.found.broadcast = versions[-1]["bytes"]
                    self._tensors(started)
            except Exception as error:  # told at the end; the run itself goes on
                self.trouble = f"{type(error).__name__}: {error}"

    def _process(self, event: Tree) -> None:
        before = self.found.process.get(event["kind"], 0)
        self.found.process[event["kind"]] = max(before, memory_of(event["pid"]))

    def _everything(self, pids: Sequence[int]) -> None:
        total = store_bytes() + sum(memory_of(pid) for pid in (os.getpid(), *pids))
        self.found.at_once = max(self.found.at_once, total)

    def _libraries(self) -> None:
        bare: Any = ray.remote(Bare)
        self.found.libraries = ray.get(bare.options(num_cpus=0).remote().memory.remote())

    def _tensors(self, started: Sequence[Tree]) -> None:
        """Asked between two tasks of each actor, at once, as the run ends soon."""
        space = f"sol-rl-{ray.get_runtime_context().get_job_id()}"
        asked: Tree = {}
        for event in started:
            kind = event["kind"]
            if kind in ("rollout", "learner", "encoder"):
                name = f"{self.config.name}/{kind}-{event['actor']}.{event['incarnation']}"
                actor: Any = ray.get_actor(name, namespace=space)
                asked[kind] = actor.__ray_call__.remote(held)
        self.found.tensors = {kind: ray.get(answer) for kind, answer in asked.items()}


def store_bytes() -> int:
    """Bytes in the object store of this machine."""
    from ray._private import internal_api, state

    address = ray.get_runtime_context().gcs_address
    reply = internal_api.get_memory_info_reply(internal_api.get_state_from_address(address))
    assert state is not None
    return int(reply.store_stats.object_store_bytes_used)

"""Learners that train one LoRA: each has the gradient of its samples, all take the summed step.

Data-parallel in torch.distributed's sense: NCCL on GPUs, gloo on the CPU. Two operations, both of
which every replica must call in the same order: ``add`` of tensors, and ``exchange`` of small
messages as JSON.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from learner.nonfinite import NonFiniteTraining
from policy.device import synchronize
from records.errors import first_line

Value = TypeVar("Value")


class GroupBroken(RuntimeError):
    """Another replica is gone, silent or unreachable: this one is of no use without it."""


class ReplicaFailed(RuntimeError):
    """The update failed on another replica, so it was taken back here too."""


class ReplicasDiffer(RuntimeError):
    """Replicas that must be equal bit by bit are not."""


class Replicas:
    """The group of a learner that is alone: adding changes nothing, not even the last bit."""

    rank = 0
    size = 1

    def exchange(self, message: Any) -> list[Any]:
        """The messages of all replicas, by rank. A message is anything that JSON can hold."""
        return [message]

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Put into every tensor, in place, its sum over the replicas: the same bits on each."""

    def take_times(self) -> dict[str, float]:
        """Seconds spent with the others since the last call, by metric name; alone: nothing."""
        return {}

    def together(self, work: Callable[[], Value]) -> tuple[Value, list[float | None]]:
        """(what ``work`` returns here; what it returns on each replica, None for no number).

        Where it raises on one replica it raises on all, so that none waits for another in vain:
        there the error itself, elsewhere NonFiniteTraining again or ReplicaFailed, which name the
        replica.
        """
        error: Exception | None = None
        mine: list[Value] = []
        message: dict[str, object] = {}
        try:
            mine = [work()]
            message = {"value": mine[0] if isinstance(mine[0], int | float) else None}
        except NonFiniteTraining as found:
            error, message = found, {"what": found.what, "module": found.module}
        except Exception as found:  # whatever it is, the others must learn of it
            error, message = found, {"error": f"{type(found).__name__}: {found}"}
        # whatever happened here: the others wait for this word before they go on
        answers = self.exchange(message)
        if error is not None:
            raise error
        for rank, other in enumerate(answers):
            if "what" in other:
                raise NonFiniteTraining(f"{other['what']} (replica {rank})", other["module"])
            if "error" in other:
                raise ReplicaFailed(f"replica {rank} of the learner failed: {other['error']}")
        return mine[0], [other["value"] for other in answers]

    def require_alike(self, checksum: str, when: str) -> None:
        """Raises ReplicasDiffer unless every replica gives the same ``checksum``."""
        found = self.exchange(checksum)
        if len(set(found)) > 1:
            raise ReplicasDiffer(
                f"the replicas of the learner differ {when}: checksums {', '.join(found)}; run them"
                " on one kind of device with one version of torch, and start again from the last"
                " checkpoint"
            )


class DistributedReplicas(Replicas):
    """One of several processes, each with a device of its own. One such group per process."""

    def __init__(
        self, rank: int, size: int, store: dist.Store, device: torch.device, timeout_s: float
    ) -> None:
        """Joins the others at ``store``; ``timeout_s`` limits every wait. Raises GroupBroken."""
        self.rank, self.size, self.device = rank, size, device
        self._times = {"time/allreduce_s": 0.0, "time/replica_wait_s": 0.0}
        # a process can be in one group only, and may have been in one that broke
        leave()
        with self._naming("joining them"):
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )

    def exchange(self, message: Any) -> list[Any]:
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(
            self.device
        )
        with self._naming("waiting for their word"), self._timed("time/replica_wait_s"):
            # only tensors of one size can be gathered, so the longest message sets it
            length = torch.tensor([len(data)], device=self.device)
            lengths = [torch.empty_like(length) for _ in range(self.size)]
            dist.all_gather(lengths, length)
            longest = max(int(each) for each in lengths)
            padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
            padded[: len(data)] = data
            found = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(found, padded)
        return [
            json.loads(bytes(part[: int(count)].cpu().numpy()))
            for part, count in zip(found, lengths, strict=True)
        ]

    def add(self, tensors: Sequence[Tensor]) -> None:
        """One all-reduce of everything, flat, in the tensors' own precision."""
        with self._naming("adding gradients"), self._timed("time/allreduce_s"):
            # one call: a LoRA has hundreds of small tensors, and each would wait for the network
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.all_reduce(flat, op=dist.ReduceOp.SUM)
            for tensor, part in zip(
                tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
            ):
                tensor.copy_(part.view_as(tensor))

    def take_times(self) -> dict[str, float]:
        taken, self._times = self._times, dict.fromkeys(self._times, 0.0)
        return taken

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        # kernels are only queued by then: without this the next wait would have their time
        synchronize(self.device)
        start = time.perf_counter()
        yield
        synchronize(self.device)
        self._times[name] += time.perf_counter() - start

    @contextmanager
    def _naming(self, doing: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:  # a RuntimeError too, and no fault of the others
            raise
        # what torch.distributed raises for a lost peer and for silence
        except RuntimeError as error:
            reason = first_line(error)
            raise GroupBroken(
                f"replica {self.rank} of {self.size} lost the others while {doing}: {reason}"
            ) from None


def open_store(host: str, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """(store, port) for the rendezvous, open on ``host`` alone as long as the object lives."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # our own socket: the store by itself would listen on every address of the machine
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, port


def reach_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The store that another replica opened. Raises GroupBroken."""
    try:
        return dist.TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        reason = first_line(error)
        raise GroupBroken(
            f"nobody answers at {host}:{port}, the rendezvous of the learner's replicas: {reason}"
        ) from None


def leave() -> None:
    """Let go of the group that this process was in, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()

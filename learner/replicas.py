"""Data-parallel replicas of the learner: gradients are summed, and all take the same step.

It uses torch.distributed, with NCCL on GPUs and gloo on CPUs. There are two operations, which every
replica must call in the same order: ``all_reduce`` of tensors, and ``all_gather`` of JSON messages.
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
    """Another replica is lost, silent or unreachable, so that this one cannot continue."""


class ReplicaFailed(RuntimeError):
    """The update failed on another replica, so it was rolled back here too."""


class ReplicasDiffer(RuntimeError):
    """Replicas that must be bit-identical are not."""


class Replicas:
    """The trivial group of a single learner: sums over replicas change nothing, not even a bit."""

    rank = 0
    size = 1

    def all_gather(self, message: Any) -> list[Any]:
        """Return the messages of all replicas, by rank. A message is any JSON value."""
        return [message]

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor, in place, by its sum over the replicas, bit-identical on all."""

    def take_times(self) -> dict[str, float]:
        """Return the seconds spent in communication since the last call, by metric name."""
        return {}

    def run_on_all(self, work: Callable[[], Value]) -> tuple[Value, list[float | None]]:
        """Run ``work`` on all replicas; return (its result here, its numeric result on each).

        If it raises on one replica, this method raises on all, so that none waits in vain: on that
        replica the error itself, on the others NonFiniteTraining or ReplicaFailed with its rank.
        """
        error: Exception | None = None
        mine: list[Value] = []
        message: dict[str, object] = {}
        try:
            mine = [work()]
            message = {"value": mine[0] if isinstance(mine[0], int | float) else None}
        except NonFiniteTraining as caught:
            error, message = caught, {"what": caught.what, "module": caught.module}
        except Exception as caught:  # any error must be reported to the others
            error, message = caught, {"error": f"{type(caught).__name__}: {caught}"}
        # in any case, as the others wait for this message before they continue
        answers = self.all_gather(message)
        if error is not None:
            raise error
        for rank, other in enumerate(answers):
            if "what" in other:
                raise NonFiniteTraining(f"{other['what']} (replica {rank})", other["module"])
            if "error" in other:
                raise ReplicaFailed(f"replica {rank} of the learner failed: {other['error']}")
        return mine[0], [other["value"] for other in answers]

    def require_alike(self, checksum: str, when: str) -> None:
        """Raise ReplicasDiffer unless all replicas pass the same ``checksum``."""
        checksums = self.all_gather(checksum)
        if len(set(checksums)) > 1:
            raise ReplicasDiffer(
                f"the replicas of the learner differ {when}: checksums {', '.join(checksums)};"
                " run them on one kind of device with one version of torch, and start again from"
                " the last checkpoint"
            )


class DistributedReplicas(Replicas):
    """One of several replicas, each a process with its own device. One group per process."""

    def __init__(
        self, rank: int, size: int, store: dist.Store, device: torch.device, timeout_s: float
    ) -> None:
        """Join the others through ``store``; every wait has ``timeout_s``. Raises GroupBroken."""
        self.rank, self.size, self.device = rank, size, device
        self._times = {"time/allreduce_s": 0.0, "time/replica_wait_s": 0.0}
        # a process can be in one group only, and may still be in one that broke
        leave_group()
        with self._naming("joining them"):
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )

    def all_gather(self, message: Any) -> list[Any]:
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(
            self.device
        )
        with self._naming("waiting for their messages"), self._timed("time/replica_wait_s"):
            # only tensors of one size can be gathered, so the longest message sets it
            length = torch.tensor([len(data)], device=self.device)
            lengths = [torch.empty_like(length) for _ in range(self.size)]
            dist.all_gather(lengths, length)
            longest = max(int(count) for count in lengths)
            padded = torch.zeros(longest, dtype=torch.uint8, device=self.device)
            padded[: len(data)] = data
            gathered = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(gathered, padded)
        return [
            json.loads(bytes(part[: int(count)].cpu().numpy()))
            for part, count in zip(gathered, lengths, strict=True)
        ]

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Sum all tensors by a single all-reduce, flattened, in their own precision."""
        with self._naming("adding gradients"), self._timed("time/allreduce_s"):
            # one call, as a LoRA has hundreds of small tensors with a network latency for each
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
        # wait for queued kernels: otherwise their time would be counted as communication
        synchronize(self.device)
        start = time.perf_counter()
        yield
        synchronize(self.device)
        self._times[name] += time.perf_counter() - start

    @contextmanager
    def _naming(self, doing: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:  # also a RuntimeError, but unrelated to other replicas
            raise
        # torch.distributed raises RuntimeError for a lost peer and for a timeout
        except RuntimeError as error:
            reason = first_line(error)
            raise GroupBroken(
                f"replica {self.rank} of {self.size} lost the others while {doing}: {reason}"
            ) from None


def open_store(host: str, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """Open the store of the rendezvous on ``host``; return (store, port).

    It is open as long as the store object exists.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # our own socket, as the store by itself would listen on all addresses of the machine
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
    """Connect to the store that another replica opened. Raises GroupBroken."""
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
            f"no answer at {host}:{port}, the rendezvous of the learner's replicas: {reason}"
        ) from None


def leave_group() -> None:
    """Leave the group that this process is in, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()

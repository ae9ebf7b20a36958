"""Data-parallel learner replicas: each computes the gradient of its samples, all apply the sum.

They communicate by torch.distributed, with NCCL on GPUs and gloo on the CPU. There are two
operations, which all replicas must call in the same order: ``add`` (all-reduce of tensors) and
``exchange`` (all-gather of small JSON messages).
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
from policy.device import synchronise
from records.errors import first_line

Value = TypeVar("Value")


class GroupBroken(RuntimeError):
    """Another replica died, timed out or is unreachable, so this one cannot continue."""


class ReplicaFailed(RuntimeError):
    """The update failed on another replica, so it was rolled back on this one too."""


class ReplicasDiffer(RuntimeError):
    """Replicas that must be bit-identical are not."""


class Replicas:
    """Group of a single learner: adding leaves tensors bit-identical."""

    rank = 0
    size = 1

    def exchange(self, message: Any) -> list[Any]:
        """Send a message to all replicas and return their messages by rank.

        A message is any value that JSON can represent.
        """
        return [message]

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor in place by its sum over the replicas, bit-identical on each."""

    def take_times(self) -> dict[str, float]:
        """Return the seconds of communication since the last call by metric name; alone: empty."""
        return {}

    def together(self, work: Callable[[], Value]) -> tuple[Value, list[float | None]]:
        """Call ``work``, as all replicas do; return (own result, results of all replicas).

        In the second list, a result that is not a number is None.

        If ``work`` raises on one replica, this raises on all, so that none waits for another in
        vain: the original error on the replica that failed, and on the others NonFiniteTraining (if
        that was the error) or ReplicaFailed, which name the failed replica.
        """
        error: Exception | None = None
        results: list[Value] = []
        message: dict[str, object] = {}
        try:
            results = [work()]
            message = {"value": results[0] if isinstance(results[0], int | float) else None}
        except NonFiniteTraining as raised:
            error, message = raised, {"what": raised.what, "module": raised.module}
        except Exception as raised:  # of any kind: the others must be told of it
            error, message = raised, {"error": f"{type(raised).__name__}: {raised}"}
        # after an error too: the others wait for this message before they continue
        answers = self.exchange(message)
        if error is not None:
            raise error
        for rank, other in enumerate(answers):
            if "what" in other:
                raise NonFiniteTraining(f"{other['what']} (replica {rank})", other["module"])
            if "error" in other:
                raise ReplicaFailed(f"replica {rank} of the learner failed: {other['error']}")
        return results[0], [other["value"] for other in answers]

    def require_alike(self, checksum: str, when: str) -> None:
        """Raise ReplicasDiffer unless every replica passes the same ``checksum``."""
        checksums = self.exchange(checksum)
        if len(set(checksums)) > 1:
            raise ReplicasDiffer(
                f"the replicas of the learner differ {when}: checksums {', '.join(checksums)}; run"
                " them on one kind of device with one version of torch, and start again from the"
                " last checkpoint"
            )


class DistributedReplicas(Replicas):
    """Group of several learner processes, each with its own device. At most one per process."""

    def __init__(
        self, rank: int, size: int, store: dist.Store, device: torch.device, timeout_s: float
    ) -> None:
        """Join the others at ``store``; ``timeout_s`` limits every wait. Raises GroupBroken."""
        self.rank, self.size, self.device = rank, size, device
        self._times = {"time/allreduce_s": 0.0, "time/replica_wait_s": 0.0}
        # a process can be in one group only, and may still be in one that broke
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
            # only tensors of equal size can be gathered: messages are padded to the longest one
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

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum all tensors by one flat all-reduce, in their own precision."""
        with self._naming("adding gradients"), self._timed("time/allreduce_s"):
            # one call: a LoRA has hundreds of small tensors, and each call has a network latency
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
        """Add the seconds that the block takes to the metric ``name``."""
        # kernels that are still queued would otherwise be counted as communication
        synchronise(self.device)
        start = time.perf_counter()
        yield
        synchronise(self.device)
        self._times[name] += time.perf_counter() - start

    @contextmanager
    def _naming(self, doing: str) -> Iterator[None]:
        """Convert torch.distributed's errors within the block to GroupBroken, naming ``doing``."""
        try:
            yield
        except torch.OutOfMemoryError:  # also a RuntimeError, but not caused by another replica
            raise
        # torch.distributed raises RuntimeError for a lost peer and for a timeout
        except RuntimeError as error:
            reason = first_line(error)
            raise GroupBroken(
                f"replica {self.rank} of {self.size} lost the others while {doing}: {reason}"
            ) from None


def open_store(host: str, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """Open a rendezvous store that listens on ``host`` only; return (store, port).

    It is open as long as the store object lives.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # by default the store would listen on every address of the machine
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
            f"nobody answers at {host}:{port}, the rendezvous of the learner's replicas: {reason}"
        ) from None


def leave() -> None:
    """Leave the process group that this process is in, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()

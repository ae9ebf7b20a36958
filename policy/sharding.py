"""Sharding of a denoiser's frozen weights over several processes (FSDP2).

With ``torch.distributed.fsdp.fully_shard`` every block gathers its weights before it computes, in
the forward and in the backward pass, and frees them afterwards. A process therefore holds its shard
of all weights plus one or two full blocks. The gathered weights have the same bits, so a pass
computes the same result as on the unsharded model. Adapters are not sharded: each process has all
of them. Every pass and every call of ``whole`` is a collective operation, which all processes must
enter in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from policy.experts import experts_of

if TYPE_CHECKING:  # only for annotations: the driver imports this module too
    from torch.distributed.tensor import DTensor


def blocks_of(transformer: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are gathered one at a time: the blocks in the denoiser's lists."""
    for expert in experts_of(transformer):
        for part in expert.children():
            if isinstance(part, nn.ModuleList):
                yield from part


def shard_base(transformer: nn.Module, device: torch.device) -> None:
    """Shard all weights except the adapters' over the processes, on ``device``, in place.

    The processes are those of torch.distributed's default group, which must be initialized.
    Weights and adapters may be on another device before: at most one full block is on ``device`` at
    a time.
    """
    import warnings

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    # blocks of some families return views; nothing writes into them, as equal gradients confirm
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    adapters = {parameter for name, parameter in transformer.named_parameters() if ".lora_" in name}
    for parameter in adapters:
        # moved explicitly, because fully_shard leaves ignored parameters where they are
        parameter.data = parameter.data.to(device)
    group = dist.group.WORLD
    assert group is not None, "replicas must connect before they shard the base"
    mesh = DeviceMesh.from_group(group, device.type)
    for part in (*blocks_of(transformer), transformer):
        # reshard the root too: the weights gathered for it would otherwise stay after a pass and be
        # stale once an adapter has been merged into the shards
        fully_shard(part, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)


def sharded(tensor: Tensor) -> DTensor | None:
    """Return the tensor itself if it is sharded, else None."""
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor; if it is sharded, gather it from all processes.

    All processes must call this for a sharded tensor.
    """
    shard = sharded(tensor)
    return tensor if shard is None else shard.full_tensor()


def own_rows(shard: DTensor, full: Tensor) -> Tensor:
    """Return this process's rows of ``full``, a tensor in the full shape of ``shard``."""
    rank, size = shard.device_mesh.get_local_rank(), shard.device_mesh.size()
    rows = -(-len(full) // size)  # rows per process, as torch.chunk splits them
    return full[rank * rows : rank * rows + len(shard.to_local())]

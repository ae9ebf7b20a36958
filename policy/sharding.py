"""The frozen weights of a denoiser in shards, one on each of several processes.

``torch.distributed.fsdp.fully_shard`` (FSDP2): every block gathers its weights before it computes,
in the forward and in the backward pass, and lets go of them afterwards, so that a process holds its
share of all weights and one or two whole blocks. What is gathered are the same bits, so a pass
computes what it computes on the whole model. Adapters are no part of it: each process has all of
them. Every pass, and every ``whole``, is a collective: all processes must come to it, in the same
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from policy.experts import experts_of

if TYPE_CHECKING:  # the driver only wants the names below
    from torch.distributed.tensor import DTensor


def blocks_of(transformer: nn.Module) -> Iterator[nn.Module]:
    """Modules that are gathered one at a time: the members of the denoiser's lists of blocks."""
    for whole in experts_of(transformer):
        for part in whole.children():
            if isinstance(part, nn.ModuleList):
                yield from part


def shard_base(transformer: nn.Module, device: torch.device) -> None:
    """Leave this process's share of all weights but the adapters' on ``device``, in place.

    The processes are those of torch.distributed's group, which must be there; weights and adapters
    may lie elsewhere before: no more than one block of them is whole on ``device`` at a time.
    """
    import warnings

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    # blocks of some families return views; nobody writes into them, as equal gradients show
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    adapters = {parameter for name, parameter in transformer.named_parameters() if ".lora_" in name}
    for parameter in adapters:
        # here, as what is ignored below stays where it is
        parameter.data = parameter.data.to(device)
    group = dist.group.WORLD
    assert group is not None, "replicas meet before they share the base"
    mesh = DeviceMesh.from_group(group, device.type)
    for part in (*blocks_of(transformer), transformer):
        # the whole too: its own weights, gathered for a pass, would otherwise stay, and be stale
        # once an adapter has been merged into the shards
        fully_shard(part, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)


def sharded(tensor: Tensor) -> DTensor | None:
    """The tensor itself where it is a share of a larger one; None: it is whole."""
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or gathered from all processes, all of which must ask for it."""
    shard = sharded(tensor)
    return tensor if shard is None else shard.full_tensor()


def own_rows(shard: DTensor, full: Tensor) -> Tensor:
    """The rows of ``full``, a tensor in the shape of the whole, that this process holds."""
    rank, size = shard.device_mesh.get_local_rank(), shard.device_mesh.size()
    each = -(-len(full) // size)  # as torch.chunk deals them
    return full[rank * each : rank * each + len(shard.to_local())]

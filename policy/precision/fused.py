"""Linears that read the same input (to_q, to_k, to_v) as one product.

One larger product uses a GPU's tensor cores better than three small ones. Published weights are
independent of this: each linear is published separately and copied into its rows of the joint
buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from policy.precision.layer import QuantizedLinear


class FusedGroup:
    """The joint layer of a group of linears, with its last result until all members have read it.

    Not thread-safe.
    """

    def __init__(self, layer: QuantizedLinear, sizes: Sequence[int]) -> None:
        self.layer, self.sizes = layer, tuple(sizes)
        # a scalar per layer, such as amax, is published once per member, and all must be equal
        self.single = {
            name: torch.zeros(len(sizes), *buffer.shape, dtype=buffer.dtype)
            for name, buffer in layer.wire_targets().items()
            if not buffer.ndim
        }
        self._input: Tensor | None = None
        self._version = 0
        self._parts: list[Tensor | None] = []

    def part(self, x: Tensor, index: int) -> Tensor:
        """Return the outputs of one member for x; compute the joint result if it is not cached.

        While torch.compile traces, the input is assumed to be unchanged between the calls of the
        members, because attention does not write to it.
        """
        traced = torch.compiler.is_compiling()
        unversioned = not traced and x.is_inference()
        version = 0 if traced or unversioned else x._version
        result = (
            self._parts[index]
            if self._input is x and self._version == version and not unversioned
            else None
        )
        if result is None:
            self._parts = list(self.layer(x).split(self.sizes, dim=-1))
            self._input, self._version = x, version
            result = self._parts[index]
        assert result is not None
        # freed part by part: a block's q, k and v need not all stay until the next block
        self._parts[index] = None
        if all(part is None for part in self._parts):
            self._input, self._parts = None, []
        return result

    def finish_loading(self) -> None:
        """Finish loading after all members are filled; raise ValueError if their scalars differ."""
        for name, values in self.single.items():
            if not bool((values == values[0]).all()):
                raise ValueError(
                    f"fused linear layers were packed with different {name}: {values.tolist()}:"
                    " publish again"
                )
            self.layer.wire_targets()[name].copy_(values[0])
        self.layer.finish_loading()


class FusedMember(nn.Module):
    """One linear of a fused group, x [..., K] -> [..., N]; the first one owns the joint layer."""

    def __init__(self, joint: FusedGroup, index: int) -> None:
        super().__init__()
        self._joint, self._index = joint, index
        self.in_features, self.out_features = joint.layer.in_features, joint.sizes[index]
        # registered in one member only, so that the joint weights are moved and counted once
        if index == 0:
            self.layer = joint.layer

    def forward(self, x: Tensor) -> Tensor:
        """Return this member's part of the joint result."""
        return self._joint.part(x, self._index)

    def wire_targets(self) -> dict[str, Tensor]:
        """Return its rows of the joint buffers, by the names that the backend's ``pack`` uses."""
        start, joint = sum(self._joint.sizes[: self._index]), self._joint
        return {
            name: (
                joint.single[name][self._index]
                if name in joint.single
                else buffer[start : start + self.out_features]
            )
            for name, buffer in joint.layer.wire_targets().items()
        }

    def finish_loading(self) -> None:
        """Finish loading after all targets were filled; the first member acts for the group."""
        if self._index == 0:
            self._joint.finish_loading()


def fuse_linears(
    linears: Sequence[nn.Linear], replacement: Callable[[nn.Linear], QuantizedLinear]
) -> list[FusedMember]:
    """Return members that replace linears [N_i, K] of one input by a joint layer [sum N_i, K]."""
    first, sizes = linears[0], [linear.out_features for linear in linears]
    joined = nn.Linear(first.in_features, sum(sizes), bias=False, device="meta")
    shape = (joined.out_features, joined.in_features)
    # not as ``new_empty`` of a weight, which fails for the packed ones of ``policy.frozen``
    like = {"dtype": first.weight.dtype, "device": first.weight.device}
    # has a shape and a device but no memory: the layer reads nothing else of this weight
    joined.weight = nn.Parameter(torch.empty(1, **like).expand(shape), requires_grad=False)
    if any(linear.bias is not None for linear in linears):
        biases = [
            torch.zeros(n, **like) if linear.bias is None else linear.bias
            for n, linear in zip(sizes, linears, strict=True)
        ]
        joined.bias = nn.Parameter(
            torch.cat([bias.detach() for bias in biases]), requires_grad=False
        )
    joint = FusedGroup(replacement(joined), sizes)
    return [FusedMember(joint, index) for index in range(len(linears))]

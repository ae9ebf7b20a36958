"""Linears that read the same input (to_q, to_k, to_v) as one product.

One larger product keeps a GPU's tensor cores busier than three. Published weights do not show it:
each linear travels by itself, and is copied into its rows of the joint buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from policy.precision.layer import QuantizedLinear


class Joint:
    """The joint layer of a group, and its last result until every member has taken its part.

    Not thread-safe.
    """

    def __init__(self, layer: QuantizedLinear, sizes: Sequence[int]) -> None:
        self.layer, self.sizes = layer, tuple(sizes)
        # what is one value per layer, such as amax, arrives once per member, and must agree
        self.single = {
            name: torch.zeros(len(sizes), *buffer.shape, dtype=buffer.dtype)
            for name, buffer in layer.wire_targets().items()
            if not buffer.ndim
        }
        self._input: Tensor | None = None
        self._version = 0
        self._parts: list[Tensor | None] = []

    def part(self, x: Tensor, index: int) -> Tensor:
        """The rows of one member in the result for x.

        Traced by torch.compile, an input counts as unchanged between the calls of the members:
        attention does not write to it.
        """
        traced = torch.compiler.is_compiling()
        unversioned = not traced and x.is_inference()
        version = 0 if traced or unversioned else x._version
        found = (
            self._parts[index]
            if self._input is x and self._version == version and not unversioned
            else None
        )
        if found is None:
            self._parts = list(self.layer(x).split(self.sizes, dim=-1))
            self._input, self._version = x, version
            found = self._parts[index]
        assert found is not None
        # given up part by part: a block's q, k and v need not all stay until the next block
        self._parts[index] = None
        if all(part is None for part in self._parts):
            self._input, self._parts = None, []
        return found

    def arrived(self) -> None:
        """All members were filled. Raises ValueError when what they must have in common differs."""
        for name, values in self.single.items():
            if not bool((values == values[0]).all()):
                raise ValueError(
                    f"linears that run as one were packed with different {name}: {values.tolist()}:"
                    " publish again"
                )
            self.layer.wire_targets()[name].copy_(values[0])
        self.layer.arrived()


class FusedMember(nn.Module):
    """One linear of a group: x [..., K] -> [..., N]. The first one owns the joint layer."""

    def __init__(self, joint: Joint, index: int) -> None:
        super().__init__()
        self._joint, self._index = joint, index
        self.in_features, self.out_features = joint.layer.in_features, joint.sizes[index]
        # with one owner the joint weights move, and are counted, once
        if index == 0:
            self.layer = joint.layer

    def forward(self, x: Tensor) -> Tensor:
        """Its part of the joint result."""
        return self._joint.part(x, self._index)

    def wire_targets(self) -> dict[str, Tensor]:
        """Its rows of the joint buffers, by the names that the backend's ``pack`` uses."""
        start, joint = sum(self._joint.sizes[: self._index]), self._joint
        return {
            name: (
                joint.single[name][self._index]
                if name in joint.single
                else buffer[start : start + self.out_features]
            )
            for name, buffer in joint.layer.wire_targets().items()
        }

    def arrived(self) -> None:
        """Called after all targets were filled; the first member answers for the group."""
        if self._index == 0:
            self._joint.arrived()


def join(
    linears: Sequence[nn.Linear], replacement: Callable[[nn.Linear], QuantizedLinear]
) -> list[FusedMember]:
    """Members in place of linears [N_i, K] of one input, over one joint layer [sum N_i, K]."""
    first, sizes = linears[0], [linear.out_features for linear in linears]
    joined = nn.Linear(first.in_features, sum(sizes), bias=False, device="meta")
    shape = (joined.out_features, joined.in_features)
    # a shape and a device, but no memory: the layer takes nothing else from its weight
    joined.weight = nn.Parameter(first.weight.new_empty(1).expand(shape), requires_grad=False)
    if any(linear.bias is not None for linear in linears):
        biases = [
            first.weight.new_zeros(n) if linear.bias is None else linear.bias
            for n, linear in zip(sizes, linears, strict=True)
        ]
        joined.bias = nn.Parameter(
            torch.cat([bias.detach() for bias in biases]), requires_grad=False
        )
    joint = Joint(replacement(joined), sizes)
    return [FusedMember(joint, index) for index in range(len(linears))]

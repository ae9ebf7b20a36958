"""Amax of a layer's input in the previous pass, by which NVFP4 packs the input of the next one.

An amax of the input itself is known only after all of it was read, and packing reads it once more.
In a sampling the input hardly changes from one step to the next: with the amax of the pass before
and some headroom, packing reads the input once, in one kernel. The amax is a power of two, so a
headroom of a power of two changes no value unless a block's amax is below 2^-12 of the tensor's,
where E4M3 is subnormal. An input that grows by more than the headroom saturates, which is counted.

Only the first pass of a sampling measures its own amax, so that results depend on the sampling
alone and not on what the actor computed before. Known as delayed scaling (FP8 recipes of
TransformerEngine).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from policy.experts import experts_of
from policy.precision import kernels
from policy.precision.nvfp4 import activation_amax, expected_amax


class AmaxHistory(nn.Module):
    """The largest |x| of one layer's input, in the previous pass and in the current one so far.

    ``previous`` and ``current`` int32 [kernels.PARTIALS] are the bits of float32 numbers, whose
    maximum counts: programs of a kernel write to different elements. ``known`` is False in the
    first pass of a sampling.
    """

    previous: Tensor
    current: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.known = False
        for name in ("previous", "current"):
            empty = torch.zeros(kernels.PARTIALS, dtype=torch.int32, device=device)
            self.register_buffer(name, empty, persistent=False)

    def amax(self, largest: Tensor) -> Tensor:
        """Return the amax float32 [] to pack an input by, and record its ``largest`` |x|."""
        top = largest.max().float()
        bits = top.view(torch.int32).expand_as(self.current)
        self.current.copy_(torch.maximum(self.current, bits))
        if not self.known:
            return activation_amax(top)
        return expected_amax(self.previous.max().view(torch.float32))


def history_for(activation_amax: str) -> Callable[[nn.Linear], AmaxHistory | None]:
    """Return a function to the history of a linear's layer, which is None for other settings."""
    if activation_amax != "previous_pass":
        return lambda linear: None
    return lambda linear: AmaxHistory(linear.weight.device)


class PassCounter:
    """Advances the histories of one transformer at the start of each of its passes."""

    def __init__(self, transformer: nn.Module) -> None:
        self._histories = [part for part in transformer.modules() if isinstance(part, AmaxHistory)]
        self._passes = 0
        self._counts: list[Tensor] = []  # of each compared pass: int64 [2], see ``end``
        if self._histories:
            transformer.register_forward_pre_hook(self._advance)

    def reset(self) -> None:
        """Start a sampling, whose first pass measures the amax of its inputs."""
        self._passes, self._counts = 0, []

    def end(self) -> tuple[int, int]:
        """Return how many inputs of a sampling saturated, and were packed by an earlier amax.

        Called once, after its last pass. Inputs are counted per pass and layer, an input of several
        layers once if they share it; one that is all zero is not counted.
        """
        self._compare()
        if not self._counts:
            return 0, 0
        saturated, packed = torch.stack(self._counts).sum(0).tolist()
        return saturated, packed

    def _compare(self) -> None:
        """Compare the inputs of the last pass with the amax that they were packed by."""
        if self._passes < 2:  # nothing, or by its own
            return
        current, previous = (
            torch.stack([getattr(history, name) for history in self._histories])
            .amax(1)
            .view(torch.float32)
            for name in ("current", "previous")
        )
        # not read here: that would wait for the GPU in every pass
        self._counts.append(
            torch.stack([(current > expected_amax(previous)).sum(), (current > 0).sum()])
        )

    def _advance(self, *_: object) -> None:
        self._compare()
        # read anew in each pass: weights and buffers may have left the GPU in between
        current = [history.current for history in self._histories]
        if self._passes:
            torch._foreach_copy_([history.previous for history in self._histories], current)
        torch._foreach_zero_(current)
        for history in self._histories:
            history.known = self._passes > 0
        self._passes += 1


def pass_counters(denoiser: nn.Module) -> list[PassCounter]:
    """Return a counter for each transformer of a denoiser whose layers may have histories."""
    return [PassCounter(transformer) for transformer in experts_of(denoiser)]

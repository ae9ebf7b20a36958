"""Muon for the matrices of the transformer blocks, AdamW for all other parameters.

It needs about half the steps of AdamW alone at this size. A convolution is treated as a matrix with
one row per output channel.

Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024): Nesterov
momentum, orthogonalized by five Newton-Schulz steps of a quintic polynomial. This implementation is
in FP32 and stacks matrices of equal shape into one product.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MOMENTUM = 0.95


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Return approximately U V^T of each matrix's singular value decomposition.

    ``matrices`` are [N, rows, columns] with rows <= columns. Singular values of the result are in
    0.7..1.2.
    """
    a, b, c = COEFFICIENTS
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Optimizer with two update rules.

    Groups have a ``kind``, 'matrix' (Muon) or 'other' (AdamW), and their own ``lr`` and
    ``weight_decay``.
    """

    def __init__(
        self,
        matrices: Iterable[torch.Tensor],
        others: Iterable[torch.Tensor],
        lr: float,
        other_lr: float,
        decay: float,
    ) -> None:
        kinds = (("matrix", matrices, lr, decay), ("other", others, other_lr, 0.0))
        groups = [
            {"params": list(params), "kind": kind, "lr": rate, "peak": rate, "weight_decay": shrink}
            for kind, params, rate, shrink in kinds
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step for all parameters that have a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            (self._matrix_step if group["kind"] == "matrix" else self._adam_step)(group, params)

    def _matrix_step(self, group: dict, params: list[torch.Tensor]) -> None:
        by_shape: dict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for p in params:
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            gradient = p.grad
            assert gradient is not None
            state["momentum"].lerp_(gradient, 1 - MOMENTUM)
            nesterov = gradient.lerp(state["momentum"], MOMENTUM).flatten(1)
            wide = nesterov if nesterov.shape[0] <= nesterov.shape[1] else nesterov.mT
            by_shape.setdefault(tuple(wide.shape), []).append((p, wide))
        for pairs in by_shape.values():
            updates = orthogonal(torch.stack([wide for _, wide in pairs]))
            for (p, _), update in zip(pairs, updates, strict=True):
                rows, columns = p.flatten(1).shape
                p.mul_(1 - group["lr"] * group["weight_decay"])
                scale = max(1.0, rows / columns) ** 0.5
                change = (update.mT if rows > columns else update).reshape_as(p)
                p.add_(change, alpha=-group["lr"] * scale)

    def _adam_step(self, group: dict, params: list[torch.Tensor]) -> None:
        for p in params:
            state = self.state[p]
            if not state:
                state |= {
                    "step": torch.zeros(()),
                    "first": torch.zeros_like(p),
                    "second": torch.zeros_like(p),
                }
            state["step"] += 1
            count = float(state["step"])
            gradient = p.grad
            assert gradient is not None
            state["first"].lerp_(gradient, 0.1)
            state["second"].lerp_(gradient.square(), 0.01)
            root = (state["second"] / (1 - 0.99**count)).sqrt_().add_(1e-8)
            p.addcdiv_(state["first"], root, value=-group["lr"] / (1 - 0.9**count))

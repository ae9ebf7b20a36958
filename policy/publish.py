"""From the learner's adapted transformer to the bytes that explorers load."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from policy.lora import adapted_modules, adapter_state, delta_weight
from policy.precision.backends import Backend
from policy.precision.nvfp4 import frozen_amax
from policy.precision.swap import ModuleRow, weight_modules
from policy.precision.wire import Manifest, pack_tensors


class NonFiniteWeights(RuntimeError):
    """A merged weight that is NaN or infinite; ``module`` says where. Nothing was published."""

    def __init__(self, module: str, detail: str) -> None:
        super().__init__(f"the weights of {module!r} are not finite, so they were not published: {detail}")
        self.module = module

    def __reduce__(self) -> tuple[Any, ...]:
        """Exceptions cross processes by their arguments, and these are not the constructor's."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class Publisher:
    """Packs one transformer again and again.

    Every quantised module travels packed; an adapted module that runs wide travels as its merged weight in the backend's
    ``wire_dtype``; everything else is the base model, which explorers load themselves. Modules without adapter are packed once.
    """

    def __init__(
        self,
        transformer: nn.Module,
        plan: Sequence[ModuleRow],
        backend: Backend,
        chunk_bytes: int,
        scale_search: bool = True,
        frozen_amax: bool = False,
    ) -> None:
        """``scale_search`` as ``search`` in ``Backend.pack``; ``frozen_amax``: the range of adapted modules is that of W, with head-room.

        Linears that run as one product share a range where the format has one per tensor.
        """
        self.transformer, self.backend = transformer, backend
        self.chunk_bytes, self.scale_search, self.frozen_amax = chunk_bytes, scale_search, frozen_amax
        self._quantised = {row.name: row.quantised for row in plan}
        self._groups: dict[str, list[str]] = {}
        for row in plan:
            if row.fused is not None:
                self._groups.setdefault(row.fused, []).append(row.name)
        self._fixed: dict[str, tuple[Tensor | None, dict[str, Tensor]]] = {}
        self._before: dict[str, dict[str, Tensor]] = {}
        self._adapter_before: dict[str, Tensor] | None = None

    @torch.no_grad()
    def export(self, adapter: str, version: int) -> tuple[Manifest, list[np.ndarray], dict[str, float]]:
        """(manifest, uint8 chunks, statistics) of the transformer with ``adapter`` merged. Raises NonFiniteWeights.

        Statistics against the export before, over adapted modules, absent the first time: `weights/codes_changed`, the share
        of stored codes that differ, and `weights/delta_cosine`, the cosine between the change of the decoded weights and the
        true change of the merged ones (absent when nothing changed).
        """
        adapted = dict(adapted_modules(self.transformer))
        owners = dict(weight_modules(self.transformer))

        def merged(name: str) -> Tensor:
            weight = owners[name].weight.detach()
            return weight.float() + delta_weight(adapted[name], adapter).view_as(weight) if name in adapted else weight

        def range_of(name: str) -> Tensor:
            own = self.backend.amax(_finite(name, merged(name)).flatten(1))
            frozen = self.frozen_amax and name in adapted
            return frozen_amax(self.backend.amax(owners[name].weight.flatten(1)), own) if frozen else own

        ranges = self._joint_ranges(range_of)
        packed: dict[str, dict[str, Tensor]] = {}
        for name, owner in owners.items():
            if name in adapted and not self._quantised[name]:
                packed[name] = {"weight": _finite(name, merged(name)).to(self.backend.wire_dtype)}
            elif name in adapted:
                amax = range_of(name) if self.frozen_amax and name not in ranges else ranges.get(name)
                packed[name] = self._pack(name, merged(name), amax)
            elif self._quantised[name]:
                packed[name] = self._pack_once(name, owner.weight, ranges.get(name))
        named = {f"{name}.{part}": tensor for name, parts in packed.items() for part, tensor in parts.items()}
        manifest, chunks = pack_tensors(named, version, self.backend.wire_format, self.chunk_bytes)
        now = {name: packed[name] for name in adapted}
        state = adapter_state(self.transformer, adapter)
        statistics = self._compare(now, state) if self._adapter_before is not None else {}
        self._before, self._adapter_before = now, state
        return manifest, chunks, statistics

    def _joint_ranges(self, range_of: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The common amax of each group that runs as one product, where the format has one per tensor."""
        ranges: dict[str, Tensor] = {}
        for names in self._groups.values():
            members = [range_of(name) for name in names]
            if not members[0].ndim:
                ranges |= dict.fromkeys(names, torch.stack(members).max())
        return ranges

    def _pack(self, name: str, weight: Tensor, amax: Tensor | None) -> dict[str, Tensor]:
        """A convolution's weight [N, K, 1, 1] is packed as [N, K]."""
        try:
            return self.backend.pack(_finite(name, weight).flatten(1), self.scale_search, amax)
        except ValueError as error:
            raise NonFiniteWeights(name, str(error)) from error

    def _pack_once(self, name: str, weight: Tensor, amax: Tensor | None) -> dict[str, Tensor]:
        """A weight without adapter is packed again only when its neighbours in a group moved its range."""
        before = self._fixed.get(name)
        if before is None or (before[0] is not None and amax is not None and not torch.equal(amax, before[0])):
            before = self._fixed[name] = (amax, self._pack(name, weight, amax))
        return before[1]

    def _compare(self, now: dict[str, dict[str, Tensor]], state: dict[str, Tensor]) -> dict[str, float]:
        """Statistics of this export against the one before. The true change is that of B A: W itself cancels."""
        before = self._adapter_before or {}
        changed = total = 0
        dot = decoded_square = true_square = 0.0
        for name, layer in adapted_modules(self.transformer):
            down, up = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
            scaling = next(iter(layer.scaling.values()))
            true = (_product(state[up], state[down]) - _product(before[up], before[down])) * scaling
            if self._quantised[name]:
                changed += int(self.backend.changed(now[name], self._before[name]))
                decoded = self.backend.decode(now[name]) - self.backend.decode(self._before[name])
            else:
                changed += int((now[name]["weight"] != self._before[name]["weight"]).sum())
                decoded = (now[name]["weight"].float() - self._before[name]["weight"].float()).flatten(1)
            total += true.numel()
            true = true.to(decoded)
            dot += float((decoded * true).sum(dtype=torch.float64))
            decoded_square += float(decoded.square().sum(dtype=torch.float64))
            true_square += float(true.square().sum(dtype=torch.float64))
        statistics = {"weights/codes_changed": changed / total}
        if decoded_square > 0 and true_square > 0:
            statistics["weights/delta_cosine"] = dot / (decoded_square * true_square) ** 0.5
        return statistics


def _finite(name: str, weight: Tensor) -> Tensor:
    """The weight itself. Raises NonFiniteWeights."""
    if not bool(torch.isfinite(weight).all()):
        bad = int((~torch.isfinite(weight)).sum())
        raise NonFiniteWeights(name, f"{bad} of {weight.numel()} are NaN or infinite; lower optimizer.lr and resume")
    return weight


def _product(up: Tensor, down: Tensor) -> Tensor:
    """B A [N, K] of a linear's adapter, or of a convolution's, whose matrices have two more dimensions of 1."""
    return up.flatten(1) @ down.flatten(1)


def export_policy(
    transformer: nn.Module,
    adapter: str,
    plan: Sequence[ModuleRow],
    backend: Backend,
    version: int,
    chunk_bytes: int,
    scale_search: bool = True,
    frozen_amax: bool = False,
) -> tuple[Manifest, list[np.ndarray]]:
    """One export without memory; a run that publishes again and again keeps a ``Publisher``."""
    manifest, chunks, _ = Publisher(transformer, plan, backend, chunk_bytes, scale_search, frozen_amax).export(adapter, version)
    return manifest, chunks

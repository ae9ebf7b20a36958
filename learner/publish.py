"""Publishing: packs the learner's adapted transformer into the bytes that rollout actors load."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from learner.nonfinite import PicklableError
from policy.frozen import plain_weight
from policy.lora import adapted_modules, adapter_state
from policy.merging import merged_weight
from policy.precision.backends import Backend
from policy.precision.manifest import Manifest
from policy.precision.nvfp4 import frozen_amax
from policy.precision.swap import ModuleRow, changing_modules, weight_modules
from policy.precision.wire import Section, SectionWriter, assemble

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer


Export = tuple[Manifest, list[np.ndarray], dict[str, float]]
"""(manifest, packed weights as uint8 shards, statistics of the changes since the last export)."""


class NonFiniteWeights(PicklableError):
    """A merged weight of ``module`` is NaN or infinite; nothing was published."""

    def __init__(self, module: str, detail: str) -> None:
        super().__init__(
            f"the weights of {module!r} are not finite, so they were not published: {detail}"
        )
        self.module = module


class Publisher:
    """Packs successive versions of one transformer.

    Quantized modules are published packed, and unquantized modules with adapters as merged weights
    in the backend's ``wire_dtype``. All other weights belong to the base model, which rollout
    actors load themselves. Modules that no update can change are packed once into separate shards,
    whose bytes stay the same in every version, so that they are sent only once. Exports, and what
    is kept between them, are in host memory; the transformer's device holds one module at a time.
    """

    def __init__(
        self,
        transformer: nn.Module,
        plan: Sequence[ModuleRow],
        backend: Backend,
        shard_bytes: int,
        scale_search: bool = True,
        frozen_amax: bool = False,
    ) -> None:
        """``scale_search`` is ``search`` of ``Backend.pack``; ``frozen_amax`` is as in ``nvfp4``.

        Linears that are fused into one product share their amax if the format has one per tensor.
        """
        self.transformer, self.backend = transformer, backend
        self.shard_bytes = shard_bytes
        self.scale_search = scale_search
        self.frozen_amax = frozen_amax
        self._plan, self._quantized = plan, {row.name: row.quantized for row in plan}
        self._groups: dict[str, list[str]] = {}
        for row in plan:
            if row.fused is not None:
                self._groups.setdefault(row.fused, []).append(row.name)
        self._constant: Section | None = None
        self._fixed: dict[str, tuple[Tensor | None, dict[str, Tensor]]] = {}
        self._before: tuple[Section, dict[str, Tensor]] | None = None

    @torch.no_grad()
    def export(self, adapter: str, version: int) -> Export:
        """Merge ``adapter`` and pack the transformer. Raises NonFiniteWeights.

        From the second export on, statistics compare adapted modules with the previous export:
        `weights/codes_changed` is the share of stored codes that differ, and `weights/delta_cosine`
        the cosine between the change of the decoded weights and the true change of the merged
        weights (absent if nothing changed).
        """
        adapted = dict(adapted_modules(self.transformer))
        owners = dict(weight_modules(self.transformer))

        def merged(name: str) -> Tensor:
            layer = adapted.get(name)
            return plain_weight(owners[name]) if layer is None else merged_weight(layer, adapter)

        def range_of(name: str) -> Tensor:
            own = self.backend.amax(_finite(name, merged(name)).flatten(1))
            if not self.frozen_amax or name not in adapted:
                return own
            return frozen_amax(self.backend.amax(plain_weight(owners[name]).flatten(1)), own)

        # two sections: shards of constant modules keep their checksums and are sent once per run
        changing = changing_modules(self._plan, adapted)
        ranges = self._joint_ranges(range_of, changing)
        state = adapter_state(self.transformer, adapter)
        changes = None
        if self._before is not None:
            changes = _Changes(self.backend, adapted, *self._before, state)

        def packed(name: str) -> dict[str, Tensor]:
            if name not in adapted:
                return self._pack_once(name, owners[name], ranges.get(name))
            own = self.frozen_amax and self._quantized[name] and name not in ranges
            amax = range_of(name) if own else ranges.get(name)
            return self._pack_adapted(name, merged(name), amax, changes)

        writer = SectionWriter(self.shard_bytes)
        for name in changing:
            _write(writer, name, packed(name))  # and keep nothing of it on the device
        if self._constant is None:
            self._constant = self._pack_constant(owners, changing, range_of)
        section = writer.finish()
        sections = [self._constant, section]
        manifest, shards = assemble(sections, version, self.backend.wire_format)
        # last: the next export must not be compared with one that failed
        self._before = section, state
        return manifest, shards, changes.statistics() if changes is not None else {}

    def _pack_constant(
        self,
        owners: Mapping[str, nn.Module],
        changing: Container[str],
        range_of: Callable[[str], Tensor],
    ) -> Section:
        """Pack the quantized modules that never change."""
        names = [name for name in owners if self._quantized[name] and name not in changing]
        ranges = self._joint_ranges(range_of, names)
        writer = SectionWriter(self.shard_bytes)
        for name in names:
            _write(writer, name, self._pack(name, plain_weight(owners[name]), ranges.get(name)))
        return writer.finish()

    def _joint_ranges(
        self, range_of: Callable[[str], Tensor], among: Container[str]
    ) -> dict[str, Tensor]:
        """Return the common amax of each fused group in ``among``, if there is one per tensor."""
        ranges: dict[str, Tensor] = {}
        for names in self._groups.values():
            if names[0] not in among:
                continue
            members = [range_of(name) for name in names]
            # formats with an amax per row need no common one
            if not members[0].ndim:
                ranges |= dict.fromkeys(names, torch.stack(members).max())
        return ranges

    def _pack(self, name: str, weight: Tensor, amax: Tensor | None) -> dict[str, Tensor]:
        """Pack a weight; that of a 1x1 convolution [N, K, 1, 1] is packed as [N, K]."""
        try:
            return self.backend.pack(weight.flatten(1), self.scale_search, amax)
        except ValueError as error:
            _finite(name, weight)  # says how many values are not
            raise NonFiniteWeights(name, str(error)) from error

    def _pack_adapted(
        self, name: str, weight: Tensor, amax: Tensor | None, changes: _Changes | None
    ) -> dict[str, Tensor]:
        """Pack a merged weight on its device and record how it has changed."""
        quantized = self._quantized[name]
        parts = (
            self._pack(name, weight, amax)
            if quantized
            else {"weight": _finite(name, weight).to(self.backend.wire_dtype)}
        )
        if changes is not None:
            changes.add(name, parts, quantized)
        return parts

    def _pack_once(self, name: str, owner: nn.Module, amax: Tensor | None) -> dict[str, Tensor]:
        """Pack a weight without adapter; again only if its group's amax has changed."""
        before = self._fixed.get(name)
        if before is None or (
            before[0] is not None and amax is not None and not torch.equal(amax, before[0])
        ):
            packed = _on_host(self._pack(name, plain_weight(owner), amax))
            before = self._fixed[name] = (amax, packed)
        return before[1]


class _Changes:
    """Accumulates over adapted modules how an export differs from the previous one.

    The true change of a weight is the change of (alpha / rank) B A, as W itself cancels.
    """

    def __init__(
        self,
        backend: Backend,
        layers: Mapping[str, LoraLayer],
        packed_before: Section,
        adapter_before: Mapping[str, Tensor],
        adapter: Mapping[str, Tensor],
    ) -> None:
        self._backend, self._layers, self._packed_before = backend, layers, packed_before
        self._adapter_before, self._adapter = adapter_before, adapter
        self._changed = self._total = 0
        self._dot = self._decoded_square = self._true_square = 0.0

    def add(self, name: str, now: dict[str, Tensor], quantized: bool) -> None:
        """Add one packed module; computed on the device of ``now``."""
        device = next(iter(now.values())).device
        names = {part: f"{name}.{part}" for part in now}
        stored = self._packed_before.tensors(names.values(), device)
        before = {part: stored[names[part]] for part in now}
        if quantized:
            changed = self._backend.changed(now, before)
            decoded = self._backend.decode(now) - self._backend.decode(before)
        else:
            changed = (now["weight"] != before["weight"]).sum()
            decoded = (now["weight"].float() - before["weight"].float()).flatten(1)
        # of any adapter, as all have the same rank and alpha
        scaling = next(iter(self._layers[name].scaling.values()))
        # from B A, as a small update could vanish in the rounding of merged weights
        change = _product(self._adapter, name, device) - _product(
            self._adapter_before, name, device
        )
        true = (change * scaling).to(decoded)
        self._changed += int(changed)
        self._total += true.numel()
        # in float64: a float32 sum of millions of small products has only a few correct digits
        self._dot += float((decoded * true).sum(dtype=torch.float64))
        self._decoded_square += float(decoded.square().sum(dtype=torch.float64))
        self._true_square += float(true.square().sum(dtype=torch.float64))

    def statistics(self) -> dict[str, float]:
        """Return the statistics of ``Publisher.export`` by metric name."""
        statistics = {"weights/codes_changed": self._changed / self._total}
        if self._decoded_square > 0 and self._true_square > 0:
            statistics["weights/delta_cosine"] = (
                self._dot / (self._decoded_square * self._true_square) ** 0.5
            )
        return statistics


def _write(writer: SectionWriter, name: str, parts: Mapping[str, Tensor]) -> None:
    """Write the packed parts of a module."""
    for part, tensor in parts.items():
        writer.add(f"{name}.{part}", tensor)


def _on_host(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move packed parts to host memory."""
    return {part: tensor.cpu() for part, tensor in parts.items()}


def _finite(name: str, weight: Tensor) -> Tensor:
    """Return ``weight``. Raises NonFiniteWeights."""
    if not bool(torch.isfinite(weight).all()):
        bad = int((~torch.isfinite(weight)).sum())
        raise NonFiniteWeights(
            name, f"{bad} of {weight.numel()} are NaN or infinite; lower optimizer.lr and resume"
        )
    return weight


def _product(adapter: Mapping[str, Tensor], name: str, device: torch.device) -> Tensor:
    """Return B A [N, K] of the adapter of a linear or 1x1 convolution, computed on ``device``."""
    b, a = (adapter[f"{name}.lora_{side}.weight"].to(device).flatten(1) for side in "BA")
    return b @ a


def export_policy(
    transformer: nn.Module,
    adapter: str,
    plan: Sequence[ModuleRow],
    backend: Backend,
    version: int,
    shard_bytes: int,
    scale_search: bool = True,
    frozen_amax: bool = False,
) -> tuple[Manifest, list[np.ndarray]]:
    """Export once; for several versions of one transformer keep a ``Publisher`` instead."""
    manifest, shards, _ = Publisher(
        transformer, plan, backend, shard_bytes, scale_search, frozen_amax
    ).export(adapter, version)
    return manifest, shards

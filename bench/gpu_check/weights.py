"""Time to pack a version of a learner's transformer and to load it in an explorer; its size."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench.gpu_check.findings import Finding, Item
from bench.gpu_check.setting import Setting, change, free, loadable
from configs.training import Lora
from learner.publish import Publisher
from planning import durations, sizes
from policy import meta
from policy.device import synchronize
from policy.explorer import Explorer
from policy.lora import adapted_modules, add_adapters
from policy.precision.backends import BACKENDS, Backend
from policy.precision.swap import quantize_plan

NAME = "flux.1-dev"
SHARD = 256 * 2**20


def measure(setting: Setting) -> Iterator[Item]:
    """Measure the first version, which packs everything, and one with changed adapters."""
    # packing does not need a format's tensor cores, so both formats can be packed on any GPU
    for backend in (BACKENDS["torch_nvfp4"], BACKENDS["fp8"]):
        yield from _format(setting, backend)
        free()


def _format(setting: Setting, backend: Backend) -> Iterator[Item]:
    device = setting.device
    labels = {"format": backend.wire_format}
    with loadable(setting, NAME) as (case, family):
        learner = family.load_transformer(device, setting.dtype)
        add_adapters(learner, Lora(), family, names=("current",))
        rows = quantize_plan(learner, family, (), backend)
        publisher = Publisher(learner, rows, backend, SHARD)
        _, plan, layers = meta.meta_explorer(family, backend, (), setting.dtype)
        adapted = [name for name, _ in adapted_modules(learner)]
        planned = sizes.wire_bytes(plan, layers, adapted, backend)
        for version, what in enumerate(("packing all of it", "packing the next version")):
            start = time.perf_counter()
            manifest, shards, statistics = publisher.export("current", version)
            seconds = time.perf_counter() - start
            sent = planned.changing if version else planned.total
            yield Finding(
                f"{case.name} {backend.wire_format}, {what}",
                seconds,
                "s",
                {**labels, "form": what},
                {"planned s": sent / durations.PACK, "GB": manifest.nbytes / 1e9, **statistics},
            )
            change(learner)
        yield Finding(
            f"{case.name} {backend.wire_format}, bytes of a version / those of the plan",
            manifest.nbytes / planned.total,
            "x",
            {**labels, "form": "bytes"},
        )
        del learner, publisher
        free()
        loader = next(each for each in _explorers(setting) if each.wire_format == manifest.format)
        explorer = Explorer(family, loader, (), device, setting.dtype)
        start = time.perf_counter()
        explorer.load(manifest, shards)
        synchronize(device)
        yield Finding(
            f"{case.name} {backend.wire_format}, loading it",
            time.perf_counter() - start,
            "s",
            {**labels, "form": "loading"},
            {"planned s": manifest.nbytes / durations.LOAD},
        )


def _explorers(setting: Setting) -> list[Backend]:
    """Return backends that can load either format, fast ones first."""
    return [*setting.quick(), BACKENDS["emulated_nvfp4"], BACKENDS["fp8"]]

"""Sections of published weights from tensors that are at hand."""

from collections.abc import Mapping

from torch import Tensor

from policy.precision.wire import Section, SectionWriter


def pack_section(named: Mapping[str, Tensor], shard_bytes: int) -> Section:
    """Write tensors in the order of ``named``."""
    writer = SectionWriter(shard_bytes)
    for name, tensor in named.items():
        writer.add(name, tensor)
    return writer.finish()

"""Check that Ray's object stores can hold the published weights, before training starts.

The size follows from the architecture alone. A store that is too small does not stop Ray: beyond
four fifths of its size Ray spills objects to disk, slowly, in every iteration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.runtime.nodes import object_stores
from configs.load import ConfigError
from configs.schema import RunConfig
from planning import sizes
from planning.assumptions import ACCELERATORS, backend_of
from planning.object_store import NOTHING_SENT, SPILLS_AT, store_size, versions_bytes, versions_held
from planning.placement import Node, needs_of, place
from planning.plan import GB, open_architecture
from planning.sizes import WireBytes
from policy import meta
from policy.families import model_directory
from policy.lora import target_modules
from policy.types import DTYPES

WIDEST = 4  # bytes of a published weight, at most; a file has at least one byte per weight


def published_bytes(config: RunConfig, accelerator: str | None = None) -> WireBytes:
    """Return the bytes of a version as sent to rollout actors on ``accelerator``.

    ``NOTHING_SENT`` if nothing is explored. Reads no weights.
    """
    if config.plan.explore is None:
        return NOTHING_SENT
    dtype = DTYPES[config.regenerate.precision]
    with open_architecture(config) as (family, _):
        backend, _ = backend_of(config, accelerator)
        model = meta.meta_denoiser(family, dtype)
        adapted = target_modules(model, config.lora.targets or family.lora_targets)
        _, rows, layers = meta.meta_explorer(
            family, backend, config.explore.modules_to_not_convert, dtype
        )
        return sizes.wire_bytes(rows, layers, adapted, backend)


def published_bytes_on(config: RunConfig, nodes: Sequence[Node]) -> WireBytes | None:
    """Return ``published_bytes`` for the rollout actors of a run on ``nodes``.

    None if the precision is left to rollout actors on an unknown kind of GPU. Raises NoRoom if the
    run has no room on ``nodes``.
    """
    if config.plan.explore is None:
        return NOTHING_SENT
    accelerator = _accelerator(_homes(config, nodes), nodes)
    return None if _is_unknown(config, accelerator) else published_bytes(config, accelerator)


def most_bytes(config: RunConfig) -> float:
    """Return an upper bound of the bytes of one version, from the sizes of the model's files.

    This takes a millisecond, while ``published_bytes`` builds the model and imports diffusers for
    it: seconds, by which it would delay every start of a small model. Infinite if there are no
    files on this machine.
    """
    folder = Path(model_directory(config.model))
    files = [file.stat().st_size for file in folder.glob("transformer*/*.safetensors")]
    return WIDEST * sum(files) if files else math.inf


def check_store(
    config: RunConfig, nodes: Sequence[Node], stores: Mapping[str, float] | None = None
) -> None:
    """Raise ConfigError if a node of rollout actors or the learner has too small an object store.

    ``nodes``: free nodes with room for the run. ``stores``: bytes by node id; None: as Ray reports
    them. Nothing is checked if the precision is left to rollout actors on an unknown kind of GPU,
    because the size of the weights is then unknown.
    """
    if config.plan.explore is None:
        return
    homes = _homes(config, nodes)
    accelerator = _accelerator(homes, nodes)
    if _is_unknown(config, accelerator):
        return
    sizes = object_stores() if stores is None else stores
    least = min((sizes[n] for kind in homes.values() for n in kind if n in sizes), default=math.inf)
    if least * SPILLS_AT >= versions_held(config) * most_bytes(config):
        return
    requested = versions_bytes(config, published_bytes(config, accelerator))
    lines: list[str] = []
    for node in sorted({*homes["rollout"], *homes["learner"]}):
        if node in sizes and sizes[node] * SPILLS_AT < requested:
            lines.append(
                f"object store: {versions_held(config)} versions of the weights are"
                f" {requested / GB:.3g} GB, node {node[:8]} has {sizes[node] / GB:.3g} GB, of which"
                f" Ray uses {SPILLS_AT:.0%} before it writes to disk: start Ray there with"
                f" --object-store-memory={store_size(requested)} (on one machine: `ray start"
                " --head` with it, then RAY_ADDRESS=auto sol-rl train)"
            )
    if lines:
        raise ConfigError(lines)


def _homes(config: RunConfig, nodes: Sequence[Node]) -> dict[str, list[str]]:
    """Return the ids of the nodes of the rollout actors and of the learner's replicas."""
    placement = place(needs_of(config), nodes)
    return {
        kind: [placement[need.actor] for need in needs_of(config) if need.kind == kind]
        for kind in ("rollout", "learner")
    }


def _accelerator(homes: Mapping[str, Sequence[str]], nodes: Sequence[Node]) -> str | None:
    """Return the kind of the rollout actors' GPUs, None if their node does not name it."""
    labels = {node.id: node.labels for node in nodes}
    return labels[homes["rollout"][0]].get("ray.io/accelerator-type")


def _is_unknown(config: RunConfig, accelerator: str | None) -> bool:
    """Return True if the rollout actors' precision depends on an unknown kind of GPU."""
    explore, on_gpus = config.plan.explore, bool(config.services.rollout.gpus)
    auto = explore is not None and explore.backend == "auto"
    return auto and on_gpus and accelerator not in ACCELERATORS

"""``sol-rl doctor`` on a cluster: a process on every node examines it."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.driver.layout import choose_cluster_layout
from cluster.driver.store import check_store, published_bytes
from cluster.runtime.nodes import all_nodes, free_nodes, object_stores
from cluster.runtime.starting import cause
from configs.load import ConfigError, parse
from configs.schema import RunConfig
from planning.doctor import Check, check_nodes, check_token
from planning.facts import Facts, examine
from planning.placement import NoRoom, needs_of, place

ANSWER_S = 120.0
"""How long a node may take to examine itself: it imports torch first."""
SENT = 64 * 2**20
MOST_SENT = 512 * 2**20


def of_cluster(config: RunConfig | None) -> list[Check]:
    """The checks of the cluster that this process is connected to."""
    checks: list[Check] = []
    if config is not None:
        config, placed = _placed(config)
        checks.append(placed)
    with _mark(config) as mark:
        facts, silent = _facts(config, mark)
    checks += check_nodes(config, facts) if facts else []
    checks += [Check(f"node {node[:8]}", "failed", why, "see `ray status`") for node, why in silent]
    return [*checks, *_stores(config), check_token(joined=True)]


def _placed(config: RunConfig) -> tuple[RunConfig, Check]:
    """``config`` laid out on this cluster, and whether every actor has a place."""
    try:
        config = choose_cluster_layout(config, lambda line: None)
        place(needs_of(config), all_nodes())
    except (ConfigError, NoRoom) as error:
        return config, Check("placement", "failed", "; ".join(error.lines))
    try:
        place(needs_of(config), free_nodes())
    except NoRoom as error:
        told = "; ".join(error.lines)
        return config, Check("placement", "note", f"other jobs hold what it needs: {told}")
    return config, Check("placement", "ok", f"{len(needs_of(config))} actors have a place")


def _stores(config: RunConfig | None) -> list[Check]:
    sizes = object_stores()
    said = ", ".join(f"{node[:8]} {size / 1e9:.1f} GB" for node, size in sorted(sizes.items()))
    if config is not None:
        try:
            check_store(config, all_nodes(), sizes)
        except ConfigError as error:
            return [Check("object store", "failed", "; ".join(error.lines))]
        except NoRoom:
            return [Check("object store", "note", f"{said}; not compared: no placement")]
    return [Check("object store", "ok", said)]


@contextlib.contextmanager
def _mark(config: RunConfig | None) -> Iterator[str | None]:
    """A file under the run root that other nodes should see; None where there is no run root."""
    if config is None or config.run_root is None:
        yield None
        return
    root = Path(config.run_root).absolute()
    with contextlib.ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            made = stack.enter_context(tempfile.NamedTemporaryFile(dir=root, prefix=".doctor-"))
        except OSError as error:
            raise ConfigError(f"run_root = {str(root)!r}: {error.strerror or error}") from None
        yield made.name


def _facts(config: RunConfig | None, mark: str | None) -> tuple[list[Facts], list[tuple[str, str]]]:
    """(the facts of every node, the nodes that gave none with the reason)."""
    tree = config.model_dump(mode="json") if config is not None else None
    nodes = all_nodes()
    remote: Any = ray.remote(look_around)  # pyright: ignore[reportUnknownVariableType]
    here = ray.get_runtime_context().get_node_id()
    size = min(max(published_bytes(config).total, SENT), MOST_SENT) if config is not None else SENT
    weights = ray.put(np.zeros(size, np.uint8))
    found, silent = list[Facts](), list[tuple[str, str]]()
    for node in nodes:
        where = NodeAffinitySchedulingStrategy(node.id, soft=False)
        # one after the other: they would share the driver's link
        asked = remote.options(scheduling_strategy=where, num_cpus=0, max_retries=0)
        try:
            sent = time.time()
            facts, received = ray.get(
                asked.remote(tree, mark, [weights] if node.id != here else []), timeout=ANSWER_S
            )
            returned = time.time()
        except Exception as error:  # whatever it is, the line says it
            silent.append((node.id, cause(error)))
            continue
        # the node read its clock between the two, which bounds the difference
        behind = max(0.0, sent - facts.now, facts.now - returned)
        rate = size / received / 1e6 if received else None
        found.append(replace(facts, node=node.id, clock=behind, bandwidth_mb_s=rate))
    return found, silent


def look_around(
    tree: dict[str, object] | None, mark: str | None, weights: list[Any]
) -> tuple[Facts, float | None]:
    """(``examine`` on this node, seconds to fetch ``weights`` from another)."""
    seconds = None
    if weights:
        began = time.perf_counter()
        ray.get(weights)
        seconds = time.perf_counter() - began
    return examine(parse(tree) if tree is not None else None, mark), seconds

"""Checks of ``sol-rl doctor`` on a cluster: a process on every node examines its node."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.object_store import directory_on_disk
from cluster.driver.layout import choose_cluster_layout
from cluster.driver.store import check_store, published_bytes_on
from cluster.runtime import ray_directory
from cluster.runtime.nodes import all_nodes, free_nodes, object_stores
from cluster.runtime.starting import cause
from configs.load import ConfigError, parse
from configs.schema import RunConfig
from planning.checks import FEW, Check, by_reason, check_nodes
from planning.doctor import check_token
from planning.facts import Facts, examine
from planning.placement import NoRoom, needs_of, place

ANSWER_S = 120.0
"""Timeout for a node to examine itself, which includes importing torch."""
SENT = 64 * 2**20
"""Least size of the object that nodes fetch to measure bandwidth, bytes; its size without a run."""
MOST_SENT = 512 * 2**20
"""Largest size of that object, which otherwise is as large as a run's published weights, bytes."""


def check_cluster(config: RunConfig | None) -> list[Check]:
    """Return the checks of the cluster that this process is connected to."""
    checks: list[Check] = []
    if config is not None:
        config, placed = _placed(config)
        checks.append(placed)
    with _mark(config) as mark:
        facts, silent = _facts(config, mark)
    checks += check_nodes(config, facts) if facts else []
    nodes = by_reason((why, node[:8]) for node, why in silent)
    checks += [Check(f"node {on}", "failed", why, "see `ray status`") for why, on in nodes.items()]
    return [*checks, *_stores(config), check_token(joined=True)]


def _placed(config: RunConfig) -> tuple[RunConfig, Check]:
    """Return ``config`` with a layout for this cluster, and the check that all actors fit."""
    try:
        config = choose_cluster_layout(config, lambda line: None)
        place(needs_of(config), all_nodes())
    except (ConfigError, NoRoom) as error:
        return config, Check("placement", "failed", "; ".join(error.lines))
    try:
        place(needs_of(config), free_nodes())
    except NoRoom as error:
        reasons = "; ".join(error.lines)
        return config, Check("placement", "note", f"other jobs occupy what it needs: {reasons}")
    return config, Check("placement", "ok", f"{len(needs_of(config))} actors can be placed")


def _stores(config: RunConfig | None) -> list[Check]:
    sizes = object_stores()
    summary = ", ".join(f"{node[:8]} {size / 1e9:.1f} GB" for node, size in sorted(sizes.items()))
    if len(sizes) > FEW:
        least, most = (f"{limit(sizes.values()) / 1e9:.1f}" for limit in (min, max))
        summary = f"{len(sizes):,} nodes, each {least} to {most} GB"
    if config is not None:
        try:
            check_store(config, all_nodes(), sizes)
        except ConfigError as error:
            return [Check("object store", "failed", "; ".join(error.lines))]
        except NoRoom:
            return [Check("object store", "note", f"{summary}; not compared: no placement")]
    return [Check("object store", "ok", summary)]


@contextlib.contextmanager
def _mark(config: RunConfig | None) -> Iterator[str | None]:
    """Create and lock a file under the run root, for all nodes to see; None without a run root."""
    if config is None or config.run_root is None:
        yield None
        return
    root = Path(config.run_root).absolute()
    with contextlib.ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(tempfile.NamedTemporaryFile(dir=root, prefix=".doctor-"))
        except OSError as error:
            raise ConfigError(f"run_root = {str(root)!r}: {error.strerror or error}") from None
        with contextlib.suppress(OSError):  # storage without locks: no node will see one
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file.name


def _facts(config: RunConfig | None, mark: str | None) -> tuple[list[Facts], list[tuple[str, str]]]:
    """Return (the facts of each node, (node, reason) for each node that returned none).

    Nodes examine themselves concurrently: a process that imports torch takes seconds to start.
    """
    tree = config.model_dump(mode="json") if config is not None else None
    asked = {node.id: _on(node.id, examine_node, tree, mark) for node in all_nodes()}
    until = time.monotonic() + ANSWER_S
    found, silent = dict[str, Facts](), list[tuple[str, str]]()
    for node, answer in asked.items():
        try:
            found[node] = ray.get(answer, timeout=max(0.0, until - time.monotonic()))
        except Exception as error:  # whatever it is, the check reports it
            silent.append((node, cause(error)))
    this_node = ray.get_runtime_context().get_node_id()
    size = _bytes_to_send(config)
    weights = ray.put(np.zeros(size, np.uint8))
    all_facts = list[Facts]()
    for node, facts in found.items():
        # one node after the other: concurrent transfers would share the driver's link
        try:
            clock, seconds = _link(node, [weights] if node != this_node else [])
        except Exception as error:
            silent.append((node, cause(error)))
            continue
        rate = size / seconds / 1e6 if seconds else None
        all_facts.append(replace(facts, node=node, clock=clock, bandwidth_mb_s=rate))
    return all_facts, silent


def _link(node: str, weights: list[Any]) -> tuple[float, float | None]:
    """Return (the least difference of a node's clock, seconds to send it ``weights``)."""
    sent = time.time()
    now, received = ray.get(_on(node, receive, weights), timeout=ANSWER_S)
    # the node read its clock between these two times, so the clocks differ at least by this
    return max(0.0, sent - now, now - time.time()), received


def _on(node: str, function: Callable[..., object], *arguments: object) -> Any:
    """Call a function on a node; return the reference of its result."""
    affinity = NodeAffinitySchedulingStrategy(node, soft=False)
    remote: Any = ray.remote(function)  # pyright: ignore[reportUnknownVariableType]
    options = {"scheduling_strategy": affinity, "num_cpus": 0, "max_retries": 0}
    return remote.options(**options).remote(*arguments)


def _bytes_to_send(config: RunConfig | None) -> int:
    """Return the size of the object that measures bandwidth: as that of a run's weights.

    It is ``SENT`` if there is no run or its weights are unknown, for example as it has no room.
    """
    published = None
    if config is not None:
        with contextlib.suppress(NoRoom):
            published = published_bytes_on(config, all_nodes())
    return SENT if published is None else min(max(published.total, SENT), MOST_SENT)


def examine_node(tree: dict[str, object] | None, mark: str | None) -> Facts:
    """Return the facts of this node."""
    facts = examine(parse(tree) if tree is not None else None, mark)
    disk = ray_directory.nearly_full(ray.get_runtime_context().get_temp_dir())
    return replace(facts, store_on_disk=directory_on_disk() or "", ray_disk=disk or "")


def receive(weights: list[Any]) -> tuple[float, float | None]:
    """Return (this node's clock, seconds to fetch ``weights``, or None if there are none).

    ``weights`` contains a reference to an object on another node.
    """
    now, began = time.time(), time.perf_counter()
    if weights:
        ray.get(weights)
    return now, time.perf_counter() - began if weights else None

"""Choose the layout of a run on the cluster it has joined, once, before actors are placed."""

from __future__ import annotations

import time
from collections.abc import Callable

from cluster.runtime.nodes import BUSY_WAIT_S, LOOK_S, all_nodes, free_nodes
from configs.schema import RunConfig
from planning.assumptions import ACCELERATORS
from planning.layouts.choose import Choice
from planning.layouts.gpus import Gpus
from planning.layouts.limits import refuse_too_many
from planning.layouts.recomputation import with_recomputation
from planning.layouts.resolve import known_gpus, needs_layout, resolve_layout
from planning.layouts.threads import with_threads
from planning.machine import usable_cores
from planning.plan import open_architecture


def choose_cluster_layout(config: RunConfig, tell: Callable[[str], None]) -> RunConfig:
    """Return ``config`` with the chosen layout's numbers, and with threads for a learner on CPUs.

    The layout is chosen for the GPUs that are free on the cluster, and reported to ``tell``. Raises
    ConfigError if no layout fits, or services request more than the cluster has.
    """
    nodes = all_nodes()
    refuse_too_many(config, 0, 0, nodes)
    # a node's CPUs are the number Ray was started with, which may exceed the machine's cores
    cores = min([usable_cores(), *(int(node.cpus) for node in nodes if node.cpus >= 1)])
    if not needs_layout(config):
        return with_threads(config, cores)
    gpus = _free_gpus(config)
    with open_architecture(config) as (family, _):
        final = resolve_layout(with_recomputation(config, family, gpus), family, gpus)
    if final.choice is not None:
        best, prediction = final.choice.best, final.choice.best.prediction
        seconds = f", {prediction.iteration:.1f} s per iteration predicted" if prediction else ""
        text = (
            f"{final.choice.why}{seconds}: {best.numbers.describe()}{_other_layouts(final.choice)}"
        )
        tell(f"layout: {best.numbers.mode}, {text}")
        if config.optimizer.gradient_checkpointing == "auto":
            share = final.config.optimizer.recomputed
            tell(f"optimizer.gradient_checkpointing = {share:g}: the fastest that fits the memory")
    return with_threads(final.config, cores)


def _other_layouts(choice: Choice) -> str:
    """Return the predicted times of the other layouts, in words; empty if none fits."""
    times = [
        f"{each.numbers.mode}{' exploring ahead' * each.numbers.ahead}"
        f"{' in turns' * bool(each.numbers.leaves)} {each.seconds:.1f} s"
        for each in choice.table
        if each.prediction and each.numbers != choice.best.numbers
    ]
    return f"; others would take: {', '.join(times)}" if times else ""


def _free_gpus(config: RunConfig) -> list[Gpus]:
    """Return the GPUs to lay the run out on.

    These are the free ones, after waiting up to ``BUSY_WAIT_S`` seconds for another job to release
    its own. If nodes may be awaited and ``layout.gpus`` exceeds the free GPUs, the number is raised
    to it, as the autoscaler is expected to add the missing ones.
    """
    began = time.monotonic()
    while sum(int(node.gpus) for node in free_nodes()) < sum(int(n.gpus) for n in all_nodes()):
        if time.monotonic() - began > BUSY_WAIT_S:
            break
        time.sleep(LOOK_S)
    gpus = known_gpus(free_nodes())
    requested = config.layout.gpus if config.layout else None
    if not (config.services.wait_for_nodes_s and requested):
        return gpus
    accelerator = config.services.rollout.accelerator or (gpus[0].kind if gpus else "")
    missing = requested - sum(each.count for each in gpus)
    if missing <= 0 or accelerator not in ACCELERATORS:
        return gpus
    return [Gpus(accelerator, requested, ACCELERATORS[accelerator].memory_gb)]

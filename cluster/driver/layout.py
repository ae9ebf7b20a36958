"""The layout of a run on the cluster that it has joined: chosen once, before actors are placed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from cluster.runtime.nodes import BUSY_WAIT_S, LOOK_S, all_nodes, free_nodes
from configs.schema import RunConfig
from planning.assumptions import ACCELERATORS
from planning.layouts.choose import Choice
from planning.layouts.gpus import Gpus
from planning.layouts.limits import refuse_too_many
from planning.layouts.recomputation import with_recomputation
from planning.layouts.resolve import known_gpus, laid_out, to_choose
from planning.layouts.threads import with_threads
from planning.make import described


def on_this_cluster(config: RunConfig, tell: Callable[[str], None]) -> RunConfig:
    """``config`` with its layout's numbers for the GPUs that are free here, and with threads for a
    learner on CPUs; ``tell`` hears which layout.

    Raises ConfigError, a line, where no layout fits, or services ask for more than there is.
    """
    nodes = all_nodes()
    refuse_too_many(config, 0, 0, nodes)
    # a node's CPUs are what Ray was told, which may be more than there are
    cores = min([os.cpu_count() or 1, *(int(node.cpus) for node in nodes if node.cpus >= 1)])
    if not to_choose(config):
        return with_threads(config, cores)
    gpus = _free_gpus(config)
    with described(config) as (family, _):
        final = laid_out(with_recomputation(config, family, gpus), family, gpus)
    if final.choice is not None:
        best, found = final.choice.best, final.choice.best.prediction
        seconds = f", {found.iteration:.1f} s per iteration predicted" if found else ""
        told = f"{final.choice.why}{seconds}: {best.numbers.describe()}{_others(final.choice)}"
        tell(f"layout: {best.numbers.mode}, {told}")
        if config.optimizer.gradient_checkpointing == "auto":
            share = final.config.optimizer.recomputed
            tell(f"optimizer.gradient_checkpointing = {share:g}: the fastest that has the memory")
    return with_threads(final.config, cores)


def _others(choice: Choice) -> str:
    """What the best layout of each other kind would take; nothing where none fits."""
    found = [
        f"{each.numbers.mode}{' exploring ahead' * each.numbers.ahead}"
        f"{' in turns' * bool(each.numbers.leaves)} {each.seconds:.1f} s"
        for each in choice.table
        if each.prediction and each.numbers != choice.best.numbers
    ]
    return f"; others would take: {', '.join(found)}" if found else ""


def _free_gpus(config: RunConfig) -> list[Gpus]:
    """Those that are free, once another job has given back what it is about to; and those that an
    autoscaler is to bring, where ``layout.gpus`` asks for more than there are.
    """
    began = time.monotonic()
    while sum(int(node.gpus) for node in free_nodes()) < sum(int(n.gpus) for n in all_nodes()):
        if time.monotonic() - began > BUSY_WAIT_S:
            break
        time.sleep(LOOK_S)
    gpus = known_gpus(free_nodes())
    wanted = config.layout.gpus if config.layout else None
    if not (config.services.wait_for_nodes_s and wanted):
        return gpus
    named = config.services.rollout.accelerator or (gpus[0].kind if gpus else "")
    missing = wanted - sum(each.count for each in gpus)
    if missing <= 0 or named not in ACCELERATORS:
        return gpus
    return [Gpus(named, wanted, ACCELERATORS[named].memory_gb)]

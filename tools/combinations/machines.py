"""Ray for ``make combinations``: on this machine, or on simulated nodes that can be lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planning.placement import ACCELERATOR
from tools.combinations.layouts import CPUS, GPUS

if TYPE_CHECKING:
    from tests.cluster.nodes import Machines


@contextmanager
def started(kind: str | None, nodes: int) -> Iterator[Machines | None]:
    """Start Ray for the duration of the block; yield its nodes if there are several.

    ``kind`` is that of the simulated GPUs, or None. With several ``nodes`` the GPUs are spread over
    them, and the head, which is not lost, holds no actor.
    """
    import ray

    from tests.cluster.nodes import Machines

    if nodes > 1:
        assert kind is not None
        each = {"num_cpus": CPUS // nodes, "num_gpus": GPUS // nodes, "labels": {ACCELERATOR: kind}}
        with Machines({"num_cpus": 0}, *[each] * nodes) as machines:
            yield machines
        return
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
    gpus = GPUS if kind else 0
    ray.init("local", num_cpus=CPUS, num_gpus=gpus, logging_level=logging.ERROR, **quiet)
    try:
        yield None
    finally:
        ray.shutdown()


def simulate_gpus(capability: str, out: Path) -> None:
    """Let every process that is started from now on have a GPU (``tests.simulated_gpu``)."""
    from tests import simulated_gpu
    from tests.simulated_gpu.install import build

    site = Path(simulated_gpu.__file__).parent / "site"
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), str(Path.cwd()), *filter(None, before)])
    os.environ["SIMULATED_GPU"] = f"{capability}:{build(out)}"
    os.environ["TRITON_INTERPRET"] = "1"  # for the kernel that has no substitute

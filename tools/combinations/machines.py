"""Ray for ``make combinations``: on this machine, or on simulated nodes that can be lost."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from planning.layouts.gpus import Gpus
from planning.placement import ACCELERATOR
from tools.combinations.layouts import CPUS, GPUS, KINDS

if TYPE_CHECKING:
    from tests.cluster.nodes import Machines


@contextmanager
def started(gpus: Sequence[Gpus], nodes: int, library: Path | None) -> Iterator[Machines | None]:
    """Start Ray for the duration of the block; yield its nodes if there are several.

    ``gpus``: the simulated ones, by kind; none if actors compute on CPUs. ``library``: what
    ``simulate_gpus`` returned. With several ``nodes``, each has GPUs of one kind, and the head,
    which is not lost, holds no actor.
    """
    import ray

    from cluster.runtime.local_ray import start_ray
    from tests.cluster.nodes import Machines

    if nodes > 1:
        assert library is not None
        each = {"num_cpus": CPUS // nodes, "num_gpus": GPUS // nodes}
        kinds = [gpus[index % len(gpus)].kind for index in range(nodes)]
        named = [{"labels": {ACCELERATOR: kind}, "env_vars": gpu(kind, library)} for kind in kinds]
        with Machines({"num_cpus": 0}, *[{**each, **node} for node in named]) as machines:
            yield machines
        return
    start_ray(num_cpus=CPUS, num_gpus=sum(each.count for each in gpus))
    try:
        yield None
    finally:
        ray.shutdown()


def gpu(kind: str, library: Path) -> dict[str, str]:
    """Return the variable with which a process has a GPU of this kind (``tests.simulated_gpu``)."""
    capabilities = {name: capability for capability, name in KINDS.items()}
    return {"SIMULATED_GPU": f"{capabilities[kind]}:{library}"}


def simulate_gpus(kind: str, out: Path) -> Path:
    """Let every process that is started from now on have a GPU; return the library it loads."""
    from tests import simulated_gpu
    from tests.simulated_gpu.install import build

    site, library = Path(simulated_gpu.__file__).parent / "site", build(out)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), str(Path.cwd()), *filter(None, before)])
    os.environ |= gpu(kind, library)
    os.environ["TRITON_INTERPRET"] = "1"  # for the kernel that has no substitute
    return library

"""Fixtures that many tests share."""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings

from tests.tiny_flux import tiny_flux_dir, tiny_flux_kontext_dir
from tests.tiny_flux2 import tiny_flux2_dir, tiny_flux2_klein_dir
from tests.tiny_qwen_image import tiny_qwen_image_dir, tiny_qwen_image_edit_dir
from tests.tiny_sana import tiny_sana_dir
from tests.tiny_sana_video import tiny_sana_video_dir
from tests.tiny_sd3 import tiny_sd3_dir
from tests.tiny_wan import tiny_wan_dir
from tests.tiny_z_image import tiny_z_image_dir

__all__ = [
    "graphs",
    "ray_here",
    "tiny_flux2_dir",
    "tiny_flux2_klein_dir",
    "tiny_flux_dir",
    "tiny_flux_kontext_dir",
    "tiny_qwen_image_dir",
    "tiny_qwen_image_edit_dir",
    "tiny_sana_dir",
    "tiny_sana_video_dir",
    "tiny_sd3_dir",
    "tiny_wan_dir",
    "tiny_z_image_dir",
]

# the same examples every time, and no deadline: a busy machine is no failure of the code
settings.register_profile("suite", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("suite")

# small tensors: more threads only cost, and threads that spin while they wait take the cores of the
# actors; one also fixes the order of sums. Read when torch is imported, so this file imports it
# nowhere.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# what imports torch's compiler would start a pool of processes, each of which imports torch
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

# where there is no GPU, Triton's kernels run in its interpreter; read when triton is imported
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

START_S = 280.0
"""For Ray's own processes to come up. By itself Ray gives them 30, however busy the machine is."""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist, which was loaded later, reads the marks in its turn
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of several test processes (pytest-xdist) one has all tests on the shared Ray, so that runs
    find the processes of the runs before; a file's other tests are together, with its fixtures.
    """
    for item in items:
        on_ray = "ray_here" in getattr(item, "fixturenames", ())
        group = "ray" if on_ray else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Raises UsageError where pytest-xdist has taken no notice of the groups.

    What was imported stays: the garbage collector, which takes a third of a second to look through
    all of it, need not do so again.
    """
    gc.collect()
    gc.freeze()
    dealt = getattr(session.config.option, "loadgroup", False)
    if dealt and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist deals tests out one by one: see pyproject.toml")


@pytest.fixture
def graphs(monkeypatch) -> Iterator[list[int]]:
    """torch.compile without a compiler: graphs are made, those of gradients too, and run operation
    by operation, with the bits of eager passes. How many operations each has.
    """
    from functools import partial

    import torch
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.utils import counters

    found: list[int] = []

    def backend(
        graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: object
    ) -> Callable[..., Any]:
        found.append(sum(node.op != "placeholder" for node in graph.graph.nodes))
        return aot_eager(graph, inputs) if torch.is_grad_enabled() else graph

    monkeypatch.setenv("CXX", sys.executable)  # something that is there; nothing is given to it
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    counters.clear()
    yield found
    assert not counters["graph_break"]
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def ray_here(tiny_sd3_dir, tmp_path_factory) -> Iterator[None]:
    """One Ray for the session, apart from any that runs here already. Its CPUs are a number: idle
    hosts keep their share. Its actors are forks, as they are where a command starts Ray.
    """
    import ray
    from ray._private import services

    from cluster.runtime import template
    from tests.cluster.runs import tiny_config

    template.start(tiny_config(tiny_sd3_dir, tmp_path_factory.mktemp("template"), "template"))
    requested = services.get_node

    def patiently(*arguments: object) -> object:
        deadline = time.monotonic() + START_S
        while True:
            try:
                return requested(*arguments)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    with mock.patch.object(services, "get_node", patiently):
        ray.init(
            "local",
            num_cpus=32,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            # or it starts a process per CPU, that is 32, before anybody asks for one
            _system_config={"prestart_worker_first_driver": False},
        )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def undisturbed(ray_here, tiny_sd3_dir, tmp_path_factory):
    """Three iterations with two rollout actors, nothing killed: read it, do not write to it."""
    from tests.cluster.runs import run_here, tiny_config

    return run_here(tiny_config(tiny_sd3_dir, tmp_path_factory.mktemp("undisturbed"), "two"))

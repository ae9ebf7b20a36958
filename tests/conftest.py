"""Fixtures shared by many tests."""

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from cluster.runtime.garbage import fewer_collections
from tests.graphs import captured_graphs
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

# the same examples in every run, and no deadline: a busy machine must not fail a test
settings.register_profile("suite", derandomize=True, deadline=None, max_examples=40)
settings.load_profile("suite")

# The tests' tensors are small: more threads would only cost time, and threads that spin while they
# wait would take cores from actors. One thread also fixes the order of sums. torch reads these
# variables when it is imported, so this file imports it inside functions only.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# modules that import torch's compiler would start a pool of processes, each of which imports torch
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

# without a GPU, Triton's kernels run in its interpreter; the variable is read when triton is
# imported
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist's own hook, which reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Assign tests to groups: pytest-xdist runs each group in one process.

    All tests that use the shared Ray are one group, so that runs reuse the processes of earlier
    runs. The tests of any other file are a group, so that they share its fixtures.
    """
    for item in items:
        on_ray = "ray_here" in getattr(item, "fixturenames", ())
        group = "ray" if on_ray else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_configure(config: pytest.Config) -> None:
    """Collect garbage as rarely as a driver does: importing the tests takes a quarter less time."""
    collections = fewer_collections()
    collections.__enter__()
    config.add_cleanup(lambda: collections.__exit__(None, None, None))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Raise UsageError if pytest-xdist ignores the groups.

    Imported modules are also excluded from garbage collection, which needs a third of a second to
    traverse them, and never frees them.
    """
    gc.collect()
    gc.freeze()
    dealt = getattr(session.config.option, "loadgroup", False)
    if dealt and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist deals tests out one by one: see pyproject.toml")


@pytest.fixture
def graphs() -> Iterator[list[int]]:
    """Yield the number of operations of each graph, as ``captured_graphs``."""
    with captured_graphs() as found:
        yield found


@pytest.fixture(scope="session")
def ray_here(tiny_sd3_dir, tmp_path_factory) -> Iterator[None]:
    """Start one Ray for the session, separate from any that runs on this machine.

    The number of CPUs is fixed and large, because idle hosts of the shared processes keep their
    CPUs. Actors are forks of a template, as in runs whose command starts Ray.
    """
    import ray

    from cluster.runtime import template
    from cluster.runtime.local_ray import start_ray
    from tests.cluster.runs import tiny_config

    template.start(tiny_config(tiny_sd3_dir, tmp_path_factory.mktemp("template"), "template"))
    start_ray(num_cpus=32)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def undisturbed(ray_here, tiny_sd3_dir, tmp_path_factory):
    """Run three iterations with two rollout actors and no faults; the result is read-only."""
    from tests.cluster.runs import run_here, tiny_config

    return run_here(tiny_config(tiny_sd3_dir, tmp_path_factory.mktemp("undisturbed"), "two"))

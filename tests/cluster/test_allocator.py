"""jemalloc in processes that compute on CPUs."""

import json
import os
import subprocess
import sys

import pytest

from actors.runtime import allocator as in_use
from cluster.runtime import allocator

PASSES = """
import json, resource, torch
from actors.runtime import allocator

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work():
    held = [torch.zeros(1_500_000) for _ in range(20)]
    small = [torch.zeros(1_000) for _ in range(20)]
    del held[::2]
    held += [torch.zeros(1_500_000) for _ in range(10)]

work()
before = faults()
work()
print(json.dumps([allocator(), faults() - before]))
"""
PAGES = 30 * 1_500_000 * 4 // 4096


@pytest.fixture
def chosen(monkeypatch) -> dict[str, str]:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv("MALLOC_CONF", raising=False)
    return allocator.variables() or pytest.skip("Ray brings no jemalloc for this machine")


def recorded(variables: dict[str, str]) -> tuple[str, int]:
    run = subprocess.run(
        [sys.executable, "-c", PASSES],
        env=os.environ | variables,
        capture_output=True,
        check=True,
        text=True,
    )
    assert run.stderr == ""  # jemalloc prints unknown settings there
    return json.loads(run.stdout)


def test_a_second_pass_reuses_the_pages_of_the_first(chosen):
    """The C library returns the pages, so that they are faulted in again, one by one or up to 16 at
    once.

    The second happens with kernels that have large pages. The test also checks the allocator's
    name.
    """
    name, faults = recorded(chosen)
    assert name == "jemalloc" and faults < PAGES / 100
    name, faults = recorded({})
    assert name == in_use() and faults > PAGES / 16


def test_the_users_allocator_and_settings_are_kept(chosen, monkeypatch):
    assert chosen["MALLOC_CONF"] == allocator.SETTINGS
    monkeypatch.setenv("MALLOC_CONF", "narenas:2")
    assert allocator.variables() == chosen | {"MALLOC_CONF": "narenas:2"}
    monkeypatch.setenv("LD_PRELOAD", "/opt/other.so")
    assert allocator.variables() == {}


def test_nothing_is_set_if_ray_has_no_jemalloc(chosen, monkeypatch, tmp_path):
    monkeypatch.setattr(allocator.platform, "machine", lambda: "aarch64")
    assert allocator.variables() == {}
    monkeypatch.undo()
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(allocator, "LIBRARY", "core/nothing.so")
    assert allocator.variables() == {}


def test_other_systems_report_the_c_library(tmp_path):
    (tmp_path / "maps").write_text("7f00-7f01 r-xp 0 0 0 /opt/ray/core/libjemalloc.so\n")
    assert in_use(tmp_path / "maps") == "jemalloc"
    assert in_use(tmp_path / "nothing") == in_use()

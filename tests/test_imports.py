"""What a process must not import to start: each of these packages costs seconds, and a run has
half a dozen processes.
"""

import subprocess
import sys

import pytest

HEAVY = "torch._dynamo", "diffusers", "transformers", "torchvision", "peft", "scipy.stats", "triton"
CHECKS = """
from cluster.driver.store import check_store, most_bytes, published_bytes
from configs.load import load
from planning.placement import Node
from planning.preflight import check_model, check_scorers
config = load("quickstart", [])
check_model(config)
check_scorers(config)
check_store(config, [Node("a" * 32, 64.0, 0.0, {})], {"a" * 32: 2.0**31})
"""


def imported(code: str, *packages: str) -> set[str]:
    """Those of ``packages`` that a new process has imported after ``code``."""
    ask = f"{code}\nimport sys; print(*({set(packages)!r} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return set(answer.stdout.split())


@pytest.mark.parametrize("actor", ["selector", "reward"])
def test_actors_that_go_by_rules_start_without_torch(actor):
    assert not imported(f"import actors.{actor}", "torch", *HEAVY)


def test_a_configuration_is_read_without_torch():
    assert not imported('from configs.load import load\nload("quickstart", [])', "torch", *HEAVY)


@pytest.mark.parametrize("actor", ["encoder", "rollout", "learner"])
def test_the_module_of_an_actor_with_a_model_imports_torch_alone(actor):
    """The class is imported by the driver too, which builds none."""
    assert not imported(f"import actors.{actor}", *HEAVY)


def test_an_explorer_is_made_of_no_adapters():
    """What it imports of ours; diffusers imports peft by itself as soon as it loads a model."""
    assert not imported("import actors.rollout, policy.explorer", "peft", "learner.publish")


def test_the_driver_checks_a_run_before_its_first_actor_without_building_its_model():
    assert not imported(f"import cluster.driver.session\n{CHECKS}", *HEAVY)


def test_the_quick_bound_on_what_is_published_is_one(tiny_sd3_dir, tmp_path):
    from cluster.driver.store import most_bytes, published_bytes
    from configs.load import load
    from tests.cluster.runs import tiny_config

    for config in (tiny_config(tiny_sd3_dir, tmp_path, "bound"), load("quickstart", [])):
        assert published_bytes(config).total <= most_bytes(config)

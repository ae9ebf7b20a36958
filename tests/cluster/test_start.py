"""What an actor imports before it can answer: that is its start, and memory while it lives."""

import pytest
import ray

from actors.reward import RewardActor
from actors.selector import SelectorActor
from tests.cluster.runs import tiny_config

HEAVY = {"torch", "diffusers", "transformers", "peft", "scipy"}


@pytest.mark.parametrize("actor", [SelectorActor, RewardActor])
def test_an_actor_that_needs_no_torch_starts_without_it(ray_here, tmp_path, actor):
    """The reward actor's only scorer goes by a rule: it encodes images as JPEG."""
    tree = tiny_config(tmp_path, tmp_path, "light").model_dump(mode="json")
    handle = ray.remote(actor).options(num_cpus=0).remote(tree)
    try:
        ray.get(handle.ready.remote())
        # a lambda travels by value: a function of this module would bring its imports along
        names = ray.get(handle.__ray_call__.remote(lambda _: sorted(__import__("sys").modules)))
    finally:
        ray.kill(handle)
    assert "numpy" in names and not HEAVY & {name.partition(".")[0] for name in names}

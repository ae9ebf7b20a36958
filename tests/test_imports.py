"""Modules that processes must not import at their start: each costs seconds, in half a dozen
processes.
"""

import json
import subprocess
import sys

HEAVY = "torch._dynamo", "diffusers", "transformers", "torchvision", "peft", "scipy.stats", "triton"
BY_RULE = """load(
    "quickstart", ["rewards.scorers=[{name = 'jpeg_compressibility'}]"]
).model_dump(mode="json")"""
RULES = """
import numpy as np
from learner.audit import agreement
from learner.fidelity import per_prompt
from learner.selection import select
rewards = np.arange(24.0)
assert select(rewards, 4).indices == (0, 1, 22, 23)
assert agreement(rewards, rewards)["kendall_tau"] > 0.999
assert per_prompt(rewards[None], rewards[None])["top4_rank"] == 2.5
"""
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


def imported(*steps: str) -> list[set[str]]:
    """Return the packages that are imported after each of ``steps``, run in order in one new
    process.
    """
    ask = "import json, sys\nfound = []\n"
    ask += "".join(f"{step}\nfound.append(sorted(sys.modules))\n" for step in steps)
    answer = subprocess.run(
        [sys.executable, "-c", f"{ask}print(json.dumps(found))"], capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    return [set(names) for names in json.loads(answer.stdout)]


def test_modules_import_torch_only_if_needed():
    """Actors without a model start without torch, and so does reading a configuration.

    The driver imports the classes of actors with a model too, but builds no model, and checks a run
    before its first actor without one.
    """
    config, selector, reward, encoder, rollout, learner, driver = imported(
        'from configs.load import load\nload("quickstart", [])',
        f"from actors.selector import SelectorActor\nSelectorActor({BY_RULE}).ready()",
        f"from actors.reward import RewardActor\nRewardActor({BY_RULE}).ready()",
        "import actors.encoder",
        "import actors.rollout",
        "import actors.learner",
        f"import cluster.driver.train\n{CHECKS}",
    )
    for found in (config, selector, reward):
        assert not found & {"torch", *HEAVY}
    assert "numpy" in reward and "scipy" not in reward
    for found in (encoder, rollout, learner, driver):
        assert "torch" in found and not found & set(HEAVY)
    assert "learner.publish" not in rollout


def test_explorers_import_no_adapters_and_the_core_no_ray():
    """Rollout actors import no adapters, and the core does not import Ray.

    diffusers imports peft by itself when it loads a model. The selector must not import torch,
    which takes two seconds, to sort 96 numbers.
    """
    rules, explorer, core = imported(
        RULES, "import policy.explorer", "import learner.trainer, rewards"
    )
    assert "torch" not in rules
    assert "policy.explorer" in explorer and not explorer & {"peft", "learner.publish"}
    assert "learner.publish" in core and "ray" not in core


def test_the_quick_bound_on_published_bytes_is_an_upper_bound(tiny_sd3_dir, tmp_path):
    from cluster.driver.store import most_bytes, published_bytes
    from configs.load import load
    from tests.cluster.runs import tiny_config

    for config in (tiny_config(tiny_sd3_dir, tmp_path, "bound"), load("quickstart", [])):
        assert published_bytes(config).total <= most_bytes(config)

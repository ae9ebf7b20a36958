"""A learner of several replicas before a run: impossible settings, placement, memory."""

import pytest
import torch

from configs.load import ConfigError, load
from planning.placement import Node, check_placement, needs_of
from planning.plan import make_plan
from planning.report import lines_of
from planning.sizes import shards_of
from policy.families import family_for
from tests.cluster.runs import tiny_config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["services.learner.replicas=3", "prompts.per_iteration=2"],
            "replicas: 3 cannot share prompts.per_iteration = 2",
        ),
        (
            ["services.learner.replicas=2", "services.learner.gpus=0.5"],
            "gpus = 0.5: two of the 2 replicas would fit on one GPU",
        ),
        (
            [
                *("services.learner.replicas=9", "services.learner.share=samples"),
                *("prompts.per_iteration=2", "selection.keep=4"),
            ],
            "replicas: 9 cannot share 8 samples",
        ),
        (["services.learner.actors=2"], "services.learner.actors"),
        (["services.learner.shard=base"], "shard: 'base' with one replica has nothing to shard"),
        (
            ["services.learner.shard=base", "services.learner.replicas=2", "lora.base=int8"],
            "shard: 'base' with lora.base = 'int8': packed weights are not sharded",
        ),
        (
            [
                *("services.learner.shard=base", "services.learner.replicas=2"),
                "regenerate.compile=true",
            ],
            "shard: 'base' with regenerate.compile: blocks that gather",
        ),
        (
            [
                *("services.learner.shard=base", "services.learner.replicas=2"),
                "optimizer.compile=true",
            ],
            "shard: 'base' with optimizer.compile: blocks that gather",
        ),
    ],
)
def test_invalid_replica_groups_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        load("quickstart", given)


def test_every_replica_needs_a_place():
    config = load("quickstart", ["services.learner.replicas=2", "services.learner.gpus=1"])
    assert [need.actor for need in needs_of(config) if need.kind == "learner"] == [
        "learner-0",
        "learner-1",
    ]
    check_placement(config, [Node("x", 64, 2)])
    with pytest.raises(
        ConfigError,
        match=r"services\.learner: 1 of 2 actors cannot be placed: each needs 0\.5 CPU and 1 GPU",
    ):
        check_placement(config, [Node("x", 64, 1)])


def test_the_plan_counts_replicas(tiny_sd3_dir, tmp_path):
    one, two = (
        make_plan(tiny_config(tiny_sd3_dir, tmp_path, "p", services__learner__replicas=n))
        for n in (1, 2)
    )
    assert two.memory["learner"].pop("sum of gradients, fp32") == 4 * two.trained
    # two prompts, one each
    halved = {
        **one.memory["learner"],
        "conditioning": (one.memory["learner"]["conditioning"] or 0) // 2,
    }
    assert two.memory["learner"] == halved
    for name, stage in one.stages.items():
        assert two.stages[name].gpus == (stage.gpus if name == "explore" else 2 * stage.gpus)
        assert two.stages[name].flops == stage.flops
    assert sorted(actor for actor in two.placed if actor.startswith("learner")) == [
        "learner-0",
        "learner-1",
    ]
    assert any(line.startswith("  learner     2 x 0.5 CPU") for line in lines_of(two))


def test_the_plan_counts_a_sharded_base(tiny_sd3_dir, tmp_path):
    """Half of the weights, half of the merged ones, and four times the largest block."""
    given = {"services__learner__replicas": 2}
    whole, parts = (
        make_plan(tiny_config(tiny_sd3_dir, tmp_path, "p", **given, services__learner__shard=shard))
        for shard in ("none", "base")
    )
    family = family_for(whole.config.model)
    blocks = shards_of(family, torch.float32)
    held, found = (dict(plan.memory["learner"]) for plan in (whole, parts))
    size = held.pop("denoiser, fp32") or 0
    assert found.pop("1/2 of the denoiser, fp32") == -(-size // 2)
    gathered = min(blocks.always + 4 * blocks.largest, 2 * size)
    assert found.pop("gathered weights, two blocks twice") == gathered
    passes = next(name for name in held if name.startswith("passes, "))
    assert 0 < (found.pop(passes) or 0) <= (held.pop(passes) or 0)
    assert found == held


def test_regeneration_tasks_are_balanced_over_replicas():
    """They are as large as possible while the load of replicas differs by at most a twentieth."""

    def size(prompts: int, replicas: int, share: str = "samples") -> int:
        given = [f"prompts.per_iteration={prompts}", f"services.learner.replicas={replicas}"]
        return load(
            "quickstart", [*given, f"services.learner.share={share}"]
        ).regeneration_task_size

    keep = load("quickstart").selection.keep
    assert keep == 24
    assert [size(48, replicas) for replicas in (1, 16, 32, 64)] == [24, 24, 12, 6]
    assert size(48, 5) == 24  # 50 turns of 48 tasks
    assert size(48, 40) == 6  # 96 tasks of 12 fill 2.4 turns of 3, 192 of 6 fill 4.8 of 5
    assert size(48, 1152) == 1 and size(48, 5, "prompts") == 24

"""Whether the object store can hold what is published, counted without weights before training
starts.
"""

import pytest
import torch

from cluster.driver.store import check_store, published_bytes, published_bytes_on
from configs.load import ConfigError
from planning.object_store import SPILLS_AT, store_size, versions_held
from planning.placement import Node, NoRoom
from planning.plan import make_plan
from planning.report import lines_of
from planning.sizes import conditioning_bytes
from policy.explorer import Explorer
from policy.families import family_for
from policy.precision.backends import BACKENDS
from tests.cluster.runs import main_here, tiny_config, write_toml

NODES = [
    Node("a" * 32, 2.0, 0.0, {"pool": "explore"}),
    Node("b" * 32, 2.0, 0.0, {"pool": "learn"}),
    Node("c" * 32, 9.0, 0.0, {}),
]


@pytest.fixture
def config(tiny_sd3_dir, tmp_path):
    rest = {f"services__{kind}__labels": {"pool": "learn"} for kind in ("learner", "encoder")}
    return tiny_config(
        tiny_sd3_dir, tmp_path, "store", services__rollout__labels={"pool": "explore"}, **rest
    )


def test_versions_have_the_bytes_of_the_plan_and_of_an_explorer(config):
    real = Explorer(family_for(config.model), BACKENDS["emulated_nvfp4"], (), "cpu", torch.float32)
    plan, sent = make_plan(config), published_bytes(config)
    assert sent == (plan.broadcast, plan.changing)
    quantized = sum(
        t.numel() * t.element_size()
        for layer in real._layers.values()
        for t in layer.wire_targets().values()
    )
    assert quantized <= sent.total < 2 * quantized
    nothing = config.model_copy(update={"arm": "diffusionnft"})
    assert published_bytes(nothing) == (0, 0)
    check_store(nothing, NODES, {})


@pytest.mark.parametrize(("iterations", "ahead", "held"), [(1, 0, 1), (9, 0, 2), (9, 1, 3)])
def test_early_encoded_prompts_are_in_the_store(config, iterations, ahead, held):
    """Those of each iteration that is explored or trained on, and of the next one."""
    family = family_for(config.model)
    of_prompt = conditioning_bytes(family, torch.float32, False)
    config = config.model_copy(update={"iterations": iterations, "explore_ahead": ahead})
    expected = held * config.prompts.per_iteration * of_prompt
    assert make_plan(config).store["conditioning"] == expected


@pytest.mark.parametrize(("small", "ahead"), [("a", 0), ("b", 0), ("a", 1)])
def test_a_too_small_object_store_is_refused_with_the_needed_size(config, small, ahead):
    config = config.model_copy(update={"explore_ahead": ahead})
    sent = published_bytes(config)
    expected = sent.total + (1 + ahead) * sent.changing
    assert versions_held(config) == 2 + ahead and 0 < sent.changing < sent.total
    enough = {node.id: expected / SPILLS_AT + 1.0 for node in NODES}
    check_store(config, NODES, enough)
    # neither explorers nor the learner are on that node
    check_store(config, NODES, {**enough, "c" * 32: 0.0})
    with pytest.raises(ConfigError) as error:
        check_store(config, NODES, {**enough, small * 32: expected / SPILLS_AT - 1.0})
    assert str(error.value).count("\n") == 0
    assert f"{2 + ahead} versions of the weights" in str(error.value)
    assert f"node {small * 8} has" in str(error.value)
    assert f"--object-store-memory={store_size(expected)}" in str(error.value)


def test_unknown_sizes_are_not_checked(config):
    """On a GPU that the plan's table lacks, the explorers themselves resolve "auto"."""
    services = config.services.model_copy(
        update={"rollout": config.services.rollout.model_copy(update={"gpus": 1.0})}
    )
    auto = config.explore.model_copy(update={"backend": "auto"})
    config = config.model_copy(update={"services": services, "explore": auto})
    kinds = {
        name: [
            Node("a" * 32, 2.0, 8.0, {"pool": "explore", "ray.io/accelerator-type": name}),
            *NODES[1:],
        ]
        for name in ("XPU", "H200")
    }
    assert published_bytes_on(config, kinds["XPU"]) is None
    expected = published_bytes(config, "H200")
    assert published_bytes_on(config, kinds["H200"]) == expected
    assert 0 < expected.changing < expected.total
    with pytest.raises(NoRoom):
        published_bytes_on(config, NODES)
    check_store(config, kinds["XPU"], {"a" * 32: 0.0})
    with pytest.raises(ConfigError, match="object store"):
        check_store(config, kinds["H200"], {"a" * 32: 0.0})


def test_the_suggested_size_of_the_object_store():
    # 13.4 x 1.1 / 0.8
    assert store_size(13_400_000_000) == 18_500_000_000 and store_size(1) == 100_000_000


def test_the_plan_prints_the_size_of_the_object_store(config):
    (line,) = [line for line in lines_of(make_plan(config)) if "--object-store-memory" in line]
    assert line.endswith("=100000000")


def test_training_refuses_a_too_small_object_store(ray_here, config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "cluster.driver.store.object_stores", lambda: dict.fromkeys(_nodes(), 1000.0)
    )
    plain = config.model_copy(update={"services": config.services.model_validate({})})
    assert main_here("train", write_toml(plain, tmp_path)) == 2
    errors = capsys.readouterr().err
    assert "object store: 2 versions of the weights" in errors and errors.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def _nodes() -> list[str]:
    import ray

    return [row["NodeID"] for row in ray.nodes()]

"""Random settings from the schema, and a run with some of them."""

import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest

from configs.load import ConfigError
from configs.objectives import SETTINGS
from tests.cluster.faults import FaultInjector
from tests.cluster.runs import tiny_config
from tests.simulated_gpu.install import missing
from tools.combinations import __main__ as combinations
from tools.combinations.draw import LEFT_OUT, can_start, drawn, options
from tools.combinations.layouts import draw_layout, simulated
from tools.combinations.plans import check_plans, try_plan
from tools.combinations.use import use


def test_settings_of_every_table_are_drawn():
    values = {name: options(name) for name in SETTINGS}
    flow, nft = values["flow_grpo"], values["diffusion_nft"]
    assert flow["objective.window.schedule"][-1] == "random" and "objective.beta" not in flow
    assert nft["objective.beta"] == [0.25, 0.5, 1.0, 2.0, 3.0, 5.0]
    assert flow["selection.keep"] == [2, 3, 5] and flow["services.learner.replicas"] == [1, 2, 3, 5]
    assert flow["lora.base"] == ["full", "int8", "nf4"]
    # at least one setting of every table that is not left out
    tables = {key.partition(".")[0] for key in flow}
    assert {"model", "guidance", "explore", "evaluate", "optimizer", "audit", "publish"} <= tables
    assert not {key for key in flow if key in LEFT_OUT}


def test_drawn_settings_are_valid_and_depend_on_the_seed_only(tiny_sd3_dir, tmp_path):
    config = tiny_config(tiny_sd3_dir, tmp_path, "base", **combinations.SMALL)
    base = json.loads(json.dumps({**config.model_dump(exclude_unset=True), "objective": {}}))
    found = [drawn(random.Random(seed), base) for seed in range(40)]
    assert found[:5] == [drawn(random.Random(seed), base) for seed in range(5)]
    assert all(can_start(base, settings) for settings in found)
    names = Counter(json.loads(settings[0].partition("=")[2]) for settings in found)
    assert set(names) == set(SETTINGS)
    keys = {setting.partition("=")[0] for settings in found for setting in settings}
    assert len(keys) > 80
    assert not can_start(base, ["selection.keep=3"])  # odd, for best and worst
    assert not can_start(base, ["model.fps=2"])  # refused by the model, not by the configuration


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_with_random_settings_repeats(ray_here, tmp_path, monkeypatch):
    monkeypatch.setattr(combinations, "MODELS", ("sd3",))
    tried = combinations.Combinations(tmp_path, 0)
    assert tried.try_one(0) is None
    assert not any((tmp_path / "runs").iterdir())


def test_another_layout_keeps_what_results_depend_on(tiny_sd3_dir, tmp_path):
    config = tiny_config(tiny_sd3_dir, tmp_path, "base", **combinations.SMALL)
    tree = {**config.model_dump(exclude_unset=True), "layout": {}}
    base, rng, gpus = json.loads(json.dumps(tree)), random.Random(0), simulated(["B200"])
    firsts = [draw_layout(rng, base, [], gpus) for _ in range(6)]
    assert len({asked[0] for asked, _ in firsts}) == 3  # modes
    numbers = {config.services.learner.replicas for _, config in firsts}
    assert len(numbers) > 1
    for asked, first in firsts:
        again, second = draw_layout(rng, base, asked, gpus, first)
        assert again != asked
        assert second.services.learner.replicas == first.services.learner.replicas
        assert second.services.learner.share == first.services.learner.share
        assert second.explore_ahead == first.explore_ahead
    # two replicas with whole GPUs, and rollout actors elsewhere
    asked = ["services.learner.replicas=2", "services.learner.gpus=1"]
    for _ in range(6):
        again, _ = draw_layout(rng, base, asked, gpus)
        assert int(again[1].removeprefix("layout.gpus=")) > 2
    with pytest.raises(ConfigError, match="does not fit on . x B200"):
        draw_layout(rng, base, ["services.rollout.actors=9", "services.rollout.gpus=1"], gpus)


def test_an_evaluation_that_differs_from_that_of_the_run_is_found(undisturbed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed.path, run)
    use(run, random.Random(0))
    assert not (run / "exported").exists()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[-1]["reward/eval_mean"] += 1e-6
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(ValueError, match="evaluate: reward/eval_mean is .*, in the run"):
        use(run, random.Random(0))


def test_a_run_that_differs_is_named_with_its_settings(tiny_sd3_dir, tmp_path, monkeypatch):
    made = iter([{"lora": "a", "metrics": "b"}, {"lora": "c", "metrics": "b"}])
    monkeypatch.setattr("tests.cluster.outcomes.outcome", lambda run, step: next(made))
    monkeypatch.setattr(combinations, "trained", lambda config, faults: None)
    monkeypatch.setattr(combinations, "MODELS", ("sd3",))
    monkeypatch.setattr(combinations, "use", lambda path, rng: None)
    monkeypatch.setattr(combinations, "injector", lambda rng, before, *_: before)
    why = combinations.Combinations(tmp_path, 0).try_one(0)
    assert why is not None and why.startswith("lora differ; sd3: objective.name=")
    assert "services.rollout.actors=" in why and why.endswith("; no fault")


def test_actors_are_lost_with_the_others_on_their_gpu_if_they_have_one(tiny_sd3_dir, tmp_path):
    config = tiny_config(tiny_sd3_dir, tmp_path, "base", services__rollout={"gpus": 0.1})
    pools = [SimpleNamespace(kind=kind) for kind in ("rollout", "selector")]
    session = SimpleNamespace(services=SimpleNamespace(pools=pools))
    before = cast(FaultInjector, SimpleNamespace(seen={(0, "begin"): 1}, session=session))
    drawn = [
        combinations.injector(random.Random(seed), before, None, config).faults[0]
        for seed in range(60)
    ]
    assert {(fault.kind, fault.way) for fault in drawn} == {
        ("run", "term"), ("rollout", "kill"), ("rollout", "gpu"), ("selector", "kill")
    }  # fmt: skip


def test_a_plan_with_random_settings(monkeypatch):
    monkeypatch.setattr("tools.combinations.plans.preset_names", lambda: ["sana-sol_rl-hpsv2"])
    monkeypatch.setattr("tools.combinations.plans.drawn", lambda *_: ["selection.rule=random"])
    assert try_plan(0, 0) == (False, None)
    monkeypatch.setattr("tools.combinations.plans.drawn", lambda *_: ["explore.pool_size=4"])
    assert try_plan(0, 0) == (True, None)  # fewer than selection.keep


def test_a_plan_below_its_bound_and_one_that_more_gpus_slow_down_are_found():
    plan = {"iteration_s": 2.0, "bound_s": 1.9}
    check_plans(plan, plan)
    with pytest.raises(ValueError, match="iteration of 1.0 s, bound 1.9 s"):
        check_plans(plan, {**plan, "iteration_s": 1.0})
    with pytest.raises(ValueError, match="2.0 s, 2.1 s on twice the GPUs"):
        check_plans(plan, {**plan, "iteration_s": 2.1})
    with pytest.raises(ValueError, match="not on twice the GPUs"):
        check_plans(plan, None)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_a_run_on_simulated_gpus_repeats(tmp_path):
    """In processes of its own, as torch cannot lose a GPU again."""
    options = ["--runs", "1", "--seed", "2", "--simulated-gpu", "10.0", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "tools.combinations", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "0  same results" in done.stdout

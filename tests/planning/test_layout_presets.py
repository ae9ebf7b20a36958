"""Layouts of every preset of a full-size model: how busy all GPUs are, and the arms compared.

Counts of the models come from the stored table, which `test_the_stored_counts_are_up_to_date`
compares with new counts.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import get_args

import pytest

from cli.main import main
from configs.arms import Arm
from configs.load import MODELS, REWARDS, load
from configs.schema import RunConfig
from planning import counting, savings
from planning.assumptions import Assumptions
from planning.layouts.arms import arms_of, ratios
from planning.layouts.choose import choose
from planning.layouts.gpus import Gpus
from planning.layouts.report import Outlook, as_json, outlook_lines, warnings
from planning.layouts.resolve import costs_of
from planning.plan import open_architecture
from policy.families import Family
from tests.planning.made_up import SHARDS

SIZES = [("B200", 180, n) for n in (1, 2, 4, 8, 16, 64)] + [("H200", 141, 8)]


@contextmanager
def preset(name: str, *overrides: str) -> Iterator[tuple[RunConfig, Family]]:
    config = load(name, overrides)
    with open_architecture(config) as (family, _):
        yield config, family


SPREAD = [
    # every model with half of the rewards, and every reward with half of the models
    pytest.param(model, reward, marks=() if (row + column) % 2 else pytest.mark.slow)
    for row, model in enumerate(MODELS)
    for column, reward in enumerate(REWARDS)
]


@pytest.mark.parametrize(("model", "reward"), SPREAD)
def test_predicted_seconds_are_near_all_work_spread_over_all_gpus(model, reward):
    with preset(f"{model}-sol_rl-{reward}") as (config, family):
        for kind, memory, count in SIZES:
            gpus = [Gpus(kind, count, memory)]
            choice = choose(config, gpus, costs_of(config, family, gpus, Assumptions()))
            most = 1.15 if (kind, count) == ("B200", 8) else 1.25
            assert choice.best.seconds <= most * choice.bound, (kind, count)
            numbers = choice.best.numbers
            assert numbers.ahead == 0  # replicas use every GPU; on 64 GPUs they share samples
            assert (numbers.share == "samples") == (count == 64)


@pytest.mark.parametrize("model", MODELS)
def test_sol_rl_is_faster_than_naive_scaling_at_equal_gpus(model):
    """Except for Wan 2.1 1.3B, where decoding clips is most of a rollout: there it gains
    nothing.
    """
    gpus = [Gpus("B200", 8, 180)]
    with preset(f"{model}-sol_rl-hpsv2") as (config, family):
        found = arms_of(config, family, gpus, Assumptions()).found
    arms = {arm: scenario.prediction for arm, scenario in found.items()}
    assert set(arms) == {"diffusionnft", "naive_scaling", "naive_quant", "sol_rl"}
    ours, naive = arms["sol_rl"], arms["naive_scaling"]
    most = 1.01 if model == "wan_1_3b" else 1.0
    assert ours.explore < naive.explore and ours.rollout < most * naive.rollout
    assert ours.iteration < most * naive.iteration
    assert ours.update == pytest.approx(naive.update)  # equal in all arms
    compared = ratios(config, arms)
    assert compared is not None and compared.rollout == naive.rollout / ours.rollout
    assert (compared.paper is not None) == (model in ("flux1", "sd35_large", "sana"))


@pytest.mark.parametrize("model", ["flux1", "wan_14b"])
def test_arms_with_a_sharded_base_are_compared(model):
    """The number of replicas is not given: the layout of every arm chooses its own."""
    gpus = [Gpus("H100", 8, 80)]
    with preset(f"{model}-sol_rl-hpsv2", *SHARDS) as (config, family):
        arms = arms_of(config, family, gpus, Assumptions())
    assert list(arms.found) == list(get_args(Arm)) and not arms.why_not
    for scenario in arms.found.values():
        learner = scenario.config.services.learner
        assert (learner.shard, learner.replicas) == ("base", 8)


def test_an_impossible_arm_is_explained_in_one_line():
    gpus = [Gpus("B200", 8, 180)]
    with preset("flux1-flow_grpo-hpsv2") as (config, family):
        arms = arms_of(config, family, gpus, Assumptions())
        choice = choose(config, gpus, costs_of(config, family, gpus, Assumptions()))
    assert list(arms.found) == ["diffusionnft", "sol_rl"]
    assert list(arms.why_not) == ["naive_scaling", "naive_quant"]
    assert all("\n" not in why and "objective" in why for why in arms.why_not.values())
    found = choice.best.prediction
    assert found is not None
    seconds = {"diffusionnft": found}
    outlook = Outlook(gpus, found, 1.0, 1.0, seconds, choice, arms_not=arms.why_not)
    lines = outlook_lines(config, outlook)
    assert f"  naive_quant           no: {arms.why_not['naive_quant']}" in lines
    assert as_json(config, outlook)["arms_not"] == arms.why_not


def test_an_arm_that_explores_nothing_uses_every_gpu():
    """Scorers used to be placed on one GPU, which had no room for more than two of them."""
    gpus = [Gpus("H100", 8, 80)]
    with preset("wan_14b-diffusionnft-hpsv2") as (config, family):
        choice = choose(config, gpus, costs_of(config, family, gpus, Assumptions()))
    assert choice.best.numbers.groups["learner"].actors == 8
    assert choice.best.seconds <= 1.05 * choice.bound


def test_a_judge_on_a_server_gets_no_share_of_a_gpu():
    gpus = [Gpus("B200", 8, 180)]
    with preset("flux1_kontext-sol_rl-vlm_edit") as (config, family):
        choice = choose(config, gpus, costs_of(config, family, gpus, Assumptions()))
    groups = choice.best.numbers.groups
    assert (groups["reward"].gpus, groups["rollout"].gpus) == (0, 0.36)
    assert groups["reward"].actors == config.services.reward.actors


@pytest.mark.slow
def test_the_learner_is_sized_for_the_larger_format_of_mixed_gpus():
    """A learner with small passes holds most when it checks the packed version that it published.

    That version has FP8 weights for rollout actors on H100 and NVFP4 weights for B200.
    """
    kinds = [Gpus("B200", 8, 180), Gpus("H100", 8, 80)]
    small = (
        "lora.base=int8",
        "regenerate.compile=false",
        "regenerate.batch_size=1",
        "optimizer.batch_size=1",
        "optimizer.gradient_checkpointing=true",
    )
    with preset("flux1-sol_rl-hpsv2", *small) as (config, family):
        single = [costs_of(config, family, [kind], Assumptions()).learner(2) for kind in kinds]
        for gpus in (kinds, kinds[::-1]):
            mixed = costs_of(config, family, gpus, Assumptions()).learner(2)
            assert mixed == max(single) > min(single)


def test_a_plan_says_where_replicas_wait_for_each_other():
    """FlowGRPO's presets take two optimizer steps per iteration, with samples dealt evenly."""
    gpus, seconds, message = [Gpus("B200", 8, 180)], {}, {}
    for deal in ("random", "even"):
        with preset("flux1-flow_grpo-hpsv2", f"optimizer.deal={deal}") as (config, family):
            choice = choose(config, gpus, costs_of(config, family, gpus, Assumptions()))
            found = choice.best.prediction
            assert found is not None
            outlook = Outlook(gpus, found, choice.bound, found.iteration, {}, choice)
            seconds[deal], message[deal] = found.iteration, warnings(config, outlook)
    (line,) = (line for line in message["random"] if line.startswith("waiting"))
    assert "an update lasts 1.1" in line and line.endswith("set optimizer.deal = 'even'")
    assert not [line for line in message["even"] if line.startswith("waiting")]
    assert seconds["even"] < 0.95 * seconds["random"]
    assert load("flux1-flow_grpo-hpsv2").optimizer.deal == "even"


@pytest.mark.parametrize("name", ["flux1-flow_grpo-hpsv2", "flux1-diffusionnft-hpsv2"])
def test_an_arm_that_explores_nothing_is_planned_on_gpus(name, capsys, monkeypatch):
    """No service of such a preset requests a GPU before a layout is chosen.

    The stored counts suffice: nothing is quantized, whatever ``explore.backend`` says.
    """
    monkeypatch.setattr(counting, "_count_part", lambda *_: pytest.fail("counted anew"))
    assert main(["plan", name, "--gpus", "8", "--accelerator", "B200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layout"]["services"]["learner"]["actors"] == 8


def test_the_printed_plan_contains_its_findings():
    gpus = [Gpus("B200", 64, 180)]
    with preset("sana-sol_rl-hpsv2") as (config, family):
        choice = choose(config, gpus, costs_of(config, family, gpus, Assumptions()))
        scenarios = arms_of(config, family, gpus, Assumptions()).found
    arms = {arm: scenario.prediction for arm, scenario in scenarios.items()}
    found = choice.best.prediction
    assert found is not None
    outlook = Outlook(gpus, found, choice.bound, 0.99 * found.iteration, arms, choice)
    text = "\n".join(outlook_lines(config, outlook))
    assert f"layout      {choice.best.numbers.mode} on 64 x B200: the fastest by prediction" in text
    assert "sol_rl against naive_scaling: rollouts" in text and "1.41 x and 1.25 x" in text
    assert "hidden      exploring is hidden behind" in text
    tree = as_json(config, outlook)
    assert tree["iteration_s"] == found.iteration and tree["bound_s"] == choice.bound
    assert set(tree["arms"]) == set(arms)  # type: ignore[call-overload]
    quicker = replace(arms["naive_scaling"], iteration=found.iteration / 2)
    swift = {"naive_scaling": quicker, "sol_rl": found}
    message = warnings(config, Outlook(gpus, found, choice.bound, found.iteration, swift, choice))
    assert any(line.startswith("slower      sol_rl is predicted to take") for line in message)


def test_the_command_prints_one_object_and_draws_it(capsys, tmp_path):
    drawn = tmp_path / "plan.html"
    command = ["plan", "sana-sol_rl-hpsv2", "--gpus", "16", "--json", "--out", str(drawn)]
    assert main(command) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["bound_s"] <= tree["iteration_s"] <= 1.25 * tree["bound_s"]
    assert tree["layout"]["mode"] == "shared" and tree["layout"]["gpus"] == 16
    assert tree["layout"]["services"]["learner"]["actors"] == 16
    assert tree["idle_share"].keys() == {"rollout", "learner", "reward", "encoder", "selector"}
    # simulated twice, with times relative to the start of an iteration
    assert tree["arms"]["sol_rl"] == pytest.approx(tree["iteration_s"], rel=1e-12)
    assert tree["iteration_s"] < tree["arms"]["naive_scaling"]
    assert tree["warnings"] == []
    work = tree["critical_path_s"]
    assert sum(work.values()) == pytest.approx(tree["iteration_s"], rel=0.02)
    assert tree["gpu_hours_per_1000_updates"] == pytest.approx(tree["iteration_s"] * 16 / 3.6)
    assert tree["one_more_gpu_s"]["B200"] <= tree["iteration_s"]
    page = drawn.read_text()
    # 50 actors have 40 lanes: each service with 16 has twelve or thirteen, and one for all
    names = re.findall(r'class="who">([^<]+)<', page)
    assert {f"{kind}, all 16" for kind in ("learner", "reward", "rollout")} < {*names}
    assert {"encoder-0", "selector-0", "learner-11", "reward-11", "rollout-11"} < {*names}
    assert len(names) == 43 and page.count("<rect") > 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("flux1-sol_rl-hpsv2", "--gpus", "1", "--gpu-memory-gb", "24"),
            "FLUX.1-dev does not fit on 1 x B200 of 24 GB: ",
        ),
        (
            ("quickstart", "--set", "services.rollout.actors=100000"),
            "services.rollout: 100000 actors of 0.5 CPU each need 50000",
        ),
        (("quickstart", "--gpus", "2"), "--gpus 2: no service requests a GPU"),
    ],
)
def test_invalid_plans_are_one_line(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(savings, "SAVINGS", savings.SAVINGS[-1:])  # each counts the model anew
    assert main(["plan", *arguments]) == 2
    first, *more = capsys.readouterr().err.splitlines()
    assert message in first
    # after what does not fit, settings that save memory are listed
    assert bool(more) == ("does not fit" in message) and all(line.startswith("  ") for line in more)

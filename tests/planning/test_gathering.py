"""Seconds to gather a sharded base, computed by hand: 64 GB, 8 replicas, made-up durations."""

from dataclasses import replace

import pytest

from actors.messages import GenerateRequest
from configs.load import load
from planning.assumptions import peer_link
from planning.counting import Counts
from planning.durations import Durations, Line
from planning.gathering import NOTHING, Gathering
from planning.layouts.gpus import Gpus, assign_gpus
from planning.layouts.predict import gathered, predict
from planning.layouts.resolve import gathering_of
from planning.layouts.spec import Group, LayoutSpec
from policy.pass_cost import PassCost
from simulator.actors import Learner
from tests.planning.made_up import SHARDS, preset, tasks

WHOLE = 64e9


def counts(denoiser: float = WHOLE) -> Counts:
    none = PassCost()
    numbers = dict.fromkeys(Counts.__dataclass_fields__, 0)
    works = dict.fromkeys(("step", "merged", "adapted", "training"), none)
    return Counts(**{**numbers, **works, "denoiser": int(denoiser), "targets": int(denoiser / 4)})


def sharded(*overrides: str) -> Gathering:
    """Return the gathering of 24 images per prompt, 10 steps, batches of 8 images or 4 points, 6
    points per sample.
    """
    given = (*SHARDS, "regenerate.batch_size=8", "optimizer.batch_size=4")
    config = preset("flux1", *given, "audit.random_seeds=0", *overrides)
    return gathering_of(config, counts(), "H200", 8)


def test_link_speeds_of_known_gpus():
    """Three quarters of NVLink's 450 GB/s; over PCIe 4, into host memory and out of it again."""
    assert peer_link("H200") == pytest.approx(337.5e9) and peer_link("B200") == 2 * 337.5e9
    assert peer_link("RTX 4090") == 12.5e9


def test_gathering_times_of_a_known_model():
    """7/8 of 64 GB at 337.5 GB/s are 0.166 s, and a prompt is regenerated in 3 batches of 10
    passes.

    A sample has 1.5 batches of points: forward, backward, and the forward of two other policies.
    """
    once = 7 / 8 * 64 / 337.5
    found = sharded()
    assert found.once(8) == pytest.approx(once) and found.once(1) == 0
    # two nodes: at the speed of their link
    assert found.once(16) == pytest.approx(15 / 16 * 64 / 25)
    assert found.of_prompt(8, 1.0) == pytest.approx((30 * once, 24 * 1.5 * 4 * once))
    # six images of a prompt are one batch as well
    assert found.of_prompt(8, 0.25) == pytest.approx((40 * once, 144 * once))
    assert found.publishing(8) == pytest.approx(once / 4)


def test_guidance_in_two_passes_gathers_twice():
    guided = ("guidance.regenerate=4", "guidance.train=4", "guidance.explore=4")
    plain, two = sharded(), sharded(*guided, "guidance.one_pass=false")
    assert (two.generate, two.train) == (2 * plain.generate, 2 * plain.train)
    one = sharded(*guided, "guidance.one_pass=true")
    assert (one.generate, one.train) == (plain.generate, plain.train)


def test_an_unsharded_base_gathers_nothing():
    assert gathering_of(load("flux1-sol_rl-hpsv2"), counts(), "H200", 8) is NOTHING
    there = tasks(229, 285, 855)
    assert there.gathered(8, 1.0) == there


def test_gathering_lengthens_an_iteration():
    """6 prompts for each of 8 replicas; exploring, which is far shorter than regenerating, overlaps
    with it.
    """
    groups = {"rollout": Group(8, 0.36), "learner": Group(8, 0.52)}
    numbers, gpus = LayoutSpec("", groups), [Gpus("H200", 8, 141)]
    plain = {"H200": tasks(8, 285, 855)}
    shards = {"H200": replace(plain["H200"], gathering=sharded())}
    laid, once = assign_gpus(numbers, gpus) or [], 7 / 8 * 64 / 337.5
    found = gathered(numbers, shards)
    assert found == pytest.approx({"regenerate": 6 * 30 * once, "update": 6 * 144 * once})
    assert gathered(numbers, plain) == {}
    before, after = predict(numbers, laid, plain), predict(numbers, laid, shards)
    assert after.update - before.update == pytest.approx(found["update"])
    # the prompt that is explored last is regenerated last: gathering for one prompt is added to
    # exploring
    assert after.iteration - before.iteration == pytest.approx(sum(found.values()), rel=0.02)


def test_a_simulated_learner_gathers_as_well():
    took = Durations(Line(), Line(0.0, 0.1), Line(0.0, 0.2), gathering=sharded())
    learner, once = Learner(took, 0, 8, None, [1]), 7 / 8 * 64 / 337.5
    request = GenerateRequest(tuple(range(9)), 10, None)
    assert learner.generate(request, None).seconds == pytest.approx(0.9 + 20 * once)
    assert learner.export(0).seconds == pytest.approx(once / 4)

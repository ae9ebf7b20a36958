"""Prompts encoded at the start of a run: the encoder then ends, and results do not change."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import ray
from ray.exceptions import ObjectLostError

from cluster.driver import conditioning_cache
from cluster.driver.conditioning_cache import CachedEncoderClient, group_key, groups_of
from cluster.runtime import clock, template
from configs.prompts import Prompt, prompts_of_iteration
from configs.sections import Model
from planning.layouts.costs import Costs
from planning.layouts.gpus import GpuAssignment
from planning.layouts.spec import Group, LayoutSpec
from planning.plan import make_plan
from records.errors import RunFailed, Stopped
from records.progress import Progress
from tests.cluster.faults import RUN, Fault, FaultInjector
from tests.cluster.outcomes import outcome
from tests.cluster.runs import run_here, tiny_config


def test_encode_once_encodes_each_prompt_of_a_run_once(tiny_sd3_dir, tmp_path):
    """Two prompts in each of two iterations, of four in all; blocks of two held-out ones."""
    config = tiny_config(tiny_sd3_dir, tmp_path, "asks", iterations=2)
    train, test = [Prompt(f"train {n}") for n in range(9)], [Prompt(f"test {n}") for n in range(3)]
    groups = [tuple(prompt.text for prompt in group) for group in groups_of(config, train, test)]
    assert groups[0] == ("train 0",)  # that of the identity check
    assert len(groups) in (4 + 2, 5 + 2) and len(set(groups)) == len(groups)
    assert groups[-2:] == [("test 0", "test 1"), ("test 2",)]
    assert groups_of(config, [], test) == [test[:2], test[2:]]


def test_a_prompt_that_was_not_encoded_ends_the_run(tmp_path):
    pool: Any = None
    a, b = [Prompt("a")], [Prompt("b")]
    known = {group_key(a): "there"}
    once = CachedEncoderClient(pool, Model(path="x"), known)  # type: ignore[arg-type]
    assert asyncio.run(once.encode(0, [a])) == ["there"]
    with pytest.raises(RunFailed, match=r"prompts.encode_once: \['b'\] was not encoded"):
        asyncio.run(once.encode(0, [a, b]))
    other = [Prompt("a", image=tmp_path / "another.png")]  # the same text with another image
    with pytest.raises(RunFailed, match=r"prompts.encode_once: \['a'\] was not encoded"):
        asyncio.run(once.encode(0, [other]))


def test_the_encoder_ends_before_other_actors_start_and_weights_are_unchanged(
    tiny_sd3_dir, tmp_path, undisturbed
):
    run = run_here(tiny_config(tiny_sd3_dir, tmp_path, "once", prompts__encode_once=True))
    assert outcome(run, 3) == outcome(undisturbed, 3)
    recorded = [(event["event"], event.get("kind")) for event in run.events()]
    at = recorded.index(("actor_removed", "encoder"))
    started = [kind for name, kind in recorded[:at] if name == "actor_started"]
    assert started == ["encoder"] and ("prompts_encoded", None) in recorded[at:]
    (event,) = [event for event in run.events() if event["event"] == "prompts_encoded"]
    assert event["groups"] == 4 + 2  # training and evaluation use the same prompts


def test_a_run_that_was_stopped_after_its_last_update_encodes_no_further_prompts(
    ray_here, tiny_sd3_dir, tmp_path
):
    """One prompt per iteration: that of a second iteration, number 1, was not encoded."""
    once = {"prompts__encode_once": True, "prompts__per_iteration": 1, "iterations": 1}
    config = tiny_config(tiny_sd3_dir, tmp_path, "whole", **once)
    assert prompts_of_iteration(4, 1, 1, config.seed) == [1]
    whole = outcome(run_here(config), 1)

    config = tiny_config(tiny_sd3_dir, tmp_path, "stopped", **once)
    with pytest.raises(Stopped):
        run_here(config, progress=FaultInjector(Fault(RUN, "term", 0, "updated")))
    run = run_here(config, resume=True)
    (resumed,) = [row for row in run.events() if row["event"] == "run_resumed"]
    assert resumed["iteration"] == 1
    assert outcome(run, 1) == whole


GONE = ObjectLostError("ab" * 28, None, "")


class Encoding:
    """Stand-in for the encoder's pool: the first ``lost`` of its results are ``broken``."""

    def __init__(self, lost: int, broken: Any = GONE):
        self.left, self.broken, self.requested = lost, broken, 0

    async def call_parts(self, task: Any, returns: int, method: Any, groups: Any) -> Any:
        self.requested += 1
        found = [asyncio.get_running_loop().create_future() for _ in groups]
        for each, group in zip(found, groups, strict=True):
            if not self.left:
                each.set_result(group)
            elif self.broken:
                each.set_exception(self.broken)
        self.left = max(0, self.left - 1)
        return [0.0, *found]


def filled(monkeypatch: pytest.MonkeyPatch, pool: Any) -> list[Any]:
    monkeypatch.setattr(conditioning_cache, "_put", lambda value: value)

    async def fill() -> CachedEncoderClient:
        once = CachedEncoderClient(pool, Model(path="x"))
        assert await once.fill([[Prompt("a")], [Prompt("b")]], 3, 0.1) == 2
        return once

    return list(asyncio.run(fill()).known.values())


def test_conditioning_lost_with_the_encoders_node_is_encoded_again(monkeypatch):
    pool = Encoding(2)
    assert filled(monkeypatch, pool) == [["a"], ["b"]] and pool.requested == 3


@pytest.mark.parametrize(("broken", "why"), [(GONE, "ObjectLostError: "), (None, "TimeoutError")])
def test_repeatedly_lost_conditioning_ends_the_run(monkeypatch, broken, why):
    with pytest.raises(RunFailed, match=f"encoded prompts were lost 3 times .* last: {why}"):
        filled(monkeypatch, Encoding(9, broken))


@pytest.mark.parametrize(("lost", "rounds"), [(0, 0), (1, 1), (32, 1), (33, 2), (70, 3)])
def test_lost_conditioning_is_looked_for_in_several_groups_at_once(lost, rounds):
    """Each lost group is waited for in vain, 32 of them at a time. The last two groups arrived."""

    async def forget() -> None:
        groups = [[Prompt(f"{n}")] for n in range(lost + 2)]
        known: dict[Any, Any] = {group_key(group): asyncio.Future() for group in groups}
        arrived = [group_key(group) for group in groups[lost:]]
        for key in arrived:
            known[key].set_result("conditioning")
        pool: Any = None
        once = CachedEncoderClient(pool, Model(path="x"), known)
        began = clock.now()
        assert await once.forget_lost(within_s=7.0) == lost
        assert clock.now() - began == pytest.approx(7.0 * rounds)
        assert list(once.known) == arrived

    with asyncio.Runner(loop_factory=clock.VirtualLoop) as runner:
        runner.run(forget())


class Owner:
    """An owner of objects, which are lost with it."""

    def own(self, value: Any) -> list[Any]:
        return [ray.put(value)]


class Losing(Progress):
    """Loses all encoded prompts when the second iteration is explored."""

    session: Any = None

    def advanced(self, stage: str, n: int = 1) -> None:
        super().advanced(stage, n)
        if stage == "scored" and self.iteration == 1 and self.session:
            known, as_fork = self.session.services.encoder.known, template.fork_runtime_env()
            owner = ray.remote(Owner).options(runtime_env=as_fork).remote()
            for group, reference in known.items():
                (known[group],) = ray.get(owner.own.remote(reference))
            ray.kill(owner)
            for reference in known.values():
                gone(reference)
            self.session = None


def gone(reference: ray.ObjectRef[Any]) -> None:
    """Return when the object is lost: a copy on this node outlives its owner by a moment."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            ray.get(reference, timeout=0.2)
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
            return
        time.sleep(0.05)
    raise AssertionError("it is still there")


def test_conditioning_lost_in_the_object_store_is_encoded_again(
    ray_here, tiny_sd3_dir, tmp_path, undisturbed
):
    once = {"prompts__encode_once": True}
    config = tiny_config(tiny_sd3_dir, tmp_path, "lost", **once)
    run = run_here(config, progress=Losing())
    assert outcome(run, 3) == outcome(undisturbed, 3)
    recorded = [row["groups"] for row in run.events() if row["event"] == "prompts_encoded"]
    assert recorded == [4 + 2, 4 + 2]
    (restored,) = [row for row in run.events() if row["event"] == "learner_restored"]
    encoders = [row for row in run.events() if row.get("kind") == "encoder"]
    assert [row["event"] for row in encoders] == [
        *("actor_started", "actor_removed", "actor_added", "actor_removed")
    ]


def test_the_plan_counts_no_encoder_but_the_encoded_prompts(tiny_sd3_dir, tmp_path):
    assignment = GpuAssignment("B200", 1, {"learner": 1, "encoder": 1})
    numbers = LayoutSpec("", {"learner": Group(1, 0.5), "encoder": Group(1, 0.1)})
    for size, held in ((3e9, 11.0), (30e9, 31.0)):  # one GB more for each process
        costs = Costs({}, {"B200": {"encoder": size}}, lambda _: 10e9, encoder_leaves=True)
        assert costs.held_gb(assignment, numbers) == held
    once = {"prompts__encode_once": True}
    stores = [
        make_plan(tiny_config(tiny_sd3_dir, tmp_path, "p", iterations=9, **more)).store
        for more in ({}, once)
    ]
    # two iterations of two prompts, or four to train on and four held out
    assert stores[1]["conditioning"] == 2 * stores[0]["conditioning"]

"""The learner as a group of replicas. Invariants: each prompt's samples go to one replica, its
rewards to all; what is a replica's own is asked of the first; a run with two replicas learns what
one learner does, up to the order of sums; when one replica is lost the whole group starts anew from
the checkpoint and ends with the bits of a run in which nobody died.
"""

import asyncio
import os
import pickle
import signal
from typing import Any

import numpy as np
import pytest
import ray
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.calls import Call, Task
from actors.clients import LearnerClient
from actors.learner import gather
from actors.messages import Portion, SampleRows, TrainingGroup
from actors.sharing import all_rewards, share
from cluster.driver.learners import EveryReplica, LearnerGroup
from cluster.runtime.member import Member
from cluster.runtime.pool import ActorPool
from cluster.runtime.template import runtime_env
from configs.load import ConfigError, load
from configs.services import LearnerService
from planning.lines import lines_of
from planning.make import make_plan
from planning.placement import Node, check_placement, needs_of
from policy.families import family_for
from policy.memory import shards_of
from records.errors import RunFailed, StateLost
from records.progress import Progress
from records.timeline import read_spans
from tests.cluster.runs import adapters, run_here, selections, tiny_config
from tests.cluster.told import HERE, Told

# ---- settings and placement


@pytest.mark.parametrize(
    ("given", "said"),
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
        (["services.learner.shard=base"], "shard: 'base' with one replica, which holds all of it"),
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
    ],
)
def test_groups_that_cannot_be(given, said):
    with pytest.raises(ConfigError, match=said):
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
        match=r"services\.learner: 1 of 2 actors have no place: each needs 0\.5 CPU and 1 GPU",
    ):
        check_placement(config, [Node("x", 64, 1)])


def test_the_plan_counts_replicas(tiny_sd3_dir, tmp_path):
    one, two = (
        make_plan(tiny_config(tiny_sd3_dir, tmp_path, "p", services__learner__replicas=n))
        for n in (1, 2)
    )
    assert two.memory["learner"].pop("sum of gradients, fp32") == 4 * two.trained
    halved = {
        **one.memory["learner"],
        "conditioning": (one.memory["learner"]["conditioning"] or 0) // 2,
    }  # two prompts, one each
    assert two.memory["learner"] == halved
    for name, stage in one.stages.items():
        assert two.stages[name].gpus == (stage.gpus if name == "explore" else 2 * stage.gpus)
        assert two.stages[name].flops == stage.flops
    assert sorted(actor for actor in two.placed if actor.startswith("learner")) == [
        "learner-0",
        "learner-1",
    ]
    assert any(line.startswith("  learner     2 x 0.5 CPU") for line in lines_of(two))


def test_the_plan_counts_a_base_in_shards(tiny_sd3_dir, tmp_path):
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


# ---- what each is sent


def test_an_update_is_shared_out_by_prompt():
    """Four prompts over three replicas: samples go to one, rewards to all."""
    groups = [group_with(p, [f"r{p}"], [(0, 1)]) for p in range(4)]
    found: dict[int, int] = {}
    rewards = all_rewards(groups[::-1]).by_prompt()
    assert {p: rewards[p].tolist() for p in rewards} == {p: [p, -p] for p in range(4)}
    for rank, request in enumerate(share(5, groups, 3, "prompts")):
        assert request.iteration == 5
        found |= {portion.prompt: rank for portion in request.portions}
        assert all(one == portion_of(groups[one.prompt]) for one in request.portions)
    assert found == {0: 0, 1: 1, 2: 2, 3: 0}
    whole = tuple(portion_of(group) for group in groups)
    for by in ("prompts", "samples"):  # of one, everything
        (alone,) = share(5, groups, 1, by)
        assert alone.portions == whole
    with pytest.raises(RunFailed, match="8 scored samples of 4 prompts, which 5 replicas"):
        share(5, groups, 5, "prompts")


def portion_of(group: TrainingGroup) -> Portion:
    """All of it."""
    return Portion(group.prompt, range(2), group.conditioning, group.samples)


def test_an_update_is_shared_out_by_sample():
    """Eight samples of four prompts over three replicas: runs of 2, 3 and 3. Of each, only the
    objects that hold its rows are named; rewards go to everyone.
    """
    groups = [group_with(p, [f"a{p}", f"b{p}"], [(5,), (0,)]) for p in range(4)]
    told = all_rewards(groups[::-1])
    assert told.prompts == (0, 1, 2, 3) and told.counts == (2, 2, 2, 2)
    assert told.rewards.tolist() == [0, 0, 1, -1, 2, -2, 3, -3]
    found = [
        [(part.samples, part.rows) for one in request.portions for part in one.samples]
        for request in share(5, groups[::-1], 3, "samples")
    ]
    assert found == [
        [("a0", (5,)), ("b0", (0,))],
        [("a1", (5,)), ("b1", (0,)), ("a2", (5,))],
        [("b2", (0,)), ("a3", (5,)), ("b3", (0,))],
    ]
    with pytest.raises(RunFailed, match="8 scored samples of 4 prompts, which 9 replicas"):
        share(5, groups, 9, "samples")


def test_what_all_replicas_are_told_is_sent_once():
    """So that what the driver sends grows with prompts and replicas, and not with both."""

    class Sent:
        def __init__(self, size: int):
            self.members, self.puts, self.calls = range(size), [], []

        def put(self, value: Any) -> str:
            self.puts.append(value)
            return "reference"

        async def perform_on(self, member: int, task: Task[Any], call: Call) -> dict[str, float]:
            self.calls.append(call.args)
            return {}

    sizes = []
    for size in (4, 400):
        groups, pool = [group_with(p, [f"r{p}"], [(0, 1)]) for p in range(size)], Sent(size)
        every = EveryReplica(pool)
        client = LearnerClient(every, every, every)
        asyncio.run(client.update(0, groups))
        (told,) = pool.puts
        assert [len(rewards) for rewards in told.by_prompt().values()] == [2] * size
        assert {told for _, told in pool.calls} == {"reference"} and len(pool.calls) == size
        sizes.append(max(len(pickle.dumps(request)) for request, _ in pool.calls))
    assert sizes[1] < sizes[0] + 10


@pytest.mark.parametrize(
    ("patience_s", "hangs", "told"), [(0.0, True, "of 1"), (None, False, "of 0")]
)
def test_a_failure_waits_for_the_other_replicas_for_so_long(patience_s, hangs, told):
    """And it is that of the lowest rank, whichever came first."""

    class Failing:
        members = range(3)

        async def perform_on(self, member: int, task: Task[Any], call: Call) -> None:
            if member == 0:
                await (asyncio.Event().wait() if hangs else asyncio.sleep(0))
            raise RunFailed(f"of {member}")

    every = EveryReplica(Failing(), patience_s)
    calls = every.perform(Task(("load", 0)), Call("load", (), {}))
    with pytest.raises(RunFailed, match=told):
        asyncio.run(asyncio.wait_for(calls, 20))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 40))
def test_every_sample_has_one_replica_and_all_have_as_many(counts, size):
    groups = [
        TrainingGroup(p, np.zeros(n, np.float32), "c", (SampleRows("s", tuple(range(n))),))
        for p, n in enumerate(counts)
    ]
    if size > sum(counts):
        with pytest.raises(RunFailed):
            share(0, groups, size, "samples")
        return
    found = [
        [(one.prompt, row) for one in request.portions for row in one.rows]
        for request in share(0, groups, size, "samples")
    ]
    assert sum(found, []) == [(p, row) for p, n in enumerate(counts) for row in range(n)]
    assert {len(mine) for mine in found} <= {sum(counts) // size, -(-sum(counts) // size)}


def test_in_what_parts_a_prompt_is_regenerated():
    """As large as come out even over the replicas, to a twentieth."""

    def size(prompts: int, replicas: int, share: str = "samples") -> int:
        given = [f"prompts.per_iteration={prompts}", f"services.learner.replicas={replicas}"]
        return load("quickstart", [*given, f"services.learner.share={share}"]).regenerated_size

    keep = load("quickstart").selection.keep
    assert keep == 24
    assert [size(48, replicas) for replicas in (1, 16, 32, 64)] == [24, 24, 12, 6]
    assert size(48, 5) == 24  # 50 turns of 48 tasks
    assert size(48, 40) == 6  # 96 tasks of 12 fill 2.4 turns of 3, 192 of 6 fill 4.8 of 5
    assert size(48, 1152) == 1 and size(48, 5, "prompts") == 24


def group_with(prompt: int, samples: list[Any], rows: list[tuple[int, ...]]) -> TrainingGroup:
    """One whose references are the objects themselves."""
    parts = tuple(SampleRows(part, chosen) for part, chosen in zip(samples, rows, strict=True))
    rewards = np.array([prompt, -prompt], np.float32)
    return TrainingGroup(prompt, rewards, f"c{prompt}", parts)  # pyright: ignore[reportArgumentType]


def test_samples_of_several_chunks_are_gathered_in_order():
    first, second = ({"latents": np.arange(4.0) + start} for start in (0, 10))
    group = group_with(0, [first, second], [(3, 1), (0,)])
    assert gather(group.samples, [first, second])["latents"].tolist() == [3, 1, 10]


# ---- the group, with actors that only tell what they were asked


def group_of(replicas: int, events: list[dict[str, Any]]) -> LearnerGroup:
    as_fork = runtime_env(load("quickstart"), "learner")
    remote = ray.remote(Told).options(num_cpus=0, runtime_env=as_fork)
    pool = ActorPool(
        "learner",
        lambda name: remote.remote(),
        LearnerService(replicas=replicas, deadline_s=120),
        lambda name, **more: events.append({"event": name, **more}),
        stateful=True,
    )
    return LearnerGroup(pool)


def test_which_replica_is_asked_for_what_and_what_a_loss_means(ray_here):
    events: list[dict[str, Any]] = []

    async def work() -> None:
        group = group_of(2, events)
        any_replica, first = group.client.any_replica, group.client.first

        def load(path: str) -> Any:
            return group.client.every_replica.call(Task[Any](("load", path)), Told.load, path)

        await group.start()
        try:
            generated = await asyncio.gather(
                *(any_replica.call(Task[int](("generate", n)), Told.generate, n) for n in range(6))
            )
            assert len(set(generated)) == 2  # the one that is free
            assert await load("a") == ((0, 2, HERE), ["a"])
            assert await first.call(Task[Any](("save", 1)), Told.save, "x") == ((0, 2, HERE), ["a"])
            with pytest.raises(RunFailed, match="ArithmeticError: on [01]"):
                await load("bad")
            with pytest.raises(StateLost, match="the learner was lost: "):
                await load("broken")
            with pytest.raises(StateLost):
                await first.call(Task[Any](("save", 2)), Told.save, "y")
            died = [event["actor"] for event in events if event["event"] == "actor_died"]
            assert died[0] == 1  # the cause comes first, not the replica that noticed
            await group.renew("lost")
            assert await load("b") == ((0, 2, HERE), ["b"])
        finally:
            await group.stop()

    asyncio.run(work())
    assert sorted(event["actor"] for event in events if event["event"] == "actor_died") == [0, 1]
    assert [event["replicas"] for event in events if event["event"] == "replicas_met"] == [2, 2]


# ---- the ring

STEADY = {"optimizer__eps": 1e-4, "checkpoint__keep_last": 3}
TWO: dict[str, Any] = {**STEADY, "services__learner__replicas": 2}


@pytest.fixture(scope="module")
def pair(ray_here, tiny_sd3_dir, tmp_path_factory):
    """Three iterations with two replicas: read it, do not write to it."""
    return run_here(tiny_config(tiny_sd3_dir, tmp_path_factory.mktemp("pair"), "pair", **TWO))


@pytest.mark.slow
def test_a_run_with_two_replicas_learns_what_one_learner_does(pair, tiny_sd3_dir, tmp_path):
    """After the first iteration, one step of AdamW: before it every bit is the same, and after it a
    weight is apart by at most 2 lr d / E with d = 1e-6 of the gradient's norm
    (tests/learner/test_group.py), and 2^-25 of rounding. Later iterations have no such bound: the
    image of a weight that is a last bit apart may have another pixel, hence another reward.
    """
    one = run_here(tiny_config(tiny_sd3_dir, tmp_path, "one", iterations=1, **STEADY))
    alone, shared = (adapters(run, 1)["adapter.safetensors"] for run in (one, pair))
    row, rows = one.metrics()[1], pair.metrics()[1]
    bound = 2 * 0.05 * 1e-6 * min(1.0, row["grad_norm"]) / STEADY["optimizer__eps"] + 2**-25
    wanted, found = safetensors.torch.load(alone), safetensors.torch.load(shared)
    apart = max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
    moved = max(
        float(wanted[name].abs().max()) for name in wanted if name.endswith("lora_B.weight")
    )  # from zero
    assert apart < bound < moved / 100
    assert selections(pair)[0] == selections(one)[0]
    assert (
        rows["reward/train_mean"] == row["reward/train_mean"]
        and rows["optimizer/points"] == row["optimizer/points"]
    )
    assert rows["time/allreduce_s"] > 0 and "time/allreduce_s" not in row


@pytest.mark.slow
def test_a_run_whose_replicas_split_a_prompt(ray_here, tiny_sd3_dir, tmp_path):
    """One prompt, two replicas. Parts are regenerated in the batches of one learner, so that before
    the first step every bit is the same, and after it the bound is that of whole prompts. How many
    rollout actors there are shows in no bit of any later iteration.
    """
    one_prompt = {**STEADY, "prompts__per_iteration": 1, "regenerate__batch_size": 2}
    split = {**one_prompt, "services__learner__replicas": 2, "services__learner__share": "samples"}
    alone, first, second = (
        run_here(tiny_config(tiny_sd3_dir, tmp_path, name, **given))
        for name, given in (
            ("one", {**one_prompt, "iterations": 1}),
            ("split", split),
            ("split-1", {**split, "services__rollout__actors": 1}),
        )
    )
    wanted, found = (
        safetensors.torch.load(adapters(run, 1)["adapter.safetensors"]) for run in (alone, first)
    )
    row, rows = alone.metrics()[1], first.metrics()[1]
    bound = 2 * 0.05 * 1e-6 * min(1.0, row["grad_norm"]) / STEADY["optimizer__eps"] + 2**-25
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < bound
    assert selections(first)[0] == selections(alone)[0]
    assert rows["reward/train_mean"] == row["reward/train_mean"]
    assert rows["optimizer/points"] == row["optimizer/points"]
    assert adapters(first, 3) == adapters(second, 3)
    spans = [span for span in read_spans(first.timeline_file) if span.work == "regenerate"]
    assert sorted(span.unit for span in spans) == [
        (n, 0, part) for n in range(3) for part in (0, 1)
    ]
    assert {span.actor for span in spans} == {0, 1}


class Killer(Progress):
    """SIGKILL to learner-1 while iteration 1 is updated."""

    session: Any = None
    killed = 0

    def start(self, total_iterations: int, start_iteration: int = 0) -> None:
        super().start(total_iterations, start_iteration)
        pool = self.session.services.learners.pool
        perform_on = pool.perform_on

        async def told(member: Member, task: Task[Any], call: Call) -> Any:
            if task.key == ("update", 1, "replica 0") and not self.killed:
                self.killed = pool.members[1].info.pid
                asyncio.get_running_loop().call_later(0.02, os.kill, self.killed, signal.SIGKILL)
            return await perform_on(member, task, call)

        pool.perform_on = told


@pytest.mark.slow
def test_a_killed_replica_starts_the_group_anew_and_nothing_is_lost(pair, tiny_sd3_dir, tmp_path):
    killer = Killer()
    run = run_here(tiny_config(tiny_sd3_dir, tmp_path, "killed", **TWO), progress=killer)
    assert killer.killed
    assert selections(run) == selections(pair) and adapters(run, 3) == adapters(pair, 3)
    events = run.events()
    died = [event for event in events if event["event"] == "actor_died"]
    assert [event["kind"] for event in died] == ["learner", "learner"] and died[0][
        "pid"
    ] == killer.killed
    (restored,) = [event for event in events if event["event"] == "learner_restored"]
    assert (restored["iteration"], restored["during"]) == (1, 1)
    assert len([event for event in events if event["event"] == "replicas_met"]) == 2


SHARDS: dict[str, Any] = {**TWO, "services__learner__shard": "base"}


@pytest.mark.slow
def test_a_base_in_shards_changes_no_bit_of_a_run(pair, tiny_sd3_dir, tmp_path):
    """Nor when a replica is killed: the group starts anew, in shards again, from the checkpoint.
    Evaluations go in rounds too, and rollout actors compute what the learner does.
    """
    killer = Killer()
    killed = run_here(tiny_config(tiny_sd3_dir, tmp_path, "shards", **SHARDS), progress=killer)
    assert killer.killed
    assert selections(killed) == selections(pair) and adapters(killed, 3) == adapters(pair, 3)
    events = killed.events()
    assert len([event for event in events if event["event"] == "replicas_met"]) == 2
    checked = [event for event in events if event["event"] == "identity_checked"]
    assert checked and all(event["error"] == 0 for event in checked)
    spans = [span for span in read_spans(killed.timeline_file) if span.service == "learner"]
    assert {"regenerate", "update", "export"} <= {span.work for span in spans}

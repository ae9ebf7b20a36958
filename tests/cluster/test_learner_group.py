"""The learner as a group of replicas; ``test_sharing`` has what each of them is sent.

Invariants: calls for one replica go to the first; a run with two replicas learns what one learner
does, up to the order of sums; if one replica is lost, the whole group restarts from the checkpoint
and ends with the bits of an undisturbed run.
"""

import asyncio
import os
import signal
from typing import Any

import pytest
import ray
import safetensors.torch

from actors.calls import Call, Task
from cluster.driver.learner_group import LearnerGroup
from cluster.runtime.member import Member
from cluster.runtime.pool import ActorPool
from cluster.runtime.starting import Gone, NotPlaced
from cluster.runtime.template import runtime_env
from configs.load import load
from configs.services import LearnerService
from records.errors import RunFailed, StateLost
from records.progress import Progress
from records.timeline import read_spans
from tests.cluster.recording_learner import HERE, RecordingLearner
from tests.cluster.runs import adapters, run_here, selections, tiny_config

# ---- the group, with actors that only record their calls


def stays(actor: str, node: str | None) -> asyncio.Future[str]:
    """Return a future that is never done, as no node is lost."""
    return asyncio.get_running_loop().create_future()


def group_of(
    replicas: int, events: list[dict[str, Any]], gone: Gone = stays, **more: Any
) -> LearnerGroup:
    as_fork = runtime_env(load("quickstart"), "learner")
    remote = ray.remote(RecordingLearner).options(num_cpus=0, runtime_env=as_fork)
    pool = ActorPool(
        "learner",
        lambda name: remote.remote(),
        LearnerService(replicas=replicas, deadline_s=120, **more),
        lambda name, **more: events.append({"event": name, **more}),
        stateful=True,
        gone=gone,
    )
    return LearnerGroup(pool)


def test_replicas_are_started_again_before_the_next_call_if_a_node_is_lost(ray_here):
    """Rollout actors of that node may wait for the learner, and the next call for them."""
    nodes: dict[str, asyncio.Future[str]] = {}

    def gone(actor: str, node: str | None) -> asyncio.Future[str]:
        nodes[actor] = asyncio.get_running_loop().create_future()
        return nodes[actor]

    async def work() -> None:
        group = group_of(2, [], gone)
        members = group.pool.members

        def load(path: str) -> Any:
            return group.client.every_replica.call(
                Task[Any](("load", path)), RecordingLearner.load, path
            )

        await group.start()
        try:
            for loss in (1, 2):  # the second one of replicas that have had no call yet
                nodes["learner-0"].set_result("its node is lost")
                async with asyncio.timeout(60):
                    while [m.incarnation for m in members if m.handle is not None] != [loss] * 2:
                        await asyncio.sleep(0.01)
                with pytest.raises(StateLost, match="its node is lost"):
                    await load("a")  # of the state that was lost
            await group.renew("its node is lost")
            assert [member.incarnation for member in members] == [2, 2]
            assert await load("b") == ((0, 2, HERE), ["b"])
        finally:
            await group.stop()

    asyncio.run(work())


def test_a_node_lost_while_replicas_connect_loses_no_others(ray_here):
    """What forms the group replaces all replicas, once."""
    nodes: dict[str, asyncio.Future[str]] = {}

    def gone(actor: str, node: str | None) -> asyncio.Future[str]:
        nodes[actor] = asyncio.get_running_loop().create_future()
        return nodes[actor]

    async def work() -> list[int]:
        group = group_of(2, [], gone)
        members = group.pool.members
        starting = asyncio.create_task(group.start())
        try:
            async with asyncio.timeout(60):
                while not all(member.slots for member in members):
                    await asyncio.sleep(0.001)
                nodes["learner-1"].set_result("its node is lost")
                await starting
            return [member.incarnation for member in members]
        finally:
            await group.stop()

    assert asyncio.run(work()) == [1, 1]


def test_calls_go_to_the_right_replicas_and_a_loss_is_state_lost(ray_here):
    events: list[dict[str, Any]] = []

    async def work() -> None:
        group = group_of(2, events)
        any_replica, first = group.client.any_replica, group.client.first

        def load(path: str) -> Any:
            return group.client.every_replica.call(
                Task[Any](("load", path)), RecordingLearner.load, path
            )

        await group.start()
        try:
            generated = await asyncio.gather(
                *(
                    any_replica.call(Task[int](("generate", n)), RecordingLearner.generate, n)
                    for n in range(6)
                )
            )
            assert len(set(generated)) == 2  # the free one
            assert await load("a") == ((0, 2, HERE), ["a"])
            assert await first.call(Task[Any](("save", 1)), RecordingLearner.save, "x") == (
                (0, 2, HERE),
                ["a"],
            )
            with pytest.raises(RunFailed, match="ArithmeticError: on [01]"):
                await load("bad")
            with pytest.raises(StateLost, match="the learner was lost: "):
                await load("broken")
            with pytest.raises(StateLost):
                await first.call(Task[Any](("save", 2)), RecordingLearner.save, "y")
            died = [event["actor"] for event in events if event["event"] == "actor_died"]
            # the cause is raised first, not the error of the replica that noticed it
            assert died[0] == 1
            await group.renew("lost")
            assert await load("b") == ((0, 2, HERE), ["b"])
        finally:
            await group.stop()

    asyncio.run(work())
    assert sorted(event["actor"] for event in events if event["event"] == "actor_died") == [0, 1]
    assert [event["replicas"] for event in events if event["event"] == "replicas_met"] == [2, 2]


@pytest.mark.parametrize(("replicas", "more"), [(1, False), (2, True)])
def test_a_learner_without_room_says_how_to_continue(monkeypatch, replicas, more):
    async def work() -> None:
        async def without_room(why: str) -> None:
            raise NotPlaced("learner actor 1 could not be placed for 600 s")

        group = group_of(replicas, [])
        monkeypatch.setattr(group.pool, "renew", without_room)
        with pytest.raises(RunFailed, match="600 s; continue with --resume") as failed:
            await group.renew("its node was lost")
        assert ("elastic = true also on fewer GPUs" in str(failed.value)) == more

    asyncio.run(work())


# ---- the ring

STEADY = {"optimizer__eps": 1e-4, "checkpoint__keep_last": 3}
TWO: dict[str, Any] = {**STEADY, "services__learner__replicas": 2}


@pytest.fixture(scope="module")
def pair(ray_here, tiny_sd3_dir, tmp_path_factory):
    """Run three iterations with two replicas; the result is read-only."""
    return run_here(tiny_config(tiny_sd3_dir, tmp_path_factory.mktemp("pair"), "pair", **TWO))


@pytest.mark.slow
def test_two_replicas_learn_the_same_as_one_learner(pair, tiny_sd3_dir, tmp_path):
    """Before the first step of AdamW all bits are equal; after it, weights differ by at most 2 lr d
    / E.

    d = 1e-6 is relative to the gradient's norm (tests/learner/test_group.py), and 2^-25 is added
    for rounding. Later iterations have no such bound: if a weight differs in its last bit, an image
    may have another pixel, and hence another reward.
    """
    one = run_here(tiny_config(tiny_sd3_dir, tmp_path, "one", iterations=1, **STEADY))
    alone, shared = (adapters(run, 1)["adapter.safetensors"] for run in (one, pair))
    row, rows = one.metrics()[1], pair.metrics()[1]
    bound = 2 * 0.05 * 1e-6 * min(1.0, row["grad_norm"]) / STEADY["optimizer__eps"] + 2**-25
    expected, found = safetensors.torch.load(alone), safetensors.torch.load(shared)
    apart = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    # from zero
    moved = max(
        float(expected[name].abs().max()) for name in expected if name.endswith("lora_B.weight")
    )
    assert apart < bound < moved / 100
    assert selections(pair)[0] == selections(one)[0]
    assert rows["reward/train_mean"] == row["reward/train_mean"]
    assert rows["optimizer/points"] == row["optimizer/points"]
    assert rows["time/allreduce_s"] > 0 and "time/allreduce_s" not in row


@pytest.mark.slow
def test_two_replicas_can_share_one_prompt(ray_here, tiny_sd3_dir, tmp_path):
    """Parts are regenerated in the batches of one learner, so that before the first step all bits
    are equal.

    After it the bound is that of whole prompts. The number of rollout actors affects no bit of any
    later iteration.
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
    expected, found = (
        safetensors.torch.load(adapters(run, 1)["adapter.safetensors"]) for run in (alone, first)
    )
    row, rows = alone.metrics()[1], first.metrics()[1]
    bound = 2 * 0.05 * 1e-6 * min(1.0, row["grad_norm"]) / STEADY["optimizer__eps"] + 2**-25
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < bound
    assert selections(first)[0] == selections(alone)[0]
    assert rows["reward/train_mean"] == row["reward/train_mean"]
    assert rows["optimizer/points"] == row["optimizer/points"]
    assert adapters(first, 3) == adapters(second, 3)
    spans = [span for span in read_spans(first.timeline_file) if span.work == "regenerate"]
    assert sorted(span.unit for span in spans) == [
        (n, 0, part) for n in range(3) for part in (0, 1)
    ]
    assert {span.actor for span in spans} == {0, 1}


@pytest.mark.slow
def test_a_run_is_resumed_with_other_replicas(ray_here, tiny_sd3_dir, tmp_path):
    """The second iteration starts from equal bits, so the bound of the first one holds again.

    The second step of AdamW adds 0.14 %: by Cauchy's inequality its mean of two gradients is at
    most 1.0014 times the root of its mean of their squares.
    """

    def run(name: str, iterations: int, replicas: int, resume: bool = False) -> Any:
        given = {**STEADY, "iterations": iterations, "services__learner__replicas": replicas}
        return run_here(tiny_config(tiny_sd3_dir, tmp_path, name, **given), resume=resume)

    alone = run("alone", 2, 1)
    run("grown", 1, 1)
    grown = run("grown", 2, 2, resume=True)
    (event,) = [row for row in grown.events() if row["event"] == "replicas_changed"]
    assert (event["before"], event["now"], event["iteration"]) == (1, 2, 1)
    assert adapters(grown, 1) == adapters(alone, 1) and selections(grown) == selections(alone)
    expected, found = (
        safetensors.torch.load(adapters(each, 2)["adapter.safetensors"]) for each in (alone, grown)
    )
    norm = min(1.0, alone.metrics()[2]["grad_norm"])
    bound = 1.0014 * 2 * 0.05 * 1e-6 * norm / STEADY["optimizer__eps"] + 2**-25
    apart = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    assert apart < bound


class Killer(Progress):
    """Sends SIGKILL to learner-1 while iteration 1 is updated."""

    session: Any = None
    killed = 0

    def start(self, total_iterations: int, start_iteration: int = 0) -> None:
        super().start(total_iterations, start_iteration)
        pool = self.session.services.learners.pool
        perform_on = pool.perform_on

        async def recorded(member: Member, task: Task[Any], call: Call) -> Any:
            if task.key == ("update", 1, "replica 0") and not self.killed:
                self.killed = pool.members[1].info.pid
                asyncio.get_running_loop().call_later(0.02, os.kill, self.killed, signal.SIGKILL)
            return await perform_on(member, task, call)

        pool.perform_on = recorded


@pytest.mark.slow
def test_a_killed_replica_restarts_the_group_without_losing_results(pair, tiny_sd3_dir, tmp_path):
    killer = Killer()
    run = run_here(tiny_config(tiny_sd3_dir, tmp_path, "killed", **TWO), progress=killer)
    assert killer.killed
    assert selections(run) == selections(pair) and adapters(run, 3) == adapters(pair, 3)
    events = run.events()
    died = [event for event in events if event["event"] == "actor_died"]
    assert [event["kind"] for event in died] == ["learner", "learner"]
    assert died[0]["pid"] == killer.killed
    (restored,) = [event for event in events if event["event"] == "learner_restored"]
    assert (restored["iteration"], restored["during"]) == (1, 1)
    assert len([event for event in events if event["event"] == "replicas_met"]) == 2


SHARDS: dict[str, Any] = {**TWO, "services__learner__shard": "base"}


@pytest.mark.slow
def test_a_sharded_base_does_not_change_the_bits_of_a_run(pair, tiny_sd3_dir, tmp_path):
    """If a replica is killed, the group restarts from the checkpoint, in shards again.

    Evaluations run in rounds too, and rollout actors compute what the learner does.
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

"""Distribution of an update: each row of samples goes to one replica, rewards to all.

What all of them get is sent once.
"""

import asyncio
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.calls import Call, Task
from actors.clients import LearnerClient
from actors.learner import gather
from actors.messages import Portion, SampleRows, TrainingGroup
from actors.sharing import all_rewards, share
from cluster.driver.learner_group import EveryReplica
from planning.waiting import owners
from records.errors import RunFailed


def group_with(prompt: int, samples: list[Any], rows: list[tuple[int, ...]]) -> TrainingGroup:
    """Return a group whose references are the objects themselves."""
    parts = tuple(SampleRows(part, chosen) for part, chosen in zip(samples, rows, strict=True))
    rewards = np.array([prompt, -prompt], np.float32)
    return TrainingGroup(prompt, rewards, f"c{prompt}", parts)


def portion_of(group: TrainingGroup) -> Portion:
    """Return the portion with the whole group."""
    return Portion(group.prompt, range(2), group.conditioning, group.samples)


def test_an_update_is_shared_by_prompt():
    """Of four prompts over three replicas, samples go to one each, and rewards to all."""
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
    for by in ("prompts", "samples"):  # for a single one, everything
        (alone,) = share(5, groups, 1, by)
        assert alone.portions == whole
    with pytest.raises(RunFailed, match="8 scored samples of 4 prompts are left .* 5 replicas"):
        share(5, groups, 5, "prompts")


def test_an_update_is_shared_by_sample():
    """Eight samples of four prompts over three replicas make runs of 2, 3 and 3.

    Each names only the objects that hold its rows; rewards go to all.
    """
    groups = [group_with(p, [f"a{p}", f"b{p}"], [(5,), (0,)]) for p in range(4)]
    recorded = all_rewards(groups[::-1])
    assert recorded.prompts == (0, 1, 2, 3) and recorded.counts == (2, 2, 2, 2)
    assert recorded.rewards.tolist() == [0, 0, 1, -1, 2, -2, 3, -3]
    found = [
        [(part.samples, part.rows) for one in request.portions for part in one.samples]
        for request in share(5, groups[::-1], 3, "samples")
    ]
    assert found == [
        [("a0", (5,)), ("b0", (0,))],
        [("a1", (5,)), ("b1", (0,)), ("a2", (5,))],
        [("b2", (0,)), ("a3", (5,)), ("b3", (0,))],
    ]
    with pytest.raises(RunFailed, match="8 scored samples of 4 prompts are left .* 9 replicas"):
        share(5, groups, 9, "samples")


@pytest.mark.parametrize("by", ["prompts", "samples"])
@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 20))
def test_a_plan_shares_as_the_driver_does(by, prompts, keep, size):
    """``planning.waiting`` counts what each replica has to wait for."""
    size = min(size, prompts if by == "prompts" else prompts * keep)
    groups = [
        TrainingGroup(p, np.zeros(keep, np.float32), "c", (SampleRows("s", tuple(range(keep))),))
        for p in range(prompts)
    ]
    found = np.full((prompts, keep), -1)
    for rank, request in enumerate(share(0, groups, size, by)):
        for one in request.portions:
            found[one.prompt, one.rows.start : one.rows.stop] = rank
    assert found.flatten().tolist() == owners(prompts, keep, size, by).tolist()


def test_common_arguments_of_all_replicas_are_sent_once():
    """What the driver sends grows with prompts and replicas, but not with their product."""

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
        (recorded,) = pool.puts
        assert [len(rewards) for rewards in recorded.by_prompt().values()] == [2] * size
        assert {recorded for _, recorded in pool.calls} == {"reference"} and len(pool.calls) == size
        sizes.append(max(len(pickle.dumps(request)) for request, _ in pool.calls))
    assert sizes[1] < sizes[0] + 10


@pytest.mark.parametrize(
    ("patience_s", "hangs", "recorded"), [(0.0, True, "of 1"), (None, False, "of 0")]
)
def test_a_failure_waits_a_limited_time_for_the_other_replicas(patience_s, hangs, recorded):
    """The failure raised is that of the lowest rank, whichever came first."""

    class Failing:
        members = range(3)

        async def perform_on(self, member: int, task: Task[Any], call: Call) -> None:
            if member == 0:
                await (asyncio.Event().wait() if hangs else asyncio.sleep(0))
            raise RunFailed(f"of {member}")

    every = EveryReplica(Failing(), patience_s)
    calls = every.perform(Task(("load", 0)), Call("load", (), {}))
    with pytest.raises(RunFailed, match=recorded):
        asyncio.run(asyncio.wait_for(calls, 20))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 40))
def test_every_sample_has_one_replica_and_all_have_equal_numbers(counts, size):
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


def test_samples_of_several_chunks_are_gathered_in_order():
    first, second = ({"latents": np.arange(4.0) + start} for start in (0, 10))
    group = group_with(0, [first, second], [(3, 1), (0,)])
    assert gather(group.samples, [first, second])["latents"].tolist() == [3, 1, 10]

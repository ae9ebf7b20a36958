"""Devices of actors: description, memory and environment."""

import asyncio
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch

from actors.learner import LearnerActor
from actors.messages import ActorInfo, GenerateRequest, Rendezvous
from actors.runtime import on_device
from cluster.driver import services
from cluster.driver.learner_group import LearnerGroup
from cluster.runtime import template
from cluster.runtime.outcomes import Outcomes
from cluster.runtime.pool import ActorPool
from cluster.runtime.sender import Sender
from configs.arms import Arm
from configs.load import load
from configs.services import LearnerService, RolloutService, Service
from learner.replicas import DistributedReplicas, GroupBroken, open_store
from policy.types import Conditioning
from records.errors import OutOfMemoryError
from rewards.combine import WeightedScorer
from tests.cores import set_cores


@on_device("rollout", "explore.chunk_size")
class Greedy:
    def __init__(self, at_once: bool = False) -> None:
        if at_once:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    def explore(self, error: Exception) -> None:
        raise error


def test_out_of_memory_names_the_service_and_the_settings_to_lower():
    with pytest.raises(OutOfMemoryError) as error:
        Greedy().explore(torch.OutOfMemoryError("Tried to allocate 2.00 GiB."))
    message = str(error.value)
    assert message.startswith("rollout explore: the GPU is out of memory: 2.00 GiB more were requ")
    assert (
        "lower explore.chunk_size" in message
        and "services.rollout" in message
        and "\n" not in message
    )
    with pytest.raises(OutOfMemoryError, match=r"^rollout init: .* 1\.00 GiB"):
        Greedy(at_once=True)
    with pytest.raises(KeyError):
        Greedy().explore(KeyError("as it was"))


def test_a_scorer_out_of_memory_is_not_a_failed_score():
    """Otherwise it would be retried, and need as much memory each time."""

    def scorer(images: object, prompts: object, metadata: object) -> np.ndarray:
        raise torch.OutOfMemoryError("CUDA out of memory")

    weighted = WeightedScorer.__new__(WeightedScorer)
    weighted.scorers, weighted.frames = {"big": scorer}, None
    with pytest.raises(torch.OutOfMemoryError):
        weighted.attempt(np.zeros((1, 3, 8, 8), np.uint8), ["a"], [{}])


def test_the_event_of_an_actor_describes_its_device():
    info = ActorInfo(1, "here", device="NVIDIA H200", capability="9.0", torch="2.13", cuda="13.0")
    assert info.event_fields() == {
        **{"pid": 1, "host": "here", "device": "NVIDIA H200", "capability": "9.0"},
        **{"torch": "2.13", "cuda": "13.0"},
    }


@pytest.mark.parametrize(
    ("gpus", "given", "allocator"),
    [
        (0.0, None, None),
        (0.5, None, "expandable_segments:True"),
        (0.5, "max_split_size_mb:64", "max_split_size_mb:64"),
    ],
)
def test_the_environment_of_actors_on_gpus(monkeypatch, gpus, given, allocator):
    """CUDA reads it when it starts, so the process must be created with it."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", given)
    found = services.environment(RolloutService(gpus=gpus, threads=3))
    assert found["OMP_NUM_THREADS"] == "3"
    assert found.get("PYTORCH_CUDA_ALLOC_CONF") == allocator
    assert found.get("TORCH_NCCL_BLOCKING_WAIT") == ("1" if gpus else None)


def test_waiting_threads_sleep_if_rollout_actors_need_the_cores(monkeypatch):
    """They spin a little where rollout actors wait while the learner trains, or as long as the user
    says.
    """
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    set_cores(monkeypatch, 4)
    sleep = {"OMP_WAIT_POLICY": "PASSIVE"}
    assert template.openmp_wait_variables(load("quickstart", ["explore_ahead=1"])) == sleep
    for arm in get_args(Arm):
        found = template.openmp_wait_variables(load("quickstart", [f"arm={arm}"]))
        assert found == sleep | {"GOMP_SPINCOUNT": "10000"}
    for count, spins in ((2, True), (3, False)):  # two threads each, on four cores
        crowd = [f"services.learner.replicas={count}", "services.learner.threads=2"]
        assert (
            "GOMP_SPINCOUNT" in template.openmp_wait_variables(load("quickstart", crowd))
        ) == spins
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert template.openmp_wait_variables(load("quickstart"))["GOMP_SPINCOUNT"] == "7"


def told_threads(*args: object, **named: object) -> tuple[dict[str, int], None]:
    return {"threads": torch.get_num_threads()}, None


@pytest.mark.parametrize(
    ("own", "weights", "expected"), [(2, None, 2), (None, None, 3), (2, "ema", 3), (2, "base", 3)]
)
def test_a_learner_uses_fewer_threads_while_rollout_actors_explore(own, weights, expected):
    """Held-out images are generated while rollout actors wait, or must have the bits that they have
    then.
    """
    learner = LearnerActor.__new__(LearnerActor)
    learner._service = LearnerService(threads=3, regenerate_threads=own)
    learner._turn = SimpleNamespace(require=lambda what: None)
    learner._trainer = SimpleNamespace(generator=SimpleNamespace(generate=told_threads))
    before = torch.get_num_threads()
    rows = Conditioning({"text": torch.zeros(1, 1)})
    _, _, samples = learner.generate(GenerateRequest((1, 2), 2, None, weights), rows)
    assert samples == {"threads": expected}
    assert torch.get_num_threads() == before


# ---- replicas


class TwoReplicas:
    """A pool that records the calls to its replicas."""

    def __init__(self, service: LearnerService) -> None:
        self.kind, self.service, self.members = "learner", service, ["first", "second"]
        self.waits: list[float] = []

    async def ask(self, member: str, method: object, *args: object) -> object:
        if method is LearnerActor.rendezvous:
            self.waits.append(args[0])  # pyright: ignore[reportArgumentType]
            return Rendezvous("here", 1, 0.0)
        return None

    def event(self, name: str, **recorded: object) -> None:
        pass


@pytest.mark.parametrize(("silence", "deadline", "wait"), [(30, 6 * 3600, 30), (30, 20, 20)])
def test_replicas_wait_for_each_other_for_the_configured_time(silence, deadline, wait):
    """The limit is shorter than that of an update."""
    pool = TwoReplicas(LearnerService(replicas=2, silence_s=silence, deadline_s=deadline))
    group = LearnerGroup.__new__(LearnerGroup)
    group.pool = pool  # pyright: ignore[reportAttributeAccessIssue]
    asyncio.run(group._join())
    assert pool.waits == [wait]


def test_a_silent_replica_is_lost_after_that_time():
    store, _ = open_store("127.0.0.1", 1.0)
    with pytest.raises(GroupBroken, match="replica 0 of 2 lost the others while joining them"):
        DistributedReplicas(0, 2, store, torch.device("cpu"), 1.0)


def test_out_of_memory_of_a_replica_is_not_reported_as_a_lost_peer():
    alone = DistributedReplicas.__new__(DistributedReplicas)
    alone.rank, alone.size = 0, 2
    with pytest.raises(torch.OutOfMemoryError), alone._naming("adding gradients"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with (
        pytest.raises(GroupBroken, match="while adding gradients: gone"),
        alone._naming("adding gradients"),
    ):
        raise RuntimeError("gone")


def test_the_pool_ends_the_run_at_the_first_out_of_memory(monkeypatch):
    """A retry would need as much memory."""
    counted: list[object] = []
    pool = ActorPool("rollout", lambda name: None, Service(), lambda *args, **fields: None)

    async def attempt(member: object, pending: object) -> object:
        from ray.exceptions import RayTaskError

        error = RayTaskError("explore", "traceback", OutOfMemoryError("no room"))
        raise error

    monkeypatch.setattr(Sender, "attempt", lambda sender, *args: attempt(*args))
    monkeypatch.setattr(Outcomes, "count_failure", lambda *recorded: counted.append(recorded))
    failures: list[Exception] = []
    pending = SimpleNamespace(
        future=SimpleNamespace(done=lambda: False), fail=failures.append, task=None
    )
    asyncio.run(pool._handle(SimpleNamespace(answer=lambda task: None), pending))  # pyright: ignore[reportArgumentType]
    assert [str(each) for each in failures] == ["OutOfMemoryError: no room"] and not counted

"""Actors on GPUs load in parallel; GPUs are granted in order only on nodes with several."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from actors.messages import ActorInfo
from cluster.driver import actor_placement, services
from cluster.driver.services import ActorServices
from configs.load import load
from planning.placement import LargerFirst, Node, NoRoom
from records.errors import RunFailed
from records.rundir import RunDirectory
from tests.cluster.gpus import SHARES


class Slow:
    """A transport whose actors load until ``loaded`` is called; ``requested`` has their order."""

    def __init__(self) -> None:
        self.requested: list[str] = []
        self.loading: list[asyncio.Future[ActorInfo]] = []
        self.dead: list[Any] = []

    def send(self, handle: Any, call: Any) -> Sequence[Any]:
        assert call.method == "ready"
        if handle in self.dead:
            ended = asyncio.get_running_loop().create_future()
            ended.set_exception(RayError("it was killed"))
            return [ended]
        self.loading.append(asyncio.get_running_loop().create_future())
        return [self.loading[-1]]

    def answer(self, reference: Any) -> Any:
        return reference

    def kill(self, handle: Any) -> None:
        pass

    def ended(self, handle: Any) -> bool:
        return handle in self.dead

    def loaded(self) -> None:
        for future in self.loading:
            future.set_result(ActorInfo(1, "here", f"{0:056x}", backend="fp8"))


@pytest.fixture
def made(monkeypatch, tmp_path) -> Any:
    """Return services with the fractions of ``SHARES["two"]`` on a node with a number of GPUs.

    Instead of Ray, the test gives the names of actors that hold theirs.
    """

    def make(gpus: int) -> tuple[Any, Slow, set[str]]:
        transport, held, node = Slow(), set[str](), Node(f"{0:056x}", 8, gpus)

        async def find_room(config: Any, kinds: Any) -> list[Node]:
            return [node]

        def options(name: str, **others: Any) -> Any:
            transport.requested.append(name.partition("/")[2].rpartition(".")[0])
            return SimpleNamespace(remote=lambda *args: object())

        for look in ("free_nodes", "all_nodes"):
            monkeypatch.setattr(actor_placement, look, lambda: [node])
        monkeypatch.setattr(actor_placement, "addresses", lambda: {node.id: ("127.0.0.1", 9)})
        monkeypatch.setattr(actor_placement, "find_room", find_room)
        monkeypatch.setattr(
            actor_placement, "started_actors", lambda: {full_name(actor) for actor in held}
        )
        monkeypatch.setattr(actor_placement, "HOLDING_S", 0.0)
        remote = SimpleNamespace(options=options)
        context = SimpleNamespace(get_job_id=lambda: "1")
        stub = SimpleNamespace(remote=lambda actor: remote, get_runtime_context=lambda: context)
        monkeypatch.setattr(services, "ray", stub)

        class Services(ActorServices):
            pass

        Services.transport = transport  # type: ignore[assignment]
        shares = SHARES["two"] if gpus > 1 else {kind: x / 2 for kind, x in SHARES["two"].items()}
        settings = [f"services.{kind}.gpus={share}" for kind, share in shares.items()]
        settings += ["name=shares", "services.reward.actors=2", "services.node_silence_s=0"]
        config = load("quickstart", settings)
        return Services(config, RunDirectory(tmp_path), lambda *_, **__: None), transport, held

    return make


EVERYONE = {
    "encoder-0",
    "learner-0",
    "reward-0",
    "reward-1",
    "rollout-0",
    "rollout-1",
    "selector-0",
}


def full_name(actor: str) -> str:
    """Return the name in Ray of ``rollout-0``, or of an incarnation of it, ``rollout-0.1``."""
    return f"shares/{actor if '.' in actor else f'{actor}.0'}"


async def settle() -> None:
    """Let all tasks run as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_on_nodes_with_one_gpu_all_services_load_at_once(made):
    async def run() -> None:
        services, transport, _ = made(1)
        starting = asyncio.create_task(services.start())
        await settle()
        assert set(transport.requested) == EVERYONE and not starting.done()
        transport.loaded()
        await starting
        await services.stop()

    asyncio.run(run())


def test_on_nodes_with_several_gpus_larger_shares_are_reserved_first(made):
    async def run() -> None:
        services, transport, held = made(2)
        starting = asyncio.create_task(services.start())
        seen: list[set[str]] = []
        for gets in ([], ["rollout-0"], ["rollout-1"], ["reward-1", "reward-0"], ["learner-0"]):
            held.update(gets)
            await settle()
            seen.append(set(transport.requested) - set().union(*seen))
        assert seen == [
            {"rollout-0", "rollout-1", "selector-0"},
            set(),
            {"reward-0", "reward-1"},
            {"learner-0"},
            {"encoder-0"},
        ]
        assert len(transport.loading) == len(EVERYONE) and not starting.done()
        transport.loaded()
        await starting
        await services.stop()

    asyncio.run(run())


def test_an_actor_that_ends_while_idle_is_started_again(made, monkeypatch):
    monkeypatch.setattr(services, "IDLE_CHECK_S", 0.0)

    async def run() -> None:
        services, transport, held = made(1)
        starting = asyncio.create_task(services.start())
        await settle()
        held.update(transport.requested)
        transport.loaded()
        await starting
        transport.requested.clear()
        transport.dead.append(services.learners.pool.members[0].handle)
        await settle()
        assert transport.requested == ["learner-0"]
        await services.stop()

    asyncio.run(run())


def test_a_smaller_share_is_started_again_after_the_larger_ones_beside_it(made):
    """Ray would put it on the fullest GPU, where it may take the room of a larger one."""

    async def run() -> None:
        services, transport, held = made(2)
        starting = asyncio.create_task(services.start())
        for gets in ("rollout-0", "rollout-1", "reward-0", "reward-1", "learner-0", "encoder-0"):
            held.add(gets)
            await settle()
        transport.loaded()
        await starting
        places, here = services.places, f"{0:056x}"
        held -= {"rollout-1", "reward-0"}  # both have died
        places.refresh(["rollout-0", "reward-1", "learner-0"])
        with pytest.raises(NoRoom, match="reward-0 starts after rollout-1, which needs more of a"):
            places.take("shares/reward-0.1")
        assert places.take("shares/rollout-1.1") == here  # larger than all
        with pytest.raises(NoRoom):
            places.take("shares/reward-0.1")
        held.add("rollout-1.1")  # it loads its model
        places.refresh(["rollout-0", "reward-1", "learner-0"])
        assert places.take("shares/reward-0.1") == here
        held.add("reward-0.1")
        places.refresh(["rollout-0", "learner-0"])  # reward-1 was killed, Ray does not know it yet
        with pytest.raises(NoRoom, match="encoder-0 starts after reward-1"):
            places.take("shares/encoder-0.1")
        places.release("reward-1")  # it has left for good
        places.refresh(["rollout-0", "learner-0"])
        assert places.take("shares/encoder-0.1") == here
        await services.stop()

    asyncio.run(run())


def test_no_node_is_requested_for_an_actor_that_lets_a_larger_one_go_first(made, monkeypatch):
    places, requested = made(2)[0].places, []
    waits = places._config.services.model_copy(update={"wait_for_nodes_s": 60.0})
    places._config = places._config.model_copy(update={"services": waits})
    monkeypatch.setattr(places, "_request", requested.append)
    for error, expected in ((LargerFirst("reward-0", "rollout-1"), []), (NoRoom([]), ["reward-0"])):

        def plan(actor: str, error: Exception = error) -> str:
            raise error

        monkeypatch.setattr(places._placer, "plan", plan)
        with pytest.raises(type(error)):
            places.take("shares/reward-0.1")
        assert requested == [expected] * bool(expected)


def test_a_failed_start_ends_the_waiting_of_the_others(made):
    async def run() -> None:
        services, transport, _ = made(2)
        starting = asyncio.create_task(services.start())
        await settle()
        transport.loading[0].set_exception(TimeoutError())
        with pytest.raises(RunFailed, match="was not placed or not ready"):
            await asyncio.wait_for(starting, 20)
        await services.stop()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_services_on_simulated_gpus_start_in_parallel():
    """It runs in a process without another Ray. No actor has loaded before all of them load: one
    after the other they would never start. Then half of them are killed.
    """
    made = subprocess.run(
        [sys.executable, "-m", "tests.cluster.gpus"], capture_output=True, text=True, timeout=580
    )
    assert made.returncode == 0, made.stderr
    lines = [line for line in made.stdout.splitlines() if line[:1] == "["]  # others are Ray's
    (one, _), (two, replaced), ended = map(json.loads, lines)
    assert one == {"0": [0.04, 0.08, 0.08, 0.15, 0.15, 0.5]}
    # rollout actors first, then reward actors: each on the fullest GPU with room
    assert two == {"0": [0.1, 0.3, 0.6], "1": [0.05, 0.3, 0.6]}
    # in one of the two orders Ray would find no GPU with 0.6 left for the second rollout actor
    assert replaced == {"0": [0.3, 0.6], "1": [0.3, 0.6]}
    # the learner's end was noticed without a call, so that the rollout actors could follow it
    assert ended == ["learner", "rollout", "rollout"]

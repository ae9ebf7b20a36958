"""Starting many actors: the work for each does not grow with their number.

Calls are counted, nothing is timed, and no process is started.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from actors.messages import ActorInfo
from cluster.driver import actor_placement, services
from cluster.driver.services import ActorServices
from cluster.driver.weights import incompatibility
from cluster.runtime.starting import cause
from configs.load import load
from planning.placement import Node
from planning.placer import Placer
from records.rundir import RunDirectory

EACH = 8
"""Actors per node."""


class Ready:
    """A transport whose actors report at once that they are ready."""

    def __init__(self) -> None:
        self.started = 0

    def send(self, handle: Any, call: Any) -> Sequence[Any]:
        assert call.method == "ready"
        return [None]

    def answer(self, reference: Any) -> asyncio.Future[ActorInfo]:
        self.started += 1
        future: asyncio.Future[ActorInfo] = asyncio.get_running_loop().create_future()
        future.set_result(ActorInfo(1, "here", f"{0:056x}", backend="fp8"))
        return future

    def kill(self, handle: Any) -> None:
        pass

    def ended(self, handle: Any) -> bool:
        return False


class Looked(Sequence[Any]):
    """Members of a pool that count accesses."""

    def __init__(self, members: Sequence[Any]):
        self.members, self.seen = members, 0

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, index: Any) -> Any:
        return self.members[index]

    def __iter__(self) -> Iterator[Any]:
        for member in self.members:
            self.seen += 1
            yield member


@pytest.fixture
def calls(monkeypatch) -> Counter[str]:
    """Replace Ray, and count calls to it by kind."""
    found: Counter[str] = Counter()

    def free_nodes() -> list[Node]:
        found["free_nodes"] += 1
        return [Node(f"{n:056x}", EACH, 0) for n in range(1024 // EACH)]  # as formatted by Ray

    def addresses() -> dict[str, tuple[str, int]]:
        found["addresses"] += 1
        return {}

    async def find_room(config: Any, kinds: Any) -> list[Node]:
        return free_nodes()

    for function in (free_nodes, addresses, find_room):
        monkeypatch.setattr(actor_placement, function.__name__, function)
    remote = SimpleNamespace(
        options=lambda **options: SimpleNamespace(remote=lambda *args: object())
    )
    context = SimpleNamespace(get_job_id=lambda: "1")
    stub = SimpleNamespace(remote=lambda actor: remote, get_runtime_context=lambda: context)
    monkeypatch.setattr(services, "ray", stub)
    return found


@pytest.mark.parametrize("actors", [16, 256])
def test_nodes_are_listed_once_for_actors_that_start_together(calls, tmp_path, actors):
    config = load("quickstart", [f"services.rollout.actors={actors}", "services.rollout.cpus=1"])
    transport = Ready()

    class Services(ActorServices):
        pass

    Services.transport = transport  # type: ignore[assignment]

    async def run() -> list[Counter[str]]:
        made = Services(config, RunDirectory(tmp_path), lambda *args, **fields: None)
        made.only("rollout")
        await made.start()
        seen = [calls.copy()]
        made.refresh_nodes()  # one turn later, as after an iteration
        made.refresh_nodes()
        seen.append(calls.copy())
        await made.stop()
        return seen

    started, later = asyncio.run(run())
    assert transport.started == actors
    assert started == {"free_nodes": 2, "addresses": 1}  # one to find room, one at the start
    assert later == {"free_nodes": 3, "addresses": 2}


def test_used_resources_are_read_once_for_all_nodes():
    class Held(dict[str, Any]):
        looks = 0

        def items(self) -> Any:
            Held.looks += 1
            return super().items()

    config = load("quickstart", ["services.rollout.actors=64", "services.rollout.cpus=1"])
    nodes = [Node(f"node-{n}", EACH, 0) for n in range(64 // EACH)]
    placer = Placer(config)
    placer.refresh(nodes)
    placer.place_all(["rollout"])
    placer._held = Held(placer._held)
    placer.refresh(nodes, [f"rollout-{n}" for n in range(64)])
    assert Held.looks == 2  # the nodes of actors and the lost nodes, but not once for each of 8


def test_a_new_actor_is_compared_with_one_existing_actor():
    def pool(*backends: str | None) -> Any:
        infos = [ActorInfo(1, "there", None, backend=backend) for backend in backends]
        return SimpleNamespace(
            members=Looked([SimpleNamespace(info=info, handle=1) for info in infos])
        )

    many, new = pool(*["fp8"] * 1000), ActorInfo(2, "here", None, backend="fp8")
    assert incompatibility(many, new) is None and many.members.seen == 1
    other = incompatibility(many, ActorInfo(2, "here", None, backend="bf16"))
    assert other is not None and "bf16, the others fp8" in other
    assert incompatibility(pool("bf16", "fp8"), new) is None
    assert incompatibility(pool(None), new) is None and incompatibility(pool(), new) is None
    assert incompatibility(many, ActorInfo(2, "here")) is None


@pytest.mark.parametrize("name", ["FileNotFoundError", "ValueError", "torch.OutOfMemoryError"])
def test_the_error_line_of_a_constructor_is_found_in_rays_message(name):
    """Ray's message has the frames around it, and one of them begins like an error of files."""
    message = f"{name}: model.path: the 'vae' of 'X' lacks 1 of its 74 weights"
    frames = f"""The actor died because of an error raised in its creation task, ray::RolloutActor
  File "/x/FileError.py", line 236, in _whole
    raise {name}(
{message}"""
    assert cause(RuntimeError(frames)) == message

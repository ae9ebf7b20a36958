"""One precision backend per run, and time for compilation; without Ray except for the last test."""

import asyncio
import concurrent.futures
import json
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.calls import Call, Task
from actors.messages import ActorInfo, ChunkKey, Exported, WeightsId
from actors.rollout import RolloutActor
from cluster.driver.weights import WeightChannel, common_backends
from cluster.runtime.answers import answer_of
from cluster.runtime.member import ActorLost, Member
from cluster.runtime.outcomes import Outcomes
from cluster.runtime.pool import ActorPool
from cluster.runtime.queue import PendingTask
from cluster.runtime.transport import RAY
from configs.services import Service
from policy.precision.manifest import Manifest
from policy.precision.wire import assemble
from records.errors import RunFailed
from tests.cluster.runs import run_here, tiny_config
from tests.sections import pack_section


def explorers(*backends: str | None, runs: tuple[str, ...] = ()) -> Any:
    """Return a pool for publishing, whose actors acknowledge all that they are sent."""
    members = [Member(i) for i in range(len(backends))]
    for i, (member, backend) in enumerate(zip(members, backends, strict=True)):
        info = ActorInfo(0, f"node{i}")
        if backend is not None:
            why = f"auto: {backend} is the best"
            info = replace(info, backend=backend, why=why, runs=runs)
        member.fill(object(), info)
    pool = SimpleNamespace(members=members, alive=len(members))

    async def each(do) -> None:
        for member in pool.members:
            await do(member)

    async def ask(member, method, backend, manifest, sent, *shards):
        assert method is RolloutActor.load
        return WeightsId(manifest.version, manifest.checksum, backend)

    pool.each, pool.ask = each, ask
    return pool


def chunk_of(version: int) -> ChunkKey:
    """Return a chunk that names a policy version."""
    return ChunkKey(0, 0, 0, version)


def checksum(version: int) -> str:
    """Return the checksum of the version that ``learner`` exports, which has no tensors."""
    return assemble([], version, "nvfp4")[0].checksum


def learner(requested: list[tuple]) -> Any:
    async def export(version, backend, weights):
        requested.append((version, backend, weights))
        return Exported(assemble([], version, "nvfp4")[0], {})

    return SimpleNamespace(export=export)


def publish(rollout, requested) -> None:
    asyncio.run(WeightChannel(lambda *args, **fields: None).publish(3, learner(requested), rollout))


def test_the_learner_packs_in_the_rollout_actors_format():
    requested = []
    publish(explorers("fp8", "fp8"), requested)
    publish(explorers(None), requested)
    assert requested == [(3, "fp8", None), (3, None, None)]


def test_the_chosen_backend_is_reported_once():
    async def run() -> list[tuple]:
        events = []
        channel = WeightChannel(lambda name, **fields: events.append((name, fields)))
        for version in range(3):
            await channel.publish(version, learner([]), explorers("fp8", "fp8"))
        # chosen by the audit: not the run's own
        await channel.publish(3, learner([]), explorers("fp8"), backend="bf16")
        assert channel.chosen == "fp8"
        return events

    events = asyncio.run(run())
    assert [name for name, _ in events] == ["backend_chosen", *["version_published"] * 4]
    assert events[0][1] == {"backend": "fp8", "why": "auto: fp8 is the best"}
    assert [fields["backend"] for _, fields in events[1:]] == ["fp8", "fp8", "fp8", "bf16"]


def test_a_resumed_run_keeps_its_precision():
    """On better GPUs ``auto`` would choose another one, but every version must be ranked by the
    same arithmetic.
    """

    async def run(rollout, requested: list[tuple]) -> list[str]:
        events: list[str] = []
        channel = WeightChannel(
            lambda name, **fields: events.append(f"{name} {fields.get('why', '')}")
        )
        channel.chosen = "fp8"  # from the checkpoint
        for version in (5, 6):
            await channel.publish(version, learner(requested), rollout)
        return events

    requested: list[tuple] = []
    rollout = explorers("te_nvfp4", "te_nvfp4", runs=("te_nvfp4", "torch_nvfp4", "fp8", "bf16"))
    kept, *rest = asyncio.run(run(rollout, requested))
    assert kept == "backend_kept as the run began; its rollout actors here would take te_nvfp4"
    assert all(event.startswith("version_published") for event in rest) and len(rest) == 2
    assert [backend for _, backend, _ in requested] == ["fp8", "fp8"]
    assert [member.weights for member in rollout.members] == [(6, checksum(6), "fp8")] * 2
    with pytest.raises(
        RunFailed,
        match=(
            r"explores in fp8, which its rollout actors here cannot run \(they support bf16,"
            r" fp32\):"
            r" continue it"
        ),
    ):
        asyncio.run(run(explorers("bf16", runs=("fp32", "bf16")), requested))


def test_rollout_actors_with_different_backends_end_the_run_before_publishing():
    requested = []
    with pytest.raises(
        RunFailed,
        match=(r"different precision backends \(te_nvfp4 on node0, fp8 on node1\), but a run must"),
    ):
        publish(explorers("te_nvfp4", "fp8"), requested)
    assert requested == []


def test_a_replacement_on_another_kind_of_gpu_is_refused():
    async def run() -> None:
        channel = WeightChannel(lambda *args, **fields: None)
        rollout = explorers("te_nvfp4", "te_nvfp4")
        await channel.publish(0, learner([]), rollout)
        member = rollout.members[1]
        member.info, member.weights = ActorInfo(0, "other", backend="torch_nvfp4"), None
        await channel.prepare_for(rollout)(member, chunk_of(0))

    with pytest.raises(RunFailed, match="torch_nvfp4 on other"):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("cold", "warm_up_s", "lost"), [(True, 30.0, False), (True, 0.0, True), (False, 30.0, True)]
)
def test_a_compiling_actor_has_a_longer_deadline(cold, warm_up_s, lost):
    """A task of half a second, with a deadline of a tenth."""

    async def run() -> int:
        service = Service(deadline_s=0.1, warm_up_s=warm_up_s)
        pool = ActorPool("rollout", lambda name: None, service, lambda *args, **fields: None)
        future: concurrent.futures.Future[int] = concurrent.futures.Future()
        threading.Timer(0.5, future.set_result, [7]).start()
        pool.members[0].cold = cold
        return await answer_of(
            RAY, pool.members[0], SimpleNamespace(future=lambda: future), service
        )

    if lost:
        with pytest.raises(ActorLost, match="no answer for 0.1 s"):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == 7


def test_the_deadline_is_normal_after_the_first_task():
    async def run() -> Member:
        outcomes = Outcomes("rollout", Service(), lambda *args, **fields: None, stateful=False)
        member, pending = Member(0), PendingTask(Task("chunk"), Call("explore", (), {}))
        member.cold = True
        outcomes.answered(pending, member, "images")
        assert pending.future.result() == "images"
        return member

    assert not asyncio.run(run()).cold


def test_the_difference_between_versions_is_computed_once(monkeypatch):
    """It traverses all tensors, so it must not be repeated for a thousand actors. A new actor gets
    all tensors.
    """
    found: list[tuple[int | None, int]] = []
    real = Manifest.changed_since

    def counted(self: Manifest, before: Manifest | None) -> list[int]:
        found.append((before and before.version, self.version))
        return real(self, before)

    monkeypatch.setattr(Manifest, "changed_since", counted)

    async def run() -> None:
        channel = WeightChannel(lambda *args, **fields: None)
        rollout = explorers("fp8", "fp8", "fp8", "fp8")
        await channel.publish(0, learner([]), rollout)
        rollout.members[3].weights = None  # replaced
        await channel.publish(1, learner([]), rollout)
        assert [m.weights.version for m in rollout.members] == [1] * 4

    asyncio.run(run())
    # the first of each version is fetched from the learner
    assert found == [(None, 0), (None, 0), (0, 1), (0, 1), (None, 1)]


def test_with_explore_ahead_an_actor_loads_the_version_of_its_chunk():
    """Two versions are held, publishing changes the weights of no actor, and older versions are
    dropped.
    """

    async def run() -> None:
        channel = WeightChannel(lambda *args, **fields: None, ahead=1)
        rollout = explorers("fp8", "fp8")
        held = lambda: [m.weights and m.weights.version for m in rollout.members]  # noqa: E731
        load, (first, second) = channel.prepare_for(rollout), rollout.members
        await channel.publish(0, learner([]), rollout)
        assert held() == [None, None]
        await load(first, chunk_of(0))
        await channel.publish(1, learner([]), rollout)
        assert held() == [0, None]  # it may be using version 0
        await load(second, chunk_of(0))
        await load(first, chunk_of(1))
        assert held() == [1, 0]
        await load(first, chunk_of(0))  # a chunk that is retried
        assert held() == [0, 0]
        await channel.publish(2, learner([]), rollout)
        with pytest.raises(RunFailed, match="policy version 0 is not available; available: 1, 2"):
            await load(first, chunk_of(0))
        # back at a checkpoint: later versions are dropped
        await channel.publish(0, learner([]), rollout)
        current = channel.current
        assert current is not None and current.id.version == 0
        with pytest.raises(RunFailed, match="available: 0;"):
            channel.held(2)

    asyncio.run(run())


def test_only_changed_shards_are_fetched_and_sent():
    """Of two constant shards and two of which one changes, one is fetched and sent from the second
    version on.

    Actors that are new, or whose weights are unknown, get all of them.
    """
    constant = pack_section({"a": torch.arange(16, dtype=torch.uint8)}, 8)
    fetched: list[tuple[int, int]] = []
    sent: list[tuple[int, int, list[int]]] = []

    async def export(version, backend, weights):
        values = {"b": torch.tensor([7.0, 7.0]), "c": torch.tensor([float(version), 0.0])}
        changing = pack_section(values, 8)
        return Exported(assemble([constant, changing], version, "nvfp4")[0], {})

    async def shard(version, index):
        fetched.append((version, index))
        return f"{version}.{index}"

    async def run() -> None:
        recorded: list[dict[str, Any]] = []
        channel = WeightChannel(lambda name, **fields: recorded.append(fields))
        rollout, client = explorers(None, None), SimpleNamespace(export=export, shard=shard)
        first, second = rollout.members
        acknowledge = rollout.ask

        async def ask(member, method, backend, manifest, indices, *shards):
            sent.append((manifest.version, member.index, indices))
            return await acknowledge(member, method, backend, manifest, indices, *shards)

        rollout.ask = ask
        await channel.publish(0, client, rollout)
        await channel.publish(1, client, rollout)
        assert channel.held(1).shards == ["0.0", "0.1", "0.2", "1.3"]
        second.weights = None  # replaced
        await channel.publish(2, client, rollout)
        await channel.publish(7, client, rollout)  # not the next version: all of it is fetched
        assert [row.get("fetched") for row in recorded] == [32, 8, 8, 32]

    asyncio.run(run())
    everything = [0, 1, 2, 3]
    assert fetched == [(0, i) for i in everything] + [(1, 3), (2, 3)] + [(7, i) for i in everything]
    assert sent == [
        (0, 0, everything), (0, 1, everything), (1, 0, [3]), (1, 1, [3]),
        (2, 0, [3]), (2, 1, everything), (7, 0, [3]), (7, 1, [3]),
    ]  # fmt: skip


def test_loading_another_precision_has_a_longer_deadline():
    """The actor builds its denoiser anew, so it may take as long as at the start."""

    async def run() -> None:
        channel, rollout = WeightChannel(lambda *args, **fields: None), explorers("emulated_nvfp4")
        (member,) = rollout.members
        await channel.publish(0, learner([]), rollout)
        assert member.weights == (0, checksum(0), "emulated_nvfp4") and not member.cold
        await channel.publish(0, learner([]), rollout, backend="fp8")
        assert member.weights == (0, checksum(0), "fp8") and member.cold

    asyncio.run(run())


def test_only_backends_that_all_rollout_actors_support_are_chosen():
    rollout = explorers("fp8", "fp8", None)
    for member, runs in zip(rollout.members, [("fp8", "bf16"), ("bf16", "fp32")], strict=False):
        member.info = replace(member.info, runs=runs)
    assert common_backends(rollout) == {"bf16"}
    assert common_backends(explorers(None)) == set()


def test_a_resumed_run_explores_with_its_first_backend(ray_here, tiny_sd3_dir, tmp_path):
    """The first iteration ran on GPUs whose ``auto`` is FP8: the second explores in FP8 too.

    Here ``auto`` would emulate NVFP4.
    """
    changes = {"explore__backend": "auto", "services__rollout__actors": 1, "evaluate__prompts": 1}
    run = run_here(tiny_config(tiny_sd3_dir, tmp_path, "elsewhere", iterations=1, **changes))
    state = run.checkpoints / "step_000001" / "state.json"
    body = json.loads(state.read_text())
    assert body["state"]["extra"]["backend"] == "emulated_nvfp4"
    body["state"]["extra"]["backend"] = "fp8"
    state.write_text(json.dumps(body))
    run = run_here(
        tiny_config(tiny_sd3_dir, tmp_path, "elsewhere", iterations=2, **changes), resume=True
    )
    assert [row["explore/backend"] for row in run.metrics() if row["kind"] == "iteration"] == [
        "emulated_nvfp4",
        "fp8",
    ]
    events = [event for event in run.events() if event["event"].startswith("backend_")]
    assert [event["event"] for event in events] == ["backend_chosen", "backend_kept"]
    assert events[1]["why"] == "as the run began; its rollout actors here would take emulated_nvfp4"
    assert {row["backend"] for row in json.loads((run.path / "quantization.json").read_text())} == {
        "fp8"
    }

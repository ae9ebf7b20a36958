"""One precision backend per run, and time to compile; without Ray."""

import asyncio
import concurrent.futures
import threading
from types import SimpleNamespace

import pytest

from cluster.errors import RunFailed
from cluster.pool import ActorLost, ActorPool
from cluster.weights import WeightChannel
from configs.services import Service


def explorers(*backends: str | None) -> SimpleNamespace:
    """A pool as far as publishing goes, whose actors acknowledge whatever they are sent."""
    facts = [{} if backend is None else {"backend": backend, "host": f"node{i}"} for i, backend in enumerate(backends)]
    pool = SimpleNamespace(
        workers=[SimpleNamespace(facts=fact, state=None, index=i) for i, fact in enumerate(facts)], alive=len(facts)
    )

    async def each(do) -> None:
        for worker in pool.workers:
            await do(worker)

    async def ask(worker, method, manifest, *chunks):
        return manifest.version, manifest.checksum

    pool.each, pool.ask = each, ask
    return pool


def learner(asked: list[tuple]) -> SimpleNamespace:
    async def call(key, method, *args, **more):
        asked.append(args)
        return SimpleNamespace(version=args[0], checksum="c", chunk_sizes=()), {}

    return SimpleNamespace(call=call)


def publish(rollout, asked) -> None:
    asyncio.run(WeightChannel(lambda *args, **fields: None).publish(3, learner(asked), rollout))


def test_the_learner_packs_for_what_the_explorers_run():
    asked = []
    publish(explorers("fp8", "fp8"), asked)
    publish(explorers(None), asked)
    assert asked == [(3, "fp8"), (3,)]


def test_explorers_that_differ_end_the_run_before_anything_is_published():
    asked = []
    with pytest.raises(RunFailed, match=r"different precision backends \(te_nvfp4 on node0, fp8 on node1\), and a run has one"):
        publish(explorers("te_nvfp4", "fp8"), asked)
    assert asked == []


def test_a_replacement_on_another_kind_of_gpu_is_noticed():
    async def run() -> None:
        channel, rollout = WeightChannel(lambda *args, **fields: None), explorers("te_nvfp4", "te_nvfp4")
        await channel.publish(0, learner([]), rollout)
        rollout.workers[1].facts, rollout.workers[1].state = {"backend": "torch_nvfp4", "host": "other"}, None
        await channel.load_into_worker(rollout)(rollout.workers[1])

    with pytest.raises(RunFailed, match="torch_nvfp4 on other"):
        asyncio.run(run())


@pytest.mark.parametrize(("cold", "warm_up_s", "lost"), [(True, 30.0, False), (True, 0.0, True), (False, 30.0, True)])
def test_a_cold_actor_has_longer(cold, warm_up_s, lost):
    """A unit of half a second against a deadline of a tenth."""

    async def run() -> int:
        service = Service(deadline_s=0.1, warm_up_s=warm_up_s)
        pool = ActorPool("rollout", lambda name: None, service, lambda *args, **fields: None)
        future: concurrent.futures.Future[int] = concurrent.futures.Future()
        threading.Timer(0.5, future.set_result, [7]).start()
        pool.workers[0].facts = {"cold": cold}
        return await pool._answer(pool.workers[0], SimpleNamespace(future=lambda: future))

    if lost:
        with pytest.raises(ActorLost, match="no answer for 0.1 s"):
            asyncio.run(run())
    else:
        assert asyncio.run(run()) == 7


def test_it_is_warm_after_its_first_unit():
    async def run() -> ActorPool:
        pool = ActorPool("rollout", lambda name: None, Service(), lambda *args, **fields: None)
        pool.workers[0].facts = {"cold": True, "backend": "fp8"}
        unit = SimpleNamespace(tries=1, accept=None, future=asyncio.get_running_loop().create_future())
        pool._answered(unit, pool.workers[0], "pictures")  # pyright: ignore[reportArgumentType]
        assert unit.future.result() == "pictures"
        return pool

    assert asyncio.run(run()).workers[0].facts == {"backend": "fp8"}

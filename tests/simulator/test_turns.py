"""The real pools and the real ring of the driver in virtual time. Weights leave GPUs between turns,
and actors die during the run. No actor works without the GPU, rollout actors and learner are never
on it together, and the run continues.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
from ray import ObjectRef
from ray.exceptions import RayActorError
from rich.console import Console

from actors.calls import Answer, Call
from cluster.driver.loop import Ring
from cluster.runtime import clock
from cluster.runtime.transport import Handle
from configs.prompts import Prompt
from planning.layouts.gpus import GpuAssignment
from records.errors import StateLost
from records.progress import Progress
from records.timeline import Span
from simulator.services import Board, Hardware, SimulatedServices
from simulator.transport import Actor, Reference
from tests.simulator.test_simulator import DURATIONS, PROMPTS, config

WORKING = {"rollout": ("explore", "load"), "learner": ("generate", "update", "export")}


class KillingTransport:
    """Sends calls and makes the actor die that receives the ``at``-th call of ``method``. Checks
    which actors are on the GPU.
    """

    def __init__(self, transport: Any, method: str, at: int):
        self._transport, self._method, self._left = transport, method, at
        self.on_gpu: set[Actor] = set()
        self.dead = 0
        send = transport.send

        def send_or_kill(handle: Handle, call: Call) -> Sequence[ObjectRef[Answer]]:
            self._watch(cast(Actor, handle), call)
            if call.method != self._method or self._left == 0:
                return send(handle, call)
            self._left -= 1
            if self._left:
                return send(handle, call)
            self.dead += 1
            self.on_gpu.discard(cast(Actor, handle))
            refs = [Reference() for _ in range(call.returns)]
            for ref in refs:
                ref.future.set_exception(RayActorError())
                ref.future.exception()
            return cast("Sequence[ObjectRef[Answer]]", refs)

        transport.send, transport.kill = send_or_kill, self.on_gpu.discard

    def _watch(self, actor: Actor, call: Call) -> None:
        if call.method == "begin_turn":
            self.on_gpu.add(actor)
            assert len({each.kind for each in self.on_gpu}) == 1, "both are on the GPU"
        elif call.method == "end_turn":
            self.on_gpu.discard(actor)
        elif call.method in WORKING.get(actor.kind, ()):
            assert actor in self.on_gpu, f"{actor.kind} is asked to {call.method} without the GPU"


async def run_two_iterations(
    method: str, at: int
) -> tuple[KillingTransport, list[Span], list[str]]:
    """Run two iterations. If the learner is lost, its iterations start again."""
    leaves = config(2, 2, leaves=("rollout", "learner"))
    rewards = leaves.rewards.model_copy(update={"deterministic": False})  # rewards are random
    run = leaves.model_copy(update={"iterations": 2, "rewards": rewards})
    spans, events = list[Span](), list[str]()
    laid = [
        GpuAssignment("one", 2, {"learner": 1, "rollout": 1}),
        GpuAssignment("one", 1, {"reward": 1}),
    ]
    services = SimulatedServices(
        run,
        Board(Hardware({"one": DURATIONS}, laid)),
        lambda name, **fields: events.append(name),
        spans.append,
    )
    transport = KillingTransport(services.transport, method, at)
    prompts = [Prompt(f"prompt {n}") for n in range(PROMPTS)]
    progress = Progress(console=Console(quiet=True), clock=clock.now)
    ring = Ring(run, services, prompts, progress, lambda name, **fields: events.append(name))
    await services.start()
    index = 0
    while index < 2:
        try:
            if index == 0:
                await ring.begin(0)
            await ring.iteration(index)
            index += 1
        except StateLost as loss:
            await ring.close()
            await services.learners.renew(str(loss))
            index = 0
    await ring.close()
    await services.stop()
    return transport, spans, events


def cases() -> Iterator[tuple[str, int]]:
    yield "nobody", 1
    yield from (("explore", at) for at in (1, 4))
    yield from ((method, at) for method in ("begin_turn", "end_turn") for at in (1, 2, 3, 5))
    yield from (("load", 2), ("generate", 2), ("update", 1), ("update", 3), ("export", 2))


@pytest.mark.parametrize(("method", "at"), list(cases()))
def test_gpus_have_one_side_at_a_time_although_actors_die(method, at):
    with asyncio.Runner(loop_factory=clock.VirtualLoop) as runner:
        transport, spans, events = runner.run(run_two_iterations(method, at))
    assert transport.dead == (method != "nobody") and events.count("actor_died") >= transport.dead
    done = [span for span in spans if span.work == "update" and span.outcome == "done"]
    assert len({span.unit[0] for span in done}) == 2  # both iterations

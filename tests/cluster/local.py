"""The ring in one process, without Ray: the product's own actors behind fake pools, in a random
order.

A call waits for a random time and is run by a random member, so that a result that depends on the
order or on the actor differs between seeds. Actors never die here; that is tested with real
processes.
"""

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from actors.calls import Call, Caller, Task
from actors.clients import EncoderClient, LearnerClient, RolloutClient, SelectorClient
from actors.encoder import EncoderActor
from actors.learner import LearnerActor
from actors.reward import RewardActor
from actors.rollout import RolloutActor
from actors.selector import SelectorActor
from cluster.driver.gpu_turns import GpuTurns, InGpuTurn, NoGpuTurns, learner_in_turn
from cluster.driver.loop import Ring
from cluster.driver.scoring import RewardService
from cluster.driver.weights import WeightChannel
from cluster.runtime.member import Member
from configs.prompts import read_prompts
from configs.schema import RunConfig
from learner.checkpoint import read
from records.rundir import RunDirectory


class LocalPool(Caller):
    """The parts of ``cluster.runtime.pool.ActorPool`` that the loop and publishing use.

    References are the objects themselves.
    """

    def __init__(self, actors: list[Any], chance: random.Random, log: list[Any], waits: int = 4):
        """``log`` gets the key of each finished call; a call waits for fewer than ``waits`` turns
        of the event loop.
        """
        self.members = [Member(index) for index in range(len(actors))]
        for member, actor in zip(self.members, actors, strict=True):
            member.fill(actor, actor.ready())
        self.prepare: Any = None
        self.alive = len(actors)
        self._chance, self._log, self._waits = chance, log, waits

    async def perform(self, task: Task[Any], call: Call) -> Any:
        for _ in range(self._chance.randrange(self._waits)):
            await asyncio.sleep(0)
        member = self._chance.choice(self.members)
        async with member.lock:
            if self.prepare:
                await self.prepare(member, task.key)
            value = getattr(member.handle, call.method)(*call.args, **call.named)
            self._log.append(task.key)
        return value

    async def perform_on(self, member: Member, task: Task[Any], call: Call) -> Any:
        await asyncio.sleep(0)
        self._log.append(task.key)
        return getattr(member.handle, call.method)(*call.args, **call.named)

    async def each(self, do: Any) -> None:
        for member in self.members:
            await do(member)

    async def ask(self, member: Member, method: Any, *args: Any) -> Any:
        return getattr(member.handle, method.__name__)(*args)


ENCODERS: dict[str, EncoderActor] = {}


def encoder_of(plain: dict[str, Any]) -> EncoderActor:
    """Return one encoder for all runs of a model: it has no state, and takes longest to load."""
    parts = [plain["model"], plain["guidance"], plain["regenerate"], plain["services"]["encoder"]]
    if (key := json.dumps(parts)) not in ENCODERS:
        ENCODERS[key] = EncoderActor(plain)
    return ENCODERS[key]


class LocalServices:
    """The parts of ``cluster.driver.services.ActorServices`` that the loop uses."""

    reissued = lost = 0

    def __init__(
        self, config: RunConfig, root: Path, explorers: int, chance: random.Random, event: Any
    ):
        plain, self.log = config.model_dump(mode="json"), []

        def pool(*actors: Any, waits: int = 4) -> Any:
            return LocalPool(list(actors), chance, self.log, waits)

        self.encoder = EncoderClient(pool(encoder_of(plain)), config.model)
        self.selector = SelectorClient(pool(SelectorActor(plain)))
        self.rollout_pool = pool(*(RolloutActor(plain) for _ in range(explorers)), waits=24)
        self.rollout = RolloutClient(self.rollout_pool)
        RunDirectory(root).create(config)
        learner = pool(LearnerActor(plain, str(root), fetch=list))
        self.learner = LearnerClient(learner, learner, learner)
        self.reward = RewardService(
            {"reward": (pool(RewardActor(plain), RewardActor(plain)), config.scorers_of("reward"))}
        )
        self.turns = NoGpuTurns()
        if config.services.takes_turns:
            pools: Any = self.rollout_pool, learner
            self.turns = GpuTurns(*pools, event)
            self.rollout = RolloutClient(InGpuTurn(self.rollout_pool, self.turns, "rollout"))
            self.learner = learner_in_turn(self.learner, self.turns)
        self.weights = WeightChannel(event, config.explore_ahead, self.turns)
        self.rollout_pool.prepare = self.weights.prepare_for(self.rollout_pool)


class Played(SimpleNamespace):
    """The results: ``rows`` of metrics, ``chosen`` by iteration, ``events``, and ``log`` of calls.

    Also the ``table`` of modules, and the path of the ``checkpoint``.
    """

    def files(self) -> dict[str, bytes]:
        """Return the tensor files of the checkpoint."""
        return {
            path.name: path.read_bytes() for path in sorted(self.checkpoint.glob("*.safetensors"))
        }


def play(
    config: RunConfig,
    root: Path,
    *,
    explorers: int = 1,
    seed: int = 0,
    start: Path | None = None,
    stop: int | None = None,
) -> Played:
    """Run iterations up to ``stop`` (default: all), from the start or from a checkpoint, and save
    one more.
    """
    return asyncio.run(
        _play(config, root, explorers, seed, start, config.iterations if stop is None else stop)
    )


async def _play(
    config: RunConfig, root: Path, explorers: int, seed: int, start: Path | None, stop: int
) -> Played:
    played = Played(rows={}, chosen={}, events=[], checkpoint=root / f"step_{stop:06d}")
    chance = random.Random(seed)

    def event(name: str, **fields: Any) -> None:
        played.events.append({"event": name, **fields})

    services: Any = LocalServices(config, root, explorers, chance, event)
    progress: Any = SimpleNamespace(
        note=print, advanced=lambda *a: None, iteration_started=lambda *a: None
    )
    ring = Ring(config, services, read_prompts(config.prompts.train), progress, event)
    first = 0
    if start is not None:
        extra = read(start)[1]["extra"]
        first = extra["iteration"]
        await services.learner.load(start.name, str(start))
        ring.monitor.restore(extra["guard"])
    await ring.begin(first)
    for index in range(first, stop):
        played.rows[index], it = await ring.iteration(index)
        played.chosen[index] = it.selected
    extra = {"iteration": stop, "guard": ring.monitor.state}
    await services.learner.save(stop, str(played.checkpoint), extra)
    played.log = services.log
    played.table = await services.learner.quantization()
    await ring.close()
    return played

"""The five services of a run: pools of actors, and a typed client for each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.clients import EncoderClient, RolloutClient, SelectorClient
from actors.encoder import EncoderActor
from actors.learner import LearnerActor
from actors.reward import RewardActor
from actors.rollout import RolloutActor
from actors.selector import SelectorActor
from cluster.driver.actor_placement import ActorPlacement
from cluster.driver.conditioning_cache import CachedEncoderClient, Start, groups_of
from cluster.driver.environment import environment
from cluster.driver.gpu_turns import GpuTurns, InGpuTurn, NoGpuTurns, learner_in_turn
from cluster.driver.learner_group import LearnerGroup
from cluster.driver.scorer_outages import ScorerOutages
from cluster.driver.scoring import RewardService
from cluster.driver.weights import WeightChannel, incompatibility
from cluster.runtime import template
from cluster.runtime.pool import ActorPool
from cluster.runtime.tasks import BackgroundTasks, run_together
from cluster.runtime.transport import RAY, Handle, Transport
from configs.load import ConfigError
from configs.prompts import Prompt
from configs.schema import RunConfig
from configs.services import SCALABLE, ScorerService
from records.errors import RunFailed
from records.rundir import Event, RunDirectory
from records.timeline import Span

IDLE_CHECK_S = 1.0
"""Seconds between checks whether the processes of idle actors still exist."""
STOP_S = 20.0
"""Seconds that the end of a run waits for a service's tasks before killing its actors."""


class ActorServices:
    """Rollout, reward, selector, encoder and learner of one run."""

    transport: Transport = RAY

    def __init__(
        self,
        config: RunConfig,
        rundir: RunDirectory,
        event: Event,
        record: Callable[[Span], None] = lambda span: None,
    ):
        self.config, self._event, self._record = config, event, record
        self.places = self._places()
        self._placed = False  # True once every actor has a place
        self._nodes_refreshed = False  # in this iteration of the event loop
        self._scaling = asyncio.Lock()  # sizes are changed one after the other
        self._watching = BackgroundTasks()
        tree = config.model_dump(mode="json")

        encoder = self.encoder_pool = self._pool("encoder", EncoderActor, tree)
        selector = self._pool("selector", SelectorActor, tree)
        self.learners = LearnerGroup(self._pool("learner", LearnerActor, tree, str(rundir.path)))
        self.rollout_pool = self._pool("rollout", RolloutActor, tree)
        kinds = ("reward", *(f"scorers.{label}" for label in config.services.scorers))
        self.reward = RewardService(
            {
                kind: (self._pool(kind, RewardActor, tree, kind), labels)
                for kind in kinds
                if (labels := config.scorers_of(kind))
            },
            config.model,
            ScorerOutages(limit, event) if (limit := config.rewards.outage_s) else None,
        )
        client = CachedEncoderClient if config.prompts.encode_once else EncoderClient
        self.encoder, self.selector = client(encoder, config.model), SelectorClient(selector)
        self.rollout, self.learner = RolloutClient(self.rollout_pool), self.learners.client
        self.turns = NoGpuTurns()
        if config.services.takes_turns:
            self.turns = GpuTurns(self.rollout_pool, self.learners.pool, event)
            self.rollout = RolloutClient(InGpuTurn(self.rollout_pool, self.turns, "rollout"))
            self.learner = learner_in_turn(self.learner, self.turns)
        self.weights = WeightChannel(event, config.explore_ahead, self.turns)
        self.rollout_pool.prepare = self.weights.prepare_for(self.rollout_pool)
        self.rollout_pool.accepts = partial(incompatibility, self.rollout_pool)
        self.pools = [encoder, *self.reward.pools, selector, self.learners.pool]
        if config.plan.explore is not None:
            self.pools.append(self.rollout_pool)

    def _places(self) -> ActorPlacement:
        return ActorPlacement(self.config, self._event)

    def _pool(self, kind: str, actor: type, *args: object) -> ActorPool:
        return ActorPool(
            kind,
            self._spawner(kind, actor, *args),
            self.config.services.of(kind),
            self._event,
            stateful=kind == "learner",
            start_deadline_s=self.config.services.start_deadline_s,
            released=self.places.release,
            record=self._record,
            transport=self.transport,
            gone=self.places.gone,
        )

    def only(self, *kinds: str) -> None:
        """Use only these services, for commands that do not train; "reward": every scoring pool."""
        scoring = [pool.kind for pool in self.reward.pools] if "reward" in kinds else []
        self.pools = [pool for pool in self.pools if pool.kind in (*kinds, *scoring)]

    async def encode_once(self, train: Sequence[Prompt], test: Sequence[Prompt]) -> None:
        """Encode all prompts that the run will need, if ``prompts.encode_once`` is set.

        The encoder is started alone, and exits before anything else is started.
        """
        if isinstance(self.encoder, CachedEncoderClient) and not self.encoder.known:
            await self._choose_places()
            await self._encode(self.encoder, self.encoder_pool.start, train, test)

    async def encode_lost(self, train: Sequence[Prompt], test: Sequence[Prompt]) -> None:
        """Encode again what ``encode_once`` encoded and was lost, with a new encoder.

        Raises RunFailed if there is no room for the encoder.
        """
        settings = self.config.services.encoder
        if isinstance(self.encoder, CachedEncoderClient) and await self.encoder.forget_lost(
            settings.deadline_s
        ):
            self.pools.append(self.encoder_pool)
            start = partial(self.encoder_pool.supervisor.resize, settings.count)
            await self._encode(self.encoder, start, train, test)

    async def _encode(
        self,
        encoder: CachedEncoderClient,
        start: Start,
        train: Sequence[Prompt],
        test: Sequence[Prompt],
    ) -> None:
        began = time.monotonic()
        count = await encoder.fill_from(
            self.encoder_pool, start, groups_of(self.config, train, test)
        )
        self.pools = [pool for pool in self.pools if pool is not self.encoder_pool]
        self._event("prompts_encoded", groups=count, seconds=round(time.monotonic() - began, 3))

    async def _choose_places(self) -> None:
        if not self._placed:
            await self.places.choose([pool.kind for pool in self.pools])
            self._placed = True

    async def start(self) -> None:
        """Choose a node for every actor, create all actors, and return when every one answers.

        Actors load in parallel. Raises ConfigError if there is no room.
        """
        starting: dict[str, ActorPool | LearnerGroup] = {pool.kind: pool for pool in self.pools}
        if "learner" in starting:
            starting["learner"] = self.learners
        await self._choose_places()
        self._watching.start(self._watch_idle())

        async def start(kind: str) -> None:
            await self.places.wait_for_larger(kind)
            await starting[kind].start()

        await run_together(*map(start, starting))

    async def _watch_idle(self) -> None:
        """Replace actors that end while they are idle, so that nothing waits for them."""
        while True:
            await asyncio.sleep(IDLE_CHECK_S)
            for pool in self.pools:
                pool.report_ended()

    async def stop(self) -> None:
        """Kill all actors of every service, then raise the first failure.

        They are killed even if ending something else fails or hangs: an actor that is left would
        keep its GPUs.
        """
        ends = [self._watching.end(), self.places.close(), *map(self._stop, self.pools)]
        for failure in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(failure, BaseException):
                raise failure

    async def _stop(self, pool: ActorPool) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                await (self.learners if pool is self.learners.pool else pool).stop()
        except TimeoutError:
            why = f"{pool.kind}: its running tasks did not end within {STOP_S:g} s"
            raise TimeoutError(why) from None
        finally:
            pool.supervisor.kill()

    async def scale(self, kind: str, size: int, partly: bool = False) -> str:
        """Change a pool's size to ``size`` actors while it works; return a report in words.

        With ``partly`` the pool grows by as many actors as there is room for. Raises ConfigError if
        the change is not possible.
        """
        pool = self._scalable(kind, size)
        async with self._scaling:
            before = target = pool.alive
            if size < before:
                target = size
            elif size > before:
                self.refresh_nodes()
                new = pool.supervisor.next_actors(size - before)
                target += await self.places.make_room(new, partly)
            try:
                await pool.supervisor.resize(target)
            except RunFailed as error:
                raise ConfigError(f"{kind}: {pool.alive} of {size} actors: {error}") from None
            finally:
                self._event("pool_scaled", kind=kind, before=before, after=pool.alive, asked=size)
            return f"{kind}: {before} -> {pool.alive} actors"

    def _scalable(self, kind: str, size: int) -> ActorPool:
        pool = next((pool for pool in self.pools if pool.kind == kind), None)
        if pool is None or kind not in SCALABLE:
            scalable = " and ".join(SCALABLE)
            raise ConfigError([f"{kind}: cannot be scaled in this run, only {scalable} can"])
        limits = self.config.services.of(kind)
        if size < limits.min_actors or (limits.max_actors is not None and size > limits.max_actors):
            fewest, most = limits.min_actors, limits.max_actors or "any number"
            allowed = f"services.{kind}.min_actors = {fewest}, max_actors = {most}"
            raise ConfigError(f"{kind}: {size} actors: {allowed}")
        return pool

    def refresh_nodes(self) -> None:
        """Update the nodes from the cluster's state, at most once per iteration of the event loop.

        Lost nodes are reported. One iteration may start a thousand actors, and checking all actors
        and nodes for each of them would take minutes.
        """
        if self._nodes_refreshed:
            return
        self.places.refresh(
            {
                pool.supervisor.name(member)
                for pool in self.pools
                for member in pool.members
                if member.handle is not None
            }
        )
        self._nodes_refreshed = True
        asyncio.get_running_loop().call_soon(self._allow_refresh)

    def _allow_refresh(self) -> None:
        self._nodes_refreshed = False

    @property
    def lost(self) -> int:
        """Number of actors that died or hung since the run started, over all services."""
        return sum(pool.supervisor.lost for pool in self.pools)

    @property
    def reissued(self) -> int:
        """Number of task retries since the run started, over all services."""
        return sum(pool.reissued for pool in self.pools)

    def _spawner(self, kind: str, actor: type, *args: object) -> Callable[[str], Handle]:
        service = self.config.services.of(kind)
        env = service.runtime_env if isinstance(service, ScorerService) else {}
        env = env or template.runtime_env(self.config, kind)
        env_vars = environment(service) | template.openmp_wait_variables(self.config)
        options: dict[str, Any] = {
            "num_cpus": service.cpus,
            "num_gpus": service.gpus,
            "max_restarts": 0,  # the pool replaces actors itself
            "runtime_env": {**env, "env_vars": {**env_vars, **env.get("env_vars", {})}},
        }
        remote: Any = ray.remote(actor)  # pyright: ignore[reportUnknownVariableType]

        def spawn(name: str) -> Handle:
            self.refresh_nodes()
            name = f"{self.config.name}/{name}"
            node = self.places.take(name)
            # ``nodes.started_actors`` finds the actor by its name. The namespace is the job's own,
            # as a cluster may have two runs of one name. Hard affinity: on another node the actor
            # would take room that is planned for others
            return remote.options(
                name=name,
                namespace=f"sol-rl-{ray.get_runtime_context().get_job_id()}",
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                **options,
            ).remote(*args)

        return spawn

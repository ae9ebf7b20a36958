"""The five services of a run as actor pools, and how Ray is joined or started."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.encoder import EncoderActor
from actors.learner import LearnerActor
from actors.reward import RewardActor
from actors.rollout import RolloutActor
from actors.selector import SelectorActor
from cluster.driver.learners import LearnerGroup
from cluster.driver.scoring import RewardService
from cluster.driver.weights import WeightChannel, misfit
from cluster.jobs.remote import require_listener
from cluster.runtime.nodes import LAG_S, LOOK_S, Requests, find_room, free_nodes
from cluster.runtime.pool import ActorPool
from configs.load import ConfigError
from configs.schema import RunConfig
from configs.services import ScorerService
from planning.layouts.limits import refuse_on_this_machine
from planning.placement import NoRoom, Placer, needs_of, start_order
from records.errors import RunFailed
from records.rundir import RunDirectory
from records.timeline import Span


def join_or_start_ray(config: RunConfig) -> bool:
    """Join the cluster of RAY_ADDRESS (a job has it set), or start Ray on this machine; True when
    joined.

    On one machine the CPU count given to Ray covers every actor's share, and a rollout actor more
    per core for scaling: the shares are there to share out clusters, not to keep a small machine
    from running the ring.

    Raises:
        ConfigError: nothing listens at RAY_ADDRESS, or this machine cannot hold the actors.
        RunFailed: Ray does neither.
    """
    joined = bool(os.environ.get("RAY_ADDRESS"))
    how: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if joined:
        require_listener(os.environ["RAY_ADDRESS"], "RAY_ADDRESS =")
        how["address"] = "auto"
    else:
        refuse_on_this_machine(config)
        cores, rollout = os.cpu_count() or 1, config.services.rollout
        more = (rollout.max_actors or rollout.actors + cores) - rollout.actors
        shares = sum(need.cpus for need in needs_of(config)) + more * rollout.cpus
        how |= {
            "address": "local",
            "num_cpus": max(cores, math.ceil(shares)),
            "include_dashboard": False,
        }
    try:
        ray.init(**how)
    except Exception as error:  # Ray's failures to start have no class of their own
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = (
            "Ray's cluster at RAY_ADDRESS cannot be joined"
            if joined
            else "Ray did not start on this machine"
        )
        raise RunFailed(f"{what}: {why}") from error
    return joined


def check_run_root(config: RunConfig, joined: bool) -> None:
    """On a cluster the run root must be named and must outlive the job. Raises ConfigError."""
    if joined and config.run_root is None:
        raise ConfigError(
            [
                "run_root: required on a cluster: a directory that is shared and writable, --set"
                " run_root=DIR"
            ]
        )
    path = os.path.abspath(config.run_root or "runs")
    if "/runtime_resources/working_dir_files/" in path:
        raise ConfigError(
            [
                f"run_root = {path!r}: lies in the job's unpacked working directory and would die"
                " with it; give a shared one"
            ]
        )


SCALABLE = ("rollout", "reward")


class Services:
    """Rollout, reward, selector, encoder and learner pools of one run."""

    def __init__(
        self,
        config: RunConfig,
        rundir: RunDirectory,
        event: Callable[..., None],
        record: Callable[[Span], None] = lambda span: None,
    ):
        self.config, self._event = config, event
        self.weights = WeightChannel(event, config.explore_ahead)
        self.placer = Placer(config)
        self._requests = Requests()
        self._scaling = asyncio.Lock()  # one change of size after the other
        plain = config.model_dump(mode="json")

        def pool(kind: str, actor: type, *extra: Any, stateful: bool = False) -> ActorPool:
            return (LearnerGroup if stateful else ActorPool)(
                kind,
                self._spawner(kind, actor, plain, *extra),
                config.services.of(kind),
                event,
                stateful=stateful,
                start_deadline_s=config.services.start_deadline_s,
                released=self._released,
                record=record,
            )

        self.encoder = pool("encoder", EncoderActor)
        held = {
            kind: config.scorers_of(kind)
            for kind in ("reward", *(f"scorers.{label}" for label in config.services.scorers))
        }
        self.reward = RewardService(
            {
                kind: (pool(kind, RewardActor, kind), labels)
                for kind, labels in held.items()
                if labels
            }
        )
        self.selector = pool("selector", SelectorActor)
        self.learner = pool("learner", LearnerActor, str(rundir.path / "failure"), stateful=True)
        self.rollout = pool("rollout", RolloutActor)
        self.rollout.prepare = self.weights.load_for(self.rollout)
        self.rollout.admits = partial(misfit, self.rollout)
        self.pools = [self.encoder, *self.reward.pools, self.selector, self.learner]
        if config.plan.explore is not None:
            self.pools.append(self.rollout)

    def only(self, *pools: ActorPool | RewardService) -> None:
        """Use no other services than these: a command that does not train needs no explorers."""
        self.pools = [
            pool
            for given in pools
            for pool in (given.pools if isinstance(given, RewardService) else [given])
        ]

    async def start(self) -> None:
        """Give every actor a place and create it; returns when every one answers. Raises
        ConfigError where a place is missing.
        """
        pools = {pool.kind: pool for pool in self.pools}
        self.placer.refresh(await find_room(self.config, tuple(pools)))
        self.placer.place_all(pools)
        for stage in start_order(self.config, pools):
            await asyncio.gather(*(pools[kind].start() for kind in stage))

    async def stop(self) -> None:
        """Kill all actors."""
        self._requests.withdraw()
        await asyncio.gather(*(pool.stop() for pool in self.pools))

    async def scale(self, kind: str, size: int, partly: bool = False) -> str:
        """Bring a pool to ``size`` actors while it works; returns what was done. ``partly``: grow
        by as many as there is room for.

        Raises ConfigError when that is not possible.
        """
        pool = self._scalable(kind, size)
        async with self._scaling:
            before = pool.alive
            room = (
                await self._make_room(pool.next_actors(size - before), partly)
                if size > before
                else 0
            )
            try:
                await pool.resize(before + room if size > before else size)
            except RunFailed as error:
                raise ConfigError([f"{kind}: {pool.alive} of {size} actors: {error}"]) from None
            finally:
                self._event("pool_scaled", kind=kind, before=before, after=pool.alive, asked=size)
            return f"{kind}: {before} -> {pool.alive} actors"

    def _scalable(self, kind: str, size: int) -> ActorPool:
        pool = next((pool for pool in self.pools if pool.kind == kind), None)
        if pool is None or kind not in SCALABLE:
            raise ConfigError(
                [
                    f"{kind}: cannot be scaled in this run; {' and '.join(SCALABLE)} can, where the"
                    " run has them"
                ]
            )
        limits = self.config.services.of(kind)
        if size < limits.min_actors or (limits.max_actors is not None and size > limits.max_actors):
            most = limits.max_actors or "any number"
            raise ConfigError(
                [
                    f"{kind}: {size} actors: services.{kind}.min_actors = {limits.min_actors},"
                    f" max_actors = {most}"
                ]
            )
        return pool

    async def _make_room(self, actors: list[str], partly: bool) -> int:
        """Reserve places for new actors, on nodes that an autoscaler may have to add first; how
        many of the first have one: all, or, if that will do, as many as there is room for.
        """
        wait_s, began = self.config.services.wait_for_nodes_s, time.monotonic()
        self.look_at_nodes()
        if partly and (room := self.placer.reserve_some(actors)):
            return room
        try:
            self.placer.reserve(actors)
            return len(actors)
        except NoRoom as error:
            why = [f"cannot grow: {line}" for line in error.lines]
        try:
            while True:
                waited = time.monotonic() - began
                if wait_s:
                    self._ask_for_nodes(*actors)
                granted = [node for actor in actors for node in self._requests.granted(actor) or ()]
                if len(granted) == len(actors) or (partly and granted and waited > LAG_S):
                    self.placer.put(actors[: len(granted)], granted)
                    return len(granted)
                if waited >= wait_s:
                    raise ConfigError(why)
                await asyncio.sleep(LOOK_S)
        finally:
            self._requests.withdraw(*actors)

    def look_at_nodes(self) -> None:
        """Take over what nodes there are now, and say which of ours are lost."""
        running = {
            f"{pool.kind}-{worker.index}"
            for pool in self.pools
            for worker in pool.workers
            if worker.handle is not None
        }
        for node, actors in self.placer.refresh(free_nodes(), running).items():
            self._event("node_lost", node=node, actors=actors)

    def _ask_for_nodes(self, *actors: str) -> None:
        """Have Ray's autoscaler bring nodes for actors without a place, each by itself: whatever
        comes can be used.
        """
        new = [actor for actor in actors if self._requests.ask(actor, [self.placer.need(actor)])]
        if new:
            self._event("nodes_asked", actors=new, each=self.placer.need(new[0]).describe())

    def _released(self, actor: str) -> None:
        self.placer.release(actor)
        self._requests.withdraw(actor)

    @property
    def lost(self) -> int:
        """Actors that died or hung since the run started, over all services."""
        return sum(pool.lost for pool in self.pools)

    @property
    def reissued(self) -> int:
        """Units given out again since the run started, over all services."""
        return sum(pool.reissued for pool in self.pools)

    def _spawner(self, kind: str, actor: type, *args: Any) -> Callable[[str], Any]:
        service = self.config.services.of(kind)
        own = service.runtime_env if isinstance(service, ScorerService) else {}
        options: dict[str, Any] = {
            "num_cpus": service.cpus,
            "num_gpus": service.gpus,
            "max_restarts": 0,  # the pool replaces actors itself
            # waiting threads that spin would take the cores of the actors that work
            "runtime_env": {
                **own,
                "env_vars": {
                    "OMP_NUM_THREADS": str(service.threads),
                    "OMP_WAIT_POLICY": "PASSIVE",
                    **own.get("env_vars", {}),
                },
            },
        }
        remote = ray.remote(actor)

        def spawn(name: str) -> Any:
            node = NodeAffinitySchedulingStrategy(
                self._place_of(name.rpartition(".")[0]), soft=False
            )
            namespace = f"sol-rl-{ray.get_runtime_context().get_job_id()}"
            return remote.options(
                name=f"{self.config.name}/{name}",
                namespace=namespace,
                scheduling_strategy=node,
                **options,
            ).remote(*args)

        return spawn

    def _place_of(self, actor: str) -> str:
        """The node to start an actor on. Raises NoRoom; where an autoscaler may bring one, it is
        asked, and who has asked waits for what Ray grants.
        """
        self.look_at_nodes()
        if actor in self._requests:
            granted = self._requests.granted(actor)
            if granted is None:
                raise NoRoom(
                    [
                        "Ray has not granted the place that it was asked for: "
                        + self.placer.need(actor).describe()
                    ]
                )
            self.placer.put([actor], granted)
            self._requests.withdraw(actor)
        try:
            return self.placer.take(actor)
        except NoRoom:
            if self.config.services.wait_for_nodes_s:
                self._ask_for_nodes(actor)
            raise


def install_stop_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[str], None]) -> None:
    """Call ``stop`` with the signal's name on SIGTERM and SIGINT. After ray.init, which installs
    handlers of its own.
    """
    import signal

    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, signal.Signals(number).name)

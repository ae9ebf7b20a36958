"""The five services of a run as actor pools, and how Ray is joined or started."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Callable
from typing import Any

import ray

from actors.encoder import EncoderActor
from actors.learner import LearnerActor
from actors.reward import RewardActor
from actors.rollout import RolloutActor
from actors.selector import SelectorActor
from cluster.pool import ActorPool
from cluster.rundir import RunDirectory
from cluster.weights import WeightChannel
from configs.load import ConfigError
from configs.schema import RunConfig


def join_or_start_ray(config: RunConfig) -> bool:
    """Join the cluster of RAY_ADDRESS (a job has it set), or start Ray on this machine; True when joined.

    On one machine the CPU count given to Ray covers every actor's share, so that no actor pends for ever on a small one.
    """
    joined = bool(os.environ.get("RAY_ADDRESS"))
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if joined:
        ray.init(address="auto", **quiet)
        return True
    services = config.services
    shares = sum(
        service.actors * service.cpus
        for service in (services.rollout, services.reward, services.encoder, services.selector, services.learner)
    )
    ray.init(num_cpus=max(os.cpu_count() or 1, math.ceil(shares)), include_dashboard=False, **quiet)
    return False


def check_run_root(config: RunConfig, joined: bool) -> None:
    """On a cluster the run root must be named and must outlive the job. Raises ConfigError."""
    if joined and config.run_root is None:
        raise ConfigError(["run_root: required on a cluster: a directory that is shared and writable, --set run_root=DIR"])
    path = os.path.abspath(config.run_root or "runs")
    if "/runtime_resources/working_dir_files/" in path:
        raise ConfigError(
            [f"run_root = {path!r}: lies in the job's unpacked working directory and would die with it; give a shared one"]
        )


class Services:
    """Rollout, reward, selector, encoder and learner pools of one run."""

    def __init__(self, config: RunConfig, rundir: RunDirectory, event: Callable[..., None]):
        self.config, self._event = config, event
        self.weights = WeightChannel(event)
        plain = config.model_dump(mode="json")

        def pool(kind: str, actor: type, *extra: Any) -> ActorPool:
            return ActorPool(kind, self._spawner(kind, actor, plain, *extra), getattr(config.services, kind), event)

        self.encoder = pool("encoder", EncoderActor)
        self.reward = pool("reward", RewardActor)
        self.selector = pool("selector", SelectorActor)
        self.learner = pool("learner", LearnerActor, str(rundir.path / "failure"))
        self.rollout = pool("rollout", RolloutActor)
        self.rollout.prepare = self.weights.load_into_worker(self.rollout)
        self.pools = [self.encoder, self.reward, self.selector, self.learner]
        if config.plan.explore is not None:
            self.pools.append(self.rollout)

    def only(self, *pools: ActorPool) -> None:
        """Use no other services than these: a command that does not train needs no explorers."""
        self.pools = list(pools)

    async def start(self) -> None:
        """Create all actors at once; returns when every one answers."""
        await asyncio.gather(*(pool.start() for pool in self.pools))

    async def stop(self) -> None:
        """Kill all actors."""
        await asyncio.gather(*(pool.stop() for pool in self.pools))

    @property
    def reissued(self) -> int:
        """Units given out again since the run started, over all services."""
        return sum(pool.reissued for pool in self.pools)

    def _spawner(self, kind: str, actor: type, *args: Any) -> Callable[[str], Any]:
        service = getattr(self.config.services, kind)
        options: dict[str, Any] = {
            "num_cpus": service.cpus,
            "num_gpus": service.gpus,
            "max_restarts": 0,
            # waiting threads that spin would take the cores of the actors that work
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(service.threads), "OMP_WAIT_POLICY": "PASSIVE"}},
        }
        if kind == "rollout":
            options["scheduling_strategy"] = "SPREAD"
        remote = ray.remote(actor)

        def spawn(name: str) -> Any:
            return remote.options(name=f"{self.config.name}/{name}", namespace=f"sol-rl-{os.getpid()}", **options).remote(*args)

        return spawn


def install_stop_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[str], None]) -> None:
    """Call ``stop`` with the signal's name on SIGTERM and SIGINT. After ray.init, which installs handlers of its own."""
    import signal

    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, signal.Signals(number).name)

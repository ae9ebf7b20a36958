"""Services whose actors load until all of them do, on simulated nodes with one and with two GPUs.

``python -m tests.cluster.gpus`` runs in a process without another Ray, and prints the results.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray

from actors.calls import Task
from actors.messages import ActorInfo
from actors.runtime import identity
from cluster.driver.services import ActorServices
from cluster.runtime.member import Member
from configs.load import load
from configs.schema import RunConfig
from records.rundir import Event, RunDirectory
from tests.cluster.nodes import Machines

ACTORS = 7
"""One of each service, but two rollout and two reward actors."""
DEADLINE_S = 240
SHARES = {
    "one": {"learner": 0.5, "rollout": 0.15, "reward": 0.08, "encoder": 0.04},
    "two": {"rollout": 0.6, "reward": 0.3, "learner": 0.1, "encoder": 0.05},
}
"""GPU fractions by node; rollout and reward have two actors each.

With two GPUs, the second rollout actor has no room if both reward actors are placed first.
"""


class Loading:
    """An actor that has loaded once all actors are loading, and reports its GPU."""

    def __init__(self, folder: str):
        (Path(folder) / str(os.getpid())).touch()
        while len(list(Path(folder).iterdir())) < ACTORS:
            time.sleep(0.05)

    def ready(self) -> ActorInfo:
        (gpu,) = ray.get_gpu_ids() or ["none"]
        return ActorInfo(os.getpid(), "here", identity().node, device=str(gpu))


class LoadingServices(ActorServices):
    """The services of a run, with such actors."""

    def __init__(self, config: RunConfig, rundir: RunDirectory, event: Event):
        self._folder = str(rundir.path)
        super().__init__(config, rundir, event)

    def _spawner(self, kind: str, actor: type, *args: object) -> Callable[[str], Any]:
        return super()._spawner(kind, Loading, self._folder)


async def start(node: str, scratch: Path) -> list[dict[str, Any]]:
    """Return, by GPU, the ``SHARES`` of the actors on it: at the start, and of replacements.

    All reward and rollout actors are killed at once, and replaced.
    """
    settings = ["services.reward.actors=2", f"services.start_deadline_s={DEADLINE_S}"]
    for kind, share in SHARES[node].items():
        settings += [f"services.{kind}.gpus={share}", f"services.{kind}.labels.home='{node}'"]
    recorded: list[dict[str, Any]] = []
    config = load("quickstart", settings)
    services = LoadingServices(
        config, RunDirectory(scratch), lambda name, **row: recorded.append({"event": name, **row})
    )
    try:
        await services.start()
        pools = {pool.kind: pool.supervisor for pool in services.pools}
        await asyncio.gather(
            *(
                pools[kind].replace(member, 0, "killed")
                for kind in ("reward", "rollout")  # smaller shares are killed first
                for member in pools[kind].members
            )
        )
    finally:
        await services.stop()
    return [_shares(recorded, node, event) for event in ("actor_started", "actor_replaced")]


async def end_all_on_gpu(scratch: Path) -> list[str]:
    """Return the services that are replaced when the learner and the rollout actors end idle.

    The learner has the larger share, is called by nobody, and rollout actors start after it.
    """
    settings = ["services.reward.actors=2", "services.start_deadline_s=60"]
    for kind, share in SHARES["one"].items():
        settings += [f"services.{kind}.gpus={share}", f"services.{kind}.labels.home='one'"]
    recorded: list[dict[str, Any]] = []
    services = LoadingServices(
        load("quickstart", settings),
        RunDirectory(scratch),
        lambda name, **row: recorded.append({"event": name, **row}),
    )
    services.rollout_pool.prepare = _no_weights
    try:
        await services.start()
        ending = [*services.rollout_pool.members, *services.learners.pool.members]
        for member in ending:
            assert member.info is not None
            os.kill(member.info.pid, signal.SIGKILL)
        call = services.rollout_pool.call(Task[ActorInfo]("explore"), Loading.ready)
        async with asyncio.timeout(60):
            await call
            # the learner has its share, but may not have answered yet
            while any(member.handle is None for member in ending):
                await asyncio.sleep(0.01)
    finally:
        await services.stop()
    return sorted(row["kind"] for row in recorded if row["event"] == "actor_replaced")


async def _no_weights(member: Member, key: object) -> None: ...


def _shares(rows: Sequence[dict[str, Any]], node: str, event: str) -> dict[str, list[float]]:
    """Return, by GPU, the shares of the actors that the events of this name report."""
    on: dict[str, list[float]] = {}
    for row in rows:
        if row["event"] == event and row["kind"] in SHARES[node]:
            on.setdefault(row["device"], []).append(SHARES[node][row["kind"]])
    return {gpu: sorted(on[gpu]) for gpu in sorted(on)}


def main() -> None:
    """Print a line of JSON for each of both nodes, and one for actors that end while idle."""
    one, two = (
        {"num_cpus": 8, "num_gpus": n, "labels": {"home": h}} for n, h in enumerate(SHARES, 1)
    )
    with Machines(one, two):
        for node in SHARES:
            with TemporaryDirectory() as scratch:
                print(json.dumps(asyncio.run(start(node, Path(scratch)))), flush=True)
        with TemporaryDirectory() as scratch:
            print(json.dumps(asyncio.run(end_all_on_gpu(Path(scratch)))), flush=True)


if __name__ == "__main__":
    main()

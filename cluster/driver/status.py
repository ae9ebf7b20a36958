"""What a running job is doing, as a plain dict that travels; ``status_text`` shows it."""

from __future__ import annotations

import time
from typing import Any, Protocol

from cluster.driver.services import Services
from cluster.jobs.board import ActorState, RunState, ServiceState
from cluster.runtime.pool import ActorPool
from cluster.runtime.worker import Worker
from configs.schema import RunConfig
from records.progress import STAGES, Progress

SHOWN = (
    "reward/train_mean",
    "time/iteration_s",
    "rollout/images_per_s",
    "audit/kendall_tau",
    "rewards/failed",
    "weights/bytes",
)


class Watched(Protocol):
    """What a session shows of itself."""

    config: RunConfig
    services: Services
    progress: Progress
    next_iteration: int
    restored: int
    last_row: dict[str, Any]


class Reporter:
    """Takes a run's state; ``busy`` is the share of the time since the last one that an actor had
    work in hand.
    """

    def __init__(self, session: Watched, directory: str):
        self._session, self._directory = session, directory
        self._last = time.monotonic()
        self._worked: dict[tuple[str, int], float] = {}

    def state(self) -> RunState:
        """The run as it is now."""
        session, progress = self._session, self._session.progress
        now = time.monotonic()
        seconds, self._last = max(now - self._last, 1e-9), now
        current = session.services.weights.current
        return {
            "run": session.config.name,
            "arm": session.config.arm,
            "directory": self._directory,
            "iteration": session.next_iteration,
            "iterations": session.config.iterations,
            "version": current.version if current else None,
            "stages": {
                stage: [progress.counts.get(stage, 0), progress.totals.get(stage, 0)]
                for stage in STAGES
            },
            "left_s": progress.time_left(),
            "held_out": list(progress.held_out),
            "restored": session.restored,
            "row": {
                key: session.last_row[key] for key in SHOWN if session.last_row.get(key) is not None
            },
            "services": [self._service(pool, seconds) for pool in session.services.pools],
        }

    def _service(self, pool: ActorPool, seconds: float) -> ServiceState:
        return {
            "kind": pool.kind,
            "waiting": pool.waiting,
            "reissued": pool.reissued,
            "starting": pool.starting,
            "actors": [self._actor(pool.kind, worker, seconds) for worker in pool.workers],
        }

    def _actor(self, kind: str, worker: Worker, seconds: float) -> ActorState:
        worked = worker.worked_s
        busy = (worked - self._worked.get((kind, worker.index), 0.0)) / seconds
        self._worked[kind, worker.index] = worked
        alive = "starting" if worker.handle is None else "leaving" if worker.leaving else "serving"
        return {
            "actor": f"{kind}-{worker.index}.{worker.incarnation}",
            "state": "benched" if worker.benched else alive,
            "version": worker.state[0] if worker.state else None,
            "units": worker.answered,
            "busy": min(1.0, busy),
            "restarts": worker.restarts,
            "host": worker.facts.get("host"),
            "pid": worker.facts.get("pid"),
            "node": str(worker.facts.get("node", ""))[:8],
        }

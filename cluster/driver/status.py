"""State of a running job in JSON types, which ``cluster.jobs.status_text`` formats."""

from __future__ import annotations

import time
from typing import Protocol

from cluster.driver.checkpoints import Position
from cluster.driver.services import ActorServices
from cluster.jobs.board import ActorState, RunState, ServiceState
from cluster.runtime.member import Member
from cluster.runtime.pool import ActorPool
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


class Observed(Protocol):
    """The attributes of a session that are reported."""

    config: RunConfig
    services: ActorServices
    progress: Progress
    position: Position


class Reporter:
    """Reports a run's state.

    The ``busy`` value of an actor is the share of the time since the last report in which it had
    tasks.
    """

    def __init__(self, session: Observed, directory: str):
        self._session, self._directory = session, directory
        self._last = time.monotonic()
        self._busy_s: dict[str, float] = {}

    def state(self) -> RunState:
        """Return the current state of the run."""
        session, progress = self._session, self._session.progress
        position = session.position
        now = time.monotonic()
        seconds, self._last = max(now - self._last, 1e-9), now
        current = session.services.weights.current
        return {
            "run": session.config.name,
            "arm": session.config.arm,
            "directory": self._directory,
            "iteration": position.next_iteration,
            "iterations": session.config.iterations,
            "version": current.id.version if current else None,
            "stages": {
                stage: [progress.counts.get(stage, 0), progress.totals.get(stage, 0)]
                for stage in STAGES
            },
            "left_s": progress.time_left(),
            "held_out": list(progress.held_out),
            "restored": position.restored,
            "row": {
                key: position.last_row[key]
                for key in SHOWN
                if position.last_row.get(key) is not None
            },
            "services": [self._service(pool, seconds) for pool in session.services.pools],
        }

    def _service(self, pool: ActorPool, seconds: float) -> ServiceState:
        return {
            "kind": pool.kind,
            "waiting": len(pool.queue),
            "reissued": pool.reissued,
            "starting": pool.supervisor.starting,
            "actors": [
                self._actor(pool.supervisor.name(member), member, seconds)
                for member in pool.members
            ],
        }

    def _actor(self, name: str, member: Member, seconds: float) -> ActorState:
        busy_s, info = member.busy_s, member.info
        busy = (busy_s - self._busy_s.get(name, 0.0)) / seconds
        self._busy_s[name] = busy_s
        alive = "starting" if member.handle is None else "leaving" if member.leaving else "serving"
        return {
            "actor": f"{name}.{member.incarnation}",
            "state": "benched" if member.benched else alive,
            "version": member.weights.version if member.weights else None,
            "tasks": member.answered,
            "busy": min(1.0, busy),
            "restarts": member.restarts,
            "host": info.host if info else None,
            "pid": info.pid if info else None,
            "node": str((info and info.node) or "")[:8],
        }

"""The end of a run: every actor ends, even if other steps fail or hang, and the run's own outcome
is kept.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from actors.calls import Task
from cluster.driver import services as services_module
from cluster.driver.cleanup import run_cleanup
from cluster.driver.live_report import LiveReport
from cluster.driver.services import ActorServices
from cluster.driver.session import Session
from cluster.runtime.member import Member
from records.errors import RunFailed
from records.rundir import RunDirectory
from tests.cluster.echo import Pool
from tests.cluster.recording_learner import RecordingLearner
from tests.cluster.runs import run_here, tiny_config
from tests.cluster.test_learner_group import group_of


def test_cleanup_continues_after_a_failure():
    done: list[str] = []
    events: list[tuple[str, dict[str, object]]] = []

    async def waits() -> None:
        await asyncio.sleep(0)
        done.append("waited for")

    async def breaks() -> None:
        raise RunFailed("no way")

    def full(name: str, **fields: object) -> None:
        events.append((name, fields))
        raise OSError(28, "No space left on device")

    ends = [("a", breaks), ("b", waits), ("c", lambda: 1 / 0), ("d", lambda: done.append("last"))]
    notes: list[str] = []
    asyncio.run(run_cleanup(ends, full, notes.append))
    assert done == ["waited for", "last"]
    recorded = [("a", "no way"), ("c", "ZeroDivisionError: division by zero")]
    # only an error that nobody foresaw has its traceback in the event
    frames = [fields.pop("traceback", "") for _, fields in events]
    assert events == [("end_failed", {"what": what, "why": why}) for what, why in recorded]
    assert frames[0] == "" and "test_ending.py" in frames[1] and "1 / 0" in frames[1]
    assert notes == [f"at the end of the run {what} failed: {why}" for what, why in recorded]


def services_of(model: Path, root: Path, *pools: Any) -> ActorServices:
    """Return the services of a run, with other pools instead of their own."""
    config = tiny_config(model, root, "ends")
    made = ActorServices(config, RunDirectory.of(config), lambda *a, **k: None)
    made.pools = list(pools)
    return made


def test_replicas_end_although_one_hangs_and_stopping_another_service_fails(
    ray_here, tiny_sd3_dir, tmp_path, monkeypatch
):
    """The group waits for an update on both replicas, and another pool cannot be stopped."""
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(services_module, "STOP_S", 0.5, raising=False)

    async def work() -> None:
        group, other, stuck = group_of(2, events, shard="base"), Pool(1), Pool(1)
        made = services_of(tiny_sd3_dir, tmp_path, other.pool, group.pool, stuck.pool)
        made.learners = group

        async def fails() -> None:
            raise OSError("no way")

        async def hangs() -> None:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                await asyncio.sleep(600)

        monkeypatch.setattr(made.places, "close", fails)
        for each in (other.pool, group, stuck.pool):
            await each.start()
        handles: list[Any] = [
            m.handle for p in (other.pool, group.pool, stuck.pool) for m in p.members
        ]
        monkeypatch.setattr(other.pool, "stop", fails)
        stuck.pool._replacements.start(hangs())
        task = Task[Any](("load", "hang"))
        update = asyncio.create_task(
            group.client.every_replica.call(task, RecordingLearner.load, "hang")
        )
        while not all(member.sent for member in group.pool.members):
            await asyncio.sleep(0.01)
        with pytest.raises(OSError, match="no way"):
            await made.stop()
        for handle in handles:
            with pytest.raises(RayActorError):
                ray.get(handle.ready.remote(), timeout=60)
        assert update.done()

    asyncio.run(asyncio.wait_for(work(), 90))
    # the tasks in progress count as no loss, and are not retried
    assert [event["event"] for event in events if event["event"] != "actor_started"] == [
        "replicas_met"
    ]


def test_an_actor_that_cannot_be_killed_does_not_keep_others_alive(monkeypatch):
    killed: list[int] = []

    def kill(member: Member) -> None:
        if member.index == 1:
            raise ConnectionError("gone")
        killed.append(member.index)

    monkeypatch.setattr(Member, "kill", kill)
    with pytest.raises(ConnectionError):
        Pool(3).pool.supervisor.kill()
    assert killed == [0, 2]


def test_a_failure_during_cleanup_does_not_hide_how_the_run_ended(
    ray_here, tiny_sd3_dir, tmp_path, monkeypatch
):
    config = tiny_config(tiny_sd3_dir, tmp_path, "hidden")

    async def fails(self: Any) -> None:
        raise ConnectionError("gone")

    async def cannot(self: Any, checkpoint: Any) -> None:
        raise RunFailed("why it failed")

    monkeypatch.setattr(LiveReport, "close", fails)
    monkeypatch.setattr(Session, "_train", cannot)
    with pytest.raises(RunFailed, match="why it failed"):
        run_here(config)
    run = RunDirectory.of(config)
    recorded = [(row["event"], row.get("why")) for row in run.events()]
    assert recorded[1:] == [
        ("run_failed", "why it failed"),
        ("end_failed", "ConnectionError: gone"),
    ]
    assert (run.path / "report.html").exists()


def test_a_run_finishes_although_its_report_fails(ray_here, tiny_sd3_dir, tmp_path, monkeypatch):
    async def nothing(self: Any, checkpoint: Any) -> None: ...

    def defect(path: Path) -> None:
        raise KeyError("before")

    monkeypatch.setattr(Session, "_train", nothing)
    monkeypatch.setattr("cluster.driver.session.build_report", defect)
    run = run_here(tiny_config(tiny_sd3_dir, tmp_path, "undrawn"))
    recorded = [(row["event"], row.get("what"), row.get("why")) for row in run.events()]
    assert recorded[1:] == [
        ("run_finished", None, None),
        ("end_failed", "report.html", "KeyError: 'before'"),
    ]


def test_an_unexpected_error_is_recorded_as_the_end_of_the_run(
    ray_here, tiny_sd3_dir, tmp_path, monkeypatch
):
    async def defect(self: Any, checkpoint: Any) -> None:
        raise KeyError("rollout")

    monkeypatch.setattr(Session, "_train", defect)
    config = tiny_config(tiny_sd3_dir, tmp_path, "defect")
    with pytest.raises(KeyError):
        run_here(config)
    (recorded,) = [row for row in RunDirectory.of(config).events() if row["event"] == "run_failed"]
    assert recorded["why"] == "KeyError: 'rollout'" and "in defect" in recorded["traceback"]

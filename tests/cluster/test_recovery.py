"""The learner dies. Invariants: the run goes on by itself from the newest checkpoint, every iteration counts once, and selections
and LoRA are those of a run in which nobody died, wherever in the iteration it happened; and it does not go on for ever."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import RunFailed
from cluster.progress import Progress
from cluster.rundir import RunDirectory
from cluster.tasks import all_or_none
from tests.cluster.runs import adapters, run_here, selections, tiny_config

ROOT = Path(__file__).parent.parent.parent


class Assassin(Progress):
    """Kills the learner once, in iteration ``iteration``: when ``moment`` pictures were regenerated, or a learner's call is made."""

    session: Any = None
    now = -1

    def __init__(self, iteration: int, moment: str, always: bool = False):
        super().__init__()
        self.listening = False
        self.iteration_to_strike, self.moment, self.always, self.done = iteration, moment, always, False

    def strike(self) -> None:
        if (self.always or not self.done) and self.now == self.iteration_to_strike:
            self.done = True
            os.kill(self.session.services.learner.workers[0].facts["pid"], signal.SIGKILL)

    def start(self, total_iterations: int, start_iteration: int = 0) -> None:
        super().start(total_iterations, start_iteration)
        if not self.listening:
            self.listen()

    def iteration_started(self, i: int, groups: int, images: int, totals: Any = None) -> None:
        super().iteration_started(i, groups, images, totals)
        self.now = i

    def advanced(self, stage: str, n: int = 1) -> None:
        super().advanced(stage, n)
        if stage == self.moment:
            self.strike()

    def listen(self) -> None:
        """Strike shortly after a call of the learner's method ``moment`` was sent."""
        self.listening = True
        learner = self.session.services.learner
        call = learner.call

        async def told(key: Any, method: str, *args: Any, **options: Any) -> Any:
            if method == self.moment:
                asyncio.get_running_loop().call_later(0.1, self.strike)
            return await call(key, method, *args, **options)

        learner.call = told


@pytest.mark.parametrize(
    ("every", "iteration", "moment", "back_to"),
    [(1, 1, "regenerated", 1), (1, 1, "update", 1), (2, 1, "export", 0), (2, 2, "generate", 2)],
)
def test_a_killed_learner_is_restored_and_nothing_is_lost(undisturbed, tiny_sd3_dir, tmp_path, every, iteration, moment, back_to):
    assassin = Assassin(iteration, moment)
    run = run_here(tiny_config(tiny_sd3_dir, tmp_path, f"{moment}{every}", checkpoint__every=every), progress=assassin)
    assert assassin.done
    assert selections(run) == selections(undisturbed)
    assert adapters(run, 3) == adapters(undisturbed, 3)
    rows = run.metrics()
    assert [(row["kind"], row["iteration"]) for row in rows] == [
        ("evaluation", 0), ("iteration", 0), ("iteration", 1), ("iteration", 2), ("evaluation", 3)
    ]  # fmt: skip
    assert rows[-1]["reward/eval_mean"] == undisturbed.metrics()[-1]["reward/eval_mean"]
    assert rows[3]["samples_seen"] == undisturbed.metrics()[3]["samples_seen"]
    events = run.events()
    (restored,) = [event for event in events if event["event"] == "learner_restored"]
    assert (restored["iteration"], restored["during"]) == (back_to, iteration)
    assert [event["kind"] for event in events if event["event"] == "actor_died"] == ["learner"]
    versions = [event["version"] for event in events if event["event"] == "version_published"]
    assert versions == [*range(iteration + 1), *range(back_to, 4)]  # the same version again, then on


def test_a_learner_that_dies_again_and_again_ends_the_run(ray_here, tiny_sd3_dir, tmp_path):
    config = tiny_config(tiny_sd3_dir, tmp_path, "hopeless", services__learner__max_restarts=1)
    with pytest.raises(RunFailed, match="the learner was lost.*max_restarts = 1 returns .* used up.*--resume"):
        run_here(config, progress=Assassin(0, "regenerated", always=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["learner", "rollout"])
def test_a_lost_node_changes_nothing(undisturbed, tiny_sd3_dir, tmp_path, kind):
    """Its actors, and the objects it held, are gone at once; another node of the same label has room."""
    command = [sys.executable, "-m", "tests.cluster.nodes", str(tiny_sd3_dir), str(tmp_path), kind, kind]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1500, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    run = RunDirectory(tmp_path / "runs" / kind)
    assert selections(run) == selections(undisturbed)
    assert adapters(run, 3) == adapters(undisturbed, 3)
    events = run.events()
    assert kind in {event["kind"] for event in events if event["event"] == "actor_died"}
    started = [event for event in events if event["event"] in ("actor_started", "actor_replaced")]
    homes = [event["node"] for event in started if (event["kind"], event["actor"]) == (kind, 0)]
    assert len(homes) == 2 and homes[0] != homes[1]
    assert any(event["event"] == "learner_restored" for event in events) or kind == "rollout"


def test_all_or_none_leaves_nobody_working():
    left = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            left.append("gone")

    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise ValueError("no")

    async def work() -> list[str]:
        with pytest.raises(ValueError, match="no"):
            await all_or_none(slow(), fails(), slow())
        return list(left)

    assert asyncio.run(work()) == ["gone", "gone"]

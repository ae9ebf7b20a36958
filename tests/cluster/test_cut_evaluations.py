"""An interrupted evaluation is done when the run continues.

Rows, scores and LoRA are those of an uninterrupted run.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cluster.driver import evaluation
from configs.schema import RunConfig
from records.errors import RunFailed
from records.progress import Progress
from records.rundir import RunDirectory
from records.sinks import Sinks
from tests.cluster.faults import Fault, FaultInjector
from tests.cluster.outcomes import outcome
from tests.cluster.runs import run_here, tiny_config

TWO: dict[str, Any] = {"evaluate__every": 1, "evaluate__explore_meanwhile": True, "iterations": 2}
ROWS = [(kind, i) for i in range(2) for kind in ("evaluation", "iteration")] + [("evaluation", 2)]


@pytest.fixture(scope="module")
def reference(ray_here, tiny_sd3_dir, tmp_path_factory) -> RunDirectory:
    """Run two iterations with evaluations before, between and after; the result is read-only."""
    root = tmp_path_factory.mktemp("evaluated")
    run = run_here(tiny_config(tiny_sd3_dir, root, "evaluated", **TWO))
    assert rows_of(run) == ROWS
    return run


def rows_of(run: RunDirectory) -> list[tuple[str, int]]:
    return [(row["kind"], row["iteration"]) for row in run.metrics()]


def scores(run: RunDirectory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run.path / "evaluations").iterdir()}


def assert_as_if_nothing_had_been(run: RunDirectory, reference: RunDirectory) -> None:
    assert rows_of(run) == ROWS
    assert scores(run) == scores(reference)
    assert outcome(run, 2) == outcome(reference, 2)


def cut(config: RunConfig, iteration: int, moment: str, resume: bool = False) -> None:
    """Run until the evaluation after ``iteration``, and end it at ``moment``.

    The moments: images have been scored, or the scores are written but not the row.
    """
    row, save = Sinks.row, evaluation.save_images

    def scored(directory: Path, i: int, *shown: Any) -> None:
        if i == iteration:
            raise RunFailed("cut")
        save(directory, i, *shown)

    def written(self: Sinks, values: Any) -> None:
        if (values["kind"], values["iteration"]) == ("evaluation", iteration):
            raise RunFailed("cut")
        row(self, values)

    place: tuple[Any, str, Any] = (
        (evaluation, "save_images", scored) if moment == "scored" else (Sinks, "row", written)
    )
    with mock.patch.object(*place), pytest.raises(RunFailed, match="cut"):
        run_here(config, resume)
    run = RunDirectory.of(config)
    assert ("evaluation", iteration) not in rows_of(run)
    assert (run.path / "evaluations" / f"step_{iteration:06d}.json").exists() == (
        moment == "written"
    )


def test_a_run_resumes_after_repeated_interruptions(reference, tiny_sd3_dir, tmp_path):
    config = tiny_config(tiny_sd3_dir, tmp_path, "cut", **TWO)
    cut(config, 0, "written")
    for iteration, moment in ((1, "scored"), (2, "written")):
        cut(config, iteration, moment, resume=True)
    progress = Progress()
    assert_as_if_nothing_had_been(run_here(config, resume=True, progress=progress), reference)
    # those before the interruption too
    rows = [row for row in reference.metrics() if row["kind"] == "evaluation"]
    assert progress.held_out == [row["reward/eval_mean"] for row in rows]


def test_an_evaluation_is_repeated_after_the_loss_of_the_learner(reference, tiny_sd3_dir, tmp_path):
    """Two calls generate training images; the third is the first of the evaluation."""
    injector = FaultInjector(Fault("learner", "kill", 0, "generate", count=3))
    run = run_here(tiny_config(tiny_sd3_dir, tmp_path, "lost", **TWO), progress=injector)
    (restored,) = [event for event in run.events() if event["event"] == "learner_restored"]
    assert (restored["during"], restored["iteration"]) == (1, 1)
    assert_as_if_nothing_had_been(run, reference)


def test_losing_a_rollout_actor_during_an_evaluation_changes_nothing(
    reference, tiny_sd3_dir, tmp_path
):
    """The first explored chunk is lost, before the first iteration begins."""
    injector = FaultInjector(Fault("rollout", "kill", -1, "explore"))
    run = run_here(tiny_config(tiny_sd3_dir, tmp_path, "killed", **TWO), progress=injector)
    assert injector.done and "actor_died" in [event["event"] for event in run.events()]
    assert_as_if_nothing_had_been(run, reference)


def test_resuming_a_run_that_stopped_early_trains_no_further(ray_here, tiny_sd3_dir, tmp_path):
    """The second update is the first that can have moved away from the base."""
    config = tiny_config(tiny_sd3_dir, tmp_path, "early", stop__max_kl=1e-12)
    cut(config, 2, "scored")
    trained = [("evaluation", 0), ("iteration", 0), ("iteration", 1)]
    assert rows_of(RunDirectory.of(config)) == trained
    run = run_here(config, resume=True)
    assert rows_of(run) == [*trained, ("evaluation", 2)]
    assert [event["iteration"] for event in run.events() if event["event"] == "stopped_early"] == [
        2
    ]

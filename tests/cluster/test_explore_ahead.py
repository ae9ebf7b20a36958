"""Exploring ahead.

Invariants: iteration i is explored with the policy of i - 1, whatever the pool, kills and resumes;
the newest policy regenerates and is trained; staleness is reported and limited.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from actors.messages import ChunkKey
from analysis.compare.cells import Request, read_comparison
from cluster.driver.iteration import Iteration
from configs.load import ConfigError, load
from configs.resume import differences
from records.errors import RunFailed
from records.rundir import RunDirectory
from records.timeline import read_spans
from tests.cluster.faults import Fault, FaultInjector
from tests.cluster.local import Played, play
from tests.cluster.outcomes import lasting, outcome
from tests.cluster.runs import adapters, run_here, selections, tiny_config
from tests.learner.tiny import tiny_groups, tiny_trainer


def ahead(model, root, name: str, **changes: Any):
    return tiny_config(model, root, name, explore_ahead=1, **changes)


@pytest.fixture(scope="module")
def alone(ray_here, tiny_sd3_dir, tmp_path_factory) -> RunDirectory:
    """Run three iterations with one rollout actor."""
    return run_here(
        ahead(tiny_sd3_dir, tmp_path_factory.mktemp("alone"), "alone", services__rollout__actors=1)
    )


def assert_same(run: RunDirectory, reference: RunDirectory) -> None:
    assert selections(run) == selections(reference)
    assert adapters(run, 3) == adapters(reference, 3)


def rows_of(run: RunDirectory) -> list[dict[str, Any]]:
    return [row for row in run.metrics() if row["kind"] == "iteration"]


def test_an_iteration_is_explored_with_the_previous_policy(alone, undisturbed):
    rows = rows_of(alone)
    assert (
        [row["explore/version"] for row in rows]
        == [0, 0, 1]
        == [line["version"] for line in selections(alone)]
    )
    assert [row["staleness"] for row in rows] == [0, 1, 1]
    assert [row["policy_version"] for row in rows] == [0, 1, 2]
    assert [row["weights/version"] for row in rows] == [1, 2, 3]
    assert selections(alone)[0] == selections(undisturbed)[0]
    assert [row["staleness"] for row in rows_of(undisturbed)] == [0, 0, 0]
    assert [line["version"] for line in selections(undisturbed)] == [0, 1, 2]
    chunks = [event["version"] for event in alone.events() if event["event"] == "version_published"]
    assert chunks == [0, 1, 2, 3]


def test_the_next_iteration_starts_before_the_current_one_ends(alone):
    """The first iteration is not explored ahead; of the others a part is, and the rest adds up to
    the iteration.
    """
    rows = rows_of(alone)
    assert rows[0]["time/explore_ahead_s"] == 0.0
    assert all(row["time/explore_ahead_s"] > 0 for row in rows[1:])
    for row in rows:
        parts = sum(
            row[f"time/{part}_s"] for part in ("explore", "regenerate", "update", "publish")
        )
        assert parts <= row["time/iteration_s"] + 1e-6


@pytest.mark.slow
def test_a_resumed_run_explores_with_the_same_older_policy(alone, tiny_sd3_dir, tmp_path):
    """Stopped after two iterations, the run explores the third with policy 1, which only the
    checkpoint has.
    """
    run_here(ahead(tiny_sd3_dir, tmp_path, "resumed", iterations=2))
    run = run_here(ahead(tiny_sd3_dir, tmp_path, "resumed"), resume=True)
    assert_same(run, alone)
    assert [row["explore/version"] for row in rows_of(run)] == [0, 0, 1]
    assert "previous.safetensors" in adapters(run, 3)


@pytest.mark.timeout(900)  # processes are restarted
def test_killed_actors_do_not_change_results(alone, tiny_sd3_dir, tmp_path):
    """A replaced rollout actor, and a new learner after a return to a checkpoint, use the older
    policy too.

    Two rollout actors give the results of one.
    """
    rollout = Fault("rollout", "kill", 1, "regenerated")
    learner = Fault("learner", "kill", 2, "regenerated")
    injector = FaultInjector(rollout, learner)
    run = run_here(ahead(tiny_sd3_dir, tmp_path, "killed"), progress=injector)
    assert injector.done == [rollout, learner]
    assert outcome(run, 3) == outcome(alone, 3)
    versions = [event["version"] for event in run.events() if event["event"] == "version_published"]
    assert versions == [0, 1, 2, 1, 2, 3]


# ---- in one process, without Ray

SEEDS = (0, 1, 2)
HALVES = {"explore__chunk_size": 4}


@pytest.fixture(scope="module")
def played(tiny_sd3_dir, tmp_path_factory) -> list[Played]:
    """Run the same three iterations with one, two and three rollout actors, each in another random
    order.
    """
    found = []
    for seed in SEEDS:
        root = tmp_path_factory.mktemp(f"played{seed}")
        config = ahead(tiny_sd3_dir, root, "local", **HALVES)
        found.append(play(config, root, explorers=1 + seed, seed=seed))
    return found


def test_order_and_pool_size_do_not_change_bits(played):
    first, *others = played
    assert [row["explore/version"] for row in first.rows.values()] == [0, 0, 1]
    assert [row["staleness"] for row in first.rows.values()] == [0, 1, 1]
    for other in others:
        assert other.chosen == first.chosen
        assert other.files() == first.files()
        assert lasting(list(other.rows.values())) == lasting(list(first.rows.values()))


def test_exploring_overlaps_learning_and_publishing_does_not_affect_running_tasks(played):
    """In some order a chunk of the next iteration is explored before the update, and one after a
    newer version was published.
    """
    before, after = 0, 0
    for run in played:
        chunks = {
            iteration: [at for at, key in enumerate(run.log) if chunk_of(key) == iteration]
            for iteration in range(3)
        }
        assert len(chunks[1]) == len(chunks[2]) == 4
        for iteration in (0, 1):
            before += sum(at < run.log.index(("update", iteration)) for at in chunks[iteration + 1])
            after += sum(
                at > run.log.index(("export", iteration + 1)) for at in chunks[iteration + 1]
            )
    assert before > 0 and after > 0


def chunk_of(key: Any) -> int | None:
    """Return the iteration of an explored chunk, or None."""
    return key.iteration if isinstance(key, ChunkKey) else None


MEANWHILE = {"evaluate__explore_meanwhile": True}
SIZED = {**MEANWHILE, "services__autoscale__enabled": True, "services__rollout__max_actors": 2}


@pytest.mark.parametrize(
    ("changes", "meanwhile"),
    [(MEANWHILE, True), ({"evaluate__explore_meanwhile": False}, False), (SIZED, False)],
    ids=["meanwhile", "not", "the pool sizes itself"],
)
def test_rollout_actors_explore_during_an_evaluation(
    ray_here, undisturbed, tiny_sd3_dir, tmp_path, changes, meanwhile
):
    """Every iteration then still has the newest policy, and the same results."""
    config = tiny_config(tiny_sd3_dir, tmp_path, "evaluated", evaluate__every=1, **changes)
    run = run_here(config)
    assert_same(run, undisturbed)
    # so that --resume may change it
    both = [load("quickstart", [f"evaluate.explore_meanwhile={is_on}"]) for is_on in (True, False)]
    assert differences(*both) == []
    rows, spans = rows_of(run), read_spans(run.timeline_file)
    assert [row["staleness"] for row in rows] == [0, 0, 0]
    for row in rows:
        began = {
            work: min(
                s.started for s in spans if (s.work, s.unit[:1]) == (work, (row["iteration"],))
            )
            for work in ("explore", "regenerate")
        }
        evaluated = [s.ended for s in spans if s.work == "evaluate"]
        last = max(ended for ended in evaluated if ended <= began["regenerate"])
        assert (began["explore"] < last) == (row["time/explore_ahead_s"] > 0) == meanwhile


def test_without_explore_ahead_an_iteration_is_explored_with_its_own_policy(
    played, tiny_sd3_dir, tmp_path
):
    newest = play(tiny_config(tiny_sd3_dir, tmp_path, "newest", **HALVES), tmp_path)
    assert [row["explore/version"] for row in newest.rows.values()] == [0, 1, 2]
    assert [row["staleness"] for row in newest.rows.values()] == [0, 0, 0]
    assert all(row["time/explore_ahead_s"] == 0 for row in newest.rows.values())
    assert newest.chosen[0] == played[0].chosen[0]
    means = [run.rows[1]["explore/reward_mean"] for run in (newest, played[0])]
    assert means[0] != means[1]  # other policies generate other images from the same noises
    assert "previous.safetensors" in played[0].files()
    assert "previous.safetensors" not in newest.files()


@pytest.mark.parametrize("stop", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_after_a_checkpoint_the_next_iteration_uses_the_same_older_policy(
    played, tiny_sd3_dir, tmp_path, stop
):
    config = ahead(tiny_sd3_dir, tmp_path, "stopped", **HALVES)
    half = play(config, tmp_path, seed=5, stop=stop)
    rest = play(config, tmp_path, explorers=2, seed=6, start=half.checkpoint)
    assert {**half.chosen, **rest.chosen} == played[0].chosen
    assert rest.files() == played[0].files()
    assert rest.rows[stop]["explore/version"] == stop - 1 and rest.rows[stop]["staleness"] == 1
    versions = [event["version"] for event in rest.events if event["event"] == "version_published"]
    assert versions == [*range(stop - 1, 4)]


def test_the_learner_exports_the_policy_before_its_last_update(tiny_sd3_dir, tmp_path):
    """The bytes are equal, in another process too, after loading a checkpoint."""
    trainer = tiny_trainer(tiny_sd3_dir, explore_ahead=1)
    before = trainer.export(4)[0].checksum
    trainer.update(0, tiny_groups())
    assert trainer.export(4)[0].checksum != before
    assert trainer.export(4, weights="previous")[0].checksum == before
    trainer.save(tmp_path / "step_000001", {})
    other = tiny_trainer(tiny_sd3_dir, perturb=False, explore_ahead=1)
    other.load(tmp_path / "step_000001")
    assert other.export(4, weights="previous")[0].checksum == before
    assert other.export(4)[0].checksum == trainer.export(4)[0].checksum
    with pytest.raises(KeyError, match="previous"):
        tiny_trainer(tiny_sd3_dir).export(4, weights="previous")


@pytest.mark.parametrize(
    ("version", "bound", "fits"),
    [(5, 0, True), (4, 0, False), (4, 1, True), (3, 1, False), (6, 1, False)],
)
def test_staleness_is_bounded(version, bound, fits):
    it = Iteration(5, version, None, [], [], SimpleNamespace())  # pyright: ignore[reportArgumentType]
    if fits:
        it.check_staleness(bound)
        assert it.staleness == 5 - version
    else:
        with pytest.raises(
            RunFailed,
            match=(
                f"iteration 5 was explored with policy version {version}, explore_ahead = {bound}"
            ),
        ):
            it.check_staleness(bound)


@pytest.mark.parametrize(
    ("arm", "why"),
    [
        ("diffusionnft", "explores nothing"),
        ("naive_scaling", "explored images"),
        ("naive_quant", "explored images"),
    ],
)
def test_arms_without_regeneration_refuse_explore_ahead(tmp_path, arm, why):
    with pytest.raises(ConfigError) as error:
        ahead(tmp_path / "model", tmp_path, "refused", arm=arm)
    (line,) = error.value.lines
    assert line.startswith(f"explore_ahead: arm {arm!r}") and why in line and line.endswith("use 0")


def test_explore_ahead_can_be_compared():
    request = Request("quickstart", arms=("sol_rl", "naive_quant"), vary=("explore_ahead=0,1",))
    cells = read_comparison(request).cells
    assert [(cell.tree["explore_ahead"], cell.refused is None) for cell in cells] == [
        (0, True),
        (1, True),
        (0, True),
        (1, False),
    ]
    # during an evaluation, exploring would not count in the seconds of an iteration
    assert not any(cell.tree["evaluate"]["explore_meanwhile"] for cell in cells)
    requested = Request("quickstart", overrides=("evaluate.explore_meanwhile=true",))
    assert all(c.tree["evaluate"]["explore_meanwhile"] for c in read_comparison(requested).cells)
    comparison = read_comparison(Request("ahead"))
    assert [cell.tree.get("explore_ahead") for cell in comparison.cells] == [0, 1]
    assert len(comparison.seeds) == 3

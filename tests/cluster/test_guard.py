"""The monitor of rank agreement.

Invariants: only consecutive measurements count; a decision after an iteration holds for all
versions published later, in every pool and after a resume; no precision becomes finer than that of
regeneration.
"""

import json
from typing import Any

import numpy as np
import pytest

from actors.messages import ChunkKey, ExploreChunk
from actors.rollout import RolloutActor
from cluster.driver.rank_monitor import SIGNS, TAU, RankMonitor
from configs.running import Audit
from policy.precision import nvfp4
from tests.cluster.local import Played, play
from tests.cluster.runs import run_here, tiny_config
from tests.learner.tiny import tiny_groups, tiny_trainer

CPU = ("emulated_nvfp4", "fp8", "bf16", "fp32")


class RecordingMonitor:
    """A monitor, with its events and notes."""

    def __init__(self, finest: str = "fp32", **settings: Any):
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.notes: list[str] = []
        self.monitor = RankMonitor(
            Audit(**settings),
            finest,
            lambda name, **fields: self.events.append((name, fields)),
            self.notes.append,
        )

    def observe(
        self,
        index: int,
        signs: float | None = None,
        tau: float | None = None,
        explored="emulated_nvfp4",
        newest=None,
        runs=CPU,
    ):
        row = {key: value for key, value in ((SIGNS, signs), (TAU, tau)) if value is not None}
        return self.monitor.observe(index, row, explored, newest or explored, runs)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]


def test_without_a_threshold_the_monitor_does_nothing():
    recorded = RecordingMonitor()
    assert recorded.observe(0, signs=0.0, tau=-1.0) == {}
    assert not recorded.events and not recorded.notes


def test_the_monitor_warns_after_patience_consecutive_iterations():
    recorded = RecordingMonitor(min_sign_agreement=0.8, patience=2)
    below = [
        recorded.observe(i, signs=signs) for i, signs in enumerate((0.7, 0.9, 0.7, 0.6, 0.5, 0.8))
    ]
    assert [row["audit/below"] for row in below] == [1, 0, 1, 2, 1, 0]  # 0.8 itself suffices
    assert recorded.events == [
        ("audit_low", {"iteration": 3, "backend": "emulated_nvfp4", "patience": 2, SIGNS: 0.6})
    ]
    (note,) = recorded.notes
    assert "audit/sign_agreement = 0.600 is below its threshold, 2 iterations in a row" in note
    assert recorded.monitor.backend is None


def test_either_measure_triggers_and_missing_values_do_not_count():
    recorded = RecordingMonitor(min_sign_agreement=0.8, min_tau=0.5, random_seeds=4, patience=3)
    for index, (signs, tau) in enumerate([(0.9, 0.4), (None, None), (0.7, None), (None, 0.3)]):
        recorded.observe(index, signs=signs, tau=tau)
    assert [
        (fields["iteration"], fields.get(SIGNS), fields.get(TAU)) for _, fields in recorded.events
    ] == [(3, None, 0.3)]


def test_precision_increases_up_to_that_of_regeneration():
    recorded = RecordingMonitor(
        finest="bf16", min_sign_agreement=1.0, patience=1, action="finer_backend"
    )
    explored = "emulated_nvfp4"
    for index in range(4):
        recorded.observe(index, signs=0.5, explored=explored)
        explored = recorded.monitor.backend or explored
    moves = [
        (f["iteration"], f["before"], f["after"], f["version"])
        for name, f in recorded.events
        if name == "backend_moved"
    ]
    assert moves == [(0, "emulated_nvfp4", "fp8", 1), (1, "fp8", "bf16", 2)]
    assert recorded.names.count("audit_low") == 4
    assert "bf16 is the finest precision supported here" in recorded.notes[-1]


def test_iterations_before_a_new_precision_takes_effect_are_not_counted():
    """With exploring ahead, the iteration after the decision was already explored with the coarser
    precision.
    """
    recorded = RecordingMonitor(min_sign_agreement=1.0, patience=1, action="finer_backend")
    recorded.observe(0, signs=0.5)
    assert recorded.monitor.backend == "fp8"
    assert recorded.observe(1, signs=0.5, newest="fp8") == {"audit/below": 0}
    assert recorded.names == ["audit_low", "backend_moved"]
    recorded.observe(2, signs=0.5, explored="fp8")
    assert recorded.monitor.backend == "bf16"


def test_a_checkpoint_restores_the_whole_state_of_the_monitor():
    """The state is the precision of the next version and of the one before, and the count."""
    recorded, other = (
        RecordingMonitor(min_sign_agreement=1.0, patience=2, action="finer_backend")
        for _ in range(2)
    )
    for index in range(3):
        recorded.observe(index, signs=0.5, explored="emulated_nvfp4" if index < 2 else "fp8")
    assert recorded.monitor.state == {"backend": "fp8", "backend_before": "fp8", "below": 1}
    other.monitor.restore(recorded.monitor.state)
    for each in (recorded, other):
        each.observe(3, signs=0.5, explored="fp8")
    assert (
        other.monitor.state
        == recorded.monitor.state
        == {"backend": "bf16", "backend_before": "fp8", "below": 0}
    )
    other.monitor.restore({})
    assert other.monitor.state == {"backend": None, "backend_before": None, "below": 0}


def test_saturated_activations_are_reported_in_every_iteration_and_noted_once():
    recorded = RecordingMonitor()
    for index, share in enumerate((0.0, 0.25, 0.5)):
        recorded.monitor.observe_saturation(index, share)
    assert recorded.events == [
        ("activations_saturated", {"iteration": 1, "share": 0.25}),
        ("activations_saturated", {"iteration": 2, "share": 0.5}),
    ]
    (note,) = recorded.notes
    assert "iteration 1: 25.00%" in note and "power_of_two" in note


def test_an_explorer_rebuilds_its_denoiser_for_another_precision(tiny_sd3_dir):
    """It loads weights of one precision after those of another, and returns to the configured one.

    A version that it does not hold is refused.
    """
    trainer = tiny_trainer(tiny_sd3_dir, explore={"pool_size": 8, "backend": "emulated_nvfp4"})
    actor = RolloutActor(trainer.config.model_dump(mode="json"))
    assert actor.ready().backend == "emulated_nvfp4" and set(actor.ready().runs) == set(CPU)
    cond, images = tiny_groups(1)[0].cond, []
    for version, backend in enumerate((None, "fp8", "fp32", None)):
        manifest, chunks, _ = trainer.export(version, backend or "emulated_nvfp4")
        assert actor.load(backend, manifest, range(len(chunks)), *chunks) == (
            version,
            manifest.checksum,
            backend,
        )
        request = ExploreChunk(
            ChunkKey(0, 0, 0, version), (1, 2), 2, "dpmpp_2m", return_latents=True
        )
        images.append(actor.explore(request, cond)[2]["latents"])
        with pytest.raises(
            RuntimeError, match=f"needs version 9, but this rollout actor has {version}"
        ):
            actor.explore(
                ExploreChunk(ChunkKey(0, 0, 0, 9), (1, 2), 2, "dpmpp_2m", return_latents=True), cond
            )
    assert np.array_equal(images[0], images[3])
    assert not any(np.array_equal(images[0], other) for other in images[1:3])
    errors = [float(np.abs(other - images[2]).mean()) for other in images[:2]]
    assert errors[1] < errors[0]  # fp8 is closer to fp32 than nvfp4


# ---- in a run

LOT = {"scorers": [{"name": "tests.cluster.scorers:Lot"}]}
"""Random rewards rank the proxies differently from the regenerated images."""
ALWAYS: dict[str, Any] = {
    "audit": {"min_sign_agreement": 1.0, "patience": 1, "action": "finer_backend"},
    "rewards": LOT,
    "iterations": 2,
    "explore__chunk_size": 4,
}
AHEAD: dict[str, Any] = {**ALWAYS, "explore_ahead": 1, "iterations": 4}


@pytest.fixture(scope="module")
def moved(tiny_sd3_dir, tmp_path_factory) -> Played:
    """Run four iterations of one rollout actor, explored ahead, with a threshold above a random
    ranking.
    """
    root = tmp_path_factory.mktemp("moved")
    return play(tiny_config(tiny_sd3_dir, root, "moved", **AHEAD), root)


def backends(played: Played) -> list[str]:
    return [row["explore/backend"] for row in played.rows.values()]


@pytest.mark.parametrize(("headroom", "share"), [(8.0, 0.0), (2.0**-10, 1.0)])
def test_a_run_reports_activations_that_outgrow_the_previous_pass(
    tiny_sd3_dir, tmp_path, monkeypatch, headroom, share
):
    """The share is that of all chunks: two prompts with two chunks each."""
    monkeypatch.setattr(nvfp4, "HEADROOM", headroom)
    settings = {"explore__activation_amax": "previous_pass", "explore__chunk_size": 4}
    run = play(tiny_config(tiny_sd3_dir, tmp_path, "clipped", **settings, iterations=1), tmp_path)
    assert run.rows[0]["explore/saturated"] == share
    events = [event for event in run.events if event["event"] == "activations_saturated"]
    assert [event["share"] for event in events] == [share] * (share > 0)


def test_the_next_iteration_is_explored_in_the_finer_precision(tiny_sd3_dir, tmp_path):
    run = play(
        tiny_config(tiny_sd3_dir, tmp_path, "finer", **ALWAYS), tmp_path, explorers=2, seed=1
    )
    same = play(
        tiny_config(tiny_sd3_dir, tmp_path, "finer", **{**ALWAYS, "audit": {}}),
        tmp_path,
        explorers=2,
        seed=1,
    )
    assert run.rows[0]["audit/sign_agreement"] < 1 and run.rows[0]["audit/below"] == 1
    assert backends(run) == ["emulated_nvfp4", "fp8"]
    assert backends(same) == ["emulated_nvfp4", "emulated_nvfp4"]
    events = {event["event"]: event for event in run.events if event.get("iteration") == 0}
    assert events["audit_low"]["backend"] == "emulated_nvfp4"
    assert (events["backend_moved"]["after"], events["backend_moved"]["version"]) == ("fp8", 1)
    assert run.chosen[0] == same.chosen[0]
    proxies = [[row["explore/reward_mean"] for row in each.rows.values()] for each in (run, same)]
    # another arithmetic gives other images
    assert proxies[0][0] == proxies[1][0] and proxies[0][1] != proxies[1][1]


def test_a_finer_precision_does_not_depend_on_pool_and_order(moved, tiny_sd3_dir, tmp_path):
    assert moved.rows[0]["audit/sign_agreement"] < 1, (
        "the threshold must trip for this to test anything"
    )
    assert backends(moved) == ["emulated_nvfp4", "emulated_nvfp4", "fp8", "fp8"]
    other = play(
        tiny_config(tiny_sd3_dir, tmp_path, "other", **AHEAD), tmp_path, explorers=3, seed=3
    )
    assert backends(other) == backends(moved)
    assert other.chosen == moved.chosen and other.files() == moved.files()


def test_a_finer_precision_survives_a_resume(moved, tiny_sd3_dir, tmp_path):
    """Version 1 is packed for fp8, but the version before, which explores next, is not."""
    config = tiny_config(tiny_sd3_dir, tmp_path, "again", **AHEAD)
    half = play(config, tmp_path, seed=4, stop=1)
    rest = play(config, tmp_path, explorers=2, seed=5, start=half.checkpoint)
    assert backends(half) + backends(rest) == backends(moved)
    assert half.chosen | rest.chosen == moved.chosen and rest.files() == moved.files()
    published = [
        (event["version"], event["backend"])
        for event in rest.events
        if event["event"] == "version_published"
    ]
    assert published[:2] == [(0, "emulated_nvfp4"), (1, "fp8")]


def test_quantization_json_describes_the_newest_precision(moved):
    last = [event["after"] for event in moved.events if event["event"] == "backend_moved"][-1]
    assert {row["backend"] for row in moved.table} == {last} != {"emulated_nvfp4"}


@pytest.mark.slow
def test_a_real_run_switches_to_the_finer_precision(ray_here, tiny_sd3_dir, tmp_path):
    """The session and real processes are used; rows, events, quantization.json and the checkpoint
    record it.
    """
    run = run_here(tiny_config(tiny_sd3_dir, tmp_path, "real", **ALWAYS))
    rows = [row for row in run.metrics() if row["kind"] == "iteration"]
    assert [row["explore/backend"] for row in rows] == ["emulated_nvfp4", "fp8"]
    last = [event["after"] for event in run.events() if event["event"] == "backend_moved"][-1]
    table = json.loads((run.path / "quantization.json").read_text())
    assert {row["backend"] for row in table} == {last}
    assert (
        json.loads((run.checkpoints / "step_000002" / "state.json").read_text())["state"]["extra"][
            "guard"
        ]["backend"]
        == last
    )

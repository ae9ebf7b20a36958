"""The ring as a whole; ``test_fault_matrix`` has its faults.

Invariants: results do not depend on the number of actors; every task counts once; failures end the
run as configured.
"""

import json
import os
import signal
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from configs.schema import RunConfig
from records.errors import RunFailed
from records.rundir import RunDirectory
from tests.cluster.local import play
from tests.cluster.processes import meanwhile
from tests.cluster.runs import adapters, main_here, run_here, selections, tiny_config, write_toml


def assert_same(run, reference) -> None:
    assert selections(run) == selections(reference)
    assert adapters(run, 3) == adapters(reference, 3)


def test_a_run_writes_all_its_files(undisturbed):
    rows = undisturbed.metrics()
    kinds = [(row["kind"], row["iteration"]) for row in rows]
    assert kinds == [
        ("evaluation", 0),
        ("iteration", 0),
        ("iteration", 1),
        ("iteration", 2),
        ("evaluation", 3),
    ]
    last = rows[3]
    assert last["samples_seen"] == 3 * 2 * 4
    assert last["policy_version"] == 2
    assert last["weights/version"] == 3
    assert last["explore/contrast"] == pytest.approx(
        last["explore/reward_best"] - last["explore/reward_worst"]
    )
    assert last["rewards/failed"] == 0
    assert last["rollout/reissued"] == 0
    assert -1 <= last["audit/kendall_tau"] <= 1
    assert 0 < last["weights/codes_changed"] < 1
    names = [event["event"] for event in undisturbed.events()]
    assert names[0] == "run_started" and names[-1] == "run_finished"
    assert names.count("version_published") == 4 and names.count("actor_started") == 6
    assert (undisturbed.path / "report.html").stat().st_size > 10_000
    config = json.loads(undisturbed.config_file.read_text())
    assert config["config"]["seed"] == 7 and config["versions"]["torch"] == version("torch")


def test_training_changes_the_lora(undisturbed):
    old = load_file(undisturbed.checkpoints / "step_000003" / "old.safetensors")
    now = load_file(undisturbed.checkpoints / "step_000003" / "adapter.safetensors")
    b = [key for key in now if "lora_B" in key]
    moved = [key for key in b if now[key].abs().max() > 0.01]  # B starts at zero
    # the context queries of the last block reach no output, so they cannot change
    assert len(moved) > len(b) // 2
    assert all(not torch.equal(now[key], old[key]) for key in moved)


def test_the_number_of_rollout_actors_changes_nothing(undisturbed, tiny_sd3_dir, tmp_path):
    """Three here, two in the other run; ``test_fault_matrix`` has one, where the driver is
    killed.
    """
    run = run_here(tiny_config(tiny_sd3_dir, tmp_path, "actors", services__rollout__actors=3))
    assert_same(run, undisturbed)


def test_sigterm_stops_after_a_checkpoint_and_says_how_to_continue(
    ray_here, tiny_sd3_dir, tmp_path, capsys
):
    config = tiny_config(
        tiny_sd3_dir,
        tmp_path,
        "stopped",
        iterations=500,
        checkpoint__every=400,
        services__rollout__actors=1,
    )
    run = RunDirectory.of(config)
    third = lambda: text_of(run.path / "metrics.jsonl").count("\n") >= 3  # noqa: E731
    with meanwhile((third, lambda: os.kill(os.getpid(), signal.SIGTERM))):
        code = main_here("train", write_toml(config, tmp_path))
    assert code == 130
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert line.startswith("stopped by SIGTERM before iteration") and "--resume" in line
    (checkpoint,) = run.checkpoints.glob("step_*")
    assert int(checkpoint.name[5:]) == 1 + max(row["iteration"] for row in run.metrics())


def text_of(path: Path) -> str:
    """Return the present text of a file, or an empty string."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


@pytest.mark.parametrize(
    "arm", ["diffusionnft", pytest.param("naive_scaling", marks=pytest.mark.slow), "naive_quant"]
)
def test_every_arm_runs(ray_here, tiny_sd3_dir, tmp_path, arm):
    run = run_here(tiny_config(tiny_sd3_dir, tmp_path, arm, arm=arm, iterations=1))
    (row,) = [row for row in run.metrics() if row["kind"] == "iteration"]
    assert row["samples_seen"] == 8 and row["grad_norm"] > 0
    assert ("explore/contrast" in row) == (arm != "diffusionnft")
    assert (run.path / "selections.jsonl").exists() == (arm != "diffusionnft")


def broken(kind: str) -> list[dict[str, Any]]:
    """Return ``rewards.scorers`` with a single scorer that fails as ``kind`` says."""
    return [{"name": "tests.cluster.scorers:Broken", "settings": {"kind": kind}}]


def test_a_scorer_that_always_fails_stops_the_run_and_is_never_a_zero(
    ray_here, tiny_sd3_dir, tmp_path
):
    """``test_reward_service`` has the ways in which it may fail."""
    config = tiny_config(tiny_sd3_dir, tmp_path, "broken", rewards__scorers=broken("nan"))
    with pytest.raises(RunFailed, match="scoring failed for 8 of 8 images"):
        run_here(config)
    run = RunDirectory.of(config)
    events = run.events()
    assert events[-1]["event"] == "run_failed"
    assert any(event["event"] == "chunk_reissued" and "Broken" in event["why"] for event in events)
    assert text_of(run.path / "metrics.jsonl") == ""


def dropping(model: Path, root: Path, keep: int) -> RunConfig:
    """Return a configuration whose scorer fails on the first image of every chunk of 2, which is
    allowed.
    """
    rewards = {"scorers": broken("first_is_nan"), "max_failed_share": 0.9, "attempts": 2}
    return tiny_config(
        model, root, f"keep{keep}", iterations=1, rewards=rewards, selection__keep=keep
    )


def test_a_sample_that_cannot_be_scored_is_dropped_and_counted(ray_here, tiny_sd3_dir, tmp_path):
    (row,) = [
        row
        for row in run_here(dropping(tiny_sd3_dir, tmp_path, 4)).metrics()
        if row["kind"] == "iteration"
    ]
    # 4 of 8 per prompt are dropped when explored, then 1 of 4 when regenerated
    assert row["rewards/failed"] == 2 * 4 + 2 * 1


def test_a_prompt_with_too_few_scored_images_ends_the_run(tiny_sd3_dir, tmp_path):
    message = "has only 4 scored images of 8, but selection.keep = 6; last failure: scorer '.*' ret"
    with pytest.raises(RunFailed, match=message):
        play(dropping(tiny_sd3_dir, tmp_path, 6), tmp_path)

"""The ring as a whole. Invariants: what is computed does not depend on how many actors compute it, on which of them die, or on
the run being killed and resumed; every unit counts once; failures end the run as the configuration says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from cluster.errors import RunFailed
from cluster.progress import Progress
from tests.cluster.runs import adapters, run_here, selections, tiny_config


def assert_same(run, reference) -> None:
    assert selections(run) == selections(reference)
    assert adapters(run, 3) == adapters(reference, 3)


def test_the_run_leaves_what_it_should(undisturbed):
    rows = undisturbed.metrics()
    kinds = [(row["kind"], row["iteration"]) for row in rows]
    assert kinds == [("evaluation", 0), ("iteration", 0), ("iteration", 1), ("iteration", 2), ("evaluation", 3)]
    last = rows[3]
    assert last["samples_seen"] == 3 * 2 * 4 and last["policy_version"] == 2 and last["weights/version"] == 3
    assert last["explore/contrast"] == pytest.approx(last["explore/reward_best"] - last["explore/reward_worst"])
    assert last["rewards/failed"] == 0 and last["rollout/reissued"] == 0 and -1 <= last["audit/kendall_tau"] <= 1
    assert 0 < last["weights/codes_changed"] < 1
    names = [event["event"] for event in undisturbed.events()]
    assert names[0] == "run_started" and names[-1] == "run_finished"
    assert names.count("version_published") == 4 and names.count("actor_started") == 6
    assert (undisturbed.path / "report.html").stat().st_size > 10_000
    config = json.loads(undisturbed.config_file.read_text())
    assert config["config"]["seed"] == 7 and config["versions"]["torch"] == torch.__version__


def test_the_lora_moved_away_from_its_start(undisturbed):
    old = load_file(undisturbed.checkpoints / "step_000003" / "old.safetensors")
    now = load_file(undisturbed.checkpoints / "step_000003" / "adapter.safetensors")
    b = [key for key in now if "lora_B" in key]
    moved = [key for key in b if now[key].abs().max() > 0.01]  # B starts at zero
    assert len(moved) > len(b) // 2  # the last block's context queries reach no output, so they cannot move
    assert all(not torch.equal(now[key], old[key]) for key in moved)


@pytest.mark.parametrize("actors", [1, 3])
def test_the_number_of_rollout_actors_changes_nothing(undisturbed, tiny_sd3_dir, tmp_path, actors):
    run = run_here(tiny_config(tiny_sd3_dir, tmp_path, f"actors{actors}", services__rollout__actors=actors))
    assert_same(run, undisturbed)


class Saboteur(Progress):
    """Kills one actor of each stateless service, each in another phase of another iteration."""

    session: Any = None
    iteration = -1

    def iteration_started(self, i: int, groups: int, images: int, totals: Any = None) -> None:
        super().iteration_started(i, groups, images, totals)
        self.iteration = i
        if i == 1:
            self.kill("encoder")

    def advanced(self, stage: str, n: int) -> None:
        super().advanced(stage, n)
        plan = {(0, "explored"): "rollout", (1, "explored"): "reward", (2, "scored"): "selector"}
        if victim := plan.get((self.iteration, stage)):
            self.kill(victim)

    def __init__(self) -> None:
        super().__init__()
        self.killed: set[str] = set()

    def kill(self, kind: str) -> None:
        if kind in self.killed:
            return
        self.killed.add(kind)
        os.kill(getattr(self.session.services, kind).workers[0].facts["pid"], signal.SIGKILL)


def test_sigkill_of_every_stateless_service_changes_nothing(undisturbed, tiny_sd3_dir, tmp_path):
    saboteur = Saboteur()
    run = run_here(tiny_config(tiny_sd3_dir, tmp_path, "killed"), progress=saboteur)
    assert_same(run, undisturbed)
    events = run.events()
    died = {event["kind"] for event in events if event["event"] == "actor_died"}
    assert died == {"rollout", "reward", "encoder", "selector"} == saboteur.killed
    assert sum(event["event"] == "chunk_reissued" for event in events) > 0
    assert run.metrics()[3]["rollout/reissued"] > 0


def test_a_killed_process_tree_is_resumed_to_the_same_bits(undisturbed, tiny_sd3_dir, tmp_path):
    config = tiny_config(tiny_sd3_dir, tmp_path, "resumed", services__rollout__actors=1)
    file = write_toml(config, tmp_path)
    run = Path(config.run_root or "") / "resumed"
    process = start(file)
    try:
        wait_for_event(run, "checkpoint_saved", process)
    finally:
        kill_tree(process.pid)
    assert not (run / "checkpoints" / "step_000003").exists()
    resumed = subprocess.run(command(file, "--resume"), capture_output=True, text=True, timeout=200, env=environment())
    assert resumed.returncode == 0, resumed.stderr
    assert "held-out reward after" in resumed.stdout
    assert_same(type(undisturbed)(run), undisturbed)
    rows = type(undisturbed)(run).metrics()
    assert [row["iteration"] for row in rows if row["kind"] == "iteration"] == [0, 1, 2]
    assert "run_resumed" in [event["event"] for event in type(undisturbed)(run).events()]
    other = subprocess.run(
        command(file, "--resume", "--set", "explore.steps=3"), capture_output=True, text=True, timeout=60, env=environment()
    )
    assert other.returncode == 2 and "explore.steps: 2 -> 3" in other.stderr and other.stderr.count("\n") == 1


def test_sigterm_stops_after_a_checkpoint_and_says_how_to_go_on(tiny_sd3_dir, tmp_path):
    config = tiny_config(tiny_sd3_dir, tmp_path, "stopped", iterations=500, checkpoint__every=400)
    run = Path(config.run_root or "") / "stopped"
    process = subprocess.Popen(
        command(str(write_toml(config, tmp_path))), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    try:
        wait_for_lines(run / "metrics.jsonl", 3, process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
    assert process.returncode == 130
    (line,) = [line for line in errors.splitlines() if line.strip()]
    assert line.startswith("stopped by SIGTERM before iteration") and "--resume" in line
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    rows = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert int(checkpoint.name[5:]) == 1 + max(row["iteration"] for row in rows)


@pytest.mark.parametrize("arm", ["diffusionnft", "naive_scaling", "naive_quant"])
def test_every_arm_runs(ray_here, tiny_sd3_dir, tmp_path, arm):
    run = run_here(tiny_config(tiny_sd3_dir, tmp_path, arm, arm=arm, iterations=1))
    (row,) = [row for row in run.metrics() if row["kind"] == "iteration"]
    assert row["samples_seen"] == 8 and row["grad_norm"] > 0
    assert ("explore/contrast" in row) == (arm != "diffusionnft")
    assert (run.path / "selections.jsonl").exists() == (arm != "diffusionnft")


@pytest.mark.parametrize("kind", ["raises", "nan", "short"])
def test_a_scorer_that_always_fails_stops_the_run_and_is_never_a_zero(ray_here, tiny_sd3_dir, tmp_path, kind):
    config = tiny_config(
        tiny_sd3_dir, tmp_path, kind, rewards__scorers=[{"name": "tests.cluster.scorers:Broken", "settings": {"kind": kind}}]
    )
    with pytest.raises(RunFailed, match="scoring failed for 8 of 8 pictures"):
        run_here(config)
    run = Path(config.run_root or "") / kind
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "run_failed"
    assert any(event["event"] == "chunk_reissued" and "Broken" in event["why"] for event in events)
    assert (
        not any(json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
        if (run / "metrics.jsonl").exists()
        else True
    )


def test_a_sample_that_cannot_be_scored_is_dropped_and_counted(ray_here, tiny_sd3_dir, tmp_path):
    config = tiny_config(
        tiny_sd3_dir,
        tmp_path,
        "dropped",
        iterations=1,
        rewards__scorers=[{"name": "tests.cluster.scorers:Broken", "settings": {"kind": "first_is_nan"}}],
        rewards__max_failed_share=0.9,
        rewards__attempts=2,
    )
    (row,) = [row for row in run_here(config).metrics() if row["kind"] == "iteration"]
    # chunks of 2: 4 of 8 per prompt are dropped when explored, then 1 of 4 when regenerated
    assert row["rewards/failed"] == 2 * 4 + 2 * 1


def test_a_prompt_left_with_too_few_pictures_stops_the_run(ray_here, tiny_sd3_dir, tmp_path):
    config = tiny_config(
        tiny_sd3_dir,
        tmp_path,
        "few",
        selection__keep=6,
        rewards__scorers=[{"name": "tests.cluster.scorers:Broken", "settings": {"kind": "first_is_nan"}}],
        rewards__max_failed_share=0.9,
        rewards__attempts=1,
    )
    with pytest.raises(RunFailed, match="left with 4 scored pictures of 8, selection.keep = 6"):
        run_here(config)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cluster", "train", *arguments]


def environment() -> dict[str, str]:
    return {**{key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}, "RAY_USAGE_STATS_ENABLED": "0"}


def start(file: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command(str(file)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment())


def wait_for_event(run: Path, name: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (run / "events.jsonl").exists() and f'"{name}"' in (run / "events.jsonl").read_text():
            return
        assert process.poll() is None, "the run ended early"
        time.sleep(0.05)
    raise AssertionError(f"no {name} within 120 s")


def wait_for_lines(path: Path, count: int, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().count("\n") >= count:
            return
        assert process.poll() is None, "the run ended early"
        time.sleep(0.05)
    raise AssertionError(f"{path.name} has not {count} lines after 120 s")


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and everything it started."""
    parent = psutil.Process(pid)
    for process in [parent, *parent.children(recursive=True)]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs([parent], timeout=10)


def write_toml(config: Any, root: Path) -> Path:
    """A configuration as a TOML file."""

    def value(item: Any) -> str:
        if isinstance(item, dict):
            return "{" + ", ".join(f"{key} = {value(v)}" for key, v in item.items() if v is not None) + "}"
        if isinstance(item, list):
            return "[" + ", ".join(value(v) for v in item) + "]"
        return json.dumps(item)

    tree = config.model_dump(mode="json")
    path = root / f"{config.name}.toml"
    path.write_text("".join(f"{key} = {value(item)}\n" for key, item in tree.items() if item is not None))
    return path

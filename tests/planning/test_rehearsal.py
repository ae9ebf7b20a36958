"""The rehearsal's measures and verdicts; it itself takes minutes and much memory."""

import gc
import json
import mmap
import os
from dataclasses import replace

import pytest
import torch

from configs.load import load
from learner.trainer import Trainer
from planning.plan import make_plan
from tools.rehearsal import gpu
from tools.rehearsal.__main__ import table
from tools.rehearsal.measuring import MemoryMeasurements, memory_of, tensor_bytes
from tools.rehearsal.pipeline import config_of


@pytest.fixture
def config(tiny_sana_dir, tmp_path):
    return config_of("sana-1.6b", tiny_sana_dir, tmp_path, 32)


def plain(parts: dict[str, int | None]) -> int:
    """Without the passes."""
    return sum(size or 0 for what, size in parts.items() if "passes" not in what)


def test_the_plan_equals_the_memory_of_a_learner_after_publishing(config):
    """Tensors and shards, by a walk over the process, as the rehearsal takes it from an actor. The
    plan's optimizer and conditioning come with the first update.
    """

    class Learner:
        def __init__(self) -> None:
            self._shards: list[object] = []

    gc.collect()
    actor, before = Learner(), tensor_bytes(None)
    trainer = Trainer(config)
    _, actor._shards, _ = trainer.export(0)
    gc.collect()
    parts = make_plan(config).memory["learner"]
    later = sum(size or 0 for what, size in parts.items() if what.startswith(("opt", "cond")))
    found = tensor_bytes(actor) - before
    # beside them the schedule of sigmas, and single numbers
    assert found == pytest.approx(plain(parts) - later, abs=500)
    del trainer


def test_a_memory_walk_counts_shared_memory_once():
    before = tensor_bytes(None)
    tensor = torch.zeros(1000)
    views = [tensor.view(10, 100), tensor[5:]]
    assert tensor_bytes(None) - before == 4000 and len(views) == 2


@pytest.mark.parametrize(
    ("flag", "share"), [(mmap.MAP_PRIVATE, 1.0), (mmap.MAP_SHARED, 0.0)], ids=["own", "shared"]
)
def test_process_memory_excludes_shared_pages(flag, share):
    # pages of our own making: a tensor may get pages that an earlier test has freed
    size = 200_000_000
    before = memory_of(os.getpid())
    with mmap.mmap(-1, size, flags=flag | mmap.MAP_ANONYMOUS) as pages:
        for start in range(0, size, mmap.PAGESIZE):
            pages[start] = 1
        grown = memory_of(os.getpid()) - before
    assert grown == pytest.approx(share * size, abs=0.1 * size)


def test_differences_above_five_percent_are_reported(config):
    plan = make_plan(config)
    store = sum(plan.store.values())
    found = MemoryMeasurements(
        {kind: plain(plan.memory[kind]) for kind in ("rollout", "learner", "encoder")},
        broadcast=plan.broadcast,
        store=store,
    )
    shown, off = table(plan, found)
    assert off == []
    assert [row[0].text for row in shown.body] == [
        *("rollout", "learner", "encoder"),
        *("broadcast", "object store, at most"),
    ]
    wrong = replace(found, broadcast=round(1.06 * plan.broadcast), store=round(0.94 * store))
    assert [line.split(":")[0] for line in table(plan, wrong)[1]] == [
        "broadcast",
        "object store, at most",
    ]


def test_a_rehearsal_on_gpus_is_the_preset_with_its_own_files(tiny_sana_dir, tmp_path):
    (tmp_path / "sana").symlink_to(tiny_sana_dir)
    (tmp_path / "run.toml").write_text(gpu.settings(tmp_path, "naive_scaling", 2, 3))
    config, preset = load(str(tmp_path / "run.toml")), load("sana-sol_rl-hpsv2")
    assert (config.arm, config.iterations, config.prompts.per_iteration) == ("naive_scaling", 3, 2)
    assert config.explore == preset.explore and config.regenerate == preset.regenerate
    assert config.optimizer == preset.optimizer
    (scorer,) = config.rewards.scorers
    assert scorer.name == "hpsv2" and scorer.settings["checkpoint"] == str(tmp_path / "hpsv2")


def test_a_rehearsals_seconds_are_those_of_the_last_iteration(tmp_path):
    """Calls after the update before the last; a stopped one counts nowhere."""
    calls = [
        ("explore", 0.0, 9.0, "done"), ("update", 9.0, 20.0, "done"),
        ("explore", 20.0, 22.0, "done"), ("explore", 22.0, 26.0, "done"),
        ("explore", 26.0, 27.0, "stopped"), ("update", 27.0, 30.0, "done"),
    ]  # fmt: skip
    keys = ("work", "started", "ended", "outcome")
    rows = [json.dumps(dict(zip(keys, call, strict=True))) for call in calls]
    (tmp_path / "timeline.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "iteration", "time/iteration_s": 20.0}\n'
        '{"kind": "iteration", "time/iteration_s": 10.0}\n'
    )
    found = gpu.seconds_of(tmp_path)
    assert found == {"explore": 3.0, "update": 3.0, "iteration": 10.0}
    assert ("explore", "3.00") in gpu.table({"sol_rl": found}).rows

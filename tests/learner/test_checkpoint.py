"""Checkpoints restore every bit. A checkpoint is complete or absent, whenever a failure happens."""

from __future__ import annotations

import json
import os
import resource
import shutil
from types import SimpleNamespace

import pytest
import torch

from configs.load import ConfigError
from learner.checkpoint import (
    CheckpointError,
    find,
    incomplete_checkpoints,
    latest_checkpoint,
    prune,
    read,
    require_same,
    save_tensors,
    step_directory,
    step_of,
    write,
)
from tests.learner.tiny import identical, tiny_groups, tiny_trainer, training_state

TENSORS = {
    "adapter": {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([float("nan"), -0.0])},
    "optimizer": {},
}


class SimulatedKill(BaseException):
    """Simulates SIGKILL: no code catches this exception or cleans up."""


# ---- the trainer's checkpoint


@pytest.mark.parametrize("steps", [1, 2])
def test_resumed_training_equals_uninterrupted_training_bit_for_bit(tiny_sd3_dir, tmp_path, steps):
    settings = {
        "optimizer": {
            "lr": 1e-2,
            "schedule": "linear",
            "warmup_iterations": 3,
            "steps_per_iteration": steps,
        },
        "old_policy": {"schedule": "linear_cap", "slope": 0.2, "cap": 0.5},
        "iterations": 5,
    }
    uninterrupted = tiny_trainer(tiny_sd3_dir, **settings)
    for s in range(4):
        uninterrupted.update(s, tiny_groups(seed=s))
        if s == 1:
            state_after_two = training_state(uninterrupted)
            uninterrupted.save(tmp_path / "step_000002", {"cursor": [1, 2], "text": "é"})
    resumed = tiny_trainer(tiny_sd3_dir, perturb=False, **settings)
    assert resumed.load(tmp_path / "step_000002") == {"cursor": [1, 2], "text": "é"}
    assert resumed.done == 2 and identical(state_after_two, training_state(resumed))
    for s in range(2, 4):
        resumed.update(s, tiny_groups(seed=s))
    assert identical(training_state(uninterrupted), training_state(resumed))
    assert not identical(state_after_two, training_state(resumed))  # training continued
    with pytest.raises(ValueError, match="iteration 3 was already trained on"):
        resumed.update(3, tiny_groups())


def test_checkpoint_consists_of_safetensors_and_json_files(tiny_sd3_dir, tmp_path):
    trainer = tiny_trainer(tiny_sd3_dir)
    # before the first update, the optimizer has no moments
    trainer.save(tmp_path / "step_000000", {})
    names = {
        "adapter.safetensors",
        "old.safetensors",
        "ema.safetensors",
        "optimizer.safetensors",
        "state.json",
    }
    assert {path.name for path in (tmp_path / "step_000000").iterdir()} == names
    fresh = tiny_trainer(tiny_sd3_dir, perturb=False)
    fresh.load(tmp_path / "step_000000")
    assert identical(training_state(trainer), training_state(fresh))


def test_unsuitable_checkpoint_is_refused_and_changes_nothing(tiny_sd3_dir, tmp_path):
    trainer = tiny_trainer(tiny_sd3_dir)
    trainer.update(0, tiny_groups())
    trainer.save(tmp_path / "step_000001", {})
    for more, message in (
        (
            {"lora": {"rank": 2, "alpha": 4}},
            (
                r"lora_A.weight' is float32 \[4, 32\] in the checkpoint but float32 \[2, 32\] in"
                r" this run"
            ),
        ),
        ({"lora": {"rank": 4, "alpha": 8, "targets": ["attn.to_q"]}}, "but absent in this run"),
        ({"seed": 12}, "is of run seed 11, but this run has seed 12"),
    ):
        other = tiny_trainer(tiny_sd3_dir, **more)
        before = training_state(other)
        with pytest.raises(CheckpointError, match=message) as caught:
            other.load(tmp_path / "step_000001")
        assert identical(before, training_state(other))
        assert other.done == 0
        assert "\n" not in str(caught.value)


def test_missing_moments_are_refused(tiny_sd3_dir, tmp_path):
    """Without the moments, AdamW would start again from zero, and no error would occur."""
    trainer = tiny_trainer(tiny_sd3_dir)
    trainer.update(0, tiny_groups())
    trainer.save(tmp_path / "step_000001", {})
    state = tmp_path / "step_000001" / "state.json"
    body = json.loads(state.read_bytes())
    del body["files"]["optimizer.safetensors"]
    state.write_text(json.dumps(body))
    other = tiny_trainer(tiny_sd3_dir)
    before = training_state(other)
    with pytest.raises(
        CheckpointError, match="optimizer: 'exp_avg/.*' is absent in the checkpoint"
    ):
        other.load(tmp_path / "step_000001")
    assert identical(before, training_state(other)) and other.done == 0


def test_save_keeps_the_last_checkpoints(tiny_sd3_dir, tmp_path):
    trainer = tiny_trainer(tiny_sd3_dir, checkpoint={"keep_last": 2})
    for step in (0, 1, 2, 10):
        trainer.save(step_directory(tmp_path, step), {"step": step})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000010"]
    assert trainer.load(latest_checkpoint(tmp_path))["step"] == 10


# ---- directories


def test_checkpoint_round_trip_is_bit_exact(tmp_path):
    write(tmp_path / "step_000001", TENSORS, {"x": 1})
    files, state = read(tmp_path / "step_000001")
    assert state == {"x": 1} and files["optimizer"] == {}
    # NaN and -0 are restored too
    assert (
        files["adapter"]["b"].view(torch.int32).tolist()
        == TENSORS["adapter"]["b"].view(torch.int32).tolist()
    )
    assert torch.equal(files["adapter"]["a"], TENSORS["adapter"]["a"])


def test_replaced_checkpoint_that_a_kill_left_is_found(tmp_path):
    rundir = SimpleNamespace(path=tmp_path, checkpoints=tmp_path)
    for step in (9, 10):
        write(step_directory(tmp_path, step), TENSORS, {})
    replaced = step_directory(tmp_path, 10).rename(tmp_path / "step_000010.replaced")
    assert [find(rundir, step) for step in (None, 10)] == [replaced, replaced] and step_of(
        replaced
    ) == 10
    with pytest.raises(ConfigError, match="no checkpoint 3; available: 9, 10"):
        find(rundir, 3)


def test_latest_checkpoint_is_the_highest_complete_step(tmp_path):
    assert latest_checkpoint(tmp_path) is None and latest_checkpoint(tmp_path / "absent") is None
    for step in (2, 10, 1_000_000):
        write(step_directory(tmp_path, step), TENSORS, {})
    (tmp_path / "step_2000000").mkdir()  # no state.json
    (tmp_path / ".step_3000000.unfinished-1").mkdir()
    (tmp_path / "step_9999999_copy").mkdir()
    assert latest_checkpoint(tmp_path).name == "step_1000000"
    prune(tmp_path, 1)
    assert latest_checkpoint(tmp_path).name == "step_1000000"
    assert not step_directory(tmp_path, 10).exists()
    with pytest.raises(ValueError, match="at least the last checkpoint must be kept"):
        prune(tmp_path, 0)


@pytest.mark.parametrize("name", ["adapter.safetensors", "state.json"])
def test_a_checkpoint_whose_directory_was_renamed_in_part_does_not_count(tmp_path, name):
    """As on an object store, which renames each file by itself, after the loss of a machine."""
    for step in (1, 2):
        write(step_directory(tmp_path, step), TENSORS, {"value": step})
    (step_directory(tmp_path, 2) / name).unlink()
    assert read(latest_checkpoint(tmp_path))[1] == {"value": 1}
    assert incomplete_checkpoints(tmp_path) == [step_directory(tmp_path, 2)]
    write(step_directory(tmp_path, 2), TENSORS, {"value": "again"})
    assert incomplete_checkpoints(tmp_path) == []
    assert read(latest_checkpoint(tmp_path))[1] == {"value": "again"}
    # a replaced one counts until all of its replacement is there
    step_directory(tmp_path, 1).rename(tmp_path / "step_000002.replaced")
    (step_directory(tmp_path, 2) / name).unlink()
    assert read(latest_checkpoint(tmp_path))[1] == {"value": 1}


def test_an_old_checkpoint_that_cannot_be_removed_is_removed_later(tmp_path, monkeypatch):
    """rclone's mounts may give a directory another inode number between two calls."""
    for step in (1, 2):
        write(step_directory(tmp_path, step), TENSORS, {})
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "samestat", lambda first, second: False)
        with pytest.raises(OSError):
            shutil.rmtree(step_directory(tmp_path, 1))
        prune(tmp_path, 1)
    (left, newest) = sorted(path.name for path in tmp_path.iterdir())
    assert left.startswith(".step_000001.unfinished-") and newest == "step_000002"
    write(step_directory(tmp_path, 3), TENSORS, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]


def test_damaged_checkpoint_is_refused(tmp_path):
    path = tmp_path / "step_000001"
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read(path)
    write(path, TENSORS, {})
    data = bytearray((path / "adapter.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "adapter.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="adapter.safetensors is damaged"):
        read(path)
    body = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(body | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99, this version reads 1"):
        read(path)
    (path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(path)
    assert latest_checkpoint(tmp_path) == path  # a run does not return to an older one unseen


SYSTEM_CALLS = ("mkdir", "rename", "replace", "fsync", "rmdir", "unlink", "open")


def fail_after(monkeypatch, calls: int, error: type[BaseException]) -> list[int]:
    """Count every call that changes the disk, and let each raise after number ``calls``. Return the
    counter.
    """
    count = [0]

    def wrap(original):
        def counted(*args, **kwargs):
            count[0] += 1
            if count[0] > calls:
                raise error()
            return original(*args, **kwargs)

        return counted

    for name in SYSTEM_CALLS:
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    return count


@pytest.mark.parametrize("same_step", [False, True], ids=["a new step", "the same step again"])
def test_last_checkpoint_is_complete_after_a_kill_at_any_time(tmp_path, monkeypatch, same_step):
    """The test simulates a kill before each disk-changing call of write and prune. Afterwards the
    old or the new checkpoint can be read, and writing a later one works.
    """
    calls, outcomes = 0, set()
    while True:
        root = tmp_path / str(calls)
        write(step_directory(root, 1), TENSORS, {"value": "old"})
        new = step_directory(root, 1 if same_step else 2)
        with monkeypatch.context() as patch:
            count = fail_after(patch, calls, SimulatedKill)
            try:
                write(new, TENSORS, {"value": "new"})
                prune(root, 1)
                finished = True
            except SimulatedKill:
                finished = False
        value = read(latest_checkpoint(root))[1]["value"]
        outcomes.add(value)
        write(step_directory(root, 3), TENSORS, {"value": "later"})
        prune(root, 1)
        assert read(latest_checkpoint(root))[1]["value"] == "later"
        assert not [path for path in root.iterdir() if path.name.startswith(".")]
        if finished:
            assert value == "new" and count[0] <= calls
            break
        calls += 1
    assert calls > 5 and outcomes == {"old", "new"}


def test_full_disk_keeps_the_last_checkpoint_and_is_reported(tmp_path):
    """A limit on the file size makes write(2) fail, as a full disk does."""
    write(step_directory(tmp_path, 1), TENSORS, {"value": "old"})
    big = {"adapter": {"a": torch.zeros(100_000)}}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(
            CheckpointError,
            match=("step_000002' could not be written: File too large: the last .* is step_000001"),
        ) as caught:
            write(step_directory(tmp_path, 2), big, {})
        with pytest.raises(OSError):
            save_tensors(tmp_path / "evidence.safetensors", big["adapter"], {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]  # no incomplete checkpoint
    assert read(latest_checkpoint(tmp_path))[1]["value"] == "old"
    write(step_directory(tmp_path, 2), big, {"value": "new"})
    assert read(latest_checkpoint(tmp_path))[1]["value"] == "new"


def test_failed_first_checkpoint_reports_that_there_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="there is no earlier checkpoint"):
        write(tmp_path / "file" / "step_000001", TENSORS, {})


def test_require_same_reports_the_first_difference():
    a = {"x": torch.zeros(2), "y": torch.zeros(3)}
    require_same(a, {name: t.clone() for name, t in a.items()}, "here")
    with pytest.raises(
        CheckpointError, match=r"here: 'y' is float32 \[3\] in the checkpoint but absent"
    ):
        require_same(a, {"x": a["x"]}, "here")
    with pytest.raises(CheckpointError, match="'x' is float32 .* but float64"):
        require_same(a, {**a, "x": a["x"].double()}, "here")

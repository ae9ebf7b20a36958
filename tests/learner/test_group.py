"""Replicas of the learner. Invariants: together they take the steps of one learner, up to the order
of sums; they are equal to each other bit by bit; what fails on one is taken back on all and said on
all; nobody waits for the dead.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from learner.replicas import GroupBroken, Replicas, open_store, reach_store
from tests.cluster.processes import finish
from tests.learner.tiny import everything, identical
from tests.learner.together import (
    COUNTS,
    EPS,
    OBJECTIVES,
    OPTIMIZER,
    groups_for,
    scenes_of,
    train,
    trainer_for,
)

ROOT = Path(__file__).parent.parent.parent


def bound_of(objective: str, metrics: list[dict[str, float]]) -> float:
    """6 (8 lr d / E + 2^-25), derived in the first test."""
    d = 1e-6 * min(OPTIMIZER["max_grad_norm"], max(row["grad_norm"] for row in metrics))
    return 6 * (8 * OPTIMIZER["lr"] * d / EPS[objective] + 2**-25)


@pytest.fixture(scope="module")
def two(tiny_sd3_dir, tmp_path_factory) -> Path:
    """What two replicas left of all scenes but one."""
    scenes = [name for name in scenes_of(Path(), Path()) if name != "flow_grpo_sharded"]
    return played(tiny_sd3_dir, tmp_path_factory.mktemp("two"), *scenes)


def played(model: Path, out: Path, *scenes: str) -> Path:
    """What two replicas left of these, in processes of their own that meet over TCP."""
    store, port = open_store("127.0.0.1", 240)
    command = [sys.executable, "-m", "tests.learner.together", "2"]
    replicas = subprocess.Popen(
        [*command, str(port), str(model), str(out), *scenes],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    code, codes, errors = finish(replicas, 900)
    del store
    expected = "0 -9\n" if "dies" in scenes else "0 0\n"  # it kills the second, and is the last
    assert (code, codes) == (0, expected), errors[-4000:]
    return out


def seen(two: Path, scene: str, rank: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    state = safetensors.torch.load((two / f"{scene}.{rank}.safetensors").read_bytes())
    return json.loads((two / f"{scene}.{rank}.json").read_text()), state


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_two_replicas_equal_one_learner_up_to_the_order_of_sums(two, tiny_sd3_dir, objective):
    """Seven samples here and two there, six optimizer steps.

    A gradient is a sum over points in float32. Its terms are added in another order, and batches of
    another size round differently: up to d = 1e-6 |g| per element, as for other batch sizes of one
    learner (test_update), |g| its norm after clipping. AdamW moves a weight by lr m / (sqrt(v) +
    E), m and v weighted means of the steps' g and g^2. An error d in each g moves m by d and
    sqrt(v) by at most sqrt(mean of d^2) = d, so a step changes by at most lr (d / E + d |m| /
    (sqrt(v) + E)^2) < 2 lr d / E, as |m| < 1.1 sqrt(v) over six steps with these betas. Six steps
    add up, and feed back: at a weight that is off by e the gradient is off by L e. With L below
    0.5, weights being of size 0.3 and gradients below 0.04, 2 lr L / E < 0.5 at the first
    objective, an error grows by less than 1.5^5 < 8 in the five steps after it, on average over the
    steps by less than 4. And each step rounds a weight below 1 once, to 2^-25. In all 6 (2 x 4 lr d
    / E + 2^-25). The averages are convex combinations of the weights.
    """
    alone = trainer_for(tiny_sd3_dir, objective)
    metrics = train(alone)
    expected = everything(alone)
    bound = bound_of(objective, metrics)
    start = everything(trainer_for(tiny_sd3_dir, objective))
    notes, states = zip(*(seen(two, objective, rank) for rank in range(2)), strict=True)
    assert identical(*states) and notes[0]["checksum"] == notes[1]["checksum"]
    weights = [name for name in expected if name.startswith(("current/", "old/", "ema/"))]
    apart = max(float((states[0][name] - expected[name]).abs().max()) for name in weights)
    moved = max(float((start[name] - expected[name]).abs().max()) for name in weights)
    assert apart < bound < moved / 100
    for one, here, there in zip(metrics, notes[0]["metrics"], notes[1]["metrics"], strict=True):
        assert here.keys() - one.keys() == {"time/allreduce_s", "time/replica_wait_s"}
        for name in one:
            if not name.startswith("time/"):
                assert here[name] == there[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), (
                    name
                )
        assert one["optimizer/points"] == here["optimizer/points"] and here["time/allreduce_s"] > 0
    assert objective != "flow_grpo" or all(row["loss/clip_share"] == 0 for row in metrics)


def test_replicas_that_share_samples_equal_one_learner(two, tiny_sd3_dir):
    """Four samples here and five there, of the second prompt one each; the bound is that above. The
    training points of a sample come from its place in its prompt, on any replica, so that the
    metrics are those of one learner.
    """
    alone = trainer_for(tiny_sd3_dir, "diffusion_nft")
    metrics = train(alone)
    expected, bound = everything(alone), bound_of("diffusion_nft", metrics)
    notes, states = zip(*(seen(two, "halves", rank) for rank in range(2)), strict=True)
    assert identical(*states) and notes[0]["checksum"] == notes[1]["checksum"]
    weights = [name for name in expected if name.startswith(("current/", "old/", "ema/"))]
    apart = max(float((states[0][name] - expected[name]).abs().max()) for name in weights)
    assert apart < bound
    for one, here, there in zip(metrics, notes[0]["metrics"], notes[1]["metrics"], strict=True):
        for name in (name for name in one if not name.startswith("time/")):
            assert here[name] == there[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name


@pytest.mark.parametrize(
    "objective", ["diffusion_nft", pytest.param("flow_grpo", marks=pytest.mark.slow)]
)
def test_a_sharded_base_does_not_change_bits(two, tiny_sd3_dir, tmp_path, objective):
    """Metrics, images with every kind of weights, what is published and two updates: those of two
    replicas that hold all of it, bit for bit, as what is gathered are the same bits. The replicas
    have three images and twelve to draw, and unequal numbers of batches to train on. Each holds
    half of the base before and after.
    """
    if objective == "flow_grpo":
        two = played(tiny_sd3_dir, tmp_path, objective, f"{objective}_sharded")
    held = []
    for rank in range(2):
        (whole, state), (parts, same) = (
            seen(two, scene, rank) for scene in (objective, f"{objective}_sharded")
        )
        assert identical(state, same)
        for name in ("checksum", "drawn", "published", "probed"):
            assert parts.get(name) == whole.get(name), name
        for one, other in zip(whole["metrics"], parts["metrics"], strict=True):
            for name in (name for name in one if not name.startswith("time/")):
                assert other[name] == one[name], name
        assert parts["held"][1] == parts["held"][2]
        held.append(parts["held"])
    assert held[0][0] == held[1][0] == held[0][1] + held[1][1]
    assert held[0][1] == held[1][1] == held[0][0] / 2
    if objective == "diffusion_nft":
        assert len(set(parts["drawn"])) == 3 and seen(two, objective, 0)[0]["probed"]


def test_failures_with_a_sharded_base_are_reported(two):
    """A loss that is not finite is said once all turns are taken, on both; different weights are
    noticed before a pass; a replica that dies within one is noticed by the other.
    """
    (first, one), (second, other) = (seen(two, "sharded_not_finite", rank) for rank in range(2))
    what = "iteration 0: the loss is nan although every velocity is finite: it overflowed in the"
    assert first["said"].startswith(f"{what} objective (replica 1); weights are as before")
    assert second["said"].startswith(f"{what} objective; weights are as before")
    assert first["unchanged"] and second["unchanged"] and identical(one, other)
    assert first["metrics"][0]["optimizer/points"] == 3 * sum(COUNTS)
    lost, _ = seen(two, "sharded_dies", 0)
    assert lost["said"].startswith("replica 0 of 2 lost the others while training: ")
    assert lost["unchanged"] and not (two / "sharded_dies.1.json").exists()
    for rank in range(2):
        message = seen(two, "sharded_out_of_step", rank)[0]["said"]
        assert message.endswith("for different weights: old, merged, ema, merged")


def test_one_replica_alone_learns_something_else(tiny_sd3_dir):
    """The bound above can fail: without the other's two samples, the weights are a hundred bounds
    apart.
    """
    both = trainer_for(tiny_sd3_dir, "diffusion_nft")
    half = trainer_for(tiny_sd3_dir, "diffusion_nft")
    metrics = train(both, 1)
    half.update(0, groups_for(half, 0, range(0, len(COUNTS), 2)))
    apart = max(
        float((everything(both)[n] - everything(half)[n]).abs().max())
        for n in everything(both)
        if n.startswith("current/")
    )
    assert apart > 100 * bound_of("diffusion_nft", metrics)


def test_a_failure_of_one_replica_is_rolled_back_and_reported_on_both(two):
    (first, one), (second, other) = seen(two, "not_finite", 0), seen(two, "not_finite", 1)
    assert first["unchanged"] and second["unchanged"]
    assert first["said"].startswith(
        "iteration 0: the regenerated latents of prompt 1 are not finite (replica 1); weights are"
        " as before"
    )
    assert second["said"].startswith(
        "iteration 0: the regenerated latents of prompt 1 are not finite; weights are as before"
    )
    # each keeps the part that it holds
    for rank, prompts in ((0, {"0000", "0002"}), (1, {"0001"})):
        with safe_open(two / f"iteration_000000.replica-{rank}.safetensors", "pt") as kept:
            assert {key[7:11] for key in kept.keys() if key.startswith("prompt_")} == prompts  # noqa: SIM118
    assert identical(one, other) and first["metrics"][0]["optimizer/points"] == 3 * sum(COUNTS)


def test_any_other_failure_names_the_replica(two):
    (first, one), (second, other) = seen(two, "fails", 0), seen(two, "fails", 1)
    assert first["said"] == "replica 1 of the learner failed: ArithmeticError: out of order"
    assert second["said"] == "out of order"
    assert first["unchanged"] and second["unchanged"] and identical(one, other)


def test_one_bit_of_difference_is_an_error(two):
    for rank in range(2):
        message = seen(two, "differs", rank)[0]["said"]
        assert message.startswith(
            "the replicas of the learner differ at the start: checksums 0 updates, "
        )


def test_a_dead_replica_is_noticed(two):
    note, _ = seen(two, "dies", 0)
    assert note["said"].startswith("replica 0 of 2 lost the others while ") and note["unchanged"]


def test_a_missing_rendezvous_is_reported():
    store, port = open_store("127.0.0.1", 5)
    del store
    with pytest.raises(GroupBroken, match=f"no answer at 127.0.0.1:{port}"):
        reach_store("127.0.0.1", port, 0.2)


def test_the_rendezvous_listens_on_one_address_only():
    store, port = open_store("127.0.0.1", 5)
    reach_store("127.0.0.1", port, 5).set("word", "here")
    assert store.get("word") == b"here"
    with pytest.raises(GroupBroken):
        reach_store("127.0.0.2", port, 0.2)  # the same machine, another address


def test_a_single_replica_neither_sums_nor_waits():
    alone, tensor = Replicas(), torch.tensor([0.1, -0.0, 3e38])
    before = tensor.clone()
    alone.all_reduce([tensor])
    assert torch.equal(tensor, before)
    assert alone.all_gather({"a": 1}) == [{"a": 1}]
    assert alone.take_times() == {}

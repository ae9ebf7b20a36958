"""Replicas of the learner. Together they take the same steps as one learner, up to the order of
sums. They are equal to each other bit for bit. A failure on one replica is undone and reported on
all. No replica waits for a dead one.
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
from tests.learner.tiny import identical, training_state
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
    """Return the bound 6 (8 lr d / E + 2^-25), which the first test derives."""
    d = 1e-6 * min(OPTIMIZER["max_grad_norm"], max(row["grad_norm"] for row in metrics))
    return 6 * (8 * OPTIMIZER["lr"] * d / EPS[objective] + 2**-25)


@pytest.fixture(scope="module")
def output_dir(tiny_sd3_dir, tmp_path_factory) -> Path:
    """The output directory of two replicas that ran all scenes but one."""
    scenes = [name for name in scenes_of(Path(), Path()) if name != "flow_grpo_sharded"]
    return run_scenes(tiny_sd3_dir, tmp_path_factory.mktemp("two"), *scenes)


def run_scenes(model: Path, out: Path, *scenes: str) -> Path:
    """Run these scenes with two replicas, which are separate processes connected over TCP. Return
    their output directory.
    """
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
    # the scene "dies" kills the second replica and runs last
    expected = "0 -9\n" if "dies" in scenes else "0 0\n"
    assert (code, codes) == (0, expected), errors[-4000:]
    return out


def scene_output(
    output_dir: Path, scene: str, rank: int
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    state = safetensors.torch.load((output_dir / f"{scene}.{rank}.safetensors").read_bytes())
    return json.loads((output_dir / f"{scene}.{rank}.json").read_text()), state


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_two_replicas_match_one_learner_up_to_the_order_of_sums(
    output_dir, tiny_sd3_dir, objective
):
    """The two replicas have seven and two samples and take six optimizer steps.

    A gradient is a sum over points in float32. The replicas add its terms in another order, and
    batches of another size round differently. So each element differs by up to d = 1e-6 |g|, as for
    other batch sizes of one learner (test_update), where |g| is the norm after clipping. AdamW
    changes a weight by lr m / (sqrt(v) + E), where m and v are weighted means of g and g^2 over the
    steps. An error d in each g changes m by d and sqrt(v) by at most sqrt(mean of d^2) = d. So a
    step changes by at most lr (d / E + d |m| / (sqrt(v) + E)^2) < 2 lr d / E, because |m| < 1.1
    sqrt(v) over six steps with these betas.

    The errors of six steps add up and also feed back: if a weight is wrong by e, the gradient is
    wrong by L e. L is below 0.5, because weights are about 0.3 and gradients are below 0.04. With 2
    lr L / E < 0.5 for the first objective, an error grows by less than 1.5^5 < 8 in the five steps
    after it, and on average over the steps by less than 4. Each step also rounds a weight below 1
    once, to 2^-25. The total is 6 (2 x 4 lr d / E + 2^-25). The averages are convex combinations of
    the weights, so the bound holds for them too.
    """
    alone = trainer_for(tiny_sd3_dir, objective)
    metrics = train(alone)
    expected = training_state(alone)
    bound = bound_of(objective, metrics)
    start = training_state(trainer_for(tiny_sd3_dir, objective))
    notes, states = zip(
        *(scene_output(output_dir, objective, rank) for rank in range(2)), strict=True
    )
    assert identical(*states) and notes[0]["checksum"] == notes[1]["checksum"]
    weights = [name for name in expected if name.startswith(("current/", "old/", "ema/"))]
    largest_difference = max(
        float((states[0][name] - expected[name]).abs().max()) for name in weights
    )
    moved = max(float((start[name] - expected[name]).abs().max()) for name in weights)
    assert largest_difference < bound < moved / 100
    for row, first, second in zip(metrics, notes[0]["metrics"], notes[1]["metrics"], strict=True):
        assert first.keys() - row.keys() == {"time/allreduce_s", "time/replica_wait_s"}
        for name in row:
            if not name.startswith("time/"):
                assert (
                    first[name] == second[name] == pytest.approx(row[name], rel=1e-4, abs=1e-7)
                ), name
        assert (
            row["optimizer/points"] == first["optimizer/points"] and first["time/allreduce_s"] > 0
        )
    assert objective != "flow_grpo" or all(row["loss/clip_share"] == 0 for row in metrics)


def test_replicas_that_share_samples_match_one_learner(output_dir, tiny_sd3_dir):
    """The replicas have four and five samples, and each has one sample of the second prompt. The
    bound is that of the test above. The training points of a sample depend on its position in its
    prompt, on any replica, so the metrics equal those of one learner.
    """
    alone = trainer_for(tiny_sd3_dir, "diffusion_nft")
    metrics = train(alone)
    expected, bound = training_state(alone), bound_of("diffusion_nft", metrics)
    notes, states = zip(
        *(scene_output(output_dir, "halves", rank) for rank in range(2)), strict=True
    )
    assert identical(*states) and notes[0]["checksum"] == notes[1]["checksum"]
    weights = [name for name in expected if name.startswith(("current/", "old/", "ema/"))]
    largest_difference = max(
        float((states[0][name] - expected[name]).abs().max()) for name in weights
    )
    assert largest_difference < bound
    for row, first, second in zip(metrics, notes[0]["metrics"], notes[1]["metrics"], strict=True):
        for name in (name for name in row if not name.startswith("time/")):
            assert first[name] == second[name] == pytest.approx(row[name], rel=1e-4, abs=1e-7), name


@pytest.mark.parametrize(
    "objective", ["diffusion_nft", pytest.param("flow_grpo", marks=pytest.mark.slow)]
)
def test_sharded_base_changes_no_bit(output_dir, tiny_sd3_dir, tmp_path, objective):
    """Replicas with a sharded base have the same metrics, images with every kind of weights,
    published weights and results of two updates as replicas with the complete base, bit for bit,
    because the gathered bits are the same. The replicas generate three and twelve images and train
    on different numbers of batches. Each stores half of the base before and after.
    """
    if objective == "flow_grpo":
        output_dir = run_scenes(tiny_sd3_dir, tmp_path, objective, f"{objective}_sharded")
    stored = []
    for rank in range(2):
        (whole, state), (sharded, same) = (
            scene_output(output_dir, scene, rank) for scene in (objective, f"{objective}_sharded")
        )
        assert identical(state, same)
        for name in ("checksum", "generated", "published", "probed"):
            assert sharded.get(name) == whole.get(name), name
        for one, other in zip(whole["metrics"], sharded["metrics"], strict=True):
            for name in (name for name in one if not name.startswith("time/")):
                assert other[name] == one[name], name
        assert sharded["stored_bytes"][1] == sharded["stored_bytes"][2]
        stored.append(sharded["stored_bytes"])
    assert stored[0][0] == stored[1][0] == stored[0][1] + stored[1][1]
    assert stored[0][1] == stored[1][1] == stored[0][0] / 2
    if objective == "diffusion_nft":
        assert (
            len(set(sharded["generated"])) == 3
            and scene_output(output_dir, objective, 0)[0]["probed"]
        )


def test_failures_with_a_sharded_base_are_reported(output_dir):
    """A non-finite loss is reported on both replicas after all turns are taken. Different weights
    are detected before a pass. If a replica dies within a pass, the other detects it.
    """
    (first, one), (second, other) = (
        scene_output(output_dir, "sharded_not_finite", rank) for rank in range(2)
    )
    what = "iteration 0: the loss is nan although every velocity is finite: it overflowed in the"
    assert first["error"].startswith(f"{what} objective (replica 1); weights are as before")
    assert second["error"].startswith(f"{what} objective; weights are as before")
    assert first["unchanged"] and second["unchanged"] and identical(one, other)
    assert first["metrics"][0]["optimizer/points"] == 3 * sum(COUNTS)
    lost, _ = scene_output(output_dir, "sharded_dies", 0)
    assert lost["error"].startswith("replica 0 of 2 lost the others while training: ")
    assert lost["unchanged"] and not (output_dir / "sharded_dies.1.json").exists()
    for rank in range(2):
        message = scene_output(output_dir, "sharded_out_of_step", rank)[0]["error"]
        assert message.endswith("for different weights: old, merged, ema, merged")


def test_training_without_the_other_replica_differs_clearly(tiny_sd3_dir):
    """This shows that the bound above is strict: without the two samples of the other replica, the
    weights differ by more than a hundred bounds.
    """
    both = trainer_for(tiny_sd3_dir, "diffusion_nft")
    half = trainer_for(tiny_sd3_dir, "diffusion_nft")
    metrics = train(both, 1)
    half.update(0, groups_for(half, 0, range(0, len(COUNTS), 2)))
    largest_difference = max(
        float((training_state(both)[n] - training_state(half)[n]).abs().max())
        for n in training_state(both)
        if n.startswith("current/")
    )
    assert largest_difference > 100 * bound_of("diffusion_nft", metrics)


def test_failure_on_one_replica_is_undone_and_reported_on_both(output_dir):
    (first, one), (second, other) = (
        scene_output(output_dir, "not_finite", 0),
        scene_output(output_dir, "not_finite", 1),
    )
    assert first["unchanged"] and second["unchanged"]
    assert first["error"].startswith(
        "iteration 0: the regenerated latents of prompt 1 are not finite (replica 1); weights are"
        " as before"
    )
    assert second["error"].startswith(
        "iteration 0: the regenerated latents of prompt 1 are not finite; weights are as before"
    )
    # each replica saves its own samples
    for rank, prompts in ((0, {"0000", "0002"}), (1, {"0001"})):
        with safe_open(output_dir / f"iteration_000000.replica-{rank}.safetensors", "pt") as saved:
            assert {key[7:11] for key in saved.keys() if key.startswith("prompt_")} == prompts  # noqa: SIM118
    assert identical(one, other) and first["metrics"][0]["optimizer/points"] == 3 * sum(COUNTS)


def test_unexpected_failure_names_the_replica(output_dir):
    (first, one), (second, other) = (
        scene_output(output_dir, "fails", 0),
        scene_output(output_dir, "fails", 1),
    )
    assert first["error"] == "replica 1 of the learner failed: ArithmeticError: out of order"
    assert second["error"] == "out of order"
    assert first["unchanged"] and second["unchanged"] and identical(one, other)


def test_difference_of_one_bit_is_an_error(output_dir):
    for rank in range(2):
        message = scene_output(output_dir, "differs", rank)[0]["error"]
        assert message.startswith(
            "the replicas of the learner differ at the start: checksums 0 updates, "
        )


def test_dead_replica_is_detected(output_dir):
    note, _ = scene_output(output_dir, "dies", 0)
    assert note["error"].startswith("replica 0 of 2 lost the others while ") and note["unchanged"]


def test_unreachable_store_is_an_error():
    store, port = open_store("127.0.0.1", 5)
    del store
    with pytest.raises(GroupBroken, match=f"no answer at 127.0.0.1:{port}"):
        reach_store("127.0.0.1", port, 0.2)


def test_store_listens_only_on_its_own_address():
    store, port = open_store("127.0.0.1", 5)
    reach_store("127.0.0.1", port, 5).set("word", "here")
    assert store.get("word") == b"here"
    with pytest.raises(GroupBroken):
        reach_store("127.0.0.2", port, 0.2)  # another address of the same machine


def test_single_replica_adds_nothing_and_never_waits():
    alone, tensor = Replicas(), torch.tensor([0.1, -0.0, 3e38])
    before = tensor.clone()
    alone.all_reduce([tensor])
    assert torch.equal(tensor, before)
    assert alone.all_gather({"a": 1}) == [{"a": 1}]
    assert alone.take_times() == {}

"""Memory of the learner's identity check: published weights, and a pass of one image."""

from dataclasses import replace

import pytest
import torch

from planning.counted_parts import batch_of
from planning.counting import counts_of
from planning.resident_memory import actor_memory
from policy.families import family_for
from policy.precision.backends import BACKENDS
from tests.planning.plans import run_of

BF16, FP32 = torch.bfloat16, torch.float32
LARGE = 10**12


@pytest.mark.parametrize(
    ("backend", "learner", "changes", "weights"),
    [
        ("bf16", BF16, {}, "broadcast"),
        ("bf16", FP32, {}, "rollout"),  # its weights cannot be used, so it loads them
        ("fp32", FP32, {}, "broadcast"),
        ("fp32", BF16, {}, "rollout"),
        ("emulated_nvfp4", FP32, {}, "broadcast"),  # takes the learner's dtype
        ("bf16", BF16, {"services__learner__shard": "base"}, "rollout"),  # parts of them
        ("bf16", BF16, {"audit__identity_every": 0}, None),
    ],
)
def test_weights_that_the_identity_check_holds(
    tiny_sd3_dir, tmp_path, backend, learner, changes, weights
):
    if "services__learner__shard" in changes:
        changes = {**changes, "services__learner__replicas": 2}
    precision = "bf16" if learner == BF16 else "fp32"
    changes = {"explore__backend": backend, "regenerate__precision": precision, **changes}
    config = run_of("sd3", tiny_sd3_dir, tmp_path, **changes)
    family = family_for(config.model)
    counts = counts_of(config, family, BACKENDS[backend])
    held = []
    for broadcast, rollout in ((LARGE, 2 * LARGE), (0, 0)):
        each = replace(counts, broadcast=broadcast, rollout=rollout)
        memory = actor_memory(config, each, family, backend, learner)["learner"]
        (passes,) = [size for name, size in memory.items() if name.startswith("passes")]
        held.append(passes)
    other = max(counts.merged.peak, counts.training.peak, counts.decode_again)
    if weights is None:
        assert held[0] == held[1] >= other
    else:
        one_image = counts.step.peak // batch_of(config)
        assert held[0] == (LARGE if weights == "broadcast" else 2 * LARGE) + one_image

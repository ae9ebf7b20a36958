"""A run whose learner holds its frozen weights in 8 or 4 bits: rollout actors explore the same
policy.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from policy.precision.backends import BACKENDS
from tests.cluster.local import play
from tests.cluster.runs import tiny_config

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed: pip install '.[base]'",
)


@pytest.mark.parametrize(
    ("base", "backend"), [("int8", "emulated_nvfp4"), ("int8", "fp8"), ("nf4", "fp8")]
)
def test_a_packed_base_is_explored_and_trained(tiny_sd3_dir, tmp_path, base, backend):
    """FP8 runs linears of one input as one product, as all backends on GPUs do."""
    if reason := BACKENDS[backend].unavailable_reason(torch.device("cpu")):
        pytest.skip(reason)
    config = tiny_config(
        tiny_sd3_dir, tmp_path, "packed", lora__base=base, explore__backend=backend,
        audit__identity_every=1,
    )  # fmt: skip
    played = play(config, tmp_path, explorers=2, stop=2)
    checks = [event for event in played.events if event["event"] == "identity_checked"]
    # both rollout actors, versions 0 to 2, from the learner's unpacked weights, packed again
    assert len(checks) == 6 and all(event["error"] == 0 for event in checks)
    assert len(played.rows) == 2 and all(row["grad_norm"] > 0 for row in played.rows.values())
    parts = ("adapter", "ema", "old", "optimizer")
    assert played.files().keys() == {f"{part}.safetensors" for part in parts}

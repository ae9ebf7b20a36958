"""A run whose learner has its frozen weights in 8 bits: rollout actors explore the same policy."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao", reason="torchao is not installed: pip install '.[base]'")

from tests.cluster.runs import adapters, run_here, tiny_config


def test_what_is_explored_is_the_packed_model_and_it_trains(tiny_sd3_dir, tmp_path, undisturbed):
    config = tiny_config(
        tiny_sd3_dir, tmp_path, "packed", iterations=2, lora__base="int8", audit__identity_every=1
    )
    run = run_here(config)
    checks = [event for event in run.events() if event["event"] == "identity_checked"]
    # both rollout actors, versions 0 to 2, from the learner's unpacked weights, packed again
    assert len(checks) >= 4 and all(event["error"] == 0 for event in checks)
    rows = [row for row in run.metrics() if row["kind"] == "iteration"]
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows)
    assert adapters(run, 2).keys() == adapters(undisturbed, 2).keys()

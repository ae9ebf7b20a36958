"""The audit of random seeds measures the agreement over a prompt's whole pool."""

import numpy as np
import pytest

from actors.selector import SelectorActor
from cluster.driver.iteration import image_counts
from configs.load import load
from tests.cluster.local import play
from tests.cluster.runs import tiny_config


def test_every_seed_is_audited_with_equal_probability(tiny_sd3_dir, tmp_path):
    """Selected or not, 3 of 8 in 2,000 draws are 750 each, with a deviation of sqrt(2000 * 3/8 *
    5/8) = 22.

    The limit is 5 of these.
    """
    config = tiny_config(tiny_sd3_dir, tmp_path, "draws", audit__random_seeds=3).model_dump(
        mode="json"
    )
    selector = SelectorActor(config)
    rewards = np.arange(8, dtype=np.float32)
    drawn = [selector.select(0, prompt, rewards).audit for prompt in range(2000)]
    assert {len(set(audit)) for audit in drawn} == {3}
    counts = np.bincount(np.concatenate(drawn), minlength=8)
    assert np.abs(counts - 750).max() < 5 * 22
    rewards[5] = np.nan
    assert all(5 not in selector.select(0, prompt, rewards).audit for prompt in range(100))


def test_image_counts_of_known_settings():
    later = {"selected": 96, "regenerated": 4 * (24 + 3), "updated": 96}
    assert image_counts(load("quickstart", ["audit.random_seeds=3"])) == (4, 4 * 96, later)
    plain = {"selected": 96, "regenerated": 96, "updated": 96}
    assert image_counts(load("quickstart", ["arm=diffusionnft"])) == (4, 4 * 24, plain)


def test_auditing_the_whole_pool_equals_regenerating_it(tiny_sd3_dir, tmp_path):
    """Half of the pool is selected, and the other half is regenerated for the audit.

    Images are generated one at a time, so that bits do not depend on that.
    """
    changes = {
        "iterations": 1,
        "regenerate__batch_size": 1,
        "optimizer__batch_size": 8,
        "audit__random_seeds": 8,
    }
    half = play(tiny_config(tiny_sd3_dir, tmp_path, "half", **changes), tmp_path)
    whole = play(
        tiny_config(tiny_sd3_dir, tmp_path, "whole", **changes, selection__keep=8), tmp_path
    )
    found, expected = half.rows[0], whole.rows[0]
    for name in ("kendall_tau", "spearman_rho", "sign_agreement"):
        assert found[f"audit/random_{name}"] == pytest.approx(expected[f"audit/{name}"], abs=1e-12)
        assert expected[f"audit/random_{name}"] == pytest.approx(
            expected[f"audit/{name}"], abs=1e-12
        )
    assert found["audit/kendall_tau"] != pytest.approx(
        found["audit/random_kendall_tau"], abs=1e-3
    ), "or this tells nothing"
    generated = [
        key for key in half.log if isinstance(key, tuple) and key[0] in ("regenerate", "audit")
    ]
    assert len([key for key in generated if key[0] == "audit"]) == 2
    assert not any(key[0] == "audit" for key in whole.log if isinstance(key, tuple))

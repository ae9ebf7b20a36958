"""A configuration as another arm: settings that the arm would refuse are left out."""

from typing import get_args

import pytest

from configs.arms import OF_TWO_STAGES, TWO_STAGES, Arm, set_arm
from configs.load import ConfigError, load_tree, parse

GIVEN = {
    "explore_ahead": "1",
    "audit.random_seeds": "2",
    "audit.min_sign_agreement": "0.5",
    "audit.min_tau": "0.2",
    "audit.action": '"finer_backend"',
    "explore.height": "16",
    "explore.width": "16",
    "explore.decoder": '"tiny"',
}


@pytest.mark.parametrize("arm", get_args(Arm))
def test_every_arm_runs_with_settings_that_only_two_stages_have(arm):
    tree = load_tree("quickstart", [f"{key}={value}" for key, value in GIVEN.items()])
    before = parse(tree)
    if arm != TWO_STAGES:
        with pytest.raises(ConfigError, match=f"arm '{arm}' .*: (leave|use)"):
            parse({**tree, "arm": arm})
    set_arm(tree, arm)
    config = parse(tree)
    assert config.arm == arm
    given = config.model_dump(exclude_unset=True)
    names = {f"{name}.{key}" for name in ("audit", "explore") for key in given.get(name, {})}
    kept = {*names, *given} & set(OF_TWO_STAGES)
    assert kept == (set(GIVEN) if arm == TWO_STAGES else set())
    assert config.explore.steps == before.explore.steps and config.regenerate == before.regenerate

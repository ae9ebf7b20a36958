"""Objectives in a configuration: their defaults, the settings that they imply, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.load import LAYERS, ConfigError, load, parse
from configs.objectives import OBJECTIVES, SETTINGS
from learner.objectives.awm import AWMSettings
from learner.objectives.dance_grpo import DanceGRPOSettings
from learner.objectives.diffusion_nft import DiffusionNFTSettings
from learner.objectives.flow_grpo import FlowGRPOSettings

BASE = 'layers = ["models/shapes", "rewards/shapes"{more}]\nname = "a"\n'


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load("quickstart", overrides)
    (line,) = error.value.lines
    assert "\n" not in line
    return line


def test_defaults_equal_those_of_the_paper():
    awm, flow, dance = AWMSettings(), FlowGRPOSettings(), DanceGRPOSettings()
    assert (awm.weighting, awm.huber_power, awm.ratio_clip, awm.kl, awm.ema) == (
        "ghuber",
        0.25,
        1.0,
        1e-3,
        1.0,
    )
    assert (awm.ema_slope, awm.ema_cap, awm.times_per_sample, awm.schedule_fraction) == (
        0.001,
        0.3,
        6,
        0.9,
    )
    assert (flow.eta, flow.ratio_clip, flow.advantage_clip, flow.kl) == (0.7, 1e-4, 5.0, 0.04)
    assert (dance.eta, dance.ratio_clip, dance.step_fraction, dance.shared_noise) == (
        0.3,
        1e-4,
        0.6,
        False,
    )


@pytest.mark.parametrize(
    ("name", "settings", "solver", "old", "std", "eps"),
    [
        ("diffusion_nft", DiffusionNFTSettings, "dpmpp_2m", "linear_cap", "global", 1e-4),
        ("awm", AWMSettings, "dpmpp_2m", "constant", "global", 1e-4),
        ("flow_grpo", FlowGRPOSettings, "flow_sde", "constant", "global", 1e-4),
        ("dance_grpo", DanceGRPOSettings, "dance_sde", "constant", "group", 1e-8),
    ],
)
def test_an_objective_is_one_field_and_brings_its_own_sampling(
    name, settings, solver, old, std, eps
):
    config = load("quickstart", [f"objective.name={name}"])
    assert type(config.objective) is settings and config.plan.solver == solver
    assert (config.resolved_old_policy.schedule, config.resolved_old_policy.value) == (old, 0.0)
    assert (config.resolved_advantages.std, config.resolved_advantages.eps) == (std, eps)
    assert parse(config.model_dump(mode="json")) == config  # as it is sent to the actors
    assert config.plan.explore.solver == "dpmpp_2m"  # exploration stays deterministic


def test_configured_values_override_those_of_the_objective():
    config = load(
        "quickstart",
        [
            "objective.name=dance_grpo",
            "advantages.std=global",
            "old_policy.value=0.25",
            "advantages.eps=0.5",
        ],
    )
    assert (config.resolved_advantages.std, config.resolved_advantages.eps) == ("global", 0.5)
    assert (config.resolved_old_policy.schedule, config.resolved_old_policy.value) == (
        "constant",
        0.25,
    )
    config = load("quickstart", ["old_policy.schedule=constant", "regenerate.solver=euler"])
    assert config.resolved_old_policy.schedule == "constant" and config.plan.solver == "euler"


def test_a_table_without_a_name_is_diffusion_nft():
    assert load("quickstart", ["objective.beta=0.5"]).objective == DiffusionNFTSettings(beta=0.5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_has_a_layer(name, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(BASE.format(more=f', "objectives/{name}"'))
    config = load(str(file))
    assert config.objective.name == name and config.objective == SETTINGS[name]()
    assert config.model.shift == (3.0 if name == "dance_grpo" else None)
    assert set(OBJECTIVES) <= {path.stem for path in (LAYERS / "objectives").glob("*.toml")}


@pytest.mark.parametrize("name", ["diffusion_nft", "awm"])
@pytest.mark.parametrize("solver", ["flow_sde", "dance_sde"])
def test_deterministic_objectives_refuse_stochastic_solvers(name, solver):
    message = refusal(f"objective.name={name}", f"regenerate.solver={solver}")
    assert message.startswith(f"regenerate.solver: '{solver}' with objective '{name}'")
    assert "use dpmpp_2m or euler or unipc" in message


@pytest.mark.parametrize(
    ("name", "own", "other"),
    [("flow_grpo", "flow_sde", "dance_sde"), ("dance_grpo", "dance_sde", "flow_sde")],
)
def test_objectives_on_paths_accept_only_their_solver(name, own, other):
    for solver in ("dpmpp_2m", "euler", other):
        message = refusal(f"objective.name={name}", f"regenerate.solver={solver}")
        assert message.startswith(f"regenerate.solver: '{solver}' with objective '{name}'")
        assert f"use {own}" in message
    assert (
        load("quickstart", [f"objective.name={name}", f"regenerate.solver={own}"]).plan.solver
        == own
    )


@pytest.mark.parametrize("name", ["flow_grpo", "dance_grpo"])
def test_objectives_on_paths_refuse_explored_samples(name):
    assert "its samples are quantized" in refusal(f"objective.name={name}", "arm=naive_quant")
    assert "merged, rounded weights" in refusal(f"objective.name={name}", "arm=naive_scaling")
    for arm in ("sol_rl", "diffusionnft"):
        assert load("quickstart", [f"objective.name={name}", f"arm={arm}"]).plan.regenerate


@pytest.mark.parametrize("name", ["diffusion_nft", "awm"])
def test_deterministic_objectives_run_in_every_arm(name):
    for arm in ("diffusionnft", "naive_scaling", "naive_quant", "sol_rl"):
        assert (
            load("quickstart", [f"objective.name={name}", f"arm={arm}"]).plan.solver == "dpmpp_2m"
        )


def test_shared_noise_is_refused_if_seeds_are_selected():
    message = refusal("objective.name=dance_grpo", "objective.shared_noise=true")
    assert message.startswith("objective.shared_noise: arm 'sol_rl' selects among initial noises")
    assert (
        load(
            "quickstart",
            ["objective.name=dance_grpo", "objective.shared_noise=true", "arm=diffusionnft"],
        ).plan.explore
        is None
    )
    shared = ["objective.name=dance_grpo", "objective.shared_noise=true"]
    explored = load("quickstart", [*shared, "explore.paths=true", "explore.steps=10"]).plan.explore
    assert explored is not None and explored.solver == "dance_sde"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["objective.name=awm"],
            "explore.paths: objective 'awm' does not train on stochastic paths",
        ),
        (["objective.name=flow_grpo"], "all explored: use 10, or explore.paths = false"),
        (
            ["objective.name=flow_grpo", "objective.window.size=3", "explore.steps=3"],
            "explore.steps: 3, but paths of 10 steps are stochastic up to step 3, and these"
            " steps are all explored: use 4 to 10, or explore.paths = false",
        ),
        (
            ["objective.name=flow_grpo", "objective.window.size=3", "explore.steps=11"],
            "use 4 to 10",
        ),
        (
            [
                "objective.name=flow_grpo",
                "objective.window.size=3",
                "objective.window.schedule=random",
            ],
            "are stochastic up to step 9",
        ),
        (
            [
                "objective.name=flow_grpo",
                "objective.window.size=3",
                "explore.height=16",
                "explore.width=16",
            ],
            "explore.paths: the noise of a path's steps is that of full-size images",
        ),
    ],
)
def test_paths_that_cannot_be_explored_are_refused(overrides, message):
    assert message in refusal("explore.paths=true", *overrides)


@pytest.mark.parametrize(
    ("name", "few", "enough"), [("awm", 2, 3), ("dance_grpo", 1, 2), ("flow_grpo", 1, 2)]
)
def test_a_schedule_too_short_to_train_on_is_refused(name, few, enough):
    assert f"with {few} objective '{name}' has no step to train on" in refusal(
        f"objective.name={name}", f"regenerate.steps={few}"
    )
    assert load(
        "quickstart", [f"objective.name={name}", f"regenerate.steps={enough}"]
    ).objective.trained_steps(enough)


def test_trained_steps_of_each_objective():
    # the first nine of ten, except the first
    assert list(AWMSettings().trained_steps(10)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert list(FlowGRPOSettings().trained_steps(10)) == list(range(9))
    assert list(DanceGRPOSettings().trained_steps(10)) == list(range(9))
    assert list(DiffusionNFTSettings().trained_steps(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["objective.name=awmm"],
            (
                "objective.name = 'awmm': one of diffusion_nft, awm, flow_grpo, dance_grpo is"
                " expected (did you mean 'awm'?)"
            ),
        ),
        (["objective=3"], "objective = 3: a table is expected"),
        (
            ["objective.name=awm", "objective.ratio_clip=-1"],
            "objective.ratio_clip = -1: Input should be greater than 0",
        ),
        (
            ["objective.name=awm", "objective.ratio_clap=1"],
            "objective.ratio_clap: no such key (did you mean 'ratio_clip'?)",
        ),
        (
            ["objective.name=awm", "objective.shared_noise=true"],
            "objective.shared_noise: no such key",
        ),
        (["explore.solver=flow_sde"], "explore.solver = 'flow_sde'"),
    ],
)
def test_mistakes_are_reported_in_the_users_spelling(overrides, message):
    assert refusal(*overrides).startswith(message)


def test_the_documentation_lists_every_key():
    rows = [
        line.split("|")[1:3]
        for line in Path("docs/configuration.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    listed = {
        name.strip(" `"): set(keys.replace("`", "").replace(",", " ").split())
        for name, keys in rows
    }
    for name, settings in SETTINGS.items():
        assert listed[name] == settings.model_fields.keys() - {"name"}

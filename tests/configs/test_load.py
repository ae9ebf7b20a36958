"""Configuration: the paper's defaults, layers, overrides, and one line per error."""

import subprocess
import sys

import pytest

from configs.load import ConfigError, layer, load, parse, preset_names
from configs.prompts import read_prompts
from configs.resume import differences
from configs.schema import RunConfig

MINIMAL = {
    "name": "a",
    "model": {"path": "shapes"},
    "prompts": {"train": "a.txt", "test": "b.txt"},
    "rewards": {"scorers": [{"name": "shapes"}]},
}


def lines(source: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(source, overrides)
    return error.value.lines


def test_defaults_equal_those_of_the_paper():
    config = RunConfig.model_validate(MINIMAL)
    assert (
        config.explore.pool_size,
        config.explore.steps,
        config.regenerate.steps,
        config.evaluate.steps,
    ) == (96, 6, 10, 40)
    assert (config.selection.keep, config.prompts.per_iteration, config.ema.decay) == (24, 48, 0.9)
    assert (
        config.lora.rank,
        config.lora.alpha,
        config.optimizer.lr,
        config.objective.beta,
        config.objective.kl,
    ) == (32, 64, 3e-4, 1.0, 1e-4)
    assert (config.old_policy.slope, config.old_policy.cap) == (0.001, 0.5)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads(name):
    assert load(name).name


@pytest.mark.parametrize(
    ("arm", "explores", "regenerates"),
    [
        ("diffusionnft", None, True),
        ("naive_scaling", (96, 10, "bf16"), False),
        ("naive_quant", (96, 10, "auto"), False),
        ("sol_rl", (96, 6, "auto"), True),
    ],
)
def test_an_arm_is_one_field(arm, explores, regenerates):
    plan = parse({**MINIMAL, "arm": arm}).plan
    found = plan.explore and (plan.explore.pool_size, plan.explore.steps, plan.explore.backend)
    assert (found, plan.regenerate) == (explores, regenerates)


def test_a_later_layer_wins_and_an_override_comes_last(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'layers = ["models/shapes", "rewards/shapes"]\nname = "mine"\n[explore]\nsteps ='
        " 4\npool_size = 48\n"
    )
    config = load(str(file), ["explore.steps=3", "name=other-1"])
    assert (config.explore.steps, config.explore.pool_size, config.name, config.model.height) == (
        3,
        48,
        "other-1",
        32,
    )


def test_a_misspelt_key_names_the_nearest():
    (line,) = lines("quickstart", "explore.stepz=3")
    assert line.startswith("explore.stepz: no such key (did you mean 'steps'?)")
    assert "pool_size" in line


def test_a_wrong_value_names_key_value_and_choices():
    (line,) = lines("quickstart", "arm=solrl")
    assert line.startswith("arm = 'solrl'")
    assert "'naive_quant'" in line
    assert "did you mean 'sol_rl'" in line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("selection.keep=200", "200 samples cannot be kept out of explore.pool_size = 96"),
        ("selection.keep=7", "7 is odd"),
        ("name=../up", "letters, digits"),
        ("seed=-1", "seed = -1"),
        ("audit.random_seeds=97", "more than explore.pool_size = 96"),
        ("explore", "expected key=value"),
        ("name.x=1", "name is a value, not a table"),
        ("services.learner.gpus=2", "set learner.replicas = 2 and learner.gpus = 1 to use as many"),
        ("services.rollout.gpus=3", "set rollout.actors = 3 and rollout.gpus = 1 to use as many"),
    ],
)
def test_impossible_values_are_one_line(override, message):
    (line,) = lines("quickstart", override)
    assert message in line and "\n" not in line


def test_unknown_preset_file_and_layer(tmp_path):
    assert "did you mean 'quickstart'" in lines("quikstart")[0]
    assert "file not found" in lines("missing.toml")[0]
    file = tmp_path / "x.toml"
    file.write_text('layers = ["models/shape"]')
    assert "did you mean 'models/shapes'" in lines(str(file))[0]
    file.write_text("a = [")
    assert "not readable as TOML" in lines(str(file))[0]


def test_every_wrong_line_is_reported_at_once():
    assert len(lines("quickstart", "explore.stepz=3", "seed=-1")) == 2


def test_resume_accepts_operational_changes_only():
    before = load("quickstart")
    same = load(
        "quickstart",
        ["services.rollout.actors=5", "logging.prometheus_port=9000", "checkpoint.every=3"],
    )
    assert differences(before, same) == []
    changed = load("quickstart", ["explore.steps=4", "services.rollout.threads=2"])
    assert differences(before, changed) == [
        "explore.steps: 6 -> 4",
        "services.rollout.threads: 1 -> 2",
    ]


def test_resume_keeps_services_on_the_kind_of_device_that_they_were_on():
    scorer = "services.scorers={shapes = {gpus = %s}}"
    for key in ("services.learner.gpus", "services.encoder.gpus", "services.reward.gpus"):
        assert differences(load("quickstart"), load("quickstart", [f"{key}=1"])) == [
            f"{key}: 0.0 -> 1.0"
        ]
        assert differences(load("quickstart", [f"{key}=0.5"]), load("quickstart")) == [
            f"{key}: 0.5 -> 0.0"
        ]
        assert (
            differences(load("quickstart", [f"{key}=0.5"]), load("quickstart", [f"{key}=1"])) == []
        )
    assert differences(load("quickstart", [scorer % 0]), load("quickstart", [scorer % 0.25])) == [
        "services.scorers.shapes.gpus: 0.0 -> 0.25"
    ]
    # checked where the label is known
    assert differences(load("quickstart"), load("quickstart", ["services.rollout.gpus=1"])) == []


def test_more_iterations_are_a_change_only_under_a_schedule_that_depends_on_them():
    schedule = "optimizer.schedule=constant"
    assert (
        differences(load("quickstart", [schedule]), load("quickstart", [schedule, "iterations=99"]))
        == []
    )
    assert differences(load("quickstart"), load("quickstart", ["iterations=99"])) == [
        f"iterations: {load('quickstart').iterations} -> 99"
    ]


def test_reading_a_configuration_imports_neither_torch_nor_ray():
    code = (
        "import sys, cli.main; from configs.load import load; load('quickstart');"
        " load('flux1-sol_rl-hpsv2');"
        " print(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


@pytest.mark.parametrize("name", ["x" * 5000, "y" * 300 + ".toml"], ids=["preset", "file"])
def test_a_name_that_no_file_can_have_is_one_line(name):
    """For such names, unlike others, Path.is_file raises."""
    with pytest.raises(ConfigError, match="no preset of that name|file not found"):
        load(name)
    with pytest.raises(ConfigError, match="unknown layer"):
        layer(name, "here")
    with pytest.raises(ConfigError, match="cannot be read .File name too long."):
        read_prompts(name)


DEEP = ".".join("a" * 3000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = " + "1" * 5000, "not readable as TOML: Exceeds the limit"),
        ("a = " + "[" * 100_000, "not readable as TOML: maximum recursion depth"),
        # the second message: Python 3.14
        (f"{DEEP} = 1", "tables are nested too deeply|TOML key has more than the allowed"),
    ],
    ids=["too many digits", "too deep a value", "too deep a key"],
)
def test_what_python_cannot_take_in_is_one_line(tmp_path, text, message):
    (tmp_path / "run.toml").write_text(text)
    for source, overrides in ((str(tmp_path / "run.toml"), []), ("quickstart", [text])):
        with pytest.raises(ConfigError, match=message) as error:
            load(source, overrides)
        assert len(error.value.lines) == 1

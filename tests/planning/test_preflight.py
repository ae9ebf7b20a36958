"""Checks of a configuration against its model that need no weights."""

import pytest

from cli.main import main
from configs.load import ConfigError
from planning.preflight import check_model
from tests.cluster.runs import tiny_config, write_toml
from tests.tiny_families import SETTINGS


def config_of(directory, root, **changes):
    model = {"family": "qwen_image", **SETTINGS["qwen_image"]}
    changes |= {f"model__{key}": value for key, value in model.items()}
    return tiny_config(directory, root, "short", **changes)


@pytest.mark.parametrize("key", ["explore", "regenerate", "evaluate"])
def test_a_schedule_that_needs_two_steps_is_checked_before_anything_starts(
    key, tiny_qwen_image_dir, tmp_path
):
    """Qwen-Image's schedule ends above 0 (shift_terminal). Its first task failed in the actors."""
    check_model(config_of(tiny_qwen_image_dir, tmp_path))
    short = config_of(tiny_qwen_image_dir, tmp_path, **{f"{key}__steps": 1})
    with pytest.raises(ConfigError, match=rf"{key}.steps: 1: the schedule of .* at least 2"):
        check_model(short)
    check_model(
        config_of(tiny_qwen_image_dir, tmp_path, model__schedule="uniform", explore__steps=1)
    )


@pytest.mark.parametrize(
    "command",
    [
        ["fidelity", "--seeds", "8", "--prompts", "1", "--steps", "1"],
        ["tune", "--seeds", "8", "--prompts", "1", "--steps", "2", "1"],
        ["signal", "--pools", "8", "--prompts", "1", "--batches", "3", "--steps", "1"],
        ["plan", "--set", "explore.steps=1"],
    ],
    ids=lambda command: command[0],
)
def test_commands_check_the_steps_that_they_were_given(
    command, tiny_qwen_image_dir, tmp_path, capsys
):
    name, *options = command
    path = write_toml(config_of(tiny_qwen_image_dir, tmp_path), tmp_path)
    out = [] if name == "plan" else ["--out", str(tmp_path / "out")]
    assert main([name, str(path), *options, *out]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("explore.steps: 1: the schedule of") and line.endswith("at least 2")

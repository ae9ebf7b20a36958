"""Checks of a configuration against its model that need no weights."""

import pytest
import torch
from safetensors.torch import save_file

from cli.main import main
from configs.load import ConfigError
from planning.plan import make_plan
from planning.preflight import check_model
from tests.cluster.runs import tiny_config, write_toml
from tests.tiny_decoder import write_tiny_decoder
from tests.tiny_families import SETTINGS


def config_of(directory, root, **changes):
    model = {"family": "qwen_image", **SETTINGS["qwen_image"]}
    of_model = {f"model__{key}": value for key, value in model.items()}
    return tiny_config(directory, root, "short", **of_model | changes)


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


SETTINGS_OF_MODEL = {
    "explore.decoder: no AutoencoderTiny decodes latents": {"explore__decoder": "tiny"},
    "lora.targets: no linear layer of the transformer": {"lora__targets": ["nothing"]},
    "explore.modules_to_not_convert: 'nothing' matches": {
        "explore__modules_to_not_convert": ["nothing"]
    },
    "lora.base: no layer of the model can be packed": {
        "lora__base": "int8",
        "explore__modules_to_not_convert": ["*"],
    },
}


@pytest.mark.parametrize("message", SETTINGS_OF_MODEL)
def test_settings_that_do_not_suit_the_model_are_refused_by_train_and_plan(
    message, tiny_qwen_image_dir, tmp_path
):
    config = config_of(tiny_qwen_image_dir, tmp_path, **SETTINGS_OF_MODEL[message])
    with pytest.raises(ConfigError) as trained:
        check_model(config)
    with pytest.raises(ConfigError) as planned:
        make_plan(config)
    assert str(trained.value) == str(planned.value)
    assert str(trained.value).startswith(message)


def test_a_size_of_proxies_is_refused_by_its_own_name(tiny_sana_dir, tmp_path, capsys):
    model = {**SETTINGS["sana"], "family": "sana", "height": 64, "width": 64}
    changes = {f"model__{key}": value for key, value in model.items()}
    changes |= {"explore__height": 16, "explore__width": 16}
    path = write_toml(tiny_config(tiny_sana_dir, tmp_path, "small", **changes), tmp_path)
    for command in ("plan", "train"):
        assert main([command, str(path)]) == 2
        expected = "explore.height: 16 pixels; this model needs multiples of 32\n"
        assert capsys.readouterr().err == expected


def test_a_plan_refuses_a_tiny_decoder_of_other_latents_but_not_a_missing_one(
    tiny_sd3_dir, tmp_path
):
    other = write_tiny_decoder(tmp_path / "other", channels=7)
    changes = {"explore__decoder": "tiny", "explore__decoder_path": other}
    with pytest.raises(ConfigError, match="'.*other' does not accept this model's latents"):
        make_plan(tiny_config(tiny_sd3_dir, tmp_path, "other", **changes))
    changes["explore__decoder_path"] = str(tmp_path / "elsewhere")
    plan = make_plan(tiny_config(tiny_sd3_dir, tmp_path, "missing", **changes))
    assert "tiny autoencoder, fp32" in plan.memory["rollout"]


def test_a_lora_to_start_from_is_checked_before_anything_starts(tiny_sd3_dir, tmp_path):
    """Shapes are compared without loading the model's weights."""
    lora = tmp_path / "lora.safetensors"

    def config(rank):
        changes = {"lora__targets": ["attn.to_q"], "lora__rank": rank}
        return tiny_config(tiny_sd3_dir, tmp_path, "run", lora__init_from=str(lora), **changes)

    with pytest.raises(ConfigError, match="lora.init_from: .* not found"):
        check_model(config(4))
    tensors = {}
    for block in (0, 1):
        name = f"transformer.transformer_blocks.{block}.attn.to_q"
        tensors[f"{name}.lora_A.weight"] = torch.ones(4, 32)
        tensors[f"{name}.lora_B.weight"] = torch.ones(32, 4)
    save_file(tensors, lora)
    check_model(config(4))
    with pytest.raises(ConfigError, match="is 32x32 of rank 4, but 32x32 of rank 3 is expected"):
        check_model(config(3))
    name = "transformer.transformer_blocks.0.ff.net.2"
    tensors[f"{name}.lora_A.weight"] = torch.ones(4, 128)
    tensors[f"{name}.lora_B.weight"] = torch.ones(32, 4)
    save_file(tensors, lora)
    targets = r'\["transformer_blocks.\*.attn.to_q", "transformer_blocks.\*.ff.net.2"\]'
    with pytest.raises(ConfigError, match=f"not in lora.targets: set lora.targets = {targets}"):
        check_model(config(4))


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, True),
        ({"services__rollout__gpus": 1.0}, False),
        ({"layout__mode": "auto"}, False),  # it will assign GPUs
        ({"layout__mode": "auto", "services__rollout__gpus": 0.0}, True),
    ],
)
def test_a_format_of_gpus_is_refused_only_where_rollout_actors_get_none(
    changes, refused, tiny_qwen_image_dir, tmp_path
):
    config = config_of(tiny_qwen_image_dir, tmp_path, explore__backend="torch_nvfp4", **changes)
    if not refused:
        check_model(config)
        return
    with pytest.raises(ConfigError, match="'torch_nvfp4' does not run on cpu here"):
        check_model(config)

"""Invalid models are refused with one clear line before anything is started or loaded."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.driver.train import train
from configs.load import ConfigError
from configs.sections import Model
from policy.families import family_for
from records.images import png_bytes
from tests.cluster.runs import tiny_config
from tests.tiny_families import SETTINGS, source_for, tiny_model


@pytest.fixture
def copied(directory, tmp_path) -> Path:
    """A copy of the model directory that a test may damage."""
    return shutil.copytree(directory, tmp_path / "model")


def test_missing_component_is_named(copied, name):
    shutil.rmtree(copied / "vae")
    with pytest.raises(
        FileNotFoundError,
        match=f"lacks its 'vae', which family '{name}' needs: download the complete pipeline",
    ):
        family_for(tiny_model(name, copied))


def test_missing_weights_are_named_before_anything_is_loaded(copied, name):
    """The test covers a component without weights, one missing file of several, and weights in a
    format that could run code.
    """
    family = family_for(tiny_model(name, copied))
    family.check_weights()
    weights = copied / "text_encoder" / "model.safetensors"
    index = copied / "text_encoder" / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2-of-2.safetensors"}})
    )
    with pytest.raises(
        FileNotFoundError,
        match="the 'text_encoder' of .* lacks its weights, model-2-of-2.safetensors: download",
    ):
        family.check_weights()
    index.write_text("{}")
    with pytest.raises(
        ValueError,
        match=r"model.path: .*index.json' cannot be read \(KeyError\): download it again",
    ):
        family.check_weights()
    index.unlink()
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(
        FileNotFoundError,
        match=(
            r"lacks its weights, \*\.safetensors: download the complete pipeline, as safetensors"
        ),
    ):
        family.check_weights()


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
def test_missing_weight_is_an_error(copied, name, part):
    """Without this check, diffusers fails without naming the weight, and transformers continues
    with a random weight.
    """
    (file,) = (copied / part).glob("*.safetensors")
    weights = load_file(file)
    del weights[missing := max(weights, key=lambda key: (weights[key].numel(), key))]
    save_file(weights, file, {"format": "pt"})
    family = family_for(tiny_model(name, copied))
    last = missing.rpartition(".")[2]
    with pytest.raises(
        FileNotFoundError,
        match=rf"the '{part}' of .* lacks 1 of its \d+ weights, such as .*{last}: download it",
    ):
        if part == "text_encoder":
            family.load_text("cpu", torch.float32)
        else:
            family.load(part, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("part", "setting", "value", "why"),
    [
        ("transformer", "num_layers", "abc", "'str' object cannot be interpreted"),
        ("vae", "latent_channels", 3, "expected shape .* but got"),
        ("text_encoder", "hidden_size", "abc", "'hidden_size'.* expected int"),
        ("text_encoder", "hidden_act", "nope", "nope"),
    ],
)
def test_a_part_that_cannot_be_built_is_named_with_the_reason(
    tiny_sd3_dir, tmp_path, part, setting, value, why
):
    model = shutil.copytree(tiny_sd3_dir, tmp_path / "model")
    file = model / part / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), setting: value}))
    family = family_for(tiny_model("sd3", model))
    with pytest.raises(
        ValueError,
        match=rf"^model.path: cannot load '{part}' of .*/model' from its files \(.*{why}.*\):"
        " download the pipeline again$",
    ):
        if part == "text_encoder":
            family.load_text("cpu", torch.float32)
        else:
            family.load(part, "cpu", torch.float32)


def test_a_device_without_memory_is_no_fault_of_the_files(tiny_sd3_dir, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("diffusers.AutoencoderKL.from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        family_for(tiny_model("sd3", tiny_sd3_dir)).load("vae", "cuda", torch.float32)


def test_weights_that_could_run_code_are_not_read(copied, name):
    """The loaders of diffusers and transformers fall back to pickled weights if safetensors files
    are missing. Our loader raises an error that names the missing file.
    """
    part = copied / "transformer"
    torch.save(
        family_for(tiny_model(name, copied)).load("transformer", "cpu", torch.float32).state_dict(),
        part / "diffusion_pytorch_model.bin",
    )
    (part / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"model.path: cannot load 'transformer' of .*diffusion_pytorch_model.safetensors",
    ):
        family_for(tiny_model(name, copied)).load_transformer("cpu", torch.float32)
    text = copied / "text_encoder"
    (text / "model.safetensors").rename(text / "pytorch_model.bin")
    with pytest.raises(
        FileNotFoundError, match=r"model.path: cannot load 'text_encoder' of .*model.safetensors"
    ):
        family_for(tiny_model(name, copied)).load_text("cpu", torch.float32)


def test_component_missing_in_the_index_is_refused(copied, name):
    index = copied / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "text_encoder": [None, None]}))
    with pytest.raises(FileNotFoundError, match="lacks its 'text_encoder'"):
        family_for(tiny_model(name, copied))


def test_component_of_another_class_is_refused(copied, name):
    index = copied / "model_index.json"
    index.write_text(
        json.dumps(
            {**json.loads(index.read_text()), "transformer": ["diffusers", "DiTTransformer2DModel"]}
        )
    )
    with pytest.raises(
        ValueError, match=f"'transformer' of .* is a DiTTransformer2DModel; family '{name}' takes "
    ):
        family_for(tiny_model(name, copied))


@pytest.mark.parametrize("part", ["transformer", "image_encoder"])
def test_part_of_an_unknown_library_is_never_imported(copied, name, part):
    """A model index may come from anyone, and the library that it names is code. The second part is
    one that the families do not use but some pipelines of diffusers would load.
    """
    index = copied / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {part: ["stranger", "Model"]}))
    with pytest.raises(ValueError, match=f"'{part}' of .* is of 'stranger': only parts"):
        family_for(tiny_model(name, copied))


def test_unsupported_pipeline_is_refused_with_the_supported_ones(copied, name):
    index = copied / "model_index.json"
    index.write_text(
        json.dumps({**json.loads(index.read_text()), "_class_name": "PixArtSigmaPipeline"})
    )
    with pytest.raises(
        ValueError,
        match="contains a PixArtSigmaPipeline; supported are StableDiffusion3Pipeline .*Flux.*Sana",
    ):
        family_for(tiny_model(name, copied))


def test_family_that_does_not_match_the_pipeline_is_refused(directory, name):
    other = "flux" if name != "flux" else "sana"
    with pytest.raises(
        ValueError, match=f"but family '{other}' is a .*: change model.path or model.family"
    ):
        family_for(Model(family=other, path=str(directory)))


def test_damaged_or_missing_configuration_file_is_refused(copied, name):
    (copied / "transformer" / "config.json").write_text("{")
    with pytest.raises(
        ValueError, match=r"model.path: transformer/config.json of .* cannot be read"
    ):
        family_for(tiny_model(name, copied)).check()
    (copied / "transformer" / "config.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=("has no transformer/config.json: download the complete pipeline")
    ):
        family_for(tiny_model(name, copied)).check()


def test_guidance_is_refused_for_models_without_a_guidance_embedding(tiny_sd3_dir):
    with pytest.raises(
        ValueError,
        match=r"model\.guidance: .* has no guidance embedding: leave out model\.guidance",
    ):
        family_for(tiny_model("sd3", tiny_sd3_dir, guidance=3.5)).check()


def test_hub_id_without_network_or_cache_is_refused(monkeypatch, tmp_path):
    """The test simulates a machine without network: it sets the offline option of the hub client
    and an empty cache.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=r"hub cannot be reached \(\w+\): run `hf download owner/model`"
    ) as caught:
        family_for(Model(path="owner/model"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("flux_kontext", {}, "'redder' has no image to edit, which family 'flux_kontext' needs"),
        (
            "sd3",
            {"image": "a.png"},
            "'redder' has an image, but family 'sd3' does not edit images: leave",
        ),
        ("flux_kontext", {"image": "no.png"}, r"no.png: cannot be read as an image \(No such file"),
        (
            "flux_kontext",
            {"image": "a.txt"},
            r"a.txt: cannot be read as an image \(cannot identify",
        ),
    ],
)
def test_invalid_images_to_edit_are_refused_before_anything_starts(
    request, tmp_path, name, line, message
):
    (tmp_path / "a.png").write_bytes(png_bytes(source_for("redder", 16, 16)))
    (tmp_path / "a.txt").write_text("no image")
    file = tmp_path / "edits.jsonl"
    good = {"image": "a.png"} if name == "flux_kontext" else {}
    lines = [{"prompt": "first", **good}, {"prompt": "redder", **line}]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    directory = request.getfixturevalue(f"tiny_{name}_dir")
    model = {f"model__{key}": value for key, value in SETTINGS[name].items()}
    prompts = {f"prompts__{key}": str(file) for key in ("train", "test")}
    changes = {"model__family": name, **prompts, **model}
    with pytest.raises(ConfigError) as caught:
        train(tiny_config(directory, tmp_path, "bad", **changes), resume=False)
    (error_line,) = caught.value.lines
    assert re.search(message, error_line) and "\n" not in error_line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model__path": "nobody/nothing"}, "run `hf download nobody/nothing`"),
        (
            {"model__height": 24, "model__family": "sana"},
            "is a StableDiffusion3Pipeline, but family|but family 'sana'",
        ),
        (
            {"model__width": 40},
            ("model.width: 40 pixels; this model needs multiples of 4 up to 32"),
        ),
        ({"model__guidance": 2.0}, "leave out model.guidance"),
        (
            {"lora__targets": ["attn.query"]},
            "lora.targets: no linear layer of the transformer has a name that ends in 'attn.query'",
        ),
        (
            {"explore__modules_to_not_convert": ["*.nothing"]},
            r"explore.modules_to_not_convert: '\*.nothing' matches no module",
        ),
        (
            {"explore__backend": "te_nvfp4"},
            "explore.backend: 'te_nvfp4' does not run on cpu here: .*; use auto, or fp8",
        ),
    ],
)
def test_invalid_models_are_refused_before_anything_starts(
    monkeypatch, tiny_sd3_dir, tmp_path, change, message
):
    """The error is a ConfigError (exit code 2) of one line. No run directory is created and Ray is
    not started.
    """
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as caught:
        train(tiny_config(tiny_sd3_dir, tmp_path, "bad", **change), resume=False)
    (line,) = caught.value.lines
    assert re.search(message, line) and "\n" not in line
    assert not (tmp_path / "runs").exists()

"""Bad models: what is wrong is one clear line, before anything is started or loaded."""

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
    """A directory to damage."""
    return shutil.copytree(directory, tmp_path / "model")


def test_a_missing_component_is_named(copied, name):
    shutil.rmtree(copied / "vae")
    with pytest.raises(
        FileNotFoundError,
        match=f"lacks its 'vae', which family '{name}' needs: download the complete pipeline",
    ):
        family_for(tiny_model(name, copied))


def test_weights_that_are_missing_are_named_before_anything_is_loaded(copied, name):
    """A part without weights, one of several files gone, and weights in a format that could run
    code.
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
def test_a_missing_weight_is_refused_rather_than_initialized(copied, name, part):
    """diffusers fails without a word on what; transformers draws a random one and goes on."""
    (file,) = (copied / part).glob("*.safetensors")
    weights = load_file(file)
    del weights[lacking := max(weights, key=lambda one: (weights[one].numel(), one))]
    save_file(weights, file, {"format": "pt"})
    family = family_for(tiny_model(name, copied))
    last = lacking.rpartition(".")[2]
    with pytest.raises(
        FileNotFoundError,
        match=rf"the '{part}' of .* lacks 1 of its \d+ weights, such as .*{last}: download it",
    ):
        if part == "text_encoder":
            family.load_text("cpu", torch.float32)
        else:
            family.load(part, "cpu", torch.float32)


def test_weights_that_could_run_code_are_not_read(copied, name):
    """The stock loaders fall back to pickled weights where safetensors are missing; ours say what
    is missing.
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


def test_a_component_left_out_of_the_index(copied, name):
    index = copied / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "text_encoder": [None, None]}))
    with pytest.raises(FileNotFoundError, match="lacks its 'text_encoder'"):
        family_for(tiny_model(name, copied))


def test_a_component_of_another_class(copied, name):
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
def test_components_of_unknown_libraries_are_never_imported(copied, name, part):
    """Anybody may have written the file, and what it names is code. The second is one that the
    families do without, and some pipelines of diffusers would load.
    """
    index = copied / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {part: ["stranger", "Model"]}))
    with pytest.raises(ValueError, match=f"'{part}' of .* is of 'stranger': only parts"):
        family_for(tiny_model(name, copied))


def test_an_unsupported_pipeline_says_which_are_supported(copied, name):
    index = copied / "model_index.json"
    index.write_text(
        json.dumps({**json.loads(index.read_text()), "_class_name": "PixArtSigmaPipeline"})
    )
    with pytest.raises(
        ValueError,
        match="contains a PixArtSigmaPipeline; supported are StableDiffusion3Pipeline .*Flux.*Sana",
    ):
        family_for(tiny_model(name, copied))


def test_the_family_of_another_pipeline(directory, name):
    other = "flux" if name != "flux" else "sana"
    with pytest.raises(
        ValueError, match=f"but family '{other}' is a .*: change model.path or model.family"
    ):
        family_for(Model(family=other, path=str(directory)))


def test_a_damaged_configuration_file(copied, name):
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


def test_embedded_guidance_is_refused_for_other_models(tiny_sd3_dir):
    with pytest.raises(
        ValueError,
        match=r"model\.guidance: .* has no guidance embedding: leave out model\.guidance",
    ):
        family_for(tiny_model("sd3", tiny_sd3_dir, guidance=3.5)).check()


def test_a_hub_id_without_network_or_cache(monkeypatch, tmp_path):
    """As on a machine that is cut off: the hub client's own offline switch, and an empty cache."""
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
def test_images_to_edit_are_found_before_anything_starts(request, tmp_path, name, line, message):
    (tmp_path / "a.png").write_bytes(png_bytes(source_for("redder", 16, 16)))
    (tmp_path / "a.txt").write_text("no image")
    file = tmp_path / "edits.jsonl"
    good = {"image": "a.png"} if name == "flux_kontext" else {}
    lines = [{"prompt": "first", **good}, {"prompt": "redder", **line}]
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    directory = request.getfixturevalue(f"tiny_{name}_dir")
    model = {f"model__{key}": value for key, value in SETTINGS[name].items()}
    prompts = {f"prompts__{key}": str(file) for key in ("train", "test")}
    changes = {"model__family": name, **prompts, **model}
    with pytest.raises(ConfigError) as caught:
        train(tiny_config(directory, tmp_path, "bad", **changes), resume=False)
    (recorded,) = caught.value.lines
    assert re.search(message, recorded) and "\n" not in recorded
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
def test_bad_models_are_found_before_anything_starts(
    monkeypatch, tiny_sd3_dir, tmp_path, change, message
):
    """ConfigError is exit code 2; one line; no run directory and no Ray."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as caught:
        train(tiny_config(tiny_sd3_dir, tmp_path, "bad", **change), resume=False)
    (line,) = caught.value.lines
    assert re.search(message, line) and "\n" not in line
    assert not (tmp_path / "runs").exists()

"""Recognizing a published model in the configuration files of a local pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.load import load
from planning import counting
from planning.plan import open_architecture
from policy.families.architectures import every_published, find_by_hub_id, write_configs
from policy.families.architectures.matching import find_by_configs
from policy.precision.backends import BACKENDS

FLUX = "black-forest-labs/FLUX.1-dev"
DOWNLOADED = {
    "transformer": {
        "_class_name": "FluxTransformer2DModel",
        "_diffusers_version": "0.30.0.dev0",
        "_name_or_path": "../checkpoints/flux-dev/transformer",
        "attention_head_dim": 128,
        "guidance_embeds": True,
        "in_channels": 64,
        "joint_attention_dim": 4096,
        "num_attention_heads": 24,
        "num_layers": 19,
        "num_single_layers": 38,
        "patch_size": 1,
        "pooled_projection_dim": 768,
    },
    "text_encoder_2": {
        "_name_or_path": "google/t5-v1_1-xxl",
        "architectures": ["T5EncoderModel"],
        "classifier_dropout": 0.0,
        "d_ff": 10240,
        "d_kv": 64,
        "d_model": 4096,
        "decoder_start_token_id": 0,
        "dense_act_fn": "gelu_new",
        "dropout_rate": 0.1,
        "eos_token_id": 1,
        "feed_forward_proj": "gated-gelu",
        "initializer_factor": 1.0,
        "is_encoder_decoder": True,
        "is_gated_act": True,
        "layer_norm_epsilon": 1e-06,
        "model_type": "t5",
        "num_decoder_layers": 24,
        "num_heads": 64,
        "num_layers": 24,
        "output_past": True,
        "pad_token_id": 0,
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": 32,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.3",
        "use_cache": True,
        "vocab_size": 32128,
    },
}
"""Files as downloaded from the hub: keys of other versions, and without keys of today's."""


def written(hub_id: str, directory: Path) -> Path:
    found = find_by_hub_id(hub_id)
    assert found is not None
    return write_configs(found[1], directory)


def found_in(directory: Path) -> str | None:
    def content(name: str) -> Any:
        return json.loads((directory / name).read_text())

    return find_by_configs(content("model_index.json"), lambda part: content(f"{part}/config.json"))


def change(file: Path, **settings: object) -> None:
    file.write_text(
        json.dumps(json.loads(file.read_text(encoding="utf-8")) | settings), encoding="utf-8"
    )


@pytest.mark.parametrize("hub_id", [model["hub_id"] for _, model in every_published()])
def test_every_published_model_is_found_by_its_own_files(tmp_path, hub_id):
    assert found_in(written(hub_id, tmp_path)) == hub_id


def test_files_of_the_hub_are_equal_to_the_description(tmp_path):
    root = written(FLUX, tmp_path)
    for part, config in DOWNLOADED.items():
        (root / part / "config.json").write_text(json.dumps(config))
    change(root / "model_index.json", image_encoder=[None, None])
    assert found_in(root) == FLUX


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("transformer/config.json", {"num_layers": 18}),
        ("transformer/config.json", {"guidance_embeds": False}),
        ("transformer/config.json", {"out_channels": 128}),  # not in the description
        ("transformer/config.json", {"quantization_config": {"bits": 4}}),  # not in the class
        ("vae/config.json", {"block_out_channels": [128, 256, 512, 1024]}),
        ("text_encoder/config.json", {"num_hidden_layers": 11}),
        ("text_encoder_2/config.json", {"quantization_config": {"bits": 4}}),
        ("model_index.json", {"_class_name": "FluxKontextPipeline2"}),
        ("model_index.json", {"text_encoder_2": [None, None]}),
        ("model_index.json", {"text_encoder_3": ["transformers", 5]}),
        ("model_index.json", {"text_encoder_3": ["transformers", "T5EncoderModel"]}),
        ("model_index.json", {"transformer": ["diffusers", "Flux2Transformer2DModel"]}),
    ],
)
def test_another_architecture_is_not_found(tmp_path, file, settings):
    root = written(FLUX, tmp_path)
    change(root / file, **settings)
    assert found_in(root) is None


def test_a_pipeline_with_another_boundary_is_not_found(tmp_path):
    root = written("Wan-AI/Wan2.2-T2V-A14B-Diffusers", tmp_path)
    change(root / "model_index.json", boundary_ratio=0.5)
    assert found_in(root) is None


def test_a_local_copy_has_the_stored_counts_of_the_published_model(tmp_path, monkeypatch):
    def refuse(part: str, *_: object) -> dict[str, Any]:
        raise AssertionError(f"{part} was counted")

    monkeypatch.setattr(counting, "_count_part", refuse)
    preset, backend = "sana-sol_rl-hpsv2", BACKENDS["torch_nvfp4"]
    published = load(preset)
    root = written(published.model.path, tmp_path / "copy")
    local = load(preset, [f"model.path={root}"])
    with open_architecture(published) as (family, _):
        expected = counting.counts_of(published, family, backend)
    with open_architecture(local) as (family, _):
        assert counting.counts_of(local, family, backend) == expected
    change(root / "transformer/config.json", num_layers=3)
    with open_architecture(local) as (family, _), pytest.raises(AssertionError, match="counted"):
        counting.counts_of(local, family, backend)


def test_another_model_at_the_path_of_a_hub_id_has_no_stored_counts(tmp_path, monkeypatch):
    counted: list[str] = []

    def recorded(part: str, *_: object) -> dict[str, None]:
        counted.append(part)
        return dict.fromkeys(counting.PARTS[part].counts)

    monkeypatch.setattr(counting, "_count_part", recorded)
    monkeypatch.chdir(tmp_path)
    config = load("sana-sol_rl-hpsv2")
    root = written(config.model.path, tmp_path / config.model.path)
    change(root / "transformer/config.json", num_layers=3)
    with open_architecture(config) as (family, _):
        counting.counts_of(config, family, BACKENDS["torch_nvfp4"])
    assert counted == list(counting.PARTS)


@pytest.mark.parametrize("part", ["transformer", "text_encoder"])
def test_a_setting_that_a_class_refuses_is_one_line(tmp_path, part):
    root = written("stabilityai/stable-diffusion-3.5-medium", tmp_path)
    name = "num_layers" if part == "transformer" else "num_hidden_layers"
    change(root / part / "config.json", **{name: "many"})
    assert found_in(root) is None
    config = load("sd35_medium-sol_rl-hpsv2", [f"model.path={root}"])
    with open_architecture(config) as (family, _), pytest.raises(ValueError, match=part) as caught:
        counting.counts_of(config, family, BACKENDS["fp8"])
    assert str(caught.value).startswith(f"model.path: the {part!r} of '{root}' cannot be built")
    assert "\n" not in str(caught.value)

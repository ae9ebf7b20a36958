"""The published architectures: their parameter counts, and how the families read them."""

import math

import pytest
import torch
import transformers

from configs.sections import Model
from policy.families import family_for
from policy.families.architectures import CONFIGS, build, published, published_names, write_configs
from policy.lora import target_modules
from policy.precision.backends import BACKENDS
from policy.precision.swap import quantize_plan

TRANSFORMERS = {
    "sd3.5-medium": 2_243_171_520,
    "sd3.5-large": 8_056_627_520,
    "flux.1-dev": 11_901_408_320,
    "sana-1.6b": 1_604_462_752,
    "qwen-image": 20_430_401_088,
    "z-image-turbo": 6_154_908_736,
    "flux.2-dev": 32_223_281_152,
    "flux.2-klein-4b": 3_875_544_576,
    "wan2.1-t2v-1.3b": 1_418_996_800,
    "wan2.1-t2v-14b": 14_288_491_584,
    "wan2.2-ti2v-5b": 4_999_787_712,
    "wan2.2-t2v-a14b": 14_288_491_584,  # each of the two transformers
    "sana-video-2b-480p": 2_056_862_144,
}
"""The model cards give these counts rounded to 2.5 (with its position table), 8.1, 12, 1.6, 20, 6,
32, 4, 1.3, 14 and 2 billion.
"""
PARTS = {
    ("sd3.5-large", "vae"): 83_819_683,
    ("flux.1-dev", "vae"): 83_819_683,
    ("sana-1.6b", "vae"): 312_250_275,
    ("sd3.5-large", "text_encoder"): 123_650_304,
    ("flux.1-dev", "text_encoder"): 123_060_480,
    ("sd3.5-large", "text_encoder_2"): 694_659_840,
    ("sd3.5-medium", "text_encoder_3"): 4_762_310_656,
    ("flux.1-dev", "text_encoder_2"): 4_762_310_656,
    ("sana-1.6b", "text_encoder"): 2_614_341_888,
    ("qwen-image", "text_encoder"): 8_292_166_656,
    ("z-image-turbo", "text_encoder"): 4_022_468_096,
    ("flux.2-dev", "text_encoder"): 24_011_361_280,
    ("flux.2-klein-4b", "text_encoder"): 4_022_468_096,
    ("qwen-image", "vae"): 126_892_531,
    ("z-image-turbo", "vae"): 83_819_683,
    ("flux.2-klein-4b", "vae"): 84_046_115,
    ("wan2.1-t2v-1.3b", "vae"): 126_892_531,
    ("wan2.1-t2v-1.3b", "text_encoder"): 5_680_910_336,
    ("wan2.2-ti2v-5b", "vae"): 704_688_668,
}
GUIDANCE = {"flux.1-dev": 3.5, "flux.2-dev": 4.0}


def count(part) -> int:
    module = build(part)
    assert all(parameter.is_meta for parameter in module.parameters())
    return sum(parameter.numel() for parameter in module.parameters())


def test_published_names_are_complete_and_unknown_names_are_refused():
    assert published_names() == sorted(TRANSFORMERS)
    with pytest.raises(
        ValueError,
        match="unknown published architecture 'sdxl'; available: flux.1-dev, flux.2-dev, ",
    ):
        published("sdxl")


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_parameter_counts_of_published_transformers(name):
    assert count(published(name)["parts"]["transformer"]) == TRANSFORMERS[name]


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_parameter_counts_of_the_other_parts(name, part):
    assert count(published(name)["parts"][part]) == PARTS[name, part]


def test_part_is_built_on_the_given_device_in_the_given_dtype():
    small = {
        "class": "diffusers.SanaTransformer2DModel",
        "config": {**published("sana-1.6b")["parts"]["transformer"]["config"]},
    }
    small["config"] |= {
        "num_layers": 1,
        "num_attention_heads": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 32,
    }
    small["config"] |= {"cross_attention_dim": 64, "caption_channels": 16}
    module = build(small, "cpu", torch.bfloat16)
    assert {(p.dtype, p.device.type, p.requires_grad) for p in module.parameters()} == {
        (torch.bfloat16, "cpu", False)
    }
    assert torch.get_default_dtype() == torch.float32 and not module.training


def shifted(mu: float, t: float) -> float:
    return math.exp(mu) / (math.exp(mu) + 1 / t - 1)


QWEN_MU = 0.5 + 0.4 * (4096 - 256) / (8192 - 256)
QWEN_SECOND = 1 - (1 - shifted(QWEN_MU, 0.75)) * 0.98 / (1 - shifted(QWEN_MU, 0.25))
"""The sigmas are stretched so that the last of four is 0.02."""
AT_10, AT_200 = 8.73809524e-05 * 4096 + 1.89833333, 0.00016927 * 4096 + 0.45666666
FLUX2_MU = AT_10 + (4 - 10) / 190 * (AT_200 - AT_10)
"""FLUX.2 defines mu for 10 and for 200 steps. This is the value at 4 steps on the line through
both.
"""
FLUX2_SECOND = shifted(FLUX2_MU, 0.75)


WAN_SECOND = 3 * 0.75025 / (1 + 2 * 0.75025)
"""The second value of linspace(1, 0.001, 5), shifted by 3."""


@pytest.mark.parametrize(
    ("name", "shape", "first_sigmas"),
    [
        ("sd3.5-medium", (16, 128, 128), [1.0, 3 * 0.75 / 2.5]),
        ("flux.1-dev", (4096, 64), [1.0, 2.71828 ** (1.15) / (2.71828**1.15 + 1 / 0.75 - 1)]),
        ("sana-1.6b", (32, 32, 32), [3 * 0.999 / 2.998, 3 * 0.74925 / 2.4985]),
        ("qwen-image", (4096, 64), [1.0, QWEN_SECOND]),
        ("z-image-turbo", (16, 128, 128), [1.0, 3 * 0.75 / 2.5]),
        ("flux.2-dev", (128, 64, 64), [1.0, FLUX2_SECOND]),
        ("flux.2-klein-4b", (128, 64, 64), [1.0, FLUX2_SECOND]),
        ("wan2.1-t2v-1.3b", (16, 9, 128, 128), [1.0 - 1e-6, WAN_SECOND]),
        ("wan2.2-t2v-a14b", (16, 9, 128, 128), [1.0 - 1e-6, WAN_SECOND]),
        ("wan2.2-ti2v-5b", (48, 9, 64, 64), [1.0 - 1e-6, 5 * 0.75025 / (1 + 4 * 0.75025)]),
        (
            "sana-video-2b-480p",
            (16, 9, 128, 128),
            [8 * 0.999 / (1 + 7 * 0.999), 8 * 0.74925 / (1 + 7 * 0.74925)],
        ),
    ],
)
def test_families_read_published_configurations(tmp_path, name, shape, first_sigmas):
    model = published(name)
    directory = write_configs(model, tmp_path / name)
    settings = Model(
        family=model["family"],
        path=str(directory),
        height=1024,
        width=1024,
        guidance=GUIDANCE.get(name),
        frames=model.get("frames"),
    )
    family = family_for(settings)
    family.check()
    assert family.latent_shape == shape
    assert family.sigmas(4)[:2].tolist() == pytest.approx(first_sigmas, rel=1e-5)
    unit = 32 if name in ("sana-1.6b", "sana-video-2b-480p", "wan2.2-ti2v-5b") else 16
    with pytest.raises(
        ValueError, match=rf"model\.width: 1048 pixels; this model needs multiples of {unit}"
    ):
        family_for(settings.model_copy(update={"width": 1048})).check()


@pytest.mark.parametrize("name", CONFIGS)
def test_configuration_classes_are_those_of_the_models(name):
    assert getattr(transformers, name).config_class.__name__ == CONFIGS[name]


QUANTIZED = {
    # both streams 4 + 8 d^2; no text output in the last block; 13 dual attentions
    "sd3.5-medium": ((24 * 24 - 9 + 4 * 13) * 1536**2),
    "sd3.5-large": (24 * 38 - 9) * 2432**2,
    # single blocks: QKV, proj_mlp, proj_out of attention and MLP
    "flux.1-dev": ((24 * 19 + (3 + 4 + 5) * 38) * 3072**2),
    # two attentions; the 1x1 convolutions of the feed-forward
    "sana-1.6b": ((8 * 20 + (5 + 2.5) * 20) * 2240**2),
    "qwen-image": 24 * 60 * 3072**2,  # both streams 4 + 8 d^2
    "z-image-turbo": (4 + 8) * 34 * 3840**2,  # gated feed-forward of 8/3 d: 3 x 8/3 d^2
    "flux.2-dev": (2 * (4 + 9) * 8 + (3 + 6 + 4) * 48)
    * 6144**2,  # gated feed-forward of 3 d: 3 x 3 d^2
    "flux.2-klein-4b": (2 * (4 + 9) * 5 + (3 + 6 + 4) * 20) * 3072**2,
    "wan2.1-t2v-1.3b": 30
    * (8 * 1536**2 + 2 * 1536 * 8960),  # two attentions; the feed-forward has its own width
    "wan2.1-t2v-14b": 40 * (8 * 5120**2 + 2 * 5120 * 13824),
    "wan2.2-ti2v-5b": 30 * (8 * 3072**2 + 2 * 3072 * 14336),
    "wan2.2-t2v-a14b": 2 * 40 * (8 * 5120**2 + 2 * 5120 * 13824),
    "sana-video-2b-480p": (8 + 6 + 3)
    * 20
    * 2240**2,  # like SANA, but wider and with the gate in the same projection
}
"""The number of weights in the matrix products of the blocks, in units of d^2. The other weights
belong to modulation, embedders, norms and biases.
"""


@pytest.mark.parametrize("name", QUANTIZED)
def test_products_of_the_blocks_of_a_published_model_are_quantized(tmp_path, name):
    """All products of the blocks are quantized and no other layers. No layer is refused for its
    shape. Every LoRA target is quantized.
    """
    model = published(name)
    family = family_for(
        Model(
            family=model["family"],
            path=str(write_configs(published(name), tmp_path / name)),
            frames=model.get("frames"),
        )
    )
    transformer = family.denoiser(lambda part: build(model["parts"][part]))
    plan = quantize_plan(transformer, family, (), BACKENDS["emulated_nvfp4"])
    quantized = {row.name for row in plan if row.quantized}
    assert all(row.quantized or "left unquantized by the model family" in row.why for row in plan)
    assert set(target_modules(transformer, family.lora_targets)) <= quantized
    assert (
        sum(transformer.get_submodule(path).weight.numel() for path in quantized) == QUANTIZED[name]
    )

"""Properties that every model family has: its tables match its model, options that save memory
change no image, and no other code depends on the family's name.
"""

import functools
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

import policy.families
from configs.sections import Model
from configs.training import Lora
from policy.families import FAMILIES, family_for
from policy.families.text import PromptEncoder
from policy.lora import adapted_modules, add_adapters, target_modules
from policy.precision.backends import BACKENDS
from policy.precision.swap import quantize_plan
from policy.sampling.noise import noise_for
from policy.types import Conditioning
from tests.tiny_families import (
    NAMES,
    SETTINGS,
    TEXT_MODULES,
    encode,
    one_of_twins,
    source_for,
    tiny_model,
)

REPOSITORY = Path(policy.families.__file__).resolve().parents[2]
NEVER = (
    "time|guidance_embed|text_embed|patch_embed|pos_embed|context_embedder|x_embedder|caption|norm"
    "|^(transformer(_2)?\\.)?proj_out$|conv_depth|conv_temp|img_in|txt_in|_mod\\.|modulation"
    "|_embedder|final_layer"
)
"""Embedders, modulation, the last projection, and layers that are not matrix products."""


@pytest.fixture
def family(name, directory):
    return family_for(tiny_model(name, directory))


@functools.cache
def text_of(name: str, directory: str) -> PromptEncoder:
    """Return the shared text encoder. Tests must not change it; a test that changes one loads its
    own.
    """
    return family_for(tiny_model(name, Path(directory))).load_text("cpu", torch.float32)


@functools.cache
def conditioning_of(name: str, directory: str) -> Conditioning:
    family = family_for(tiny_model(name, Path(directory)))
    return encode(family, ["a red circle"], text=text_of(name, directory))


@functools.cache
def denoiser_of(name: str, directory: str) -> nn.Module:
    """Return the shared denoiser in float32. Tests must not change it; a test that changes one
    loads its own.
    """
    return family_for(tiny_model(name, Path(directory))).load_transformer("cpu", torch.float32)


def conditioning(family) -> Conditioning:
    """Return the conditioning of one prompt."""
    return conditioning_of(family.name, family.directory)


# ---- tables


def test_table_of_families_matches_the_configuration_schema():
    assert list(FAMILIES) == list(get_args(Model.model_fields["family"].annotation)) == list(NAMES)
    assert all(name == family.name for name, family in FAMILIES.items())


def test_products_of_the_blocks_are_quantized(family):
    """Every linear layer and 1x1 convolution of the blocks is quantized, and no layer that must
    stay unquantized. Every pattern of the family matches a layer.
    """
    transformer = denoiser_of(family.name, family.directory)
    plan = quantize_plan(transformer, family, (), BACKENDS["emulated_nvfp4"])
    assert len(plan) == sum(
        isinstance(module, nn.Linear | nn.Conv2d) for module in transformer.modules()
    )
    for row in plan:
        assert row.quantized == (re.search(NEVER, row.name) is None), row
    for pattern in family.modules_to_not_convert:
        assert any(fnmatchcase(row.name, pattern) for row in plan), pattern
    by_name = {row.name: row.quantized for row in plan}
    if family.name == "flux":  # two layers have this name
        assert by_name["single_transformer_blocks.1.proj_out"] and not by_name["proj_out"]
    if family.name == "sana":
        assert by_name["transformer_blocks.0.ff.conv_inverted"]
        assert by_name["transformer_blocks.1.ff.conv_point"]


LORA_MODULES = {
    "sd3": 2 * 8 - 1,  # the last block has no to_add_out
    "flux": 1 * 8 + 2 * 5,
    "flux_kontext": 1 * 8 + 2 * 5,
    "sana": 2 * 8,
    "qwen_image": 2 * 8 - 1,
    "qwen_image_edit": 2 * 8 - 1,
    "z_image": (2 + 1 + 1) * 4,  # layers, and a refiner of each stream
    "flux2": 1 * 8 + 2 * 2,
    "flux2_klein": 1 * 8 + 2 * 2,
    "wan": 2 * 8,
    "sana_video": 2 * 8,
}


def test_lora_targets_are_quantized_layers_of_the_blocks(family):
    transformer = family.load_transformer("cpu", torch.float32)
    # an error if one of them matches nothing
    names = target_modules(transformer, family.lora_targets)
    assert len(names) == LORA_MODULES[family.name]
    assert all(re.search(NEVER, name) is None and re.search(r"\.\d+\.", name) for name in names)
    add_adapters(transformer, Lora(rank=2, alpha=2), family)
    assert [module for module, _ in adapted_modules(transformer)] == names
    quantized = {
        row.name
        for row in quantize_plan(transformer, family, (), BACKENDS["emulated_nvfp4"])
        if row.quantized
    }
    assert quantized >= set(names)


def test_skeleton_has_every_parameter_and_shape(family):
    skeleton, transformer = family.skeleton(), denoiser_of(family.name, family.directory)
    assert [(n, p.shape) for n, p in skeleton.named_parameters()] == [
        (n, p.shape) for n, p in transformer.named_parameters()
    ]
    assert all(p.is_meta and not p.requires_grad for p in skeleton.parameters())


def test_fused_linears_read_the_same_input(family):
    """The inputs are recorded in a forward pass: the input tensors of fused layers have the same
    address. No layer is listed twice.
    """
    transformer = family.load_transformer("cpu", torch.float32)
    inputs: dict[str, int] = {}

    def hook(path):
        return lambda module, args: inputs.update({path: args[0].data_ptr()})

    for path, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(hook(path))
    with torch.no_grad():
        family.velocity(
            transformer,
            noise_for([1], family.latent_shape),
            torch.tensor(0.5),
            conditioning(family),
        )
    fused_paths = []
    for first, *others in family.fuse:
        blocks = [path.removesuffix(first) for path in inputs if path.endswith(f".{first}")]
        for block in blocks:
            paths = [block + part for part in (first, *others)]
            assert len({inputs[path] for path in paths}) == 1
            fused_paths += paths
    assert len(fused_paths) == len(set(fused_paths)) and len(fused_paths) >= 6


# ---- conditioning and memory


def test_conditioning_does_not_depend_on_other_prompts(family):
    text = text_of(family.name, family.directory)
    few = encode(family, ["a red circle", "two blue crosses above a green square"], text=text)
    more = encode(
        family,
        [
            "three squares",
            "two blue crosses above a green square",
            "a cross",
            "a red circle",
            "a red circle",
        ],
        text=text,
    )
    for key, rows in few.tensors.items():
        assert torch.equal(more.tensors[key][[3, 1]], rows)
        assert torch.equal(more.tensors[key][3], more.tensors[key][4])
        assert rows.device.type == "cpu" and not rows.requires_grad
    with pytest.raises(ValueError, match="no prompts to encode"):
        encode(family, [], text=text)


def test_conditioning_has_the_shapes_that_the_plan_counts(family):
    row = conditioning(family)
    assert {
        name: tuple(tensor.shape[1:]) for name, tensor in row.tensors.items()
    } == family.conditioning_shapes


def test_encoder_loads_only_text_encoders(family):
    """Families that edit images also load the autoencoder."""
    encoder = text_of(family.name, family.directory)
    assert isinstance(encoder, PromptEncoder)
    assert encoder.pipe.transformer is None and (encoder.pipe.vae is not None) == family.edits
    modules = [part for part in encoder.pipe.components.values() if isinstance(part, nn.Module)]
    assert len(modules) == TEXT_MODULES[family.name] + family.edits
    assert all(
        not p.requires_grad and not module.training
        for module in modules
        for p in module.parameters()
    )


def test_offloaded_text_encoders_are_on_the_device_only_during_encoding(name, directory):
    """Offloaded text encoders give the same result bit for bit. They are moved to the device and
    back, also after an error. A fake device replaces a GPU.
    """
    family = family_for(tiny_model(name, directory, text_offload=True))
    encoder = family.load_text("cpu", torch.float32)
    assert isinstance(encoder, PromptEncoder)
    moves = []
    original = encoder.pipe.to
    encoder.pipe.to = lambda device: moves.append(str(device)) or original(device)
    images = [source_for("a red circle", family.model.height, family.model.width)]
    result = encoder.encode(["a red circle"], images if family.edits else None)
    assert moves == ["cpu", "cpu"] and encoder.offload
    resident = conditioning(family)
    assert all(torch.equal(result.tensors[key], tensor) for key, tensor in resident.tensors.items())

    class FakePipe:
        components: dict = {}
        moves: list = []

        def to(self, device):
            self.moves.append(str(device))
            return self

    def broken(pipe, prompt):
        assert pipe.moves == ["meta"]
        raise RuntimeError("out of memory")

    offloaded = PromptEncoder(FakePipe(), broken, "meta", offload=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        offloaded.encode(["x"])
    assert FakePipe.moves == ["meta", "cpu"]


@pytest.mark.parametrize("name", one_of_twins(False))  # twins also share one kind of autoencoder
def test_slicing_keeps_images_and_tiling_changes_pixels(name, directory):
    """Slicing decodes the images one by one, which gives the same result up to the order of sums.
    Tiles that are smaller than the image change the pixels, which shows that tiling takes place.
    """
    plain, sliced, tiled = (
        family_for(tiny_model(name, directory, **more))
        for more in ({}, {"vae_slicing": True}, {"vae_tiling": True})
    )
    latents = noise_for([1, 2], plain.latent_shape)
    images = plain.decode(plain.load_vae("cpu", torch.float32), latents).int()
    vae = sliced.load_vae("cpu", torch.float32)
    calls = []
    vae.decoder.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    assert (sliced.decode(vae, latents).int() - images).abs().max() <= 1
    assert calls == [1, 1] * plain.latent_shape[1] if plain.video else calls == [1, 1]
    vae = tiled.load_vae("cpu", torch.float32)
    assert vae.use_tiling
    if name in ("qwen_image", "qwen_image_edit", "wan", "sana_video"):
        vae.enable_tiling(8, 8, 4, 4)
    elif name == "sana":
        vae.enable_tiling(16, 16, 8, 8)
    else:
        vae.tile_latent_min_size, vae.tile_sample_min_size = 4, 8
    calls.clear()
    vae.decoder.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    result = tiled.decode(vae, latents).int()
    assert len(calls) > 1
    assert result.shape == images.shape
    assert (result - images).abs().float().mean() > 0.1


@pytest.mark.parametrize("name", one_of_twins(True))
def test_half_precision_transformer_gives_float32_velocities(family):
    x, sigma, cond = noise_for([3], family.latent_shape), torch.tensor(0.5), conditioning(family)
    half = family.velocity(family.load_transformer("cpu", torch.bfloat16), x, sigma, cond)
    full = family.velocity(denoiser_of(family.name, family.directory), x, sigma, cond)
    assert half.dtype == full.dtype == torch.float32
    assert 0 < (half - full).abs().max() < 0.1 * full.abs().max()  # 2^-8 through a few layers
    double = family.velocity(family.load_transformer("cpu", torch.float32).double(), x, sigma, cond)
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), full, rtol=0, atol=1e-5 * float(full.abs().max()))


# ---- only one place knows families by name


def test_core_code_contains_no_family_name():
    """Neither the loop nor the actors, the objectives or any other core code depends on the name of
    a family.
    """
    words = [
        *FAMILIES,
        *(family.pipeline_class for family in FAMILIES.values()),
        *(
            family.components["transformer"][0]
            for family in FAMILIES.values()
            if family.name != "sd3"
        ),
    ]
    pattern = re.compile(
        rf"\b({'|'.join([*words, 'SD3Transformer2DModel', 'stable.diffusion'])})\b", re.IGNORECASE
    )
    files = [
        REPOSITORY / "cluster" / "driver" / f"{name}.py"
        for name in ("loop", "session", "evaluation")
    ]
    for folder in ("actors", "learner", "policy", "rewards"):
        files += [
            file
            for file in (REPOSITORY / folder).rglob("*.py")
            if "families" not in file.relative_to(REPOSITORY).parts
        ]
    assert len(files) > 30
    result = [
        f"{file.name}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert result == []
    assert set(SETTINGS) == set(FAMILIES)

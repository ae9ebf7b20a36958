"""Decoding of proxy images: which decoder is used in which precision, and which settings are
refused before a run starts.
"""

import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from configs.load import ConfigError, load
from learner.publish import export_policy
from planning import passes
from planning.plan import make_plan
from planning.preflight import check_model
from policy import meta, pass_cost
from policy.decoders import (
    check_decoder,
    compiled_decoder,
    decoder_on,
    load_decoder,
    meta_decoder,
    proxy_dtype,
)
from policy.explorer import Explorer
from policy.families import family_for
from policy.families.files import SHAPES_DECODER
from policy.precision.backends import BACKENDS
from shapes.checksum import checksum
from shapes.decoder_build import psnr
from tests.learner.tiny import tiny_config, tiny_groups, tiny_trainer
from tests.tiny_decoder import write_tiny_decoder
from tests.tiny_families import tiny_model
from tests.tiny_sd3 import TINY_HEIGHT, TINY_WIDTH

CPU = torch.device("cpu")


@pytest.fixture
def config(tiny_sd3_dir, tmp_path):
    explore = {"pool_size": 8, "backend": "fp32", "decoder": "tiny"}
    explore["decoder_path"] = write_tiny_decoder(tmp_path / "decoder")
    return tiny_config(tiny_sd3_dir, explore=explore)


@pytest.mark.parametrize(
    ("precision", "arm", "on_gpu", "expected"),
    [
        ("auto", "sol_rl", True, torch.bfloat16),
        ("auto", "sol_rl", False, torch.float32),
        ("bf16", "sol_rl", False, torch.bfloat16),
        ("fp32", "sol_rl", True, torch.float32),
        ("bf16", "naive_quant", True, torch.float32),  # the explored images are used for training
        ("auto", "naive_scaling", True, torch.float32),
    ],
)
def test_only_proxy_images_are_decoded_in_bfloat16(precision, arm, on_gpu, expected):
    config = load("quickstart", [f"arm={arm}", f"explore.decoder_precision={precision}"])
    assert proxy_dtype(config, on_gpu) == expected


def test_quickstart_decodes_with_its_float32_autoencoder():
    config = load("quickstart")
    vae = load_decoder(config, family_for(config.model), CPU)
    assert type(vae).__name__ == "AutoencoderKL"
    assert {p.dtype for p in vae.parameters()} == {torch.float32}


def test_tiny_decoder_changes_pixels_but_not_latents(config, tiny_sd3_dir):
    trainer = tiny_trainer(tiny_sd3_dir)
    outputs = {}
    for name, vae in (("full", None), ("tiny", load_decoder(config, trainer.family, CPU))):
        explorer = Explorer(trainer.family, BACKENDS["fp32"], vae=vae)
        plan = explorer.plan
        explorer.load(*export_policy(trainer.transformer, "old", plan, BACKENDS["fp32"], 0, 2**20))
        outputs[name] = explorer.explore(tiny_groups(1)[0].cond, [1, 2], 3, "euler")
    assert np.array_equal(outputs["full"][1], outputs["tiny"][1])
    assert outputs["tiny"][0].shape == outputs["full"][0].shape == (2, 3, TINY_HEIGHT, TINY_WIDTH)
    assert not np.array_equal(outputs["full"][0], outputs["tiny"][0])
    # the decoder takes the latents of the denoiser directly: neither scaled nor shifted
    tiny_decoder = load_decoder(config, trainer.family, CPU)
    decoded = tiny_decoder.get_submodule("decoder")(torch.from_numpy(outputs["tiny"][1]))
    pixels = (decoded * 0.5 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
    assert np.array_equal(pixels.numpy(), outputs["tiny"][0])


def test_unsuitable_tiny_decoder_is_refused_in_one_line(config, tmp_path):
    family = family_for(config.model)
    check_decoder(config, family)

    def refusal_of(path: str | None) -> str:
        explore = config.explore.model_copy(update={"decoder_path": path})
        with pytest.raises(ConfigError) as caught:
            check_model(config.model_copy(update={"explore": explore}))
        line = str(caught.value)
        assert line.startswith("explore.decoder") and "\n" not in line
        return line

    assert "config.json not found in" in refusal_of(str(tmp_path / "nowhere"))
    assert "does not accept this model's latents" in refusal_of(
        write_tiny_decoder(tmp_path / "a", channels=7)
    )
    assert "makes images of 32x32 pixels" in refusal_of(
        write_tiny_decoder(tmp_path / "b", stages=3)
    )
    assert "run `hf download madebyollin/taesd3`" in refusal_of(None)
    (tmp_path / "decoder" / "diffusion_pytorch_model.safetensors").rename(tmp_path / "away")
    assert "diffusion_pytorch_model.safetensors not found in" in refusal_of(
        str(tmp_path / "decoder")
    )
    (tmp_path / "away").rename(tmp_path / "decoder" / "diffusion_pytorch_model.safetensors")
    file = tmp_path / "decoder" / "config.json"
    described = json.loads(file.read_text())
    file.write_text(json.dumps(described | {"_class_name": "AutoencoderKL"}))
    assert "contains a AutoencoderKL" in refusal_of(str(tmp_path / "decoder"))
    file.write_text("[]")
    assert "cannot be read" in refusal_of(str(tmp_path / "decoder"))


def test_missing_weight_of_a_tiny_decoder_is_an_error(config, tmp_path):
    file = tmp_path / "decoder" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    del weights[missing := max(weights)]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(FileNotFoundError, match=f"lacks 1 weights, such as {missing}: download"):
        load_decoder(config, family_for(config.model), CPU)


def test_family_without_a_known_tiny_decoder_needs_a_path(config, tiny_sana_dir):
    model = config.model.model_copy(update={"family": "sana", "path": str(tiny_sana_dir)})
    model = model.model_copy(update={"height": 32, "width": 32})
    explore = config.explore.model_copy(update={"decoder_path": None})
    sana = config.model_copy(update={"model": model, "explore": explore})
    with pytest.raises(ValueError, match="no default tiny decoder of family 'sana' is known"):
        check_decoder(sana, family_for(model))


@pytest.mark.parametrize("name", ["flux2", "qwen_image"])
def test_latents_with_statistics_of_their_autoencoder_refuse_a_tiny_decoder(name, config, request):
    model = tiny_model(name, request.getfixturevalue(f"tiny_{name}_dir"))
    with pytest.raises(ConfigError, match=f"no AutoencoderTiny decodes latents of family '{name}'"):
        check_model(config.model_copy(update={"model": model}))


def test_z_image_has_the_tiny_decoder_of_flux(config, tiny_z_image_dir):
    model = tiny_model("z_image", tiny_z_image_dir)
    check_decoder(config.model_copy(update={"model": model}), family_for(model))
    explore = config.explore.model_copy(update={"decoder_path": None})
    found = config.model_copy(update={"model": model, "explore": explore})
    with pytest.raises(FileNotFoundError, match="'madebyollin/taef1' is not in this machine's"):
        check_decoder(found, family_for(model))


@pytest.mark.parametrize("arm", ["diffusionnft", "naive_scaling", "naive_quant"])
def test_arms_without_proxy_images_refuse_a_tiny_decoder(arm):
    with pytest.raises((ConfigError, ValidationError), match="there are no proxy images to decode"):
        load("quickstart", [f"arm={arm}", "explore.decoder=tiny"])


def test_plan_counts_the_chosen_decoder(config):
    family = family_for(config.model)
    loaded = load_decoder(config, family, CPU)
    tiny = make_plan(config)
    assert tiny.memory["rollout"]["tiny autoencoder, fp32"] == pass_cost.held_bytes(loaded)
    assert "autoencoder, fp32" in tiny.memory["learner"]
    explore = config.explore.model_copy(update={"decoder": "full", "decoder_precision": "bf16"})
    full = make_plan(config.model_copy(update={"explore": explore}))
    autoencoder = meta.meta_component(family, "vae", torch.float32)
    assert full.memory["rollout"]["autoencoder, bf16"] == pass_cost.held_bytes(autoencoder) // 2
    assert full.memory["learner"]["autoencoder, fp32"] == pass_cost.held_bytes(autoencoder)
    assert full.stages["explore"].narrow
    assert not full.stages["regenerate"].narrow and not tiny.stages["explore"].narrow
    assert tiny.stages["regenerate"].decoding == full.stages["regenerate"].decoding
    images = config.prompts.per_iteration * config.explore.pool_size
    without_data = meta_decoder(config, family, torch.float32)
    _, work = passes.decoding_work(family, 1, without_data)
    assert tiny.stages["explore"].decoding == images * work.flops


def test_shipped_tiny_decoder_approximates_the_autoencoder():
    """When the decoder was trained, it reached 31.3 dB on 300 scenes. On a tenth of the scenes the
    value may differ by 2 dB.
    """
    config = load("quickstart", ["explore.decoder=tiny"])
    check_model(config)
    family = family_for(config.model)
    tiny, full = load_decoder(config, family, CPU), family.load_vae(CPU, torch.float32)
    assert psnr(full, tiny, count=30) > 29  # pyright: ignore[reportArgumentType]


def test_shipped_tiny_decoder_has_the_documented_checksum():
    directory = SHAPES_DECODER
    assert checksum(directory) in (directory.parent / "README.md").read_text()
    assert sum(file.stat().st_size for file in directory.iterdir()) < 200_000


def test_decoders_are_compiled_only_on_gpus(tiny_sd3_dir):
    vae = family_for(tiny_model("sd3", tiny_sd3_dir)).load_vae(CPU, torch.float32)
    assert decoder_on(CPU, vae, True) is decoder_on(torch.device("cuda"), vae, False) is vae
    assert decoder_on(torch.device("cuda", 1), vae, True) is not vae


@pytest.mark.parametrize("name", ["sd3", "sana", "flux2_klein", "wan", "qwen_image"])
def test_compiled_decoder_is_one_graph_and_does_not_change_the_autoencoder(request, graphs, name):
    """A decoder that keeps frames between calls is not compiled. In this test the graphs run with
    the eager operations, so results are equal bit for bit.
    """
    family = family_for(tiny_model(name, request.getfixturevalue(f"tiny_{name}_dir")))
    vae = family.load_vae(CPU, torch.float32)
    compiled = compiled_decoder(vae)
    keeps_frames = name in ("wan", "qwen_image")
    assert (compiled is vae) == keeps_frames
    latents = torch.randn(2, *family.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        images = family.decode(vae, latents, batch_size=1)
        assert not graphs
        assert torch.equal(family.decode(compiled, latents, batch_size=1), images)
    assert len(graphs) == (not keeps_frames)
    assert compiled.get_submodule("decoder.conv_in") is vae.get_submodule("decoder.conv_in")

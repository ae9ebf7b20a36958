"""The example family of docs/new_model.md. The test extracts its code from the page and compares it
with the diffusers pipeline.
"""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

import configs.families
import policy.families
from configs.lookup import load_class
from configs.sections import Model
from configs.training import Lora
from policy.families import FAMILIES, Family, family_for
from policy.lora import adapted_modules, add_adapters
from policy.precision.backends import BACKENDS
from policy.precision.swap import quantize_plan
from policy.sampling.noise import noise_for
from policy.sampling.sample import sample
from tests.tiny_families import as_array
from tests.tiny_sd3 import tiny_t5_tokenizer, tiny_vae

PAGE = Path(__file__).resolve().parents[2] / "docs" / "new_model.md"
SEEDS = [11, 7]
EXAMPLE = "auraflow"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny AuraFlowPipeline with random weights. Images are 16x24, latents [4, 8, 12]."""
    from diffusers import (
        AuraFlowPipeline,
        AuraFlowTransformer2DModel,
        FlowMatchEulerDiscreteScheduler,
    )
    from transformers import UMT5Config, UMT5EncoderModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformer = AuraFlowTransformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=32,
            out_channels=4,
            pos_embed_max_size=64,
        )
        text = UMT5EncoderModel(
            UMT5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        ).eval()
        pipe = AuraFlowPipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
            vae=tiny_vae(),
            text_encoder=text,
            tokenizer=tiny_t5_tokenizer(),
        )
        path = tmp_path_factory.mktemp(EXAMPLE)
        pipe.save_pretrained(path)
    return path


def code_block(pattern: str) -> str:
    """Return the only code block of the page that begins with this pattern."""
    (code,) = re.findall(rf"```python\n({pattern}.*?)```", PAGE.read_text(), re.DOTALL)
    return code


@pytest.fixture
def family(directory, monkeypatch, tmp_path):
    """The family as a reader of the page would add it: the file of the page is in the named place,
    and the row of the page is in the table.
    """
    (tmp_path / f"{EXAMPLE}.py").write_text(code_block('"""AuraFlow'))
    monkeypatch.setattr(policy.families, "__path__", [*policy.families.__path__, str(tmp_path)])
    rows = families_with_the_example()["FAMILIES"]
    assert rows.keys() - FAMILIES.keys() == {EXAMPLE}
    monkeypatch.setitem(FAMILIES, EXAMPLE, load_class(rows[EXAMPLE], Family))
    model = Model(path=str(directory), height=16, width=24, max_sequence_length=12)
    result = family_for(model.model_copy(update={"family": EXAMPLE}))
    result.check()
    yield result
    sys.modules.pop(f"policy.families.{EXAMPLE}")


def families_with_the_example() -> dict:
    """Execute configs/families.py with the row of the page added after the others, and return its
    names.
    """
    source = Path(configs.families.__file__).read_text(encoding="utf-8")
    last = '    "sana_video": "policy.families.sana_video:SanaVideo",\n'
    assert source.count(last) == 1
    module: dict = {}
    exec(
        compile(source.replace(last, last + code_block(f'    "{EXAMPLE}"')), "families.py", "exec"),
        module,
    )
    return module


def test_configuration_accepts_the_example_family():
    assert (
        TypeAdapter(families_with_the_example()["FamilyName"]).validate_python(EXAMPLE) == EXAMPLE
    )
    with pytest.raises(ValueError, match="'sana_video' or 'auraflow'"):
        TypeAdapter(families_with_the_example()["FamilyName"]).validate_python("auroflow")


def test_example_family_matches_the_diffusers_pipeline(family, directory):
    from diffusers import AuraFlowPipeline

    pipe = AuraFlowPipeline.from_pretrained(directory)
    pipe.set_progress_bar_config(disable=True)
    noise = noise_for(SEEDS, family.latent_shape)

    def stock(output_type):
        sigmas = np.linspace(1, 1 / 4, 4).tolist()
        arguments = {
            "height": 16,
            "width": 24,
            "sigmas": sigmas,
            "guidance_scale": 1.0,
            "max_sequence_length": 12,
        }
        return pipe(
            "a red circle",
            num_images_per_prompt=2,
            latents=noise,
            output_type=output_type,
            **arguments,
        ).images

    rows = family.load_text("cpu", torch.float32).encode(["a red circle"]).repeat(2)
    ours = sample(family, family.load_transformer("cpu", torch.float32), rows, SEEDS, 4, "euler")
    assert ours.shape == (2, 4, 8, 12)
    assert torch.equal(ours, stock("latent"))  # bit for bit: the same operations
    images = family.decode(family.load_vae("cpu", torch.float32), ours)
    np.testing.assert_array_equal(images.numpy(), as_array(stock("pil")))
    assert images.float().std() > 10


def test_tables_of_the_example_match_its_model(family):
    transformer = family.load_transformer("cpu", torch.float32)
    plan = quantize_plan(transformer, family, (), BACKENDS["emulated_nvfp4"])
    for row in plan:
        assert row.quantized == (re.search(r"time|embed|norm|^proj_out$", row.name) is None), row
    add_adapters(transformer, Lora(rank=2, alpha=2), family)
    assert len(adapted_modules(transformer)) == 8

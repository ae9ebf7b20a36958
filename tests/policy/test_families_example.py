"""The family that docs/new_model.md shows: taken out of the page as it stands, and compared with
its stock pipeline.
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
NAMED = "auraflow"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny AuraFlowPipeline of random weights. Images are 16x24, latents [4, 8, 12]."""
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
        path = tmp_path_factory.mktemp(NAMED)
        pipe.save_pretrained(path)
    return path


def on_the_page(pattern: str) -> str:
    """The one block of code in the page that begins so."""
    (code,) = re.findall(rf"```python\n({pattern}.*?)```", PAGE.read_text(), re.DOTALL)
    return code


@pytest.fixture
def family(directory, monkeypatch, tmp_path):
    """As someone who follows the page has it: the page's file where it says, and the page's row in
    the table.
    """
    (tmp_path / f"{NAMED}.py").write_text(on_the_page('"""AuraFlow'))
    monkeypatch.setattr(policy.families, "__path__", [*policy.families.__path__, str(tmp_path)])
    rows = table_with_the_row()["FAMILIES"]
    assert rows.keys() - FAMILIES.keys() == {NAMED}
    monkeypatch.setitem(FAMILIES, NAMED, load_class(rows[NAMED], Family))
    whole = Model(path=str(directory), height=16, width=24, max_sequence_length=12)
    found = family_for(whole.model_copy(update={"family": NAMED}))
    found.check()
    yield found
    sys.modules.pop(f"policy.families.{NAMED}")


def table_with_the_row() -> dict:
    """configs/families.py with the page's row put behind the others, executed."""
    source = Path(configs.families.__file__).read_text()
    last = '    "sana_video": "policy.families.sana_video:SanaVideo",\n'
    assert source.count(last) == 1
    module: dict = {}
    exec(
        compile(source.replace(last, last + on_the_page(f'    "{NAMED}"')), "families.py", "exec"),
        module,
    )
    return module


def test_a_family_needs_only_its_row():
    assert TypeAdapter(table_with_the_row()["FamilyName"]).validate_python(NAMED) == NAMED
    with pytest.raises(ValueError, match="'sana_video' or 'auraflow'"):
        TypeAdapter(table_with_the_row()["FamilyName"]).validate_python("auroflow")


def test_the_example_family_equals_the_stock_pipeline(family, directory):
    from diffusers import AuraFlowPipeline

    pipe = AuraFlowPipeline.from_pretrained(directory)
    pipe.set_progress_bar_config(disable=True)
    noise = noise_for(SEEDS, family.latent_shape)

    def stock(output_type):
        sigmas = np.linspace(1, 1 / 4, 4).tolist()
        how = {
            "height": 16,
            "width": 24,
            "sigmas": sigmas,
            "guidance_scale": 1.0,
            "max_sequence_length": 12,
        }
        return pipe(
            "a red circle", num_images_per_prompt=2, latents=noise, output_type=output_type, **how
        ).images

    rows = family.load_text("cpu", torch.float32).encode(["a red circle"]).repeat(2)
    ours = sample(family, family.load_transformer("cpu", torch.float32), rows, SEEDS, 4, "euler")
    assert ours.shape == (2, 4, 8, 12)
    assert torch.equal(ours, stock("latent"))  # bit for bit: the same operations
    images = family.decode(family.load_vae("cpu", torch.float32), ours)
    np.testing.assert_array_equal(images.numpy(), as_array(stock("pil")))
    assert images.float().std() > 10


def test_the_examples_tables_fit(family):
    transformer = family.load_transformer("cpu", torch.float32)
    plan = quantize_plan(transformer, family, (), BACKENDS["emulated_nvfp4"])
    for row in plan:
        assert row.quantized == (re.search(r"time|embed|norm|^proj_out$", row.name) is None), row
    add_adapters(transformer, Lora(rank=2, alpha=2), family)
    assert len(adapted_modules(transformer)) == 8

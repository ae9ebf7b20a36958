"""A LoRA to start from: files of diffusers and of other programs, and what is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor, nn

from configs.training import Lora
from policy.families import FAMILIES, family_for
from policy.initial_lora import read_lora
from policy.lora import adapter_state, add_adapters, use_adapter
from policy.lora_files import FILE, METADATA, save_diffusers_lora
from policy.merging import merged_weights
from policy.sampling.noise import noise_for
from policy.sampling.sample import sample
from tests.policy.conftest import LORA, SEEDS
from tests.tiny_families import SOLVER, encode, stock_call, stock_pipeline, tiny_model

RANK = 3


class Writer:
    """Random LoRA matrices of a transformer's modules, under the names of another program."""

    def __init__(self, transformer: nn.Module, names: tuple[str, str], alpha: float | None):
        self.transformer, self.names, self.alpha = transformer, names, alpha
        self.generator = torch.Generator().manual_seed(4)
        self.tensors: dict[str, Tensor] = {}

    def add(self, name: str, *modules: str) -> None:
        """Add one pair of matrices, whose B has the rows of all ``modules``."""
        linears: list[Any] = [self.transformer.get_submodule(module) for module in modules]
        down = torch.randn(RANK, linears[0].in_features, generator=self.generator) * 0.3
        rows = sum(linear.out_features for linear in linears)
        up = torch.randn(rows, RANK, generator=self.generator) * 0.3
        self.tensors |= dict(zip((name + part for part in self.names), (down, up), strict=True))
        if self.alpha is not None:
            self.tensors[f"{name}.alpha"] = torch.tensor(self.alpha)


PEFT = (".lora_A.weight", ".lora_B.weight")
KOHYA = (".lora_down.weight", ".lora_up.weight")
QKV, ADDED = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")


def flux_blocks(write: Writer, name: Callable[[str], str], qkv: str, proj: str) -> None:
    """Write the attention of the blocks with two streams, queries to values as one matrix."""
    for stream, parts, out in (("img", QKV, "to_out.0"), ("txt", ADDED, "to_add_out")):
        block = "transformer_blocks.0.attn"
        write.add(name(qkv.format(stream)), *(f"{block}.{part}" for part in parts))
        write.add(name(proj.format(stream)), f"{block}.{out}")


def flux_kohya(transformer: nn.Module) -> dict[str, Tensor]:
    write = Writer(transformer, KOHYA, 2.0)
    prefix = "lora_unet_double_blocks_0_"
    flux_blocks(write, lambda part: prefix + part, "{}_attn_qkv", "{}_attn_proj")
    return write.tensors


def flux_xlabs(transformer: nn.Module) -> dict[str, Tensor]:
    write = Writer(transformer, (".down.weight", ".up.weight"), None)
    number = {"img": "1", "txt": "2"}
    flux_blocks(
        write,
        lambda part: f"double_blocks.0.processor.{part[3:]}{number[part[:3]]}",
        "{}qkv_lora",
        "{}proj_lora",
    )
    return write.tensors


def flux_alpha(transformer: nn.Module) -> dict[str, Tensor]:
    """Names of diffusers, with an alpha beside each pair."""
    write = Writer(transformer, PEFT, 5.0)
    for part in QKV:
        module = f"transformer_blocks.0.attn.{part}"
        write.add(f"transformer.{module}", module)
    return write.tensors


def flux2_ai_toolkit(transformer: nn.Module) -> dict[str, Tensor]:
    write = Writer(transformer, PEFT, None)
    prefix = "diffusion_model.double_blocks.0."
    flux_blocks(write, lambda part: prefix + part, "{}_attn.qkv", "{}_attn.proj")
    block = "single_transformer_blocks.0.attn"
    for name, part in (("linear1", "to_qkv_mlp_proj"), ("linear2", "to_out")):
        write.add(f"diffusion_model.single_blocks.0.{name}", f"{block}.{part}")
    return write.tensors


def qwen_image_kohya(transformer: nn.Module) -> dict[str, Tensor]:
    write = Writer(transformer, KOHYA, 2.0)
    for part in (*QKV, *ADDED, "to_out.0", "to_add_out"):
        module = f"transformer_blocks.0.attn.{part}"
        write.add("lora_unet_" + module.replace(".", "_"), module)
    return write.tensors


def z_image_comfyui(transformer: nn.Module) -> dict[str, Tensor]:
    write = Writer(transformer, PEFT, 2.0)
    for part in (*QKV, "to_out.0"):
        module = f"layers.0.attention.{part}"
        write.add(f"diffusion_model.{module}", module)
    return write.tensors


def wan_blocks(write: Writer, prefix: str, between: str) -> dict[str, Tensor]:
    for i in (0, 1):
        for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn")):
            for part, short in zip((*QKV, "to_out.0"), "qkvo", strict=True):
                name = between.join(("blocks", str(i), theirs, short))
                write.add(prefix + name, f"blocks.{i}.{ours}.{part}")
        for part, name in (("net.0.proj", "0"), ("net.2", "2")):
            write.add(
                prefix + between.join(("blocks", str(i), "ffn", name)), f"blocks.{i}.ffn.{part}"
            )
    return write.tensors


def wan_original(transformer: nn.Module) -> dict[str, Tensor]:
    return wan_blocks(Writer(transformer, PEFT, None), "diffusion_model.", ".")


def wan_musubi(transformer: nn.Module) -> dict[str, Tensor]:
    return wan_blocks(Writer(transformer, KOHYA, 6.0), "lora_unet_", "_")


FORMATS: dict[Callable[[nn.Module], dict[str, Tensor]], str] = {
    flux_kohya: "flux",
    flux_xlabs: "flux",
    flux_alpha: "flux",
    flux2_ai_toolkit: "flux2",
    qwen_image_kohya: "qwen_image",
    z_image_comfyui: "z_image",
    wan_original: "wan",
    wan_musubi: "wan",
}


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
def test_run_starts_from_the_lora_of_another_program(write, request, tmp_path):
    """It generates what the stock pipeline generates with the same file."""
    name = FORMATS[write]
    directory = request.getfixturevalue(f"tiny_{name}_dir")
    family = family_for(tiny_model(name, directory))
    transformer = family.load_transformer("cpu", torch.float32)
    file = tmp_path / "other.safetensors"
    save_file(write(transformer), file)
    targets = tuple(read_lora(file, family).products)
    lora = Lora(rank=4, alpha=7, targets=targets, init_from=str(file))
    assert add_adapters(transformer, lora, family) == 0
    rows = encode(family, ["a red circle"]).repeat(3)
    with use_adapter(transformer, "ema"):
        ours = sample(family, transformer, rows, SEEDS, 3, SOLVER[name])
    pipe, noise = stock_pipeline(name, directory), noise_for(SEEDS, family.latent_shape)
    base = stock_call(pipe, family.model, "a red circle", noise, 3, "latent")
    pipe.load_lora_weights(str(tmp_path), weight_name="other.safetensors")
    theirs = stock_call(pipe, family.model, "a red circle", noise, 3, "latent")
    # B has been divided and multiplied by alpha / rank, which rounds it once more
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5 * float(ours.abs().max()))
    assert (theirs - base).abs().max() > 0.01


@pytest.mark.parametrize(("rank", "alpha"), [(4, 8), (6, 3), (4, 32)])
def test_run_starts_from_an_existing_lora(
    family, adapted, transformer, randomise, tmp_path, rank, alpha
):
    """The product s B A is the same in every module, at the same or a larger rank and for any
    alpha.
    """
    state = randomise(adapted, "current", 6)
    save_diffusers_lora(tmp_path, state, LORA)
    expected = dict(merged_weights(adapted, "current"))
    fresh = family.load_transformer("cpu", torch.float32)
    add_adapters(fresh, Lora(rank=rank, alpha=alpha, init_from=str(tmp_path)), family, seed=9)
    for name in ("current", "old", "ema"):
        for module, weight in merged_weights(fresh, name):
            torch.testing.assert_close(weight, expected[module], rtol=1e-5, atol=1e-6)
    downs = adapter_state(fresh, "current")["transformer_blocks.0.attn.to_q.lora_A.weight"]
    assert (downs.abs().sum(1) > 0).all()  # added rows can learn


def test_unusable_initial_lora_is_refused(family, adapted, tmp_path, randomise):
    save_diffusers_lora(tmp_path, randomise(adapted, "current", 6), LORA)
    cases = [
        (
            Lora(rank=4, init_from=str(tmp_path / "none")),
            FileNotFoundError,
            "lora.init_from: pytorch_lora_weights.* not found in",
        ),
        (
            Lora(rank=2, init_from=str(tmp_path)),
            ValueError,
            "is 32x32 of rank 4, but 32x32 of rank 2 is expected: raise lora.rank",
        ),
        (
            Lora(rank=4, targets=("attn.to_q",), init_from=str(tmp_path)),
            ValueError,
            "which is not in lora.targets",
        ),
        (
            Lora(rank=4, targets=("attn.query",)),
            ValueError,
            "lora.targets: no linear layer of the transformer has a name that ends in 'attn.query'",
        ),
        (
            Lora(rank=4, targets=("attn.to_q", "to_w")),
            ValueError,
            "ends in 'to_w'; existing names are such as 'transformer_blocks",
        ),
    ]
    for lora, error, message in cases:
        with pytest.raises(error, match=message):
            add_adapters(family.load_transformer("cpu", torch.float32), lora, family)
    (tmp_path / FILE).write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00not json")
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        add_adapters(
            family.load_transformer("cpu", torch.float32),
            Lora(rank=4, init_from=str(tmp_path)),
            family,
        )


@pytest.mark.parametrize(
    ("settings", "strength"),
    [
        ({}, 1.0),
        ({"lora_alpha": 6}, 2.0),
        ({"lora_alpha": 6, "use_rslora": True}, 6 / 3**0.5),
        ({"lora_alpha": 6, "alpha_pattern": {"attn.to_q": 12, "to_k": 1}}, 4.0),
        ({"lora_alpha": 6, "alpha_pattern": {"to_k": 1}}, 2.0),
    ],
)
def test_strength_is_that_of_pefts_settings(family, tmp_path, settings, strength):
    """alpha / rank, as peft computes it from a ``LoraConfig``."""
    pair = {"lora_A": torch.ones(3, 8), "lora_B": torch.ones(8, 3)}
    save_file(
        {f"transformer.a.attn.to_q.{part}.weight": value for part, value in pair.items()},
        tmp_path / FILE,
        metadata={METADATA: json.dumps({f"transformer.{k}": v for k, v in settings.items()})},
    )
    assert read_lora(tmp_path, family).products["a.attn.to_q"].strength == pytest.approx(strength)
    if settings:
        attention = nn.ModuleDict({part: nn.Linear(8, 8) for part in ("to_q", "to_k")})
        model = nn.ModuleDict({"a": nn.ModuleDict({"attn": attention})})
        config = LoraConfig(r=3, target_modules=["to_q", "to_k"], **settings)
        wrapped: Any = inject_adapter_in_model(config, model)
        assert wrapped.get_submodule("a.attn.to_q").scaling["default"] == pytest.approx(strength)


PAIR = {
    "transformer.a.lora_A.weight": torch.ones(2, 3),
    "transformer.a.lora_B.weight": torch.ones(3, 2),
}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("[]", "is not a JSON object"),
        ("1" * 5000, "that is not JSON"),
        ("[" * 100_000, "(recursion|Stack overflow)"),  # the second: Python 3.14
        ('{"transformer.lora_alpha": "8"}', "lora_alpha '8', not a number above 0"),
        ('{"transformer.lora_alpha": 0}', "lora_alpha '0', not a number above 0"),
        ('{"transformer.lora_alpha": Infinity}', "lora_alpha 'inf', not a number above 0"),
    ],
)
def test_invalid_alpha_in_a_lora_file_is_refused(family, tmp_path, metadata, message):
    save_file(PAIR, tmp_path / FILE, metadata={METADATA: metadata})
    with pytest.raises(ValueError, match=f"lora.init_from: .*{message}"):
        read_lora(tmp_path, family)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"transformer.a.lora_magnitude_vector": torch.ones(3)}, "not a matrix of a LoRA"),
        ({"transformer.a.dora_scale": torch.ones(3)}, "is a DoRA, not a LoRA: merge it"),
        ({"transformer.a.lokr_w1": torch.ones(3)}, "is a LoKr, not a LoRA"),
        ({"transformer.a.lora_B.bias": torch.ones(3)}, "a bias or a norm, 'transformer.a.lora_B.b"),
        ({"transformer.b.diff": torch.ones(3)}, "a bias or a norm, 'transformer.b.diff'"),
        ({"transformer.a.lora_B.weight": torch.full((3, 2), torch.nan)}, "that are not finite"),
        (
            {"transformer.b.lora_A.weight": torch.ones(2, 3)},
            "has only 'b.lora_A.weight' of its pair",
        ),
        ({"transformer.a.lora_B.weight": torch.ones(3, 5)}, "'a' that cannot be multiplied"),
        ({"other.b.lora_B.weight": torch.ones(4, 2)}, "7 outputs of layers, .* reads 3: it was"),
    ],
)
def test_what_is_not_a_lora_of_the_transformer_is_refused(family, tmp_path, change, message):
    save_file(PAIR | change, tmp_path / FILE)
    with pytest.raises(ValueError, match=f"lora.init_from: '.*{message}"):
        read_lora(tmp_path, family)


def test_bias_changes_of_zero_are_left_out(family, tmp_path):
    save_file(PAIR | {"transformer.a.lora_B.bias": torch.zeros(3)}, tmp_path / FILE)
    assert set(read_lora(tmp_path, family).products) == {"a"}


@pytest.mark.parametrize("name", FAMILIES)
def test_lora_of_another_model_is_refused(name, tmp_path):
    save_file({"unet.down.lora_A.weight": torch.ones(2, 3)}, tmp_path / "one")
    unloaded = object.__new__(FAMILIES[name])  # reading needs only the class of the pipeline
    message = f"(has no weights of a|as a LoRA for) .*{unloaded.pipeline_class}"
    with pytest.raises(ValueError, match=message):
        read_lora(tmp_path / "one", unloaded)


def test_layers_of_text_encoders_are_counted_and_left_out(tiny_flux_dir, tmp_path):
    family = family_for(tiny_model("flux", tiny_flux_dir))
    transformer = family.load_transformer("cpu", torch.float32)
    tensors = flux_kohya(transformer)
    prefix = "lora_te1_text_model_encoder_layers_0_self_attn_"
    for part in ("q_proj", "k_proj"):
        tensors |= {
            f"{prefix}{part}.lora_down.weight": torch.ones(RANK, 8),
            f"{prefix}{part}.lora_up.weight": torch.ones(8, RANK),
            f"{prefix}{part}.alpha": torch.tensor(2.0),
        }
    save_file(tensors, tmp_path / FILE)
    initial = read_lora(tmp_path, family)
    assert initial.text_encoders == 2 and len(initial.products) == 8
    lora = Lora(rank=4, targets=tuple(initial.products), init_from=str(tmp_path))
    assert add_adapters(transformer, lora, family) == 2

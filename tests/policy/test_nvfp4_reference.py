"""The quantizer equals, bit for bit, the reference quantizer that NVIDIA publishes in Python. The
interfaces of TransformerEngine that ``te_nvfp4`` uses exist.

Both are read from the pure-Python wheel of TransformerEngine. Its compiled parts are not needed:
run ``pip download --no-deps transformer-engine==2.20.2``, unzip the file, and set
TRANSFORMER_ENGINE_WHEEL to the directory. Without it, the tests are skipped.
The directory must not be on PYTHONPATH, because peft imports TransformerEngine if it finds it, and
the import fails without the compiled parts.
"""

import ast
import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest
import torch

from policy.precision import te_nvfp4
from policy.precision.nvfp4 import pack_activation, quantize
from policy.precision.te_nvfp4 import PARTS, engine_lacks, nvfp4_recipe


def package() -> Path | None:
    """Return the directory of the package ``transformer_engine``, unpacked or installed."""
    named = os.environ.get("TRANSFORMER_ENGINE_WHEEL")
    if named:
        return Path(named) / "transformer_engine"
    result = importlib.util.find_spec("transformer_engine")
    return Path(next(iter(result.submodule_search_locations or []))) if result else None


PACKAGE = package()
pytestmark = pytest.mark.skipif(
    PACKAGE is None, reason="TRANSFORMER_ENGINE_WHEEL names no unpacked wheel of transformer-engine"
)


@pytest.fixture
def stubbed(monkeypatch):
    """The package tree of TransformerEngine without its compiled parts. Empty classes replace what
    these define.
    """

    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    def module(name: str, **contents: object) -> None:
        stub = types.ModuleType(name)
        stub.__path__ = [str(PACKAGE.joinpath(*name.split(".")[1:]))]
        vars(stub).update(contents)
        monkeypatch.setitem(sys.modules, name, stub)

    for name in ("", ".common", ".pytorch", ".pytorch.tensor"):
        module(f"transformer_engine{name}")
    module(
        "transformer_engine.pytorch.quantized_tensor",
        QuantizedTensorStorage=type("Storage", (), {}),
        Quantizer=Quantizer,
    )
    module("transformer_engine.pytorch.tensor.utils", is_custom=lambda tensor: True)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.startswith("transformer_engine"):
            del sys.modules[name]


def data_sets() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(64, 128, generator=generator)
    sparse = normal * (torch.rand(64, 128, generator=generator) < 0.1)
    blocks = normal.clone()
    blocks[:, 16:32] = (
        0  # blocks of zeros; the next line makes blocks that underflow to a scale of zero
    )
    blocks[:32, 48:64] *= 1e-8
    grid = torch.randint(-12, 13, (64, 128), generator=generator) / 2.0  # ties of E2M1
    return {
        "normal": normal,
        "heavy tails": normal**5,
        "small": normal * 1e-30,
        "large": normal * 1e30,
        "sparse": sparse,
        "zero and tiny blocks": blocks,
        "ties": grid,
        "columns of unequal size": normal * torch.logspace(-6, 6, 128),
        "bfloat16": normal.bfloat16().float(),
        "zeros": torch.zeros(32, 64),
    }


@pytest.mark.parametrize("name", data_sets())
def test_codes_and_scales_equal_the_reference(stubbed, name):
    reference = stubbed("transformer_engine.pytorch.custom_recipes.reference_nvfp4")
    formats = stubbed("transformer_engine.pytorch.custom_recipes.reference_utils").Fp4Formats
    quantizer = reference.NVFP4QuantizerRef(
        dtype=formats.E2M1, columnwise=False, quant_tile_shape=(1, 16)
    )
    weight = data_sets()[name]
    codes, scales, _, _, amax, _ = quantizer._quantize(weight)
    for packed in (quantize(weight), pack_activation(weight, exact=True)):
        assert torch.equal(packed.amax.view(1), amax.view(1))
        assert torch.equal(
            packed.scales, scales.view(torch.uint8)[: len(weight), : weight.shape[1] // 16]
        )
        assert torch.equal(packed.codes, codes.view(torch.uint8))


def test_recipe_exists_in_the_installed_version(stubbed):
    recipes = stubbed("transformer_engine.common.recipe")
    assert engine_lacks(types.SimpleNamespace(**dict.fromkeys(PARTS)), recipes) == []
    recipe = nvfp4_recipe(recipes)
    assert isinstance(recipe, recipes.NVFP4BlockScaling)
    for operand in (recipe.fp4_quant_fwd_inp, recipe.fp4_quant_fwd_weight):
        assert not (
            operand.random_hadamard_transform
            or operand.stochastic_rounding
            or operand.fp4_2d_quantization
        )
    assert recipe.fp4_format.name == "E2M1" and recipe.nvfp4_4over6 == "none"


def arguments(file: str, owner: str, function: str) -> set[str]:
    """Return the argument names of ``owner.function`` in a file of the wheel. The file cannot be
    imported without CUDA.
    """
    tree = ast.parse((PACKAGE / "pytorch" / file).read_text())
    body = next(
        node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner
    )
    result = next(
        node for node in body if isinstance(node, ast.FunctionDef) and node.name == function
    )
    return {argument.arg for argument in [*result.args.args, *result.args.kwonlyargs]}


def test_arguments_that_the_backend_passes_exist():
    """The arguments are read from ``policy/precision/te_nvfp4.py``, so that the test stays
    consistent with the code.
    """
    source = ast.parse(Path(te_nvfp4.__file__).read_text(encoding="utf-8"))
    calls = {
        node.func.attr: {keyword.arg for keyword in node.keywords}
        for node in ast.walk(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    tensor = arguments("tensor/nvfp4_tensor.py", "NVFP4Tensor", "__new__") | arguments(
        "quantized_tensor.py", "QuantizedTensor", "__new__"
    )
    assert calls["NVFP4Tensor"] and calls["NVFP4Tensor"] <= tensor
    assert calls["NVFP4Quantizer"] <= arguments(
        "tensor/nvfp4_tensor.py", "NVFP4Quantizer", "__init__"
    )
    assert calls["Linear"] <= arguments("module/linear.py", "Linear", "__init__")
    exported = (PACKAGE / "pytorch" / "__init__.py").read_text()
    for name in (
        "Linear",
        "NVFP4Tensor",
        "NVFP4Quantizer",
        "autocast",
        "is_nvfp4_available",
        "DType",
    ):
        assert f" {name}\n" in exported or f", {name}\n" in exported

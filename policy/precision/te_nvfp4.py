"""``te_nvfp4``: NVFP4 tensor cores through TransformerEngine, on the buffers of ``torch_nvfp4``.

NOT VERIFIED: this has not run on a Blackwell GPU. Written for TransformerEngine 2.20, in whose code
its layers run up to the kernels (``tests/policy/test_te_layers.py``, no GPU needed).
``tests/policy/test_nvfp4_hardware.py`` compares it with the emulation on such a GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from policy.precision.layer import QuantizedLinear, flatten_rows, padded_rows
from policy.precision.torch_nvfp4 import NVFP4Weight, TorchNVFP4
from records.errors import first_line

Engine = Any
"""TransformerEngine's modules and objects; untyped, as it is not installed for type checks."""
PARTS = ("DType", "NVFP4Quantizer", "NVFP4Tensor", "autocast", "is_nvfp4_available")


def import_engine() -> tuple[Engine, Engine]:
    """Import ``transformer_engine.pytorch`` and ``transformer_engine.common.recipe``.

    Raises ImportError for any failure; TransformerEngine itself raises RuntimeError without CUDA.
    """
    try:
        return importlib.import_module("transformer_engine.pytorch"), importlib.import_module(
            "transformer_engine.common.recipe"
        )
    except ImportError:
        raise
    except Exception as error:
        raise ImportError(first_line(error)) from error


TRICKS = ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
"""Fields of the recipe that disable its training techniques, which this format does not use."""


def engine_lacks(engine: Any, recipes: Any) -> list[str]:
    """Return the parts of TransformerEngine that ``te_nvfp4`` needs and this version lacks."""
    missing = [part for part in PARTS if not hasattr(engine, part)]
    recipe = getattr(recipes, "NVFP4BlockScaling", None)
    if recipe is None:
        return [*missing, "NVFP4BlockScaling"]
    fields = {field.name for field in dataclasses.fields(recipe)}
    return missing + [f"NVFP4BlockScaling.{name}" for name in TRICKS if name not in fields]


def nvfp4_recipe(recipes: Any) -> Any:
    """Return the recipe ``NVFP4BlockScaling`` for this format: 1x16 blocks, exact amax per tensor.

    ``recipes`` is the module ``transformer_engine.common.recipe``. Row-wise scaling is not used: it
    writes FP32 and finishes with eager passes, 26 bytes per element of the result. Weights are
    already packed, so "map to 4 or 6" affects activations only.
    """
    return recipes.NVFP4BlockScaling(**dict.fromkeys(TRICKS, True))


INDEXED = 2**31
"""Number of elements that TransformerEngine's kernels can address with int32 indices."""


class EngineLinear(NVFP4Weight):
    """x [..., K] -> [..., N] by ``te.Linear`` on an ``NVFP4Tensor`` of this module's buffers."""

    not_compiled = (
        "torch.compile cannot trace TransformerEngine's layers, so each one would break the graph:"
        ' use explore.activation_amax = "power_of_two", or torch_nvfp4'
    )

    def __init__(self, linear: nn.Linear, engine: Any, recipe: Any) -> None:
        super().__init__(linear)
        self._engine, self._recipe = engine, recipe
        self._linear: Engine = None
        self._built_on: int | None = None

    def _built(self) -> Engine:
        """Return the te.Linear for the current buffers; rebuild it after the module was moved."""
        if self._built_on != self.codes.data_ptr():
            # in a tuple, otherwise torch would register it as a submodule
            self._linear, self._built_on = (self._build(),), self.codes.data_ptr()
        return self._linear[0]

    def _build(self) -> Engine:
        te = self._engine
        quantizer = te.NVFP4Quantizer(
            rowwise=True, columnwise=False, with_rht=False, with_2d_quantization=False
        )
        # scales in cuBLAS's order are padded to tiles of 128 rows, see ``layer.swizzled``
        rows = -(-self.out_features // 128) * 128
        weight = te.NVFP4Tensor(
            (self.out_features, self.in_features),
            torch.bfloat16,
            rowwise_data=self.codes,
            rowwise_scale_inv=self.swizzled.view(rows, -1),
            columnwise_data=None,
            columnwise_scale_inv=None,
            amax_rowwise=self.amax,
            amax_columnwise=None,
            fp4_dtype=te.DType.kFloat4E2M1,
            quantizer=quantizer,
            with_gemm_swizzled_scales=True,
            requires_grad=False,
            device=self.codes.device,
        )
        # on the meta device, so that it allocates no weight: it is replaced below
        linear = te.Linear(
            self.in_features,
            self.out_features,
            bias=self.bias is not None,
            params_dtype=torch.bfloat16,
            device="meta",
        )
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().to(torch.bfloat16), requires_grad=False)
        return linear.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Apply te.Linear to rows zero-padded to a multiple of 32, as its fast quantizer requires.

        Raises ValueError for more elements than its kernels can address.
        """
        rows = flatten_rows(x).to(torch.bfloat16)
        largest = len(rows) * max(self.in_features, self.out_features)
        if largest >= INDEXED:
            raise ValueError(
                f"te_nvfp4: {largest} elements exceed the {INDEXED} that TransformerEngine's"
                " kernels can address: lower explore.chunk_size, or use torch_nvfp4"
            )
        with torch.no_grad(), self._engine.autocast(enabled=True, recipe=self._recipe):
            y = self._built()(padded_rows(rows, 32))
        return self.shaped(y[: len(rows)].contiguous(), x)


class EngineNVFP4(TorchNVFP4):
    """The backend ``te_nvfp4``, which uses the same published weights as ``torch_nvfp4``.

    Running needs TransformerEngine, packing does not. Its own layers use one exact amax per tensor.
    Its quantizer does not support a power of two as amax, which keeps images independent of each
    other: with that setting the layers are those of ``torch_nvfp4``.
    """

    name = "te_nvfp4"
    auto_on = None

    def unavailable_reason(self, device: torch.device) -> str | None:
        """Return why this backend does not run on this device, or None if it does.

        Checks the needs of ``torch_nvfp4``, the parts of TransformerEngine, and its own report.
        """
        refusal = super().unavailable_reason(device)
        if refusal is not None:
            return refusal
        try:
            engine, recipes = import_engine()
        except ImportError as error:
            return (
                f"transformer_engine.pytorch does not import ({error}): docs/precision.md says how"
                " it is installed"
            )
        if missing := engine_lacks(engine, recipes):
            return (
                "TransformerEngine 2.17 or later is needed: this version has no"
                f" {', '.join(missing)}"
            )
        available, reason = engine.is_nvfp4_available(return_reason=True)
        return None if available else f"TransformerEngine says: {reason}"

    def replacements(self, activation_amax: str) -> Callable[[nn.Linear], QuantizedLinear]:
        """Return a function to layers that share one recipe, or the packed input if not "exact".

        Raises ImportError if TransformerEngine is needed but missing.
        """
        if activation_amax != "exact":
            return super().replacements(activation_amax)
        engine, recipes = import_engine()
        recipe = nvfp4_recipe(recipes)
        return lambda linear: EngineLinear(linear, engine, recipe)

    def placeholder_replacements(self) -> Callable[[nn.Linear], QuantizedLinear]:
        """Return a function to layers of the same size that need no TransformerEngine."""
        return NVFP4Weight

"""``torch_nvfp4`` and ``te_nvfp4``: NVFP4 tensor cores, by torch alone or by TransformerEngine.

NOT VERIFIED: neither backend has run on a Blackwell GPU. What a CPU can tell has been tested: the
packed buffers, the order of the scales, the padding, and torch's own check of the arguments' shapes
(on fake tensors). Written against torch 2.13 and TransformerEngine 2.20. To be looked at first on a
GPU: ``tests/policy/test_nvfp4_hardware.py`` runs there, and compares both with the emulation;
whether captured graphs survive a load, which copies in place; speed.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from policy.precision import kernels, nvfp4
from policy.precision.layer import LastInput, QuantisedLinear, padded_rows, rows_of, swizzled
from policy.precision.nvfp4 import BLOCK, SPAN_INVERSE
from policy.precision.packing import NVFP4Packing

BLACKWELL = (10, 0)
"""The compute capability from which on there are NVFP4 tensor cores."""


class NVFP4Weight(QuantisedLinear):
    """A weight in the form that NVFP4 kernels read, filled from the compact form that travels.

    On the device: ``codes`` uint8 [N, K / 2], ``swizzled`` uint8 [ceil(N/128) 128 * ceil(K/64) 4],
    ``amax`` and ``factor`` = amax / 2688 float32 [1]. The compact scales [N, K / 16] stay on the
    host: they are put in order on arrival, and the kernel does not need them.
    """

    float32_buffers = ("amax", "factor")
    codes: Tensor
    swizzled: Tensor
    amax: Tensor
    factor: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear)
        device = linear.weight.device
        self.compact = torch.zeros(self.out_features, self.in_features // BLOCK, dtype=torch.uint8)
        self.register_buffer(
            "codes",
            torch.zeros(self.out_features, self.in_features // 2, dtype=torch.uint8, device=device),
        )
        self.register_buffer("swizzled", swizzled(self.compact).to(device))
        for name in self.float32_buffers:
            self.register_buffer(name, torch.zeros(1, dtype=torch.float32, device=device))

    def wire_targets(self) -> dict[str, Tensor]:
        """``amax`` travels without a dimension: a view of the same memory."""
        return {"codes": self.codes, "scales": self.compact, "amax": self.amax.view(())}

    def arrived(self) -> None:
        """Put the scales in order and make the factor, in place."""
        self.swizzled.copy_(swizzled(self.compact))
        torch.mul(self.amax, SPAN_INVERSE, out=self.factor)


def kernel_refuses(rows: int, columns: int) -> str | None:
    """Why a weight [N, K] does not fit the kernels, which want K / 2 and N in multiples of 16."""
    if columns % 32:
        return f"K = {columns} is not a multiple of 32"
    return f"N = {rows} is not a multiple of 16" if rows % 16 else None


def no_blackwell(device: torch.device) -> str | None:
    """Why there are no NVFP4 tensor cores here."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "NVFP4 kernels need a Blackwell GPU, and torch sees no CUDA device here"
    capability = torch.cuda.get_device_capability(device)
    if capability < BLACKWELL:
        return (
            "NVFP4 kernels need a Blackwell GPU of compute capability 10.0, this one has"
            f" {capability[0]}.{capability[1]}"
        )
    return None


# ---- torch alone


class Operand(NamedTuple):
    """Activations [M, K] as the product reads them: ``codes`` uint8 [M up to a multiple of 16,
    K / 2], ``scales`` uint8 in cuBLAS's order, ``factor`` = amax / 2688 float32 [].
    """

    codes: Tensor
    scales: Tensor
    factor: Tensor


def pack_operand(x: Tensor, exact: bool) -> Operand:
    """Activations [..., K], K a multiple of 16: by two kernels where there are such, else by many
    operations with the same result.
    """
    rows = rows_of(x)
    if kernels.missing(x.device) is None:
        return Operand(*kernels.nvfp4_pack(rows, exact))
    packed = nvfp4.pack_activation(padded_rows(rows), exact)
    return Operand(packed.codes, swizzled(packed.scales), packed.amax * SPAN_INVERSE)


def scaled_mm(
    x: Operand, codes: Tensor, scales: Tensor, factor: Tensor, bias: Tensor | None = None
) -> Tensor:
    """alpha (Ux Uw^T) + bias of packed x [M, K] and a weight [N, K] in kernel form: bfloat16 [M,
    N], rounded once; M in multiples of 16.

    M is a multiple of 16. Each operand has two scales: E4M3 per block of 16, and float32 per
    tensor, amax / 2688, so that the kernel applies alpha before it rounds.
    """
    from torch.nn.functional import ScalingType, SwizzleType
    from torch.nn.functional import scaled_mm as torch_scaled_mm

    recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    order = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    return torch_scaled_mm(
        x.codes.view(torch.float4_e2m1fn_x2),
        codes.view(torch.float4_e2m1fn_x2).t(),
        scale_a=[x.scales.view(torch.float8_e4m3fn), x.factor],
        scale_recipe_a=recipe,
        scale_b=[scales.view(torch.float8_e4m3fn), factor.view(())],
        scale_recipe_b=recipe,
        swizzle_a=order,
        swizzle_b=order,
        bias=None if bias is None else bias.to(torch.bfloat16),
        output_dtype=torch.bfloat16,
    )


class TorchNVFP4Linear(NVFP4Weight):
    """x [..., K] -> [..., N]: activations packed once for all layers that get them, the product by
    cuBLAS.
    """

    def __init__(self, linear: nn.Linear, last: LastInput, exact: bool) -> None:
        super().__init__(linear)
        self._last, self._exact = last, exact

    def forward(self, x: Tensor) -> Tensor:
        """alpha (Ux Uw^T) + bias."""
        packed = self._last.once(x, lambda x: pack_operand(x, self._exact))
        y = scaled_mm(packed, self.codes, self.swizzled, self.factor, self.bias)
        return self.shaped(y.narrow(0, 0, x.numel() // self.in_features), x)


class TorchNVFP4(NVFP4Packing):
    """The backend."""

    name = "torch_nvfp4"
    dtype = torch.bfloat16
    fuses = packs_eagerly = True
    auto_on = "cuda"
    capability = BLACKWELL
    speedup = 4

    def unavailable(self, device: torch.device) -> str | None:
        """A Blackwell GPU, and torch from 2.10 on."""
        if not hasattr(torch.nn.functional, "scaled_mm"):
            return (
                f"torch {torch.__version__} has no torch.nn.functional.scaled_mm, which came with"
                " 2.10"
            )
        return no_blackwell(device)

    def refuses(self, rows: int, columns: int) -> str | None:
        """The packed K must be a multiple of 16 bytes."""
        return kernel_refuses(rows, columns)

    def replacements(self, activation_amax: str) -> Callable[[nn.Linear], QuantisedLinear]:
        """Layers that share the packed input."""
        last = LastInput()
        return lambda linear: TorchNVFP4Linear(linear, last, activation_amax == "exact")


# ---- TransformerEngine


Engine = Any
"""TransformerEngine's modules and objects: it is not installed where types are checked."""
PARTS = ("DType", "NVFP4Quantizer", "NVFP4Tensor", "autocast", "is_nvfp4_available")


def import_engine() -> tuple[Engine, Engine]:
    """The modules ``transformer_engine.pytorch`` and ``transformer_engine.common.recipe``.

    Raises ImportError, whatever went wrong: TransformerEngine raises RuntimeError without CUDA.
    """
    try:
        return importlib.import_module("transformer_engine.pytorch"), importlib.import_module(
            "transformer_engine.common.recipe"
        )
    except ImportError:
        raise
    except Exception as error:
        raise ImportError(
            str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        ) from error


TRICKS = ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
"""What the recipe does for training, and this format does without."""


def engine_lacks(engine: Any, recipes: Any) -> list[str]:
    """What ``te_nvfp4`` is made of and this TransformerEngine does not have."""
    missing = [part for part in PARTS if not hasattr(engine, part)]
    recipe = getattr(recipes, "NVFP4BlockScaling", None)
    if recipe is None:
        return [*missing, "NVFP4BlockScaling"]
    fields = {field.name for field in dataclasses.fields(recipe)}
    return missing + [f"NVFP4BlockScaling.{name}" for name in TRICKS if name not in fields]


def nvfp4_recipe(recipes: Any) -> Any:
    """``NVFP4BlockScaling`` of the module ``transformer_engine.common.recipe`` as this format is:
    1x16 blocks, one exact amax per tensor.

    Not its scaling by row: that writes FP32 and finishes by eager passes, 26 bytes per element of
    the result. Weights come packed, so "map to 4 or 6" concerns activations only.
    """
    return recipes.NVFP4BlockScaling(**dict.fromkeys(TRICKS, True))


INDEXED = 2**31
"""Elements that TransformerEngine's kernels, which count in int32, can address."""


class EngineLinear(NVFP4Weight):
    """x [..., K] -> [..., N] by ``te.Linear`` over an ``NVFP4Tensor`` of this module's buffers."""

    not_compiled = (
        "TransformerEngine excludes its layers from tracing, so that every one of them would break"
        ' the graph: use explore.activation_amax = "power_of_two", or torch_nvfp4'
    )

    def __init__(self, linear: nn.Linear, engine: Any, recipe: Any) -> None:
        super().__init__(linear)
        self._engine, self._recipe = engine, recipe
        self._linear: Engine = None
        self._built_on: int | None = None

    def _built(self) -> Engine:
        """The te.Linear over the buffers where they are now: moving a module gives it new ones."""
        if self._built_on != self.codes.data_ptr():
            self._linear, self._built_on = (
                (self._build(),),
                self.codes.data_ptr(),
            )  # in a tuple: not a submodule
        return self._linear[0]

    def _build(self) -> Engine:
        te = self._engine
        quantizer = te.NVFP4Quantizer(
            rowwise=True, columnwise=False, with_rht=False, with_2d_quantization=False
        )
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
        """One te.Linear, rows padded with zeros to a multiple of 32: its fast quantiser wants that.

        Raises ValueError for more elements than it can count.
        """
        rows = rows_of(x).to(torch.bfloat16)
        largest = len(rows) * max(self.in_features, self.out_features)
        if largest >= INDEXED:
            raise ValueError(
                f"te_nvfp4: {largest} elements are more than TransformerEngine's kernels can"
                f" address, which is {INDEXED}: lower explore.chunk_size, or use torch_nvfp4"
            )
        with torch.no_grad(), self._engine.autocast(enabled=True, recipe=self._recipe):
            y = self._built()(padded_rows(rows, 32))
        return self.shaped(y[: len(rows)].contiguous(), x)


class EngineNVFP4(NVFP4Packing):
    """The backend; see ``policy.precision.backends.Backend``. Packing needs no TransformerEngine,
    running does.

    Its own layers run with one exact amax per tensor. A power of two, which keeps images apart, its
    quantiser cannot be given: layers with that are those of ``torch_nvfp4``.
    """

    name = "te_nvfp4"
    dtype = torch.bfloat16
    fuses = packs_eagerly = True
    capability = BLACKWELL
    speedup = 4

    def unavailable(self, device: torch.device) -> str | None:
        """What ``torch_nvfp4`` needs, all parts of TransformerEngine, and what that says itself."""
        refusal = TorchNVFP4().unavailable(device)
        if refusal is not None:
            return refusal
        try:
            engine, recipes = import_engine()
        except ImportError as error:
            return (
                f"transformer_engine.pytorch does not import ({error}): pip install -e '.[gpu]'"
                " --no-build-isolation"
            )
        if missing := engine_lacks(engine, recipes):
            return (
                "this TransformerEngine is too old, 2.17 or later is needed: it has no"
                f" {', '.join(missing)}"
            )
        available, reason = engine.is_nvfp4_available(return_reason=True)
        return None if available else f"TransformerEngine says: {reason}"

    def refuses(self, rows: int, columns: int) -> str | None:
        """As ``torch_nvfp4``, whose layers these may be."""
        return kernel_refuses(rows, columns)

    def replacements(self, activation_amax: str) -> Callable[[nn.Linear], QuantisedLinear]:
        """Layers that share one recipe, or the packed input. Raises ImportError where
        TransformerEngine is absent.
        """
        if activation_amax != "exact":
            return TorchNVFP4().replacements(activation_amax)
        engine, recipes = import_engine()
        recipe = nvfp4_recipe(recipes)
        return lambda linear: EngineLinear(linear, engine, recipe)

    def blanks(self) -> Callable[[nn.Linear], QuantisedLinear]:
        """The weights that the layers hold, without TransformerEngine."""
        return NVFP4Weight

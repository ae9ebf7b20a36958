"""Explorers: batch composition, a frozen weight range, and compiling."""

import shutil
import sys

import numpy as np
import pytest
import torch
import torch._dynamo

from learner.publish import Publisher
from policy.explorer import Explorer
from policy.precision import compiling, kernels
from policy.precision.backends import BACKENDS
from policy.precision.compiling import CompileFailed
from policy.precision.nvfp4 import dequantize, frozen_amax, quantize
from policy.precision.swap import quantize_plan

CPU_BACKENDS = ("fp32", "bf16", "fp8", "emulated_nvfp4")


def publisher(family, transformer, backend, **options):
    return Publisher(
        transformer, quantize_plan(transformer, family, (), backend), backend, 2**16, **options
    )


def explorer_of(family, adapted, name, **options) -> Explorer:
    backend = BACKENDS[name]
    explorer = Explorer(family, backend, **options)
    explorer.load(*publisher(family, adapted, backend).export("current", 0)[:2])
    return explorer


@pytest.mark.parametrize("name", CPU_BACKENDS)
def test_image_does_not_depend_on_other_images_in_the_batch(family, adapted, cond, randomise, name):
    """In batches of equal size, the latents of an image are equal bit for bit whatever the other
    images are: products of one shape sum in one order, and images share no quantization scale. For
    the emulation this follows from rounding amax to a power of two, and it holds while no block's
    amax is below amax / 2^15, which is the case here.
    """
    randomise(adapted, "current", 2)
    explorer = explorer_of(family, adapted, name)
    batches = [(5, 6, 7), (5, 2**60, 99), (5, 5, 5)]
    latents = [explorer.explore(cond.rows(0), seeds, 3, "dpmpp_2m")[1] for seeds in batches]
    assert np.array_equal(latents[0][0], latents[1][0])
    assert np.array_equal(latents[0][0], latents[2][0])
    assert not np.array_equal(latents[0][1], latents[1][1])


def test_exact_amax_makes_images_depend_on_the_batch(family, adapted, cond, randomise):
    """With an exact amax, the other images in a batch change the result. This is why amax is
    rounded up to a power of two. The rounding has almost no effect on accuracy.
    """
    randomise(adapted, "current", 2)
    explorers = [
        explorer_of(family, adapted, "emulated_nvfp4", activation_amax=kind)
        for kind in ("exact", "power_of_two")
    ]
    exact, rounded = (
        [e.explore(cond.rows(0), (5, n, n + 1), 3, "dpmpp_2m")[1][0] for n in (6, 60, 600)]
        for e in explorers
    )
    assert any(not np.array_equal(exact[0], other) for other in exact[1:])
    reference = explorer_of(family, adapted, "fp32").explore(
        cond.rows(0), (5, 6, 7), 3, "dpmpp_2m"
    )[1][0]
    errors = [np.linalg.norm(latents[0] - reference) for latents in (exact, rounded)]
    assert errors[1] == pytest.approx(errors[0], rel=0.5)


@pytest.mark.parametrize(
    ("name", "bound"), [("fp32", 1e-5), ("fp8", 0.01), ("bf16", 0.01), ("emulated_nvfp4", 0.01)]
)
def test_image_depends_on_batch_size_only_by_rounding(
    family, adapted, cond, randomise, name, bound
):
    """With another batch size, sums are computed in another order, which changes FP32 values of
    order 1 by about 2^-24. Where results or operands are then rounded to fewer bits, a few values
    near a rounding boundary change by one step: 2^-8 in bfloat16, 2^-2 in E2M1. All differences
    stay below the error of the precision itself, and latents are of order 1.
    """
    randomise(adapted, "current", 2)
    explorer = explorer_of(family, adapted, name)
    alone = explorer.explore(cond.rows(0), (5,), 3, "dpmpp_2m")[1][0]
    together = explorer.explore(cond.rows(0), (5, 6, 7, 8), 3, "dpmpp_2m")[1][0]
    assert np.linalg.norm(alone - together) <= bound * np.linalg.norm(alone)


def test_frozen_range_doubles_until_it_covers_the_weight():
    base = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 3.0])
    now = torch.tensor([0.5, 2.0, 2.1, 9.0, 0.7, 0.0])
    assert frozen_amax(base, now).tolist() == [2.0, 2.0, 4.0, 16.0, pytest.approx(0.7), 6.0]


def test_frozen_range_keeps_the_codes_of_unchanged_weights():
    """One weight becomes larger than all others. Without freezing, the scales of all blocks are
    rounded again. With a frozen range, only the block of this weight changes.
    """
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    grown = weight.clone()
    grown[3, 5] = 1.3 * weight.abs().max()
    backend = BACKENDS["emulated_nvfp4"]
    for frozen in (False, True):
        before, after = (
            backend.pack(
                w, True, frozen_amax(backend.amax(weight), backend.amax(w)) if frozen else None
            )
            for w in (weight, grown)
        )
        others = torch.ones(16, 32, dtype=torch.bool)
        others[3, :8] = False
        assert torch.equal(before["codes"][others], after["codes"][others]) == frozen
    assert after["amax"] == 2 * weight.abs().max()


def test_doubled_amax_hardly_increases_the_error():
    """E4M3 scales have an unused factor of two at the upper end. So the error with twice the amax
    equals the error with the exact amax to within a few percent.
    """
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    errors = [
        (dequantize(quantize(weight, True, amax)) - weight).norm()
        for amax in (None, 2 * weight.abs().max())
    ]
    assert errors[1].item() == pytest.approx(errors[0].item(), rel=0.03)


@pytest.mark.parametrize("name", ["emulated_nvfp4", "fp8"])
def test_published_scales_are_frozen_at_the_base_weights(family, adapted, randomise, name):
    """Every adapted layer has a scale that is the scale of its base weight times a power of two,
    whatever the adapter is. The same holds after a run is resumed.
    """
    backend = BACKENDS[name]
    base = {
        row.name: adapted.get_submodule(row.name)
        for row in quantize_plan(adapted, family, (), backend)
    }
    first = publisher(family, adapted, backend, frozen_amax=True)
    manifest, chunks, _ = first.export("current", 0)
    randomise(adapted, "current", 2)
    manifest, chunks, _ = first.export("current", 1)
    resumed = publisher(family, adapted, backend, frozen_amax=True).export("current", 1)
    assert resumed[0].checksum == manifest.checksum
    explorer = Explorer(family, backend)
    explorer.load(manifest, chunks)
    weight = base["transformer_blocks.0.attn.to_q"].base_layer.weight
    targets = explorer.transformer.get_submodule("transformer_blocks.0.attn.to_q").wire_targets()
    published_amax, base_amax = (
        (targets["scales"] * 448, weight.abs().amax(-1))
        if name == "fp8"
        else (targets["amax"], weight.abs().max())
    )
    exponents = torch.log2(published_amax / base_amax)
    assert (exponents >= 0.999).all() and torch.allclose(exponents, exponents.round(), atol=1e-5)


def test_compiling_without_a_compiler_is_refused_in_one_line(family, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError,
        match=(
            r"^explore.compile: torch.compile needs a C\+\+ compiler on a CPU, but there is no"
            r" 'no-such-compiler'"
        ),
    ):
        Explorer(family, BACKENDS["fp32"], compile=True)
    monkeypatch.setattr(kernels, "_triton_unusable", lambda: "the package triton is not installed")
    assert "triton is not" in (compiling.compiler_missing(torch.device("cuda")) or "")


def test_compiling_that_is_disabled_by_the_environment_is_refused(family, monkeypatch):
    monkeypatch.setenv("CXX", sys.executable)
    off = torch._dynamo.config.patch(disable=True)
    with (
        off,
        pytest.raises(
            ValueError,
            match="^explore.compile: the environment variable TORCH_COMPILE_DISABLE disables it",
        ),
    ):
        Explorer(family, BACKENDS["fp32"], compile=True)


def test_explorer_that_cannot_compile_raises_an_error(family, adapted, cond, monkeypatch):
    """The test covers a compiler that fails and a compiler that gives up after too many shapes.
    Both must be errors, although torch by default continues eagerly in the second case.
    """

    def broken(graph, inputs):
        raise RuntimeError("no code for this\nmore about it")

    monkeypatch.setenv("CXX", sys.executable)  # any existing program; it is never called
    explorer = explorer_of(family, adapted, "fp32", compile=True)
    assert torch._dynamo.config.recompile_limit == compiling.SHAPES
    explorer._denoiser = torch.compile(explorer.transformer, backend=broken, dynamic=False)
    with pytest.raises(
        CompileFailed,
        match=(
            r"^explore.compile: torch.compile failed .*no code for this.*: fix it, or set"
            r" explore"
        ),
    ):
        explorer.explore(cond.rows(0), (5,), 1, "euler")
    doubled = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        with compile_regenerating():
            assert doubled(torch.ones(2)).tolist() == [2, 2]
        with (
            pytest.raises(
                CompileFailed, match=r"^regenerate.compile: called with more than \d+ shapes"
            ),
            compile_regenerating(),
        ):
            doubled(torch.ones(3))
    with pytest.raises(ValueError, match="^not about compiling$"), compile_regenerating():
        raise ValueError("not about compiling")


def compile_regenerating():
    return compiling.compile_failures("regenerate.compile")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_explorer_generates_nearly_the_same_images(family, adapted, cond, randomise):
    """The compiler fuses elementwise operations and may change the order of sums, so results differ
    as with another batch size. Weights that are loaded after compiling take effect.
    """
    randomise(adapted, "current", 2)
    eager, compiled = (
        explorer_of(family, adapted, "fp8", compile=compile) for compile in (False, True)
    )
    for version in (0, 1):
        expected = eager.explore(cond.rows(0), (5, 6), 2, "dpmpp_2m")[1]
        actual = compiled.explore(cond.rows(0), (5, 6), 2, "dpmpp_2m")[1]
        assert np.linalg.norm(actual - expected) <= 0.01 * np.linalg.norm(expected)
        if version == 0:
            randomise(adapted, "current", 9)
            for explorer in (eager, compiled):
                explorer.load(*publisher(family, adapted, BACKENDS["fp8"]).export("current", 1)[:2])
            assert not np.array_equal(
                eager.explore(cond.rows(0), (5, 6), 2, "dpmpp_2m")[1], expected
            )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@torch.no_grad()
def test_compiled_emulation_equals_the_eager_one_bit_for_bit():
    """The compiled quantized operand equals the eager one bit for bit, for every kind of block. The
    compiler must not reorder the additions that perform the rounding.
    """
    from policy.precision.nvfp4 import quantize_activation

    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) ** 5
    x[0, :16], x[1, 16:32], x[2, 3] = 0, 1e-12, 6.0
    operand, amax = torch.compile(lambda x: quantize_activation(x), dynamic=False)(x)
    expected, wanted_amax = quantize_activation(x)
    assert torch.equal(operand + 0.0, expected + 0.0) and amax == wanted_amax

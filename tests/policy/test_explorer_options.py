"""Neighbours in a batch, a frozen range, and compiling."""

import shutil
import sys

import numpy as np
import pytest
import torch
import torch._dynamo

from learner.publish import Publisher
from policy.explorer import Explorer
from policy.precision import compiling
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
def test_an_image_does_not_depend_on_its_neighbours(family, adapted, cond, randomise, name):
    """In batches of one size, bit for bit: products of one shape sum in one order, and no scale is
    shared. For the emulation that is the power of two, and holds while no block's amax is below
    amax / 2^15, which it is not here.
    """
    randomise(adapted, "current", 2)
    explorer = explorer_of(family, adapted, name)
    batches = [(5, 6, 7), (5, 2**60, 99), (5, 5, 5)]
    latents = [explorer.explore(cond.rows(0), seeds, 3, "dpmpp_2m")[1] for seeds in batches]
    assert np.array_equal(latents[0][0], latents[1][0])
    assert np.array_equal(latents[0][0], latents[2][0])
    assert not np.array_equal(latents[0][1], latents[1][1])


def test_with_an_exact_amax_images_affect_each_other(family, adapted, cond, randomise):
    """What the power of two is there for; and it costs no accuracy to speak of."""
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
    truth = explorer_of(family, adapted, "fp32").explore(cond.rows(0), (5, 6, 7), 3, "dpmpp_2m")[1][
        0
    ]
    errors = [np.linalg.norm(latents[0] - truth) for latents in (exact, rounded)]
    assert errors[1] == pytest.approx(errors[0], rel=0.5)


@pytest.mark.parametrize(
    ("name", "bound"), [("fp32", 1e-5), ("fp8", 0.01), ("bf16", 0.01), ("emulated_nvfp4", 0.01)]
)
def test_an_image_depends_on_the_batch_size_only_by_rounding(
    family, adapted, cond, randomise, name, bound
):
    """Sums in another order: 2^-24 of values of order 1 in FP32. Where results or operands are then
    rounded to fewer bits, a sum that lay on the edge falls the other way: a step of 2^-8 in
    bfloat16, of 2^-2 in E2M1, for few values. All stay below what the precision itself costs, and
    latents are of order 1.
    """
    randomise(adapted, "current", 2)
    explorer = explorer_of(family, adapted, name)
    alone = explorer.explore(cond.rows(0), (5,), 3, "dpmpp_2m")[1][0]
    together = explorer.explore(cond.rows(0), (5, 6, 7, 8), 3, "dpmpp_2m")[1][0]
    assert np.linalg.norm(alone - together) <= bound * np.linalg.norm(alone)


def test_the_frozen_range_doubles_until_it_covers():
    base = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 3.0])
    now = torch.tensor([0.5, 2.0, 2.1, 9.0, 0.7, 0.0])
    assert frozen_amax(base, now).tolist() == [2.0, 2.0, 4.0, 16.0, pytest.approx(0.7), 6.0]


def test_a_frozen_range_keeps_codes_of_unchanged_weights():
    """One weight grows past the others: unfrozen, the scale of every block is rounded anew; frozen,
    only its own block changes.
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


def test_headroom_hardly_increases_the_error():
    """E4M3 scales have a binade to spare: the error with twice the amax is that with amax, to a few
    percent.
    """
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    errors = [
        (dequantize(quantize(weight, True, amax)) - weight).norm()
        for amax in (None, 2 * weight.abs().max())
    ]
    assert errors[1].item() == pytest.approx(errors[0].item(), rel=0.03)


@pytest.mark.parametrize("name", ["emulated_nvfp4", "fp8"])
def test_publishing_with_a_frozen_range(family, adapted, randomise, name):
    """Every adapted layer has the scale that its base weight gives, whatever the adapter is, and
    after a resume too.
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
    held = explorer.transformer.get_submodule("transformer_blocks.0.attn.to_q").wire_targets()
    now, then = (
        (held["scales"] * 448, weight.abs().amax(-1))
        if name == "fp8"
        else (held["amax"], weight.abs().max())
    )
    exponents = torch.log2(now / then)
    assert (exponents >= 0.999).all() and torch.allclose(exponents, exponents.round(), atol=1e-5)


def test_compiling_without_a_compiler_is_one_line(family, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError,
        match=(
            r"^explore.compile: torch.compile needs a C\+\+ compiler on a CPU, but there is no"
            r" 'no-such-compiler'"
        ),
    ):
        Explorer(family, BACKENDS["fp32"], compile=True)
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    assert "triton" in (compiling.compiler_missing(torch.device("cuda")) or "")


def test_disabled_compilation_is_refused_rather_than_run_eagerly(family, monkeypatch):
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


def test_an_explorer_that_cannot_compile_reports_it_and_generates_nothing(
    family, adapted, cond, monkeypatch
):
    """A compiler that is there and fails, and one that gives up after too many shapes: an error
    each, where torch's own default for the second is to go on eagerly.
    """

    def broken(graph, inputs):
        raise RuntimeError("no code for this\nmore about it")

    monkeypatch.setenv("CXX", sys.executable)  # something that is there; nothing is given to it
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
def test_compiled_explorers_generate_the_same_images(family, adapted, cond, randomise):
    """The compiler fuses elementwise work and may sum in another order: as with another batch size.
    And weights loaded after compiling are the ones that are used.
    """
    randomise(adapted, "current", 2)
    eager, compiled = (
        explorer_of(family, adapted, "fp8", compile=compile) for compile in (False, True)
    )
    for version in (0, 1):
        expected = eager.explore(cond.rows(0), (5, 6), 2, "dpmpp_2m")[1]
        found = compiled.explore(cond.rows(0), (5, 6), 2, "dpmpp_2m")[1]
        assert np.linalg.norm(found - expected) <= 0.01 * np.linalg.norm(expected)
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
def test_a_compiled_emulation_has_the_bits_of_the_eager_one():
    """Of the quantized operand, with every kind of block: the compiler must not reorder the
    additions that round.
    """
    from policy.precision.nvfp4 import quantize_activation

    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) ** 5
    x[0, :16], x[1, 16:32], x[2, 3] = 0, 1e-12, 6.0
    operand, amax = torch.compile(lambda x: quantize_activation(x), dynamic=False)(x)
    expected, wanted_amax = quantize_activation(x)
    assert torch.equal(operand + 0.0, expected + 0.0) and amax == wanted_amax

"""Packing kernels must equal the eager functions bit for bit, on ordinary data and on data that is
hard to pack. Without a GPU they run under Triton's interpreter.
"""

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.precision import kernels, nvfp4
from policy.precision.fp8 import quantize_rows, row_scales
from policy.precision.history import AmaxHistory
from policy.precision.layer import padded_rows, swizzled
from policy.precision.nvfp4 import (
    SEARCH_OFFSETS,
    SPAN_INVERSE,
    pack_activation,
    power_of_two_above,
    quantize,
)

triton = pytest.importorskip("triton", reason="the packing kernels need triton")
import triton.language as tl  # noqa: E402

from policy.precision.kernels import programs  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and DEVICE == "cpu", reason="neither a GPU nor Triton's interpreter"
    ),
]


def ordinary(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 3
    return x.bfloat16()


def difficult(name: str, rows: int, columns: int) -> torch.Tensor:
    """Return a bfloat16 matrix [M, K]. Each name is one kind of data that is hard to pack."""
    x = ordinary(rows, columns)
    if name == "zero rows":
        x[1::2] = 0
    elif name == "all zero":
        x.zero_()
    elif name == "negative zeros":
        x[:, ::3] = -0.0
    elif name == "subnormal blocks":  # blocks whose E4M3 scale is subnormal, or underflows to zero
        x[:, :16] *= 2.0**-16
        x[:, 16:32] *= 2.0**-19
        x[0, 32:] *= 2.0**-40
    elif name == "subnormal numbers":
        x = x * 2.0**-70 * 2.0**-64
    elif name == "huge":
        x[0] *= 2.0**124
    elif name == "one outlier":
        x[-1, -1] = 3e38
    elif name == "NaN":
        x[-1, 5] = float("nan")
    elif name == "Inf":
        x[0, -1] = -float("inf")
    return x


DIFFICULT = (
    "zero rows", "all zero", "negative zeros", "subnormal blocks", "subnormal numbers", "huge",
    "one outlier", "NaN", "Inf",
)  # fmt: skip


def assert_fp8(x: torch.Tensor) -> None:
    x = x.to(DEVICE)
    codes, scales = kernels.fp8_pack(x)
    # a GPU computes an eager division by a constant as a product with 1 / 448
    expected = row_scales(x.cpu())
    bits = quantize_rows(x.cpu(), expected).view(torch.uint8)
    assert torch.equal(scales.cpu().view(torch.int32), expected.view(torch.int32)) or bool(
        (scales.cpu().isnan() == expected.isnan()).all()
        and torch.equal(scales.cpu().nan_to_num(1), expected.nan_to_num(1))
    )
    actual = codes.cpu().view(torch.uint8)
    nan = (bits & 127) == 127  # the sign of a NaN depends on the processor
    assert torch.equal(actual & 127, bits & 127) and torch.equal(actual[~nan], bits[~nan])


def assert_nvfp4(x: torch.Tensor, exact: bool = False) -> None:
    codes, scales, factor = (t.cpu() for t in kernels.nvfp4_pack(x.to(DEVICE), exact))
    expected = pack_activation(padded_rows(x), exact)
    order = swizzled(expected.scales)
    assert torch.equal(scales & 127, order & 127)
    if expected.amax.isnan():  # every product is NaN, whatever the codes are
        assert factor.isnan() and bool(((order & 127) == 127).any())
        return
    assert torch.equal(scales, order) and torch.equal(codes, expected.codes)
    assert factor == expected.amax * SPAN_INVERSE


def assert_weight(x: torch.Tensor, search: bool, amax: torch.Tensor | None = None) -> None:
    """Compare a packed weight with the eager functions, which sum the errors in the same order."""
    own = x.abs().max().float() if amax is None else amax
    offsets = SEARCH_OFFSETS if search else range(0)
    codes, scales = kernels.nvfp4_pack_weight(x.to(DEVICE), own.to(DEVICE), offsets)
    with mock.patch.object(nvfp4, "block_sum", nvfp4.pair_sums):
        expected = quantize(x.cpu(), search, amax)
    assert torch.equal(scales.cpu(), expected.scales) and torch.equal(codes.cpu(), expected.codes)


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (129, 80), (16, 144)])
def test_packing_of_ordinary_weights(shape, search):
    assert_weight(ordinary(*shape), search)
    assert_weight(ordinary(*shape).float() * 1.1, search)


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("name", [name for name in DIFFICULT if name not in ("NaN", "Inf")])
def test_packing_of_difficult_weights(name, search):
    x = difficult(name, 5, 80)
    assert_weight(x, search)
    # shared with larger weights, or frozen before this one grew
    for factor in (8.0, 0.25):
        assert_weight(x, search, (x.abs().max().float() * factor).clamp(max=3e38))


@given(st.integers(0, 2**32), st.floats(-40, 40), st.booleans())
@settings(max_examples=20)
def test_packing_of_any_weight(seed, exponent, heavy):
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 32, generator=chance) * 2.0**exponent
    assert_weight(x**3 if heavy else x, True)


def test_the_last_of_the_offsets_is_tried():
    """It is the best one for one block in some 8,000."""
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    row, amax = x[434:435], x.abs().max()
    plain, searched = (quantize(row, search, amax).scales[0, 10] for search in (False, True))
    assert int(searched) - int(plain) == SEARCH_OFFSETS[-1]
    assert_weight(row, True, amax)


@pytest.mark.parametrize("search", [False, True])
def test_weights_are_quantized_by_the_kernel_if_there_is_one(monkeypatch, search):
    x = ordinary(5, 80).float()
    frozen = x.abs().max() * 2
    with mock.patch.object(nvfp4, "block_sum", nvfp4.pair_sums):
        expected = [quantize(x, search), quantize(x, search, frozen)]
    monkeypatch.setattr(kernels, "missing", lambda device: None)
    for packed, other in zip(
        (quantize(x, search), quantize(x, search, frozen)), expected, strict=True
    ):
        assert all(
            torch.equal(a, b)
            for a, b in zip(vars(packed).values(), vars(other).values(), strict=True)
        )
    with pytest.raises(ValueError, match="NVFP4 cannot pack a weight with amax nan"):
        quantize(difficult("NaN", 5, 80), search)


def test_amax_of_a_weight_shows_what_is_not_finite():
    x = ordinary(7, 48)
    assert kernels.tensor_amax(x.to(DEVICE)).cpu() == x.abs().max()
    for name in ("NaN", "Inf"):
        assert not kernels.tensor_amax(difficult(name, 7, 48).to(DEVICE)).isfinite()


@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (2, 4096 + 16)])
def test_fp8_packing_of_ordinary_data(shape):
    assert_fp8(ordinary(*shape))
    assert_fp8(ordinary(*shape).float())


@pytest.mark.parametrize("name", DIFFICULT)
def test_fp8_packing_of_difficult_data(name):
    assert_fp8(difficult(name, 3, 48))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [(1, 16), (17, 48), (129, 64), (16, 80), (200, 144)])
def test_nvfp4_packing_of_ordinary_data(shape, exact):
    assert_nvfp4(ordinary(*shape), exact)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", DIFFICULT)
def test_nvfp4_packing_of_difficult_data(name, exact):
    assert_nvfp4(difficult(name, 5, 80), exact)


def assert_recording(x: torch.Tensor, before: torch.Tensor | None) -> None:
    """Check the codes of x, packed by the amax of ``before`` or its own, and the recorded amax."""
    histories = [AmaxHistory(torch.device(DEVICE)) for _ in range(2)]
    for history in histories:
        if before is not None:
            history.known = True
            history.previous[-1] = before.abs().max().float().view(torch.int32)
    kernel, eager = histories
    previous = kernel.previous if kernel.known else None
    packed = kernels.nvfp4_pack_recording(x.to(DEVICE), previous, kernel.current)
    codes, scales, factor = (t.cpu() for t in packed)
    expected = pack_activation(padded_rows(x), amax=eager.amax(x.to(DEVICE).abs()).cpu())
    order = swizzled(expected.scales)
    assert int(kernel.current.max()) == int(eager.current.max()) or not x.isfinite().all()
    assert torch.equal(scales & 127, order & 127)
    assert factor == expected.amax * SPAN_INVERSE or factor.isnan() and expected.amax.isnan()
    if x.isfinite().all() and not factor.isnan():
        assert torch.equal(codes, expected.codes)


@pytest.mark.parametrize("name", DIFFICULT)
@pytest.mark.parametrize("before", ["none", "ordinary", *DIFFICULT])
def test_packing_by_the_amax_of_the_previous_pass(name, before):
    rows = {"none": None, "ordinary": ordinary(2, 32)}
    previous = rows[before] if before in rows else difficult(before, 5, 80)
    assert_recording(difficult(name, 5, 80), previous)


@pytest.mark.parametrize("shape", [(1, 16), (129, 64), (300, 144)])
def test_the_recorded_amax_is_that_of_all_tiles(shape):
    x = ordinary(*shape)
    x[-1, -1] = 100.0
    assert_recording(x, ordinary(1, 16))
    current = torch.zeros(kernels.PARTIALS, dtype=torch.int32, device=DEVICE)
    kernels.nvfp4_pack_recording(x.to(DEVICE), None, current)
    assert current.max().view(torch.float32) == 100.0


def test_programs_that_share_an_element_keep_the_largest(monkeypatch):
    """Nine tiles record into two elements, and the largest value is in the first tile."""
    monkeypatch.setattr(kernels, "PARTIALS", 2)
    x = ordinary(300, 144)
    x[0, 0] = 100.0
    assert_recording(x, ordinary(1, 16))


def test_a_compiled_graph_records_into_the_same_tensor(graphs):
    """Two calls in one graph raise the same tensor; torch replaces such writes while it traces."""

    def twice(x: torch.Tensor, history: AmaxHistory) -> list[torch.Tensor]:
        previous = history.previous if history.known else None
        packed = (kernels.nvfp4_pack_recording(y, previous, history.current) for y in (x, x + 1))
        return [part for parts in packed for part in parts]

    x, histories = ordinary(17, 32).to(DEVICE), [AmaxHistory(torch.device(DEVICE)) for _ in "ab"]
    for history in histories:
        history.previous.fill_(torch.tensor(2.0).view(torch.int32))
    with torch.no_grad():
        for known in (False, True):
            for history in histories:
                history.known = known
            results = torch.compile(twice)(x, histories[0]), twice(x, histories[1])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
            assert torch.equal(histories[0].current, histories[1].current)
    assert int(histories[0].current.max()) > 0 and len(graphs) == 2


def test_float32_activations_are_packed():
    assert_nvfp4(ordinary(5, 80).float() * 1.1)


def test_range_covers_every_part_of_the_data(monkeypatch):
    """There are more elements than the programs process at once. The largest element is in the
    last, incomplete part.
    """
    assert [kernels.partials(n) for n in (1, 8192, 8193, 2**31)] == [1, 1, 2, 256]
    monkeypatch.setattr(kernels, "ELEMENTS", 128)
    monkeypatch.setattr(kernels, "PARTIALS", 4)
    x = ordinary(17, 48)
    x[-1, -1] = 100.0
    assert kernels.partials(x.numel()) == 4
    assert kernels.partial_amax(x.to(DEVICE)).max().view(torch.float32) == 100.0
    assert_nvfp4(x)


def test_non_contiguous_rows_are_packed():
    x = ordinary(6, 96)
    for view in (x[:, :48], x[::2], ordinary(32, 6).t()):
        assert_fp8(view)
        assert_nvfp4(view)


@settings(max_examples=12)
@given(
    st.integers(1, 3), st.integers(1, 9), st.integers(0, 10**6), st.floats(-45, 38), st.booleans()
)
def test_any_shape_and_range_is_packed(rows, blocks, seed, exponent, spread):
    """Values range from subnormal numbers to the largest ones. With ``spread``, every block has
    another magnitude.
    """
    x = ordinary(rows, 16 * blocks, seed).float() * 2.0**-2
    if spread:
        sizes = torch.randint(-20, 1, (blocks,), generator=torch.Generator().manual_seed(seed))
        x = (x.unflatten(1, (blocks, 16)) * 2.0 ** sizes[:, None]).flatten(1)
    x = (x * 10.0 ** (exponent / 2) * 10.0 ** (exponent / 2)).bfloat16()
    assert_fp8(x)
    assert_nvfp4(x)


@settings(max_examples=12)
@given(st.lists(st.integers(0, 2**16 - 1), min_size=16, max_size=16))
def test_any_bfloat16_bits_are_packed(bits):
    """The bfloat16 values are given by their bits, including NaN, Inf and zeros of both signs."""
    x = torch.tensor([bits], dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    assert_fp8(x)
    assert_nvfp4(x)


def test_all_values_of_both_formats_are_rounded_correctly():
    """The values cover every E4M3 code, every midpoint between two codes, and the neighbors of the
    midpoints. Midpoints are rounded to the even code. The largest value of a row is 448, so that
    its scale is 1.
    """
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    midpoints = (grid[1:] + grid[:-1]) / 2
    bits = midpoints.view(torch.int32)
    near = torch.stack([bits - 1, bits, bits + 1]).view(torch.float32).flatten()
    x = torch.cat([grid, midpoints, near, -near, -grid, torch.tensor([448.0])]).unsqueeze(0)
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % 16))
    assert row_scales(x) == 1.0
    assert_fp8(x)
    values = torch.arange(0, 6.25, 0.125)  # all E2M1 values, midpoints and quarters; amax is 2688
    x = torch.cat([values, -values]).view(-1, 1).repeat(1, 16)
    x[:, 0], x[:, 1:3] = 6.0, torch.tensor([6.0 - 2.0**-20, -(2.5 + 2.0**-21)])
    assert_nvfp4(torch.cat([x, torch.full((1, 16), 2688.0)]))


@triton.jit
def apply_power_of_two_above(source, target, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    tl.store(target + index, programs.power_of_two_above(tl.load(source + index)))


def test_power_of_two_above_over_the_whole_range():
    """The function is tested separately, for every exponent and some mantissas, including subnormal
    numbers.
    """
    low = torch.tensor([0, 1, 2, 0x400000, 0x7FFFFF, 3, 0x123456, 0x200001], dtype=torch.int32)
    bits = (torch.arange(254, dtype=torch.int32)[:, None] << 23 | low).flatten()
    bits = torch.cat([bits, bits.new_zeros(2048 - len(bits))])
    source = bits.to(DEVICE)
    actual = torch.empty_like(source)
    apply_power_of_two_above[(1,)](source, actual, COUNT=2048)
    expected = power_of_two_above(bits.view(torch.float32))
    assert torch.equal(actual.cpu().view(torch.float32), expected)


COMPILE = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from policy.precision.kernels import programs

X = {"x": "*bf16", "partial": "*i32", "codes": "*u8", "scales": "*fp32", "factor": "*fp32",
     "amax": "*fp32", "current": "*i32", "count": "i64", "rows": "i32", "padded": "i32",
     "columns": "i32"}
# these instructions keep NaN through the limits and the cast
NEEDED = {"fp8_rows": ("max.NaN.f32", "min.NaN.f32", "cvt.rn.satfinite.e4m3x2.f32")}
for name, constants, warps in (
    ("fp8_rows", {"WIDTH": 4096, "HARDWARE": True}, 4),
    ("partial_amax", {"BLOCK": 8192}, 8),
    ("nvfp4_tiles", {"PARTIALS": 256, "EXACT": False, "PREVIOUS": False, "SLOTS": 0}, 4),
    ("nvfp4_tiles", {"PARTIALS": 256, "EXACT": False, "PREVIOUS": True, "SLOTS": 256}, 4),
    ("nvfp4_weight", {"FIRST": -4, "LAST": 8, "BLOCKS": 128}, 4),
):
    program = getattr(programs, name)
    names = program.arg_names
    kinds = {n: X.get(n, "constexpr") for n in names}
    if name.startswith("nvfp4"):
        kinds["scales"] = "*u8"
    sixteen = [["tt.divisibility", 16]]
    aligned = {(i,): sixteen for i, n in enumerate(names) if n in X and n != "rows"}
    given = {(names.index(n),): v for n, v in constants.items()}
    source = ASTSource(program, kinds, given, aligned)
    for capability in (90, 100):
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32),
                              options={"num_warps": warps, "enable_fp_fusion": False})
        ptx = made.asm["ptx"]
        print(name, capability, len(made.asm["cubin"]) > 0,
              [word for word in ("fma", "ftz", "approx", "div.full") if word in ptx],
              max(map(int, re.findall(r"ld.global.v([24])", ptx))),
              all(word in ptx for word in NEEDED.get(name, ())))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler comes with its Linux wheel")
def test_kernels_compile_for_hopper_and_blackwell(tmp_path):
    """The kernels compile to machine code of Hopper and Blackwell. Triton needs no GPU for this.
    The code contains no contracted sums, no flushed subnormals and no approximate divisions, and
    reads activations as vectors.
    """
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines() == [
        f"{name} {capability} True [] 4 True"
        for name in (*("fp8_rows", "partial_amax", "nvfp4_tiles", "nvfp4_tiles", "nvfp4_weight"),)
        for capability in (90, 100)
    ]

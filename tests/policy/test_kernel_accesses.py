"""What the packing kernels read and write: a wrong address ends a process on a GPU, and only there.

Triton's interpreter reads and writes whatever an address holds, so its calls are checked here.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from policy.precision import kernels
from policy.precision.nvfp4 import SEARCH_OFFSETS

pytest.importorskip("triton", reason="the packing kernels need triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)


class Accesses:
    """Bytes of the tensors of a launch: those it may access, and how often each was written."""

    def __init__(self) -> None:
        self._given: dict[int, int] = {}  # address of a tensor's first byte -> that after its last
        self.written: dict[int, np.ndarray] = {}

    def give(self, tensor: torch.Tensor) -> None:
        """Allow access to the elements of a contiguous tensor."""
        assert tensor.is_contiguous()
        start, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        self._given[start] = start + size
        self.written.setdefault(start, np.zeros(size, dtype=np.int64))

    def check(self, pointers: np.ndarray, mask: np.ndarray, size: int, writes: bool) -> None:
        """Check one access of ``size`` bytes at each of the pointers that are not masked."""
        used = np.asarray(pointers)[np.asarray(mask, dtype=bool)].astype(np.int64)
        owner = np.zeros_like(used)
        for start, end in self._given.items():
            owner[(used >= start) & (used + size <= end)] = start
        assert owner.all(), f"{np.count_nonzero(owner == 0)} of {used.size} are outside"
        for start in np.unique(owner) if writes else ():
            first = used[owner == start] - start
            np.add.at(self.written[start], first[:, None] + np.arange(size), 1)


@contextmanager
def checked() -> Iterator[Accesses]:
    """Check the accesses of all launches in the block."""
    from triton.runtime import interpreter

    accesses, builder = Accesses(), interpreter.InterpreterBuilder
    load, store, atomic = (
        getattr(builder, f"create_{name}") for name in ("masked_load", "masked_store", "atomic_rmw")
    )
    copied = interpreter.GridExecutor._init_args_hst

    def size_of(pointer):
        return np.dtype(interpreter._get_np_dtype(pointer.get_element_ty())).itemsize

    def given(self, args, named):
        for each in args:
            if isinstance(each, torch.Tensor):
                accesses.give(each)
        return copied(self, args, named)

    def checked_load(self, pointers, mask, *rest):
        accesses.check(pointers.data, mask.data, size_of(pointers), writes=False)
        return load(self, pointers, mask, *rest)

    def checked_store(self, pointers, value, mask, *rest):
        accesses.check(pointers.data, mask.data, size_of(pointers), writes=True)
        return store(self, pointers, value, mask, *rest)

    def checked_atomic(self, operation, pointer, value, mask, *rest):
        accesses.check(pointer.data, mask.data, size_of(pointer), writes=False)
        return atomic(self, operation, pointer, value, mask, *rest)

    with (
        mock.patch.object(interpreter.GridExecutor, "_init_args_hst", given),
        mock.patch.object(builder, "create_masked_load", checked_load),
        mock.patch.object(builder, "create_masked_store", checked_store),
        mock.patch.object(builder, "create_atomic_rmw", checked_atomic),
    ):
        yield accesses


def within(rows: int, columns: int) -> torch.Tensor:
    """Return a matrix [M, K] between other numbers, which a wrong address would meet."""
    around = torch.full((rows + 2, columns), float("nan"), dtype=torch.bfloat16)
    around[1:-1] = torch.randn(rows, columns)
    return around[1:-1]


def assert_written_once(accesses: Accesses, *outputs: torch.Tensor) -> None:
    for output in outputs:
        times = accesses.written[output.data_ptr()]
        assert times.size == output.numel() * output.element_size() and (times == 1).all()


EXAMPLES = settings(max_examples=25, phases=[Phase.generate])  # an example takes up to a second
ROWS = st.integers(1, 300) | st.sampled_from([1, 31, 32, 33, 127, 128, 129, 256])


@given(rows=st.integers(1, 4), columns=st.integers(1, 200))  # a program per row
@EXAMPLES
def test_fp8(rows, columns):
    x = within(rows, columns)
    with checked() as accesses:
        codes, scales = kernels.fp8_rows(x)
    assert_written_once(accesses, codes, scales)


@given(
    rows=ROWS,
    blocks=st.integers(1, 12),
    exact=st.booleans(),
    recording=st.booleans(),
    previous=st.booleans(),
)
@EXAMPLES
def test_nvfp4_activations(rows, blocks, exact, recording, previous):
    x = within(rows, 16 * blocks)
    with checked() as accesses:
        partial = kernels.partial_amax(x)
        if recording:
            current = torch.zeros(kernels.PARTIALS, dtype=torch.int32)
            outputs = kernels.nvfp4_tiles_recording(x, partial, current, previous)
        else:
            outputs = kernels.nvfp4_tiles(x, partial, exact)
    assert_written_once(accesses, partial, *outputs)


@given(rows=st.integers(1, 50), blocks=st.integers(1, 8), search=st.booleans())
@EXAMPLES
def test_nvfp4_weights(rows, blocks, search):
    x, offsets = within(rows, 16 * blocks), SEARCH_OFFSETS if search else range(0)
    with checked() as accesses:
        outputs = kernels.nvfp4_pack_weight(x, x.abs().max().float(), offsets)
    assert_written_once(accesses, *outputs)


def test_an_amax_of_more_elements_than_programs_take_at_a_time():
    """Each program then reads several blocks of elements, the last one in part."""
    x = within(3, kernels.ELEMENTS * kernels.PARTIALS // 2)
    with checked() as accesses:
        partial = kernels.partial_amax(x)
    assert_written_once(accesses, partial)
    assert len(partial) == kernels.PARTIALS


def test_a_wrong_address_is_found():
    x = within(4, 64)
    with checked(), pytest.raises(Exception, match="are outside"):
        codes, scales = torch.empty(4, 64, dtype=torch.uint8), torch.empty(3)
        kernels._programs(x.device).fp8_rows[(4,)](x, codes, scales, 64, WIDTH=64, HARDWARE=False)

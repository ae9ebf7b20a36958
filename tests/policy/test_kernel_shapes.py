"""What is wrong with a packing or a quantized product is seen on tensors without data on a CUDA
device. That nothing is, at the size of every published model: ``tests/bench/test_gpu_check.py``.
"""

import pytest

from bench.gpu_check.shapes import FORMATS, fault
from policy.precision import kernels
from policy.precision.backends import BACKENDS


@pytest.mark.parametrize("backend", FORMATS)
def test_invalid_kernel_arguments_are_detected(backend, monkeypatch):
    """Columns that cuBLAS refuses, rows that would be copied first, packing by torch."""
    good = ((4, 64), (64, 1), 48, False)
    assert fault(BACKENDS[backend], good) is None
    assert "divisible by 16" in str(fault(BACKENDS[backend], ((4, 96), (96, 1), 40, False)))
    assert fault(BACKENDS[backend], ((4, 64), (128, 1), 48, False)) is not None
    monkeypatch.setattr(kernels, "missing", lambda device: "left out")
    assert fault(BACKENDS[backend], good) is not None

"""Faults of a packing or a quantized product are detected with tensors without data on a CUDA
device. ``tests/bench/test_gpu_check.py`` tests that the sizes of the published models have no
faults.
"""

import pytest

from bench.gpu_check.shapes import FORMATS, fault
from policy.precision import kernels
from policy.precision.backends import BACKENDS


@pytest.mark.parametrize("backend", FORMATS)
def test_faults_are_detected(backend, monkeypatch):
    """The test covers column counts that cuBLAS refuses, rows that would have to be copied first,
    and packing by torch operations.
    """
    good = ((4, 64), (64, 1), 48, False)
    assert fault(BACKENDS[backend], good) is None
    assert "multiple of 16" in str(fault(BACKENDS[backend], ((4, 96), (96, 1), 40, False)))
    assert fault(BACKENDS[backend], ((4, 64), (128, 1), 48, False)) is not None
    monkeypatch.setattr(kernels, "missing", lambda device: "left out")
    assert fault(BACKENDS[backend], good) is not None

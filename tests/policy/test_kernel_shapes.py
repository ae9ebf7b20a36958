"""Every packing and every quantised product of the published models, on tensors without data on a
CUDA device.
"""

import pytest

from bench.gpu_check.shapes import FORMATS, fault, inputs_of
from policy.families.architectures import published_names
from policy.precision import kernels
from policy.precision.backends import BACKENDS


@pytest.mark.parametrize("name", published_names())
def test_a_step_at_the_size_of_a_published_model(name):
    """Each input packed once and multiplied once. SANA's pixels lie together, so that its 1x1
    convolutions copy nothing before that.
    """
    seen = inputs_of(name)
    assert len(seen) >= 4
    for backend in FORMATS:
        assert [fault(BACKENDS[backend], each) for each in seen] == [None] * len(seen)


@pytest.mark.parametrize("backend", FORMATS)
def test_what_is_wrong_is_seen(backend, monkeypatch):
    """Columns that cuBLAS refuses, rows that would be copied first, packing by torch."""
    good = ((4, 64), (64, 1), 48, False)
    assert fault(BACKENDS[backend], good) is None
    assert "divisible by 16" in str(fault(BACKENDS[backend], ((4, 96), (96, 1), 40, False)))
    assert fault(BACKENDS[backend], ((4, 64), (128, 1), 48, False)) is not None
    monkeypatch.setattr(kernels, "missing", lambda device: "left out")
    assert fault(BACKENDS[backend], good) is not None
